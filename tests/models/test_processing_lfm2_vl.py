"""Sizes, tiles, pixels, settings and items of LFM2-VL, against its Hugging Face processor."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxvit.errors import CheckpointError, MediaError
from jaxvit.models.family import Item, Piece
from jaxvit.models.lfm2_vl.processing import Settings, items, prepare, ratios, smart_resize, tiling, too_large

CONFIG = {"model_type": "lfm2_vl", "vision_config": {}, "text_config": {"hidden_size": 1024}}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no thumbnail": {"use_thumbnail": False},
    "tolerance 1.5": {"max_pixels_tolerance": 1.5},
    "bicubic": {"resample": 3},
    "one tile": {"resample": 3, "min_tiles": 1},
    "untiled": {"do_image_splitting": False},
}
"""What distinguishes the published checkpoints' settings, and tiling turned off."""


def settings(name: str = "defaults", overrides: Any = None, **raw: Any) -> Settings:
    files = {"config.json": CONFIG, "preprocessor_config.json": {**CHECKPOINTS[name], **raw}}
    return Settings.from_files(files, overrides)


@cache
def reference(name: str = "defaults"):
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    return Lfm2VlImageProcessor(return_row_col_info=True, **CHECKPOINTS[name])


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def processed(*pictures: np.ndarray, name: str = "defaults") -> dict[str, Any]:
    import torch

    tensors = [torch.from_numpy(picture.transpose(2, 0, 1).copy()) for picture in pictures]
    return dict(reference(name)(tensors, return_tensors="pt"))


def canonical(rows: np.ndarray, height: int, width: int) -> np.ndarray:
    """The reference's rows [N, 768], row-major, in our order: cell by cell."""
    return rows.reshape(height // 2, 2, width // 2, 2, 768).swapaxes(1, 2).reshape(-1, 768)


def normalised(piece: Piece, ours: Settings) -> np.ndarray:
    return ours.table[piece.patches, ours.channels]


def random_sizes(count: int, pixels: float, seed: int, aspect: float = 12) -> list[tuple[int, int]]:
    generator = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        height, width = (int(n) for n in np.exp(generator.uniform(0, np.log(5000), 2)))
        if height * width <= pixels and max(height, width) / min(height, width) <= aspect:
            found.append((height, width))
    return found


# Sizes


@pytest.mark.reference
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_2000_random_sizes_are_tiled_as_in_the_reference(name: str):
    ours, theirs = settings(name), reference(name)
    common = {"max_image_tokens": 256, "encoder_patch_size": 16, "downsample_factor": 2}
    splits = theirs.do_image_splitting and not theirs.min_tiles == theirs.max_tiles == 1
    near = [(h, w) for h in range(600, 1100, 23) for w in range(600, 1100, 29)]
    for height, width in random_sizes(2000, 2.5e7, 1, aspect=200) + near:
        columns, rows = theirs.smart_resize(height, width, min_image_tokens=64, **common)
        assert smart_resize(height, width, ours) == (rows, columns)
        large = theirs._is_image_too_large(height, width, max_pixels_tolerance=theirs.max_pixels_tolerance, **common)
        assert too_large(height, width, ours) == large
        expected = (1, 1)
        if large and splits:
            expected = theirs._get_grid_layout(height, width, theirs.min_tiles, theirs.max_tiles, 512)[1::-1]
        assert tiling(height, width, ours) == expected, (height, width)


@pytest.mark.reference
@pytest.mark.parametrize("limits", [(2, 10), (1, 10), (1, 1), (3, 40)], ids=str)
def test_the_candidate_ratios_stand_in_the_references_order(limits: tuple[int, int]):
    assert list(ratios(*limits)) == reference()._target_ratios(*limits)


@pytest.mark.parametrize(
    ("name", "size", "grid", "last", "tokens"),
    [
        ("defaults", (1, 1), (1, 1), (16, 16), 64),
        ("defaults", (33, 47), (1, 1), (14, 20), 70),
        ("defaults", (100, 1600), (1, 1), (6, 100), 150),
        ("defaults", (512, 512), (1, 1), (32, 32), 256),
        ("defaults", (1024, 1024), (2, 2), (32, 32), 1280),
        ("defaults", (768, 1024), (2, 3), (26, 36), 1770),
        ("defaults", (1200, 800), (3, 2), (38, 26), 1783),
        ("defaults", (2000, 1000), (4, 2), (44, 22), 2290),
        ("defaults", (1080, 1920), (2, 4), (24, 42), 2300),
        ("no thumbnail", (1080, 1920), (2, 4), (32, 32), 2048),
        ("defaults", (768, 1376), (2, 4), (22, 42), 2279),
        ("defaults", (500, 5000), (1, 10), (10, 100), 2810),
        ("one tile", (755, 692), (1, 1), (32, 32), 256),
        ("untiled", (1080, 1920), (1, 1), (24, 42), 252),
    ],
    ids=str,
)
def test_known_sizes_tiles_and_token_counts(name, size, grid, last, tokens):
    ours = settings(name)
    item = prepare(np.zeros((*size, 3), np.uint8), ours)
    tiles = grid[0] * grid[1]
    thumbnail = tiles > 1 and ours.use_thumbnail
    assert item.layout == {"rows": grid[0], "columns": grid[1], "thumbnail": thumbnail}
    assert len(item.pieces) == tiles + thumbnail
    assert item.grids[-1] == (1, *last)
    assert item.grids[: tiles - 1] == ((1, 32, 32),) * (tiles - 1)
    assert item.tokens == tokens == item.num_patches // 4 == len(item.patches) // 4


@pytest.mark.parametrize(("size", "aspect", "patches"), [((33, 10000), 303.0, 1112), ((10, 20000), 2000.0, 2860)])
def test_a_view_of_too_many_patches_is_refused_naming_the_aspect(size, aspect: float, patches: int):
    with pytest.raises(MediaError, match=rf"{aspect} times the other, so its view has {patches} patches.*1024"):
        prepare(np.zeros((*size, 3), np.uint8), settings("untiled"))


def test_a_thin_picture_whose_tiles_have_no_thumbnail_is_taken():
    picture = np.zeros((33, 20000, 3), np.uint8)
    assert prepare(picture, settings("no thumbnail")).layout["columns"] == 10
    with pytest.raises(MediaError, match="times the other"):
        prepare(picture, settings())


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"min_tiles": 1},
        {"min_image_tokens": 200},
        {"max_image_tokens": 80},
        {"min_image_tokens": 16, "tile_size": 64},
    ],
    ids=str,
)
def test_the_budget_range_holds_every_view_and_is_reached(raw: dict[str, int]):
    ours = settings(**raw)
    low, high = ours.budget_range()
    counts = set()
    for size in [(512, 512), *random_sizes(3000, 1e7, 2, aspect=100)]:
        view = smart_resize(*size, ours)
        tiled = ours.splits and too_large(*size, ours)
        if tiled:
            counts.add(ours.tile_tokens)
        if (not tiled or tiling(*size, ours) != (1, 1)) and (tokens := view[0] * view[1] // 1024) <= high:
            counts.add(tokens)
    assert low <= min(counts) <= low + 2
    assert high - 2 <= max(counts) <= high


# Pixels


@pytest.mark.reference
@pytest.mark.parametrize("name", ["defaults", "bicubic"])
def test_pixels_of_40_random_sizes_are_bit_equal_to_the_reference(name: str):
    compare_pixels([*random_sizes(40, 1.5e6, 3), (900, 1300), (1700, 800), (1024, 1024)], name)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.reference
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_sweep_of_pixels_is_bit_equal_to_the_reference(name: str):
    compare_pixels(random_sizes(340, 1.5e6, 4), name)


def compare_pixels(sizes: list[tuple[int, int]], name: str) -> None:
    ours = settings(name)
    for seed, size in enumerate(sizes):
        picture = noise(*size, seed)
        theirs = processed(picture, name=name)
        item = prepare(picture, ours)
        shapes = theirs["spatial_shapes"].tolist()
        assert [list(grid[1:]) for grid in item.grids] == shapes, size
        assert [item.layout["rows"], item.layout["columns"]] == [
            int(theirs[n][0]) for n in ("image_rows", "image_cols")
        ]
        for piece, rows, (height, width) in zip(item.pieces, theirs["pixel_values"].numpy(), shapes, strict=True):
            expected = canonical(rows[: height * width], height, width)
            np.testing.assert_array_equal(normalised(piece, ours), expected)


def test_tiles_stand_row_by_row_with_the_thumbnail_last():
    picture = np.zeros((1024, 1536, 3), np.uint8)
    for row in range(2):
        for column in range(3):
            picture[512 * row : 512 * (row + 1), 512 * column : 512 * (column + 1)] = 40 * (3 * row + column)
    item = prepare(picture, settings())
    assert item.layout == {"rows": 2, "columns": 3, "thumbnail": True}
    for place, piece in enumerate(item.pieces[:-1]):
        assert (piece.patches == 40 * place).all()
    assert len(np.unique(item.pieces[-1].patches)) > 6


def test_rows_stand_cell_by_cell_with_channels_last():
    picture = np.zeros((256, 320, 3), np.uint8)
    picture[..., 0] = np.repeat(np.arange(16), 16)[:, None]
    picture[..., 1] = np.repeat(np.arange(20), 16)[None, :]
    picture[..., 2] = 7
    [piece] = prepare(picture, settings()).pieces
    expected = [(2 * y + dy, 2 * x + dx, 7) for y in range(8) for x in range(10) for dy in (0, 1) for dx in (0, 1)]
    assert [tuple(int(v) for v in patch[:3]) for patch in piece.patches] == expected
    assert (piece.patches.reshape(-1, 256, 3) == piece.patches[:, None, :3]).all()


def test_the_pixels_do_not_alias_the_callers_array():
    picture = noise(512, 512)
    item = prepare(picture, settings())
    before = item.patches.copy()
    picture[...] = 0
    np.testing.assert_array_equal(item.patches, before)


@pytest.mark.reference
@pytest.mark.parametrize("size", [(300, 400), (900, 1300), (1024, 1024)], ids=str)
def test_tokens_are_those_of_the_references_prompt(size: tuple[int, int]):
    """Its own expansion of one picture's placeholder."""
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    processor = Lfm2VlProcessor.__new__(Lfm2VlProcessor)
    processor.image_processor, processor.image_token = reference(), "#"
    processor.image_start_token, processor.image_end_token = "<s>", "<e>"
    processor.image_thumbnail_token = "<t>"
    theirs = processed(noise(*size))
    prompt = processor.replace_image_token(theirs, 0, use_image_special_tokens=True)
    item = prepare(noise(*size), settings())
    rows, columns, thumbnail = (item.layout[name] for name in ("rows", "columns", "thumbnail"))
    parts = ["#" * piece.tokens for piece in item.pieces]
    if rows * columns > 1:
        marks = [f"<|img_row_{r + 1}_col_{c + 1}|>" for r in range(rows) for c in range(columns)] + ["<t>"] * thumbnail
        parts = [mark + part for mark, part in zip(marks, parts, strict=True)]
    assert prompt == "<s>" + "".join(parts) + "<e>"


# Settings


def test_each_field_is_read_where_it_is_found_first():
    files = {
        "config.json": {**CONFIG, "min_tiles": 3, "max_tiles": 7, "use_thumbnail": False, "max_image_tokens": 200},
        "processor_config.json": {
            "image_processor": {"resample": 3, "max_pixels_tolerance": None},
            "max_pixels_tolerance": 1.5,
            "max_tiles": 8,
            "min_image_tokens": 32,
        },
        "preprocessor_config.json": {"resample": 2, "max_tiles": 9, "min_image_tokens": None},
    }
    found = Settings.from_files(files)
    assert found.kernel == "bicubic"  # image_processor of processor_config.json
    assert found.max_tiles == 9  # preprocessor_config.json
    assert (found.max_pixels_tolerance, found.min_image_tokens) == (1.5, 32)  # flat processor_config.json
    assert (found.min_tiles, found.use_thumbnail, found.max_image_tokens) == (3, False, 200)  # config.json
    assert found.tile_size == 512  # default
    assert Settings.from_files(files, {"max_tiles": 4, "resample": 2}).max_tiles == 4  # a keyword


@pytest.mark.parametrize(
    ("raw", "overrides", "words"),
    [
        ({"min_tiles": 11}, None, r"min_tiles \(11\) is more than max_tiles \(10\)"),
        ({}, {"min_image_tokens": 300}, r"min_image_tokens \(300\) is more than max_image_tokens \(256\)"),
        ({}, {"max_pixels": 5}, "max_pixels are not known here; there are tile_size, min_tiles"),
        ({"tile_size": 500}, None, r"tile_size \(500\) is no multiple of 32"),
        ({"encoder_patch_size": 14}, None, "encoder_patch_size is 14 in the processor's settings, 16 in config.json"),
        ({"downsample_factor": 3}, None, "downsample_factor is 3"),
        ({"max_pixels_tolerance": -1}, None, "max_pixels_tolerance must be a positive number, got -1"),
        ({"use_thumbnail": "yes"}, None, "use_thumbnail must be true or false, got 'yes'"),
        ({"resample": 0}, None, "resample is 0"),
        ({"max_tiles": 0}, None, "max_tiles must be a positive integer, got 0"),
        ({"do_rescale": False}, None, "do_rescale is false"),
    ],
    ids=str,
)
def test_settings_that_cannot_hold_are_refused_by_name(raw, overrides, words: str):
    with pytest.raises(CheckpointError, match=words):
        settings(overrides=overrides, **raw)


def test_do_resize_false_is_ignored_as_in_the_reference():
    assert settings(do_resize=False) == settings()


def test_a_missing_settings_file_warns():
    with pytest.warns(UserWarning, match=r"no preprocessor_config.json"):
        assert Settings.from_files({"config.json": CONFIG}) == Settings()


# The processor's output


def same(found: Item, expected: Item) -> None:
    assert (found.grids, found.tokens) == (expected.grids, expected.tokens)
    for piece, other in zip(found.pieces, expected.pieces, strict=True):
        assert piece.patches.dtype == np.uint8
        np.testing.assert_array_equal(piece.patches, other.patches)


PICTURES = [(300, 400), (1024, 1024), (64, 64), (800, 1500)]


@pytest.mark.reference
@pytest.mark.parametrize("name", ["defaults", "no thumbnail", "one tile"])
def test_the_processors_output_gives_the_same_items_as_the_pictures(name: str):
    ours = settings(name)
    pictures = [noise(*size, seed) for seed, size in enumerate(PICTURES)]
    expected = [prepare(picture, ours) for picture in pictures]
    inputs = processed(*pictures, name=name)
    for found, item in zip(items(inputs, ours), expected, strict=True):
        same(found, item)
        assert found.layout == item.layout
    for key in ("image_rows", "image_cols"):
        del inputs[key]
    for found, item in zip(items(inputs, ours, [len(item.pieces) for item in expected]), expected, strict=True):
        same(found, item)
        assert found.layout["thumbnail"] == item.layout["thumbnail"]


def outputs(**changed: Any) -> dict[str, Any]:
    inputs = {
        "pixel_values": np.zeros((2, 64, 768), np.float32),
        "spatial_shapes": np.array([[4, 8], [8, 8]]),
        "pixel_attention_mask": np.arange(64)[None] < np.array([[32], [64]]),
        "image_rows": [1, 1],
        "image_cols": [1, 1],
    }
    return {name: value for name, value in {**inputs, **changed}.items() if value is not None}


def test_views_without_uint8_pixels_stay_float32():
    first, second = items(outputs(), settings())
    assert first.patches.dtype == second.patches.dtype == np.float32
    assert (first.tokens, second.tokens) == (8, 16)


@pytest.mark.parametrize(
    ("changed", "pieces_per_item", "words"),
    [
        ({"image_rows": None}, None, "no image_rows and image_cols.*pieces_per_item"),
        ({"image_rows": None}, [3], r"pieces_per_item is \[3\], and there are 2 pieces"),
        ({"image_rows": [2, 2], "image_cols": [2, 2]}, None, r"image_rows x image_cols is \[4, 4\]"),
        ({"image_rows": [1]}, None, "image_rows has 1 values, image_cols 2"),
        ({}, [2], r"pieces_per_item is \[2\], image_rows and image_cols say \[1, 1\]"),
        ({"pixel_values": None}, None, "no pixel_values"),
        ({"spatial_shapes": None}, None, "no spatial_shapes"),
        (
            {"spatial_shapes": np.array([[4, 7], [8, 8]])},
            None,
            r"spatial_shapes\[0\] is 4 x 7: sides must be multiples",
        ),
        ({"spatial_shapes": np.array([[4, 8], [8, 10]])}, None, r"spatial_shapes\[1\] is 8 x 10.*patches at most 64"),
        ({"spatial_shapes": np.array([[4, 4], [8, 8]])}, None, r"pixel_attention_mask\[0\] has 32 patches.*say 16"),
        ({"pixel_values": np.zeros((2, 64, 588))}, None, r"pixel_values must be \[views, patches, 768\]"),
    ],
    ids=str,
)
def test_incomplete_output_is_refused_by_name(changed, pieces_per_item, words: str):
    with pytest.raises(MediaError, match=words):
        items(outputs(**changed), settings(), pieces_per_item)
