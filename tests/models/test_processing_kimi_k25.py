"""Sizes, pixels, settings and items of Kimi-K2.5, against its Hugging Face processor."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvit.errors import CheckpointError, MediaError
from jaxvit.models.family import Item, Piece
from jaxvit.models.kimi_k25.processing import (
    Limits,
    Settings,
    items,
    most_tokens,
    navit_resize,
    prepare,
    prepare_video,
)

CONFIG = {"model_type": "kimi_k25", "vision_config": {}}
HUB = {
    "in_patch_limit": 16384,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
}
FILES = {"config.json": CONFIG, "preprocessor_config.json": {"media_proc_cfg": HUB}}


def settings(overrides: Any = None, **hub: Any) -> Settings:
    files = {"config.json": CONFIG, "preprocessor_config.json": {"media_proc_cfg": {**HUB, **hub}}}
    return Settings.from_files(files, overrides)


@cache
def reference(kind: str = "image"):
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    return Kimi_K25ImageProcessor() if kind == "image" else Kimi_K25VideoProcessor()


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def processed(*pictures: np.ndarray) -> dict[str, np.ndarray]:
    import torch

    tensors = [torch.from_numpy(picture.transpose(2, 0, 1).copy()) for picture in pictures]
    return {name: value.numpy() for name, value in reference()(tensors, return_tensors="pt").items()}


def filmed(frames: list[np.ndarray], fps: float | None = None, **options: Any):
    """The reference's output for frames as given, with their metadata."""
    import torch
    from transformers.video_utils import VideoMetadata

    video = torch.from_numpy(np.stack(frames).transpose(0, 3, 1, 2).copy())
    if fps is not None:
        options["video_metadata"] = [VideoMetadata(len(frames), fps=fps, frames_indices=list(range(len(frames))))]
    return reference("video")(
        videos=[video], do_sample_frames=False, return_metadata=True, return_tensors="pt", **options
    )


def canonical(rows: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """The reference's rows [N, 3, 14, 14], row-major in a frame, in our order: cell by cell."""
    t, h, w = grid
    return rows.reshape(t, h // 2, 2, w // 2, 2, 588).swapaxes(2, 3).reshape(-1, 588)


def normalised(piece: Piece, ours: Settings) -> np.ndarray:
    return ours.table[piece.patches, ours.channels]


def random_sizes(count: int, pixels: float, seed: int) -> list[tuple[int, int]]:
    generator = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        height, width = (int(n) for n in np.exp(generator.uniform(0, np.log(12000), 2)))
        if height * width <= pixels:
            found.append((height, width))
    return found


# Sizes


@pytest.mark.reference
@pytest.mark.parametrize("limits", [(16384, 512), (4096, 512), (300, 32)], ids=str)
def test_2000_random_sizes_come_out_as_in_the_reference(limits: tuple[int, int]):
    from transformers.models.kimi_k25 import image_processing_kimi_k25 as theirs

    for height, width in random_sizes(2000, 1e8, 1):
        resized, padded = theirs.navit_resize(height, width, 14, 2, *limits)
        assert navit_resize(height, width, Limits(*limits)) == (*resized, *padded)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 1), (2, 2)),
        ((27, 27), (2, 2)),
        ((29, 29), (4, 4)),
        ((448, 449), (32, 34)),
        ((300, 417), (22, 30)),
        ((2000, 2000), (130, 130)),
        ((489, 7081), (36, 496)),
        ((28, 7168), (2, 512)),
        ((9000, 20), (512, 2)),
    ],
    ids=str,
)
def test_known_sizes_and_token_counts(size: tuple[int, int], grid: tuple[int, int]):
    item = prepare(np.zeros((*size, 3), np.uint8), settings())
    assert item.grids == ((1, *grid),)
    assert item.tokens == grid[0] * grid[1] // 4
    assert item.num_patches == grid[0] * grid[1] == len(item.patches)
    assert item.layout == {"merge_size": 2}


def test_the_largest_piece_by_tokens_is_a_picture_and_by_patches_a_chunk():
    assert settings().budget_range() == (1, 17856 // 4)
    assert settings().largest_patches() == 4 * 5352
    rows, columns = navit_resize(153, 6731, Limits(4096))[2:]
    assert rows * columns == 5352 * 14**2


@pytest.mark.parametrize("limits", [(16384, 512), (4096, 512), (300, 32), (50, 512), (1, 4)], ids=str)
def test_no_size_has_more_tokens_than_the_largest_and_some_size_has_them(limits: tuple[int, int]):
    most = most_tokens(Limits(*limits))
    sizes = random_sizes(4000, 1e8, 2)
    sizes += [(14 * a + d, 14 * b + e) for a, b in random_sizes(3000, 3e5, 3) for d, e in ((13, 13), (0, 13), (7, 3))]
    sizes += [(14 * a + 13, 14 * b + 13) for a in range(1, 80) for b in (*range(1, 48), *range(300, 560, 3))]
    sizes += [(1, 10**length) for length in range(4, 9)]
    counts = [rows * columns // 784 for rows, columns in (navit_resize(*s, Limits(*limits))[2:] for s in sizes)]
    assert 0.97 * most <= max(counts) <= most


# Pixels


@pytest.mark.reference
def test_pixels_of_40_random_sizes_are_bit_equal_to_the_reference():
    compare_pixels(random_sizes(40, 1.5e6, 4))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.reference
def test_a_sweep_of_pixels_is_bit_equal_to_the_reference():
    compare_pixels(random_sizes(2000, 1.5e6, 5))


def compare_pixels(sizes: list[tuple[int, int]]) -> None:
    ours = settings()
    for seed, size in enumerate(sizes):
        picture = noise(*size, seed)
        theirs = processed(picture)
        item = prepare(picture, ours)
        assert item.grids == (tuple(theirs["image_grid_thw"][0]),)
        expected = canonical(theirs["pixel_values"], item.grids[0])
        np.testing.assert_array_equal(normalised(item.pieces[0], ours), expected)


@pytest.mark.reference
@pytest.mark.parametrize(("frames", "size"), [(1, (90, 130)), (3, (90, 130)), (11, (130, 61)), (4, (1500, 1700))])
def test_pixels_of_a_clip_are_bit_equal_to_the_reference(frames: int, size: tuple[int, int]):
    ours = settings()
    pictures = [noise(*size, seed) for seed in range(frames)]
    theirs = filmed(pictures)
    item = prepare_video(pictures, ours)
    assert item.grids == tuple(map(tuple, theirs["video_grid_thw"].tolist()))
    rows = theirs["pixel_values_videos"].numpy()
    start = 0
    for piece in item.pieces:
        np.testing.assert_array_equal(normalised(piece, ours), canonical(rows[start : start + piece.rows], piece.grid))
        start += piece.rows
    assert start == len(rows)


def test_padding_is_black_before_and_minus_one_after_normalisation():
    ours = settings()
    piece = prepare(np.full((448, 449, 3), 255, np.uint8), ours).pieces[0]
    values = (
        normalised(piece, ours).reshape(16, 17, 2, 2, 3, 14, 14).transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, 448, 476)
    )
    assert (values[:, :, :449] == 1.0).all()
    assert (values[:, :, 449:] == -1.0).all()


def test_rows_stand_frame_by_frame_and_cell_by_cell():
    frames = []
    for number in range(2):
        frame = np.zeros((56, 84, 3), np.uint8)
        frame[..., 0] = np.repeat(np.arange(4), 14)[:, None]
        frame[..., 1] = np.repeat(np.arange(6), 14)[None, :]
        frame[..., 2] = number
        frames.append(frame)
    [piece] = prepare_video(frames, settings()).pieces
    expected = [
        (f, 2 * y + dy, 2 * x + dx) for f in (0, 1) for y in (0, 1) for x in (0, 1, 2) for dy in (0, 1) for dx in (0, 1)
    ]
    assert [(int(p[392]), int(p[0]), int(p[196])) for p in piece.patches] == expected


def test_the_pixels_do_not_alias_the_callers_array():
    picture = noise(56, 84)
    item = prepare(picture, settings())
    before = item.patches.copy()
    picture[...] = 0
    np.testing.assert_array_equal(item.patches, before)


# Clips


@pytest.mark.parametrize(
    ("frames", "chunks"), [(1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1]), (11, [4, 4, 3])]
)
def test_a_clip_is_cut_into_chunks_of_four_frames(frames: int, chunks: list[int]):
    item = prepare_video([np.zeros((448, 448, 3), np.uint8)] * frames, settings())
    assert item.grids == tuple((count, 32, 32) for count in chunks)
    assert [piece.rows for piece in item.pieces] == [1024 * count for count in chunks]
    assert [piece.tokens for piece in item.pieces] == [256] * len(chunks)
    assert item.tokens == 256 * len(chunks)


def test_a_frames_limit_is_its_own_and_not_the_pictures():
    picture = noise(1500, 1700)
    assert prepare(picture, settings()).tokens > prepare_video([picture], settings()).tokens


def test_a_limit_on_the_whole_video_is_shared_by_a_chunks_frames():
    ours = settings(in_patch_limit_video=400)
    pictures = [noise(400, 400)] * 5
    grids = prepare_video(pictures, ours).grids
    assert grids[0] == (4, *(n // 14 for n in navit_resize(400, 400, Limits(100))[2:]))
    assert grids[1] == (1, *(n // 14 for n in navit_resize(400, 400, Limits(400))[2:]))


def test_prune_is_refused():
    with pytest.raises(MediaError, match=r"prune is 0.5, and Kimi-K2.5's clips are not pruned"):
        prepare_video([noise(56, 56)], settings(), prune=0.5)


@pytest.mark.parametrize(
    ("fps", "timestamps", "times"),
    [(4.0, None, (0.0, 1.0)), (None, None, (0.0, 2.0)), (4.0, (0.0, 1.0, 2.0, 3.0, 7.5), (0.0, 7.5))],
)
def test_chunk_times_come_from_timestamps_then_fps_then_the_checkpoints_rate(fps, timestamps, times):
    item = prepare_video([noise(56, 56)] * 5, settings(), fps, timestamps)
    assert item.layout == {"merge_size": 2, "chunk_times": times}


@pytest.mark.reference
def test_sampling_a_file_takes_the_references_frames():
    from transformers.video_utils import VideoMetadata

    for total in [1, 2, 3, 30, 31, 299, 1000]:
        for native in (5.0, 23.976, 30.0):
            metadata = VideoMetadata(total_num_frames=total, fps=native)
            for fps in (0.5, 1.0, 2.0, 5.0):
                theirs = reference("video").sample_frames(metadata, fps=fps).tolist()
                assert list(settings().sample_frames(total, native, fps)) == theirs, (total, native, fps)
            theirs = reference("video").sample_frames(metadata).tolist()
            assert list(settings().sample_frames(total, native, None)) == theirs


@pytest.mark.reference
def test_tokens_and_times_are_those_of_the_references_prompt():
    """Its own expansion of one clip's placeholder, from the same frames."""
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

    pictures = [noise(200, 300, seed) for seed in range(11)]
    theirs = filmed(pictures, fps=1.5)
    processor = Kimi_K25Processor.__new__(Kimi_K25Processor)
    processor.video_processor, processor.video_token = reference("video"), "#"
    prompt = processor.replace_video_token(theirs, 0)
    item = prepare_video(pictures, settings(), fps=1.5)
    chunks = re.findall(
        r"(\d\d):(\d\d):(\d\d\.\d{3})<\|media_begin\|>video<\|media_content\|>(#+)<\|media_end\|>", prompt
    )
    assert [len(tokens) for *_, tokens in chunks] == [piece.tokens for piece in item.pieces]
    seconds = [int(h) * 3600 + int(m) * 60 + float(s) for h, m, s, _ in chunks]
    assert seconds == pytest.approx(item.layout["chunk_times"], abs=1e-3)
    assert items(theirs, settings())[0].layout == item.layout


# Settings


def test_the_hubs_settings_are_the_defaults():
    assert settings() == Settings()


def test_transformers_spelling_is_read_like_the_hubs():
    size = {"max_height": 64, "max_width": 64}
    nested = {
        "image_processor": {"max_patches": 900, "size": size},
        "video_processor": {"max_patches": 400, "size": size, "temporal_patch_size": 3, "fps": 1},
    }
    theirs = Settings.from_files({"config.json": CONFIG, "processor_config.json": nested})
    hub = settings(
        in_patch_limit=900,
        in_patch_limit_each_frame=400,
        patch_limit_on_one_side=64,
        temporal_merge_kernel_size=3,
        sample_fps=1.0,
    )
    assert theirs == hub
    assert theirs.image == Limits(900, 64)


@pytest.mark.reference
@pytest.mark.parametrize("names", [("pre",), ("pre", "video"), ("pre", "video", "nested")], ids=str)
def test_the_reference_loaded_from_the_same_folder_has_the_same_limits(tmp_path: Path, names: tuple[str, ...]):
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    files: dict[str, Any] = {"config.json": CONFIG}
    if "pre" in names:
        files["preprocessor_config.json"] = {"max_patches": 900, "image_processor_type": "Kimi_K25ImageProcessor"}
    if "video" in names:
        files["video_preprocessor_config.json"] = {"max_patches": 500, "temporal_patch_size": 3}
    if "nested" in names:
        files["processor_config.json"] = {"image_processor": {"max_patches": 800}, "video_processor": {"fps": 1}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    ours = Settings.from_files(files)
    image, video = (kind.from_pretrained(tmp_path) for kind in (Kimi_K25ImageProcessor, Kimi_K25VideoProcessor))
    assert ours.image.max_patches == image.max_patches
    assert (ours.video.max_patches, ours.chunk, ours.fps) == (video.max_patches, video.temporal_patch_size, video.fps)


def test_a_keyword_beats_the_file():
    ours = settings({"max_patches": 64, "video_max_patches": 16, "fps": 1.0})
    assert (ours.image.max_patches, ours.video.max_patches, ours.fps) == (64, 16, 1.0)
    assert prepare(noise(448, 448), ours).num_patches == 64


@pytest.mark.parametrize(
    ("hub", "overrides", "words"),
    [
        ({}, {"max_pixels": 5}, "max_pixels are not known here; there are max_patches, video_max_patches, fps"),
        ({}, {"fps": 0}, "fps is 0: give frames a second, more than 0"),
        ({}, {"fps": ""}, "fps is '': give frames a second"),
        ({}, {"fps": True}, "fps is True: give frames a second"),
        ({}, {"fps": float("nan")}, "fps is nan: give frames a second"),
        ({}, {"max_patches": 0}, "max_patches must be a positive integer, got 0"),
        ({}, {"fps": -1}, "fps is -1"),
        ({"fixed_output_tokens": 100}, None, "fixed_output_tokens is 100"),
        ({"max_num_frames_each_video": 10}, None, "max_num_frames_each_video is 10"),
        ({"in_patch_limit": "many"}, None, "max_patches must be a positive integer, got 'many'"),
        ({"in_patch_limit_video": -3}, None, "in_patch_limit_video must be a positive integer, got -3"),
    ],
    ids=str,
)
def test_settings_that_cannot_hold_are_refused_by_name(hub, overrides, words: str):
    with pytest.raises(CheckpointError, match=words):
        settings(overrides, **hub)


def test_unequal_sides_in_transformers_spelling_are_refused():
    raw = {"size": {"max_height": 512, "max_width": 256}}
    with pytest.raises(CheckpointError, match="max_height 512 and max_width 256"):
        Settings.from_files({"config.json": CONFIG, "preprocessor_config.json": raw})


def test_a_missing_settings_file_warns_and_takes_the_defaults():
    with pytest.warns(UserWarning, match=r"no preprocessor_config.json"):
        assert Settings.from_files({"config.json": CONFIG}) == Settings()


# The processor's output


def same(found: Item, expected: Item) -> None:
    assert (found.grids, found.tokens, found.layout) == (expected.grids, expected.tokens, expected.layout)
    for piece, other in zip(found.pieces, expected.pieces, strict=True):
        assert piece.patches.dtype == np.uint8
        assert (piece.grid, piece.tokens) == (other.grid, other.tokens)
        np.testing.assert_array_equal(piece.patches, other.patches)


@pytest.mark.reference
def test_the_processors_output_gives_the_same_items_as_pictures_and_clips():
    ours = settings()
    pictures = [noise(56, 56, 1), noise(300, 417, 2)]
    clips = [[noise(90, 60, seed) for seed in range(5)], [noise(84, 84, 9)]]
    outputs = [filmed(clip, fps=2.0) for clip in clips]
    inputs: dict[str, Any] = dict(processed(*pictures))
    for name in ("pixel_values_videos", "video_grid_thw"):
        inputs[name] = np.concatenate([output[name].numpy() for output in outputs])
    inputs["num_chunks_per_video"] = [2, 1]
    expected = [prepare(p, ours) for p in pictures] + [prepare_video(c, ours, 2.0) for c in clips]
    for found, item in zip(items(inputs, ours), expected, strict=True):
        same(found, item)
    del inputs["num_chunks_per_video"]
    for found, item in zip(items(inputs, ours, [2, 1]), expected, strict=True):
        same(found, item)


def test_pixels_that_are_no_uint8_stay_float32():
    values = np.full((4, 3, 14, 14), 0.12345, np.float32)
    [item] = items({"pixel_values": values, "image_grid_thw": [[1, 2, 2]]}, settings())
    assert item.patches.dtype == np.float32


VIDEO_4 = {"pixel_values_videos": np.zeros((4, 3, 14, 14)), "video_grid_thw": [[1, 2, 2]]}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "no pixel_values.* in the inputs; there is nothing"),
        ({"input_ids": [[1]]}, "no pixel_values.* in the inputs; there is input_ids"),
        ({"pixel_values": np.zeros((4, 3, 14, 14))}, "no image_grid_thw"),
        ({"pixel_values": np.zeros((4, 3, 16, 16)), "image_grid_thw": [[1, 2, 2]]}, r"\[patches, 3, 14, 14\]"),
        ({"pixel_values": np.zeros((4, 588)), "image_grid_thw": [[1, 2, 4]]}, "asks for 8 patches, and there are 4"),
        (VIDEO_4, "no num_chunks_per_video"),
        ({**VIDEO_4, "num_chunks_per_video": [2]}, r"num_chunks_per_video is \[2\], and there are 1 pieces"),
        (
            {
                "pixel_values_videos": np.zeros((20, 588)),
                "video_grid_thw": [[5, 2, 2]],
                "num_chunks_per_video": [1],
            },
            "a grid of 5 frames, and a chunk has 4 at most",
        ),
        ({"pixel_values": np.zeros((1028, 588)), "image_grid_thw": [[1, 2, 514]]}, "a side has 512 at most"),
    ],
    ids=str,
)
def test_incomplete_output_is_refused_by_name(inputs, words: str):
    with pytest.raises(MediaError, match=words):
        items(inputs, settings())
