"""Pictures and clips -> items of Kimi-K2.5, with the sizes and the pixels of its Hugging Face processor.

A picture is one piece; a clip is cut into chunks of up to four frames, one piece each, whose tokens are as many as one
frame has. Pictures are never enlarged: they shrink only over a limit, and black rows and columns fill them up to whole
merged cells; those patches are ordinary ones. Patches are [rows, 588] uint8, (channel, y, x); rows stand frame by
frame, in a frame cell by cell, four patches a merged cell, cells row-major.

``Item.layout``: ``merge_size``, and for a clip ``chunk_times``: seconds at which each chunk begins, from the
timestamps, else from fps, else from the rate at which the checkpoint samples videos (2 a second).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from jaxvit.errors import CheckpointError, MediaError
from jaxvit.models import pixels
from jaxvit.models.family import Item, Piece
from jaxvit.models.options import section
from jaxvit.resample import Kernel, resize

HALF = (0.5, 0.5, 0.5)
LONGEST = 2048
"""Patches along a side that a checkpoint may allow, at most."""


@dataclass(frozen=True)
class Limits:
    """Patches of a picture or of one frame, patches along a side (both before the padding), and the resize's kernel."""

    max_patches: int
    side: int = 512
    kernel: Kernel = "bicubic"


@dataclass(frozen=True)
class Settings:
    """Processing settings of a checkpoint.

    Attributes:
        image: for pictures.
        video: for each frame of a clip.
        chunk_patches: limit on the patches of a whole chunk, shared by its frames; None for none.
        chunk: frames of a chunk at most.
        fps: frames a second that are taken from a video file when the caller names none.
    """

    image: Limits = Limits(16384)
    video: Limits = Limits(4096)
    chunk_patches: int | None = None
    chunk: int = 4
    fps: float = 2.0
    patch_size: int = 14
    merge_size: int = 2
    image_mean: tuple[float, ...] = HALF
    image_std: tuple[float, ...] = HALF
    rescale_factor: float = 1 / 255

    OVERRIDES = ("max_patches", "video_max_patches", "fps")
    """Names of settings that a keyword may set."""

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> Settings:
        """Reads the settings in the hub's spelling (``media_proc_cfg``) or in that of transformers.

        In the latter, pictures: ``image_processor`` of processor_config.json, else preprocessor_config.json; frames:
        ``video_processor`` of processor_config.json, else video_preprocessor_config.json, else
        preprocessor_config.json. A keyword beats the file.

        Raises:
            CheckpointError: an unknown keyword, or a setting that is not implemented; the message names it.
        """
        overrides = dict(overrides or {})
        pixels.check_overrides(overrides, cls.OVERRIDES)
        nested = files.get("processor_config.json", {})
        single = files.get("preprocessor_config.json", {})
        if isinstance(hub := single.get("media_proc_cfg"), Mapping):
            image, video = _from_hub(hub)
        else:
            image = section(nested, "image_processor") or single
            video = section(nested, "video_processor") or files.get("video_preprocessor_config.json") or single
            if not image:
                warnings.warn("no preprocessor_config.json: its settings are the family's defaults", stacklevel=2)
        colours = pixels.colours_of(image, HALF, HALF)
        if pixels.colours_of(video, HALF, HALF) != colours:
            raise CheckpointError("image_mean, image_std or rescale_factor of pictures and of videos differ")
        sizes = [[pixels.field(raw, name, default) for name, default in _SIZES] for raw in (image, video)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(f"patch_size and merge_size of pictures and of videos differ: {sizes[0]}, {sizes[1]}")
        fps = pixels.rate(overrides.get("fps"), video.get("fps"))
        total = video.get("chunk_patches")
        patch_size, merge_size = sizes[0]
        mean, std, rescale_factor = colours
        return cls(
            _limits(image, overrides.get("max_patches"), 16384),
            _limits(video, overrides.get("video_max_patches"), 4096),
            None if total is None else pixels.positive("in_patch_limit_video", total),
            pixels.field(video, "temporal_patch_size", 4),
            fps,
            patch_size,
            merge_size,
            mean,
            std,
            rescale_factor,
        )

    @property
    def factor(self) -> int:
        """Pixels of a token along a side."""
        return self.patch_size * self.merge_size

    @cached_property
    def table(self) -> Float32[np.ndarray, "256 3"]:
        """The normalised value of each uint8 value of each channel."""
        return pixels.normalisation_table(self.image_mean, self.image_std, self.rescale_factor)

    @cached_property
    def channels(self) -> np.ndarray:
        """int32 [588]: the colour channel of each value of a patch."""
        return np.repeat(np.arange(3, dtype=np.int32), self.patch_size**2)

    def chunk_limits(self, frames: int) -> Limits:
        """The limits of each frame of a chunk of so many."""
        if self.chunk_patches is None:
            return self.video
        share = max(1, min(round(self.chunk_patches / frames), self.video.max_patches))
        return Limits(share, self.video.side, self.video.kernel)

    def budget_range(self) -> tuple[int, int]:
        """Tokens of the smallest and of the largest piece: a picture, or a chunk of a clip."""
        frames = [most_tokens(self.chunk_limits(count), self.patch_size, self.merge_size) for count in self.chunks]
        return 1, max(most_tokens(self.image, self.patch_size, self.merge_size), *frames)

    def largest_patches(self) -> int:
        """Patches of the largest piece, which is a chunk of frames and not the piece of the most tokens."""
        frames = [
            count * most_tokens(self.chunk_limits(count), self.patch_size, self.merge_size) for count in self.chunks
        ]
        return self.merge_size**2 * max(most_tokens(self.image, self.patch_size, self.merge_size), *frames)

    @property
    def chunks(self) -> range:
        """The numbers of frames that a chunk may have."""
        return range(1, self.chunk + 1)

    def sample_frames(self, total: int, native: float, fps: float | None) -> list[int]:
        """Which frames of a file are taken: spread evenly, ``fps`` a second."""
        return pixels.uniform(total, native, fps or self.fps)


_SIZES = (("patch_size", 14), ("merge_size", 2))


def _from_hub(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hub's names -> those of transformers, for pictures and for frames."""
    for name in ("fixed_output_tokens", "max_num_frames_each_video"):
        if raw.get(name) is not None:
            raise CheckpointError(f"media_proc_cfg: {name} is {raw[name]!r}, and only null is implemented")
    side = pixels.field(raw, "patch_limit_on_one_side", 512)
    both = {
        "size": {"max_height": side, "max_width": side},
        "patch_size": raw.get("patch_size"),
        "merge_size": raw.get("merge_kernel_size"),
        "image_mean": raw.get("image_mean"),
        "image_std": raw.get("image_std"),
    }
    image = {**both, "max_patches": raw.get("in_patch_limit")}
    video = {
        **both,
        "max_patches": raw.get("in_patch_limit_each_frame"),
        "temporal_patch_size": raw.get("temporal_merge_kernel_size"),
        "fps": raw.get("sample_fps"),
        "chunk_patches": raw.get("in_patch_limit_video"),
    }
    return image, video


def _limits(raw: Mapping[str, Any], keyword: Any, default: int) -> Limits:
    size = section(raw, "size")
    height, width = size.get("max_height", 512), size.get("max_width", 512)
    if height != width:
        raise CheckpointError(f"size has max_height {height} and max_width {width}: only equal ones are implemented")
    patches = pixels.field(raw, "max_patches", default) if keyword is None else pixels.positive("max_patches", keyword)
    return Limits(patches, pixels.positive("size.max_height", height, LONGEST), pixels.kernel_of(raw, 3))


# Sizes ---------------------------------------------------------------------------------------------------------------


def navit_resize(height: int, width: int, limits: Limits, patch: int = 14, merge: int = 2) -> tuple[int, int, int, int]:
    """Height and width in pixels after the resize, then after the padding to whole merged cells.

    After the padding a picture may have more patches than the limit, as in the reference.
    """
    side = limits.side * patch
    patches = max(1.0, height // patch) * max(1.0, width // patch)
    scale = min(1.0, math.sqrt(limits.max_patches / patches), side / height, side / width)
    new_height = min(max(1, int(height * scale)), side)
    new_width = min(max(1, int(width * scale)), side)
    factor = merge * patch
    return new_height, new_width, -(-new_height // factor) * factor, -(-new_width // factor) * factor


@lru_cache(maxsize=64)
def most_tokens(limits: Limits, patch: int = 14, merge: int = 2) -> int:
    """Tokens of the largest picture or frame under these limits.

    The scale depends on whole patches only, so of all sizes with the same whole patches the largest gives the most. At
    a side's limit that is the limit itself. A picture that ends with more than one row of cells shrinks to no less than
    half (its whole patches fill the limit, each way at least one), so sides of twice the limit are enough; one of a
    single row, long enough, has a whole side of cells under any limit.
    """
    reach = np.arange(1, 2 * limits.side + 1)
    sides = np.concatenate([reach * patch + patch - 1, [limits.side * patch]])
    width, factor = sides[None, :], merge * patch
    most = limits.side // merge
    for start in range(0, len(sides), 256):  # some heights at a time, for memory's sake
        height = sides[start : start + 256, None]
        patches = np.maximum(1, height // patch) * np.maximum(1, width // patch)
        scale = np.minimum(1.0, np.sqrt(limits.max_patches / patches))
        scale = np.minimum(scale, np.minimum(limits.side * patch / height, limits.side * patch / width))
        rows, columns = (-(-np.maximum(1, (side * scale).astype(np.int64)) // factor) for side in (height, width))
        most = max(most, int((rows * columns).max()))
    return most


# Pictures -> items ---------------------------------------------------------------------------------------------------


def prepare(picture: UInt8[np.ndarray, "height width 3"], settings: Settings) -> Item:
    """One RGB picture to an item of one piece."""
    return _item([cut([picture], settings.image, settings)], settings)


def prepare_video(
    frames: Sequence[UInt8[np.ndarray, "height width 3"]],
    settings: Settings,
    fps: float | None = None,
    timestamps: Sequence[float] | None = None,
    prune: float = 0.0,
) -> Item:
    """Frames of one size to an item of one piece a chunk. Raises MediaError for ``prune``, which is Qwen2.5-VL's."""
    if prune:
        raise MediaError(f"prune is {prune}, and Kimi-K2.5's clips are not pruned: leave it out")
    starts = range(0, len(frames), settings.chunk)
    chunks = [frames[start : start + settings.chunk] for start in starts]
    pieces = [cut(chunk, settings.chunk_limits(len(chunk)), settings) for chunk in chunks]
    times = tuple(float(start / (fps or settings.fps) if timestamps is None else timestamps[start]) for start in starts)
    return _item(pieces, settings, chunk_times=times)


def cut(frames: Sequence[np.ndarray], limits: Limits, settings: Settings) -> Piece:
    """Frames of one size, resized, padded and cut into the patches of one piece."""
    patch, merge = settings.patch_size, settings.merge_size
    height, width, full_height, full_width = navit_resize(frames[0].shape[0], frames[0].shape[1], limits, patch, merge)
    grid = (len(frames), full_height // patch, full_width // patch)
    patches = np.empty((len(frames), grid[1] * grid[2], 3 * patch**2), np.uint8)
    for frame, rows in zip(frames, patches, strict=True):
        planes = resize(frame, height, width, limits.kernel)
        if planes.shape[1:] != (full_height, full_width):
            padding = ((0, 0), (0, full_height - height), (0, full_width - width))
            planes = np.pad(planes, padding)  # zeros before the normalisation, so -1 after it
        rows[...] = pixels.cells(planes, merge, patch).reshape(rows.shape)
    return Piece(grid, patches.reshape(-1, patches.shape[2]), grid[1] * grid[2] // merge**2)


def _item(pieces: Sequence[Piece], settings: Settings, **extra: Any) -> Item:
    return Item(
        tuple(pieces),
        tuple(piece.grid for piece in pieces),
        sum(piece.tokens for piece in pieces),
        {"merge_size": settings.merge_size, **extra},
    )


# The Hugging Face processor's output -> items ------------------------------------------------------------------------


def items(inputs: Mapping[str, Any], settings: Settings, pieces_per_item: Sequence[int] | None = None) -> list[Item]:
    """Items of ``pixel_values`` with ``image_grid_thw``, then those of ``pixel_values_videos`` with ``video_grid_thw``.

    ``num_chunks_per_video`` (or ``pieces_per_item``, for the videos) says which chunks are one video;
    ``video_metadata``, where it is there, when each chunk begins. Pixels that are the table's values bit for bit become
    uint8 again.
    """
    found: list[Item] = []
    if inputs.get("pixel_values") is not None:
        found += [_item([piece], settings) for piece in _pieces(inputs, "pixel_values", "image_grid_thw", settings)]
    if inputs.get("pixel_values_videos") is not None:
        pieces = _pieces(inputs, "pixel_values_videos", "video_grid_thw", settings)
        name = "num_chunks_per_video" if inputs.get("num_chunks_per_video") is not None else "pieces_per_item"
        counts = inputs.get(name, pieces_per_item)
        if counts is None:
            raise MediaError("inputs have no num_chunks_per_video: hand it in, or pieces_per_item, the chunks a video")
        start = 0
        for place, count in enumerate(pixels.whole_pieces(name, counts, len(pieces))):
            chunks = pieces[start : start + count]
            found.append(_item(chunks, settings, chunk_times=_times(inputs, place, chunks, settings)))
            start += count
    elif pieces_per_item is not None:
        raise MediaError("pieces_per_item is for pixel_values_videos, and there are none: leave it out")
    if not found:
        there = ", ".join(sorted(map(str, inputs))) or "nothing"
        raise MediaError(f"no pixel_values and no pixel_values_videos in the inputs; there is {there}")
    return found


def _pieces(inputs: Mapping[str, Any], name: str, grids_name: str, settings: Settings) -> list[Piece]:
    merge, values = settings.merge_size, 3 * settings.patch_size**2
    rows = pixels.host(inputs[name], np.float32)
    if rows.ndim not in (2, 4) or math.prod(rows.shape[1:]) != values:
        raise MediaError(f"{name} must be [patches, 3, {settings.patch_size}, {settings.patch_size}], got {rows.shape}")
    rows = rows.reshape(-1, values)
    pieces = []
    start = 0
    for t, h, w in pixels.grids_of(inputs, grids_name, len(rows), merge):
        if t > settings.chunk:
            raise MediaError(
                f"{grids_name} has a grid of {t} frames, and a chunk has {settings.chunk} at most: cut the clip"
            )
        if max(h, w) > settings.image.side:
            raise MediaError(f"{grids_name} has a grid of {h} x {w} patches: a side has {settings.image.side} at most")
        part = rows[start : start + t * h * w].reshape(t, h // merge, merge, w // merge, merge, values)
        part = part.swapaxes(2, 3).reshape(-1, values)
        exact = pixels.recover(part, settings.table, settings.channels)
        pieces.append(Piece((t, h, w), part if exact is None else exact, h * w // merge**2))
        start += t * h * w
    return pieces


def _times(inputs: Mapping[str, Any], place: int, chunks: Sequence[Piece], settings: Settings) -> tuple[float, ...]:
    """Seconds at which the chunks begin: the metadata's, else by the rate at which the checkpoint samples videos."""
    starts = np.cumsum([0] + [chunk.grid[0] for chunk in chunks[:-1]])
    metadata = inputs.get("video_metadata")
    if metadata is not None and getattr(metadata[place], "fps", None) and metadata[place].frames_indices is not None:
        return tuple(float(metadata[place].timestamps[start]) for start in starts)
    return tuple(float(start / settings.fps) for start in starts)
