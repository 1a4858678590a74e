"""Sizes, pixels, settings and items of Qwen2.5-VL, against its Hugging Face processor."""

from __future__ import annotations

import json
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvit.errors import CheckpointError, MediaError
from jaxvit.models.family import Item
from jaxvit.models.qwen2_5_vl.processing import (
    Limits,
    Settings,
    in_window_order,
    items,
    prepare,
    prepare_video,
    smart_resize,
    token_range,
)

CONFIG = {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 1280}}
OFFICIAL = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SMALL = {**OFFICIAL, "max_pixels": 1003520}


def settings(raw: Any = OFFICIAL, overrides: Any = None, **files: Any) -> Settings:
    return Settings.from_files({"config.json": CONFIG, "preprocessor_config.json": raw, **files}, overrides)


@cache
def reference(kind: str = "image"):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    return Qwen2VLImageProcessor(**OFFICIAL) if kind == "image" else Qwen2VLVideoProcessor(**OFFICIAL)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def processed(picture: np.ndarray) -> dict[str, np.ndarray]:
    """What the reference makes of a picture, as numpy."""
    import torch

    tensor = torch.from_numpy(picture.transpose(2, 0, 1).copy())
    return {name: value.numpy() for name, value in reference()(tensor, return_tensors="pt").items()}


def canonical(rows: np.ndarray, grid: tuple[int, ...], ours: Settings) -> np.ndarray:
    """The reference's rows [N, 1176] in our order: frame pair by frame pair, cells in window order, frames apart."""
    t, h, w = grid
    cells = rows.reshape(-1, 3, 2, 196).transpose(0, 2, 1, 3).reshape(t, h * w // 4, -1)
    return np.concatenate([in_window_order(pair, h // 2, w // 2, ours).reshape(-1, 1176) for pair in cells])


def normalised(item: Item, ours: Settings) -> np.ndarray:
    """An item's normalised values [N, 1176]; a still's frame twice."""
    values = ours.table[item.patches, np.tile(ours.channels, item.patches.shape[1] // 588)]
    return np.tile(values, 2) if values.shape[1] == 588 else values


def random_sizes(count: int, pixels: float, seed: int, aspect: float = 200) -> list[tuple[int, int]]:
    generator = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        height, width = (int(n) for n in np.exp(generator.uniform(0, np.log(8000), 2)))
        if height * width <= pixels and max(height, width) / min(height, width) <= aspect:
            found.append((height, width))
    return found


# Sizes


@pytest.mark.reference
@pytest.mark.parametrize("limits", [(3136, 12845056), (3136, 1003520), (100352, 602112), (100000, 100352)], ids=str)
def test_2000_random_sizes_come_out_as_in_the_reference(limits: tuple[int, int]):
    from transformers.models.qwen2_vl import image_processing_qwen2_vl as theirs

    for height, width in random_sizes(2000, 6e7, 1):
        expected = theirs.smart_resize(height, width, min_pixels=limits[0], max_pixels=limits[1])
        assert smart_resize(height, width, Limits(*limits)) == expected


@pytest.mark.parametrize(
    ("size", "raw", "resized", "tokens"),
    [
        ((1, 1), OFFICIAL, (56, 56), 4),
        ((26, 28), OFFICIAL, (56, 84), 6),
        ((27, 332), OFFICIAL, (28, 336), 12),
        ((14, 14), OFFICIAL, (56, 56), 4),
        ((10, 10), OFFICIAL, (56, 56), 4),
        ((300, 417), OFFICIAL, (308, 420), 165),
        ((480, 640), OFFICIAL, (476, 644), 391),
        ((15420, 690), OFFICIAL, (15428, 700), 13775),
        ((15420, 690), SMALL, (4732, 196), 1183),
        ((15420, 690), {**OFFICIAL, "max_pixels": 100000}, (1484, 56), 106),
        ((1080, 1920), SMALL, (728, 1316), 1222),
        ((1080, 1920), OFFICIAL, (1092, 1932), 2691),
    ],
    ids=str,
)
def test_known_sizes_and_token_counts(size, raw, resized, tokens):
    item = prepare(np.zeros((*size, 3), np.uint8), settings(raw))
    assert item.grids == ((1, resized[0] // 14, resized[1] // 14),)
    assert item.tokens == tokens == item.pieces[0].tokens
    assert item.num_patches == 4 * tokens == len(item.patches)


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (3, 700)], ids=str)
def test_an_aspect_over_200_is_refused_with_ratio_and_limit(size: tuple[int, int]):
    with pytest.raises(MediaError, match=rf"{max(size) / min(size):.1f} times the other, the limit is 200"):
        prepare(np.zeros((*size, 3), np.uint8), settings())


def test_an_aspect_of_exactly_200_is_taken():
    assert prepare(np.zeros((2, 400, 3), np.uint8), settings()).tokens > 0


@pytest.mark.parametrize(
    "limits",
    [
        (3136, 1003520),
        (100352, 602112),
        (3136, 100000),
        (100352, 100352),
        (50000, 60000),
        (784, 784),
        (3136, 3136),
        (1, 1000),
        (3136, 6272),
    ],
    ids=str,
)
def test_the_budget_range_holds_every_size_and_is_reached(limits: tuple[int, int]):
    low, high = token_range(Limits(*limits))
    sizes = [(h, w) for h in range(1, 24) for w in range(1, min(200 * h, 4000) + 1, 1 if h < 8 else 7)]
    sizes += [(h, min(200 * h, h * k + d)) for h in (500, 1003) for k in range(1, 201) for d in (-1, 0, 1)]
    sizes += random_sizes(4000, 1e7, 2)
    counts = [math.prod(smart_resize(*size, Limits(*limits))) // 784 for size in sizes]
    assert low <= min(counts) <= low + 1
    assert max(counts) <= high <= max(counts) + 2


def test_the_official_settings_range_from_4_to_16384_tokens():
    assert settings().budget_range() == (4, 16384)


# Pixels


@pytest.mark.reference
def test_pixels_of_40_random_sizes_are_bit_equal_to_the_reference():
    ours = settings()
    for seed, size in enumerate(random_sizes(40, 1.5e6, 3)):
        picture = noise(*size, seed)
        theirs = processed(picture)
        item = prepare(picture, ours)
        assert item.grids == (tuple(theirs["image_grid_thw"][0]),)
        np.testing.assert_array_equal(normalised(item, ours), canonical(theirs["pixel_values"], item.grids[0], ours))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.reference
def test_a_sweep_of_pixels_is_bit_equal_to_the_reference():
    ours = settings()
    for seed, size in enumerate(random_sizes(2000, 1.5e6, 4)):
        picture = noise(*size, seed)
        theirs = processed(picture)
        item = prepare(picture, ours)
        np.testing.assert_array_equal(normalised(item, ours), canonical(theirs["pixel_values"], item.grids[0], ours))


@pytest.mark.reference
@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_pixels_of_a_clip_are_bit_equal_to_the_reference(frames: int):
    import torch

    ours = settings()
    pictures = [noise(90, 130, seed) for seed in range(frames)]
    video = torch.from_numpy(np.stack(pictures).transpose(0, 3, 1, 2).copy())
    theirs = reference("video")(videos=[video], do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt")
    item = prepare_video(pictures, ours)
    grid = tuple(theirs["video_grid_thw"][0].tolist())
    assert item.grids == (grid,)
    expected = canonical(theirs["pixel_values_videos"].numpy(), grid, ours)
    np.testing.assert_array_equal(normalised(item, ours), expected)


@pytest.mark.reference
def test_the_table_is_bit_equal_to_the_reference():
    import torch

    ours = settings()
    ramp = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).expand(3, 256, 1).contiguous()
    p = reference()
    theirs = p.rescale_and_normalize(ramp, True, p.rescale_factor, True, tuple(p.image_mean), tuple(p.image_std))
    np.testing.assert_array_equal(ours.table, theirs.numpy()[:, :, 0].T)


def test_black_and_white_pixels_have_the_known_normalised_values():
    table = settings().table
    assert [table[0].min(), table[0].max()] == pytest.approx([-1.792, -1.480], abs=6e-4)
    assert [table[255].min(), table[255].max()] == pytest.approx([1.930, 2.146], abs=6e-4)


def test_the_pixels_do_not_alias_the_callers_array():
    picture = noise(56, 84)
    item = prepare(picture, settings())
    before = item.patches.copy()
    picture[...] = 0
    np.testing.assert_array_equal(item.patches, before)


def test_rows_stand_cell_by_cell_in_window_order():
    """A picture whose every patch has a colour of its own: (y, x) in patches."""
    rows, columns = 10, 14  # 5 x 7 cells: windows of 4 x 4, 4 x 3, 1 x 4 and 1 x 3 cells
    picture = np.zeros((rows * 14, columns * 14, 3), np.uint8)
    picture[..., 0] = np.repeat(np.arange(rows), 14)[:, None]
    picture[..., 1] = np.repeat(np.arange(columns), 14)[None, :]
    piece = prepare(picture, settings()).pieces[0]
    assert piece.grid == (1, rows, columns)
    assert piece.windows == 4
    expected = [
        (2 * y + dy, 2 * x + dx)
        for top in (0, 4)
        for left in (0, 4)
        for y in range(top, min(top + 4, 5))
        for x in range(left, min(left + 4, 7))
        for dy in (0, 1)
        for dx in (0, 1)
    ]
    assert [(int(patch[0]), int(patch[196])) for patch in piece.patches] == expected


def test_a_page_of_1080_x_1920_takes_at_most_100_ms_of_one_core():
    ours, picture = settings(), noise(1080, 1920)
    taken = []
    for _ in range(5):
        start = time.process_time()  # of all threads, so neither other processes nor more cores change it
        prepare(picture, ours)
        taken.append(time.process_time() - start)
    assert min(taken) <= 0.1


# Clips


@pytest.mark.parametrize(("frames", "pairs"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_an_odd_clip_repeats_its_last_frame(frames: int, pairs: int):
    pictures = [np.full((56, 56, 3), 10 * number, np.uint8) for number in range(frames)]
    item = prepare_video(pictures, settings())
    assert item.grids == ((pairs, 4, 4),)
    assert len(item.pieces) == pairs
    assert all(piece.grid == (1, 4, 4) and piece.patches.shape == (16, 1176) for piece in item.pieces)
    colours = [int(piece.patches[0, place]) for piece in item.pieces for place in (0, 588)]
    assert colours == [10 * min(number, frames - 1) for number in range(2 * pairs)]


@pytest.mark.parametrize(
    ("fps", "timestamps", "seconds"),
    [(2.0, None, 1.0), (4.0, None, 0.5), (None, (0.0, 0.5, 1.0, 1.5), 1.0), (None, None, 1.0), (None, (1.0,) * 4, 1.0)],
)
def test_seconds_per_grid_come_from_fps_then_timestamps_then_one(fps, timestamps, seconds):
    item = prepare_video([noise(56, 56)] * 4, settings(), fps, timestamps)
    assert item.layout == {"grid_thw": (2, 4, 4), "merge_size": 2, "seconds_per_grid": seconds}


@pytest.mark.parametrize(
    ("frames", "prune", "tokens"), [(10, 0.5, 10), (10, 0.9, 4), (2, 0.5, 4), (10, 0.0, 20), (7, 0.3, 11)]
)
def test_pruning_keeps_its_share_and_never_less_than_a_frame_pair(frames: int, prune: float, tokens: int):
    item = prepare_video([noise(56, 56)] * frames, settings(), prune=prune)
    assert item.tokens == tokens
    assert item.prune == prune


@pytest.mark.reference
def test_sampling_a_file_takes_the_references_frames():
    from transformers.video_utils import VideoMetadata

    ours = settings()
    for total in [2, 3, 4, 5, 7, 30, 31, 100, 299, 1000, 5000]:
        for native in (5.0, 24.0, 29.97, 30.0):
            for fps in (0.5, 1.0, 2.0, 7.0):
                metadata = VideoMetadata(total_num_frames=total, fps=native)
                theirs = reference("video").sample_frames(metadata, fps=fps).tolist()
                assert ours.sample_frames(total, native, fps) == theirs, (total, native, fps)


def test_sampling_a_file_of_one_frame_takes_it():
    assert settings().sample_frames(1, 30.0, 2.0) == [0]


@pytest.mark.reference
def test_a_long_clips_frames_share_their_pixels_where_the_checkpoint_says_so():
    import torch

    raw = {**OFFICIAL, "cap_pixels_per_frame": True, "max_video_tokens": 100}
    pictures = [noise(300, 400, seed) for seed in range(6)]
    video = torch.from_numpy(np.stack(pictures).transpose(0, 3, 1, 2).copy())
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    theirs = Qwen2VLVideoProcessor(**raw)(videos=[video], do_sample_frames=False, return_tensors="pt")
    item = prepare_video(pictures, settings(raw))
    assert item.grids == (tuple(theirs["video_grid_thw"][0].tolist()),)
    assert item.grids != prepare_video(pictures, settings()).grids


# Settings


@pytest.mark.parametrize(
    ("raw", "overrides", "tokens"),
    [
        ({"max_pixels": 1003520}, None, 1222),
        ({"size": {"shortest_edge": 3136, "longest_edge": 1003520}}, None, 1222),
        ({"size": {"longest_edge": 12845056}}, None, 2691),
        ({"max_pixels": 1003520, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}, None, 1222),
        ({"max_pixels": 12845056}, {"max_pixels": 1003520}, 1222),
        ({"max_pixels": 12845056}, {"size": {"longest_edge": 1003520}}, 1222),
        ({"size": {"longest_edge": 12845056}}, {"max_pixels": 1003520}, 1222),
        ({"max_pixels": 1003520}, {"max_pixels": 12845056}, 2691),
        ({}, None, 1222),
    ],
    ids=str,
)
def test_either_spelling_changes_the_grid_and_a_keyword_beats_the_file(raw, overrides, tokens):
    assert prepare(np.zeros((1080, 1920, 3), np.uint8), settings(raw, overrides)).tokens == tokens


@pytest.mark.parametrize(
    ("raw", "overrides", "words"),
    [
        ({"min_pixels": 5000, "max_pixels": 4000}, None, r"min_pixels \(5000\) is more than max_pixels \(4000\)"),
        (OFFICIAL, {"min_pixels": 20000000}, r"min_pixels \(20000000\) is more than max_pixels \(12845056\)"),
        (OFFICIAL, {"video_max_pixels": 100}, r"video_min_pixels \(3136\) is more than video_max_pixels \(100\)"),
        (OFFICIAL, {"max_pixels": 4000, "size": {"longest_edge": 5000}}, "max_pixels = 4000 and size.*5000 contradict"),
        (OFFICIAL, {"longest_edge": 5000}, "longest_edge are not known here; there are min_pixels, max_pixels"),
        (OFFICIAL, {"fps": 0}, "fps is 0: give frames a second, more than 0"),
        (OFFICIAL, {"fps": ""}, "fps is '': give frames a second"),
        (OFFICIAL, {"fps": True}, "fps is True: give frames a second"),
        (OFFICIAL, {"fps": float("nan")}, "fps is nan: give frames a second"),
        (OFFICIAL, {"max_pixels": -1}, "max_pixels must be a positive integer, got -1"),
        (OFFICIAL, {"max_pixels": 1.5}, "max_pixels must be a positive integer, got 1.5"),
        ({**OFFICIAL, "patch_size": 16}, None, "patch_size is 16 in the processor's settings, 14 in config.json"),
        ({**OFFICIAL, "resample": 1}, None, "resample is 1"),
        ({**OFFICIAL, "do_normalize": False}, None, "do_normalize is false"),
        ({**OFFICIAL, "do_resize": False}, None, "do_resize is false"),
        ({**OFFICIAL, "image_std": [0.5, 0.0, 0.5]}, None, "image_std has a zero"),
        (OFFICIAL, {"fps": float("nan")}, "fps is nan"),
    ],
    ids=str,
)
def test_settings_that_cannot_hold_are_refused_by_name(raw, overrides, words: str):
    with pytest.raises(CheckpointError, match=words):
        settings(raw, overrides)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"preprocessor_config.json": OFFICIAL}, (3136, 12845056)),
        ({"preprocessor_config.json": {"max_pixels": 1003520}}, (100352, 1003520)),
        (
            {"preprocessor_config.json": OFFICIAL, "video_preprocessor_config.json": {"max_pixels": 200000}},
            (100352, 200000),
        ),
        (
            {
                "preprocessor_config.json": OFFICIAL,
                "video_preprocessor_config.json": {"max_pixels": 200000},
                "processor_config.json": {"video_processor": {"size": {"shortest_edge": 4000, "longest_edge": 300000}}},
            },
            (4000, 300000),
        ),
        ({"processor_config.json": {"image_processor": OFFICIAL}}, (100352, 602112)),
    ],
    ids=["preprocessor", "class default", "video file", "nested", "only nested images"],
)
def test_the_limits_of_frames_are_read_where_the_reference_reads_them(files, expected):
    found = Settings.from_files({"config.json": CONFIG, **files}).video
    assert (found.min_pixels, found.max_pixels) == expected


@pytest.mark.reference
@pytest.mark.parametrize("names", [("pre",), ("pre", "video"), ("pre", "video", "nested")], ids=str)
def test_the_reference_loaded_from_the_same_folder_has_the_same_limits(tmp_path: Path, names: tuple[str, ...]):
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    files: dict[str, Any] = {"config.json": CONFIG}
    if "pre" in names:
        files["preprocessor_config.json"] = {"max_pixels": 1003520, "image_processor_type": "Qwen2VLImageProcessor"}
    if "video" in names:
        files["video_preprocessor_config.json"] = {"max_pixels": 500000}
    if "nested" in names:
        size = {"shortest_edge": 4000, "longest_edge": 300000}
        files["processor_config.json"] = {"image_processor": {"size": size}, "video_processor": {"max_pixels": 700000}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    ours = Settings.from_files(files)
    for found, theirs in (
        (ours.image, Qwen2VLImageProcessor.from_pretrained(tmp_path)),
        (ours.video, Qwen2VLVideoProcessor.from_pretrained(tmp_path)),
    ):
        assert (found.min_pixels, found.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])


def test_a_missing_settings_file_warns_and_takes_the_official_values():
    with pytest.warns(UserWarning, match=r"no preprocessor_config.json.*12845056"):
        found = Settings.from_files({"config.json": CONFIG})
    assert found == settings()


# The processor's output


@pytest.mark.reference
def test_the_processors_output_gives_the_same_items_as_the_pictures():
    import torch

    ours = settings()
    pictures = [noise(56, 56, 1), noise(300, 417, 2), noise(140, 140, 3)]
    tensors = [torch.from_numpy(p.transpose(2, 0, 1).copy()) for p in pictures]
    found = items(reference()(tensors, return_tensors="pt"), ours)
    for item, expected in zip(found, [prepare(p, ours) for p in pictures], strict=True):
        assert item.patches.dtype == np.uint8
        np.testing.assert_array_equal(item.patches, expected.patches)
        assert (item.grids, item.tokens, item.layout) == (expected.grids, expected.tokens, expected.layout)


@pytest.mark.reference
def test_the_processors_videos_come_behind_its_pictures():
    import torch

    ours = settings()
    pictures = [noise(84, 112, seed) for seed in range(5)]
    video = torch.from_numpy(np.stack(pictures).transpose(0, 3, 1, 2).copy())
    inputs = {
        **processed(pictures[0]),
        **reference("video")(videos=[video], do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt"),
        "second_per_grid_ts": [0.5],
    }
    image, clip = items(inputs, ours)
    np.testing.assert_array_equal(image.patches, prepare(pictures[0], ours).patches)
    expected = prepare_video(pictures, ours, fps=4.0)
    np.testing.assert_array_equal(clip.patches, expected.patches)
    assert clip.layout == expected.layout


@pytest.mark.reference
def test_pixels_that_are_no_uint8_stay_float32():
    ours = settings()
    inputs = processed(noise(56, 84))
    inputs["pixel_values"] = inputs["pixel_values"] + np.float32(1e-3)
    [item] = items(inputs, ours)
    assert item.patches.dtype == np.float32
    np.testing.assert_array_equal(item.patches, canonical(inputs["pixel_values"], item.grids[0], ours)[:, :588])


@pytest.mark.reference
def test_bfloat16_pixels_and_pixels_that_need_gradients_are_taken():
    import torch

    values = processed(noise(56, 84))
    tensor = torch.from_numpy(values["pixel_values"]).to(torch.bfloat16).requires_grad_()
    [item] = items({"pixel_values": tensor, "image_grid_thw": values["image_grid_thw"]}, settings())
    assert item.patches.dtype == np.float32


def test_nan_pixels_are_passed_on_as_they_are():
    values = np.full((16, 1176), np.nan, np.float32)
    [item] = items({"pixel_values": values, "image_grid_thw": [[1, 4, 4]]}, settings())
    assert np.isnan(item.patches).all()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "no pixel_values.* in the inputs; there is nothing"),
        ({"input_ids": [[1]]}, "no pixel_values.* in the inputs; there is input_ids"),
        ({"pixel_values": np.zeros((16, 1176))}, "no image_grid_thw"),
        ({"pixel_values": np.zeros((16, 588)), "image_grid_thw": [[1, 4, 4]]}, r"must be \[patches, 1176\]"),
        (
            {"pixel_values": np.zeros((16, 1176)), "image_grid_thw": [[1, 4, 6]]},
            "asks for 24 patches, and there are 16",
        ),
        ({"pixel_values": np.zeros((12, 1176)), "image_grid_thw": [[1, 4, 3]]}, "multiples of 2"),
        (
            {
                "pixel_values_videos": np.zeros((16, 1176)),
                "video_grid_thw": [[1, 4, 4]],
                "second_per_grid_ts": [1.0, 2.0],
            },
            "2 values for 1 videos",
        ),
    ],
    ids=str,
)
def test_incomplete_output_is_refused_by_name(inputs, words: str):
    with pytest.raises(MediaError, match=words):
        items(inputs, settings())


def test_pieces_per_item_is_refused_where_it_says_nothing():
    with pytest.raises(MediaError, match="pieces_per_item"):
        items({"pixel_values": np.zeros((16, 1176)), "image_grid_thw": [[1, 4, 4]]}, settings(), [1])
