"""Pictures put together again from patches, and where tokens lie on them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxvit import views
from jaxvit.errors import MediaError
from jaxvit.models import family_of
from jaxvit.models.family import Family
from jaxvit.resample import resize
from jaxvit.weights.files import read_config_files
from tests.families import FAMILIES, VIDEO, checkpoint, picture


def family(name: str, **overrides: object) -> Family:
    return family_of(read_config_files(checkpoint(name)), overrides)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_picture_that_needs_no_resize_comes_back_bit_for_bit(name: str) -> None:
    side = 448 if name in VIDEO else 512
    original = np.random.default_rng(0).integers(0, 256, (side // 2, side, 3), dtype=np.uint8)
    (view,) = views.views(family(name), family(name).prepare(original))
    np.testing.assert_array_equal(view.pixels, original)
    assert (view.name, view.frames) == ("picture", None)
    assert tuple(view.side * length for length in view.tokens.shape) == original.shape[:2]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_lies_on_one_place(name: str) -> None:
    item = family(name).prepare(picture(800, 1300))
    found = views.views(family(name), item)
    assert sorted(np.concatenate([view.tokens.ravel() for view in found])) == list(range(item.tokens))
    for view in found:
        assert view.pixels.shape == (*(view.side * length for length in view.tokens.shape), 3)


def test_tiles_stand_side_by_side_and_the_thumbnail_apart() -> None:
    lfm2 = family("lfm2_vl")
    original = picture(1024, 1536)
    item = lfm2.prepare(original)
    assert (item.layout["rows"], item.layout["columns"]) == (2, 3)
    whole, thumbnail = views.views(lfm2, item)
    planes = resize(original, 1024, 1536, lfm2.settings.kernel)
    np.testing.assert_array_equal(whole.pixels, planes.transpose(1, 2, 0))
    assert whole.tile == (16, 16)
    assert (whole.name, thumbnail.name, thumbnail.tile) == ("picture", "thumbnail", None)
    assert (whole.frames, thumbnail.frames) == (None, None)
    assert list(whole.tokens[0, 14:18]) == [14, 15, 256, 257]
    assert whole.tokens[16, 0] == 3 * 256
    assert thumbnail.tokens[0, 0] == 6 * 256


def test_windows_are_those_of_the_family() -> None:
    (view,) = views.views(family("qwen2_5_vl"), family("qwen2_5_vl").prepare(picture(224, 224)))
    assert view.window * view.side == 112
    (view,) = views.views(family("kimi_k25"), family("kimi_k25").prepare(picture(224, 224)))
    assert view.window == 0


@pytest.mark.parametrize("name", VIDEO)
def test_a_clip_has_a_view_a_piece_of_its_first_frame(name: str) -> None:
    clip = [picture(112, 168, seed) for seed in range(6)]
    one = family(name)
    found = views.views(one, one.prepare_video(clip, None, None, 0.0))
    step = 2 if name == "qwen2_5_vl" else 4
    assert [view.frames for view in found] == [(first, min(first + step - 1, 6)) for first in range(1, 7, step)]
    assert [view.name for view in found] == [f"{n + 1} of {len(found)}" for n in range(len(found))]
    settings = one.settings.video
    for index, view in enumerate(found):
        height, width = view.pixels.shape[:2]
        frame = resize(clip[index * step], height, width, settings.kernel).transpose(1, 2, 0)
        np.testing.assert_array_equal(view.pixels, frame)


def test_normalised_pixels_make_no_picture() -> None:
    one = family("lfm2_vl")
    item = one.prepare(picture(256, 256))
    piece = dataclasses.replace(item.pieces[0], patches=item.pieces[0].patches.astype(np.float32))
    with pytest.raises(MediaError, match="normalised pixels"):
        views.views(one, dataclasses.replace(item, pieces=(piece,)))
