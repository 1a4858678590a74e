"""Pictures: what is painted where, and what the words on them say."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxvit import plots, sheet
from jaxvit.compare import Comparison, Report
from jaxvit.errors import DependencyError
from jaxvit.metrics import Metrics
from jaxvit.models import family_of
from jaxvit.models.family import Family, Item
from jaxvit.views import views
from jaxvit.weights.files import read_config_files
from tests.families import checkpoint, picture

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def qwen() -> Family:
    return family_of(read_config_files(checkpoint("qwen2_5_vl")))


@pytest.fixture(scope="module")
def lfm2() -> Family:
    return family_of(read_config_files(checkpoint("lfm2_vl")))


@pytest.fixture
def painted(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Every array that is drawn as an image, in order."""
    from matplotlib.axes import Axes

    found: list[np.ndarray] = []
    imshow = Axes.imshow

    def recording(self: Axes, array: np.ndarray, *arguments: object, **options: object) -> object:
        found.append(np.asarray(array))
        return imshow(self, array, *arguments, **options)

    monkeypatch.setattr(Axes, "imshow", recording)
    return found


@pytest.fixture(autouse=True)
def readable() -> Iterator[None]:
    """SVG files keep their text as text."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield


def words(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())


def embeddings(item: Item, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(item.tokens, 40)).astype(np.float32)


@pytest.mark.parametrize("shape", [(50, 20), (20, 50)])
def test_components_are_those_of_the_singular_values(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(1)
    array = (generator.normal(size=shape) * np.linspace(3, 0.1, shape[1])).astype(np.float32)
    projected, shares = plots.components(array)
    u, s, _ = np.linalg.svd(array - array.mean(0, dtype=np.float64), full_matrices=False)
    np.testing.assert_allclose(np.abs(projected), np.abs(u[:, :3] * s[:3]), atol=1e-6)
    np.testing.assert_allclose(shares, s[:3] ** 2 / (s**2).sum(), rtol=1e-6)
    assert (projected[np.abs(projected).argmax(0), range(3)] > 0).all()


def test_a_single_token_has_no_components_and_still_a_colour() -> None:
    projected, shares = plots.components(np.ones((1, 8), np.float32))
    assert projected.tolist() == [[0, 0, 0]]
    assert shares.tolist() == [0, 0, 0]
    assert plots.colours(projected).tolist() == [[0, 0, 0]]


def test_colours_reach_from_0_to_1_and_outliers_are_clipped() -> None:
    projected = np.random.default_rng(2).normal(size=(1000, 3))
    projected[0] = 1e6
    found = plots.colours(projected)
    assert (found.min(), found.max()) == (0, 1)
    assert found[0].tolist() == [1, 1, 1]
    assert 0.4 < np.median(found) < 0.6


def test_each_token_is_painted_in_its_colour_where_it_lies(
    qwen: Family, painted: list[np.ndarray], tmp_path: Path
) -> None:
    item = qwen.prepare(picture(140, 168))
    array = embeddings(item)
    plots.show(qwen, item, array, tmp_path / "map.png", title="a picture")
    seen, tinted = painted
    (view,) = views(qwen, item)
    np.testing.assert_array_equal(seen, view.pixels)
    colours = plots.colours(plots.components(array)[0])
    gray = view.pixels.mean(-1, keepdims=True) / 255
    for (row, column), token in np.ndenumerate(view.tokens):
        place = np.s_[row * 28 : row * 28 + 28, column * 28 : column * 28 + 28]
        np.testing.assert_allclose(tinted[place], 0.82 * colours[token] + 0.18 * gray[place], atol=1e-12)


@pytest.mark.parametrize("random", [True, False])
def test_the_picture_says_when_weights_are_random(qwen: Family, tmp_path: Path, random: bool) -> None:
    item = qwen.prepare(picture(140, 168))
    plots.show(qwen, item, embeddings(item), tmp_path / "map.svg", title="cat.jpg", random=random)
    said = words(tmp_path / "map.svg")
    assert "cat.jpg" in said
    assert "token, 28 \u00d7 28 pixels" in said
    assert "attention window, 112 \u00d7 112 pixels" in said
    assert any("random weights" in text for text in said) is random


def test_a_thumbnail_stands_beside_the_tiles(lfm2: Family, painted: list[np.ndarray], tmp_path: Path) -> None:
    item = lfm2.prepare(picture(1024, 1024))
    plots.show(lfm2, item, embeddings(item), tmp_path / "map.svg", title="a picture")
    whole, thumbnail = views(lfm2, item)
    assert [array.shape for array in painted] == [whole.pixels.shape] * 2 + [thumbnail.pixels.shape] * 2
    said = words(tmp_path / "map.svg")
    assert "thumbnail" in said
    assert "tile, 512 \u00d7 512 pixels" in said


def test_a_clip_has_two_panels_a_piece_under_its_frames(
    qwen: Family, painted: list[np.ndarray], tmp_path: Path
) -> None:
    item = qwen.prepare_video([picture(84, 112, seed) for seed in range(5)], 2.0, None, 0.0)
    array = embeddings(item)
    plots.show(qwen, item, array, tmp_path / "clip.svg", title="clip.mp4")
    found = views(qwen, item)
    tint = plots.colours(plots.components(array)[0])  # one set of colours for the clip
    for view, seen, tinted in zip(found, painted[::2], painted[1::2], strict=True):
        np.testing.assert_array_equal(seen, view.pixels)
        gray = view.pixels.mean(-1, keepdims=True) / 255
        place = np.s_[28:56, 84:112]
        np.testing.assert_allclose(tinted[place], 0.82 * tint[view.tokens[1, 3]] + 0.18 * gray[place], atol=1e-12)
    said = words(tmp_path / "clip.svg")
    assert {"1 of 3", "frames 1 to 2, the first is shown", "3 of 3"} <= set(said)
    assert said.count("what the tower sees") == 3
    assert any(text.endswith("6 frames") for text in said)  # the last one twice


def test_of_a_long_clip_pieces_are_shown_that_lie_evenly_over_it(
    qwen: Family, painted: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "SHOWN", 3)
    item = qwen.prepare_video([picture(56, 56, seed) for seed in range(18)], None, None, 0.0)
    plots.show(qwen, item, embeddings(item), tmp_path / "clip.svg", title="clip.mp4")
    assert len(painted) == 6
    said = words(tmp_path / "clip.svg")
    assert {"1 of 9", "5 of 9", "9 of 9"} <= set(said)
    assert any(text.endswith("18 frames, 3 of 9 pieces") for text in said)


class Axes:
    """Notes the lines that are drawn: (axis, place, width)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, float]] = []

    def axhline(self, place: float, **style: float) -> None:
        self.found.append(("y", place, style["linewidth"]))

    def axvline(self, place: float, **style: float) -> None:
        self.found.append(("x", place, style["linewidth"]))


def test_lines_lie_between_tokens_and_stronger_ones_between_windows(qwen: Family) -> None:
    (view,) = views(qwen, qwen.prepare(picture(168, 280)))
    axes = Axes()
    sheet.grid_lines(axes, view, points=1.0)
    thin, strong = sorted({width for _, _, width in axes.found})
    assert [place for axis, place, width in axes.found if (axis, width) == ("x", thin)] == [
        28 * n - 0.5 for n in range(1, 10)
    ]
    assert [place for axis, place, width in axes.found if (axis, width) == ("x", strong)] == [111.5, 223.5]
    assert [place for axis, place, width in axes.found if (axis, width) == ("y", strong)] == [111.5]


def test_a_grid_too_fine_to_be_seen_is_left_out(qwen: Family) -> None:
    (view,) = views(qwen, qwen.prepare(picture(168, 280)))
    axes = Axes()
    sheet.grid_lines(axes, view, points=0.05)
    assert {(axis, place) for axis, place, _ in axes.found} == {("x", 111.5), ("x", 223.5), ("y", 111.5)}


def test_long_names_lose_their_middle() -> None:
    assert sheet.shortened("cat.jpg") == "cat.jpg"
    assert sheet.shortened("new\nline, no text \udcff.jpg") == "new\ufffdline, no text \ufffd.jpg"
    short = sheet.shortened("a photograph with quite a long name of its own.jpg")
    assert len(short) == 36
    assert short.startswith("a photograph")
    assert short.endswith("own.jpg")


def _report(items: list[Item], errors: list[np.ndarray], bound: float = 1e-5) -> Report:
    found = [
        Comparison(f"{index}.jpg", item.tokens, None, Metrics(rms, rms, 1.0), None, None, None, bound, (), error)
        for index, (item, error) in enumerate(zip(items, errors, strict=True))
        for rms in [float(np.sqrt(np.mean(error.astype(np.float64) ** 2)))]
    ]
    return Report(tuple(found), "qwen2_5_vl", "float32", None, {"torch": "0", "transformers": "0", "jax": "0"})


def test_differences_are_painted_on_one_logarithmic_scale(
    qwen: Family, painted: list[np.ndarray], tmp_path: Path
) -> None:
    items = [qwen.prepare(picture(112, 112)), qwen.prepare(picture(112, 140))]
    errors = [np.full(item.tokens, 2e-6, np.float32) for item in items]
    errors[0][:3] = 0, 1e-4, np.nan
    plots.differences(qwen, items, _report(items, errors), tmp_path / "off.svg")
    colours = matplotlib.colormaps["magma"]
    first, second = painted[1], painted[3]
    np.testing.assert_allclose(first[0, 0], colours(0.0)[:3])  # an equal token: the scale's lower end
    np.testing.assert_allclose(first[0, 28], colours(1.0)[:3])  # 1e-4, the upper end
    np.testing.assert_allclose(first[0, 56], colours(1.0)[:3])  # not finite
    np.testing.assert_allclose(second[0, 0], colours(np.log10(2) / 2)[:3])  # 2e-6, between 1e-6 and 1e-4
    said = words(tmp_path / "off.svg")
    assert {"0.jpg", "1.jpg"} <= set(said)
    assert "relative RMS 2.0e-06, bound 1.0e-05" in said


def test_a_report_of_equal_arrays_has_a_picture(qwen: Family, tmp_path: Path) -> None:
    item = qwen.prepare(picture(112, 112))
    report = _report([item], [np.zeros(item.tokens, np.float32)])
    plots.differences(qwen, [item], report, tmp_path / "off.png")
    assert (tmp_path / "off.png").stat().st_size > 10_000
    nothing = dataclasses.replace(report, items=(dataclasses.replace(report.items[0], bound=0.0),))
    plots.differences(qwen, [item], nothing, tmp_path / "off.png")


def test_many_pictures_stand_in_columns(qwen: Family, painted: list[np.ndarray], tmp_path: Path) -> None:
    items = [qwen.prepare(picture(112, 112 + 28 * index)) for index in range(9)]
    errors = [np.full(item.tokens, 1e-6, np.float32) for item in items]
    plots.differences(qwen, items, _report(items, errors), tmp_path / "off.svg")
    assert len(painted) == 18
    assert words(tmp_path / "off.svg").count("difference of each token") == 9


ROWS = [
    {"patches": 1024, "milliseconds": 4.0, "floor": 1.0, "peer": None},
    {"patches": 256, "milliseconds": 2.0, "floor": 0.5},
    {"patches": 4096, "milliseconds": 20.0, "floor": 8.0, "peer": 30.0},
]


def test_a_ladder_is_a_staircase_with_floor_and_peer_where_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes as Real

    stairs: list = []
    monkeypatch.setattr(Real, "step", lambda self, x, y, **_: stairs.append((list(x), list(y))))
    plots.ladder_plot(ROWS, tmp_path / "ladder.svg", title="a tower", subtitle="on a device", peer="vLLM")
    assert stairs == [([128, 256, 1024, 4096], [2.0, 2.0, 4.0, 20.0])]
    said = words(tmp_path / "ladder.svg")
    assert {"a tower", "on a device", "jaxvit 20 ms", "floor 8 ms", "vLLM 30 ms"} <= set(said)
    plots.ladder_plot([{**row, "peer": None} for row in ROWS], tmp_path / "alone.svg", title="a tower")
    assert not any("PyTorch" in text for text in words(tmp_path / "alone.svg"))


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r"jaxvit\[plots\]"):
        plots.need()
