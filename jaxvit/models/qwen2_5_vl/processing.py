"""Pictures and clips -> items of Qwen2.5-VL, with the sizes and the pixels of its Hugging Face processor.

A picture is one piece of [rows, 588] uint8 (one frame; the device doubles it), a clip one piece of [rows, 1176] a frame
pair: the first frame's 588 values, then the second's. The 588 are (channel, y, x). Rows stand cell by cell, four
patches a merged cell, cells in window order.

``Item.layout``: ``grid_thw`` (t, h, w), ``merge_size``, and for a clip ``seconds_per_grid``: seconds from one frame
pair to the next, from fps, else from the timestamps, else 1.0, which is what the language model assumes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from jaxvit.errors import CheckpointError, MediaError
from jaxvit.models import pixels
from jaxvit.models.family import Grid, Item, Piece
from jaxvit.models.options import section
from jaxvit.models.qwen2_5_vl.config import Config
from jaxvit.models.qwen2_5_vl.layout import windows
from jaxvit.resample import Kernel, resize

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT = 200
IMAGE_DEFAULTS = (56 * 56, 28 * 28 * 1280)
VIDEO_DEFAULTS = (128 * 28 * 28, 768 * 28 * 28)
PUBLISHED = {"min_pixels": 3136, "max_pixels": 12845056}
"""What every official repository's preprocessor_config.json holds."""


@dataclass(frozen=True)
class Limits:
    """Pixels of a picture or of one frame after the resize, and the kernel of the resize."""

    min_pixels: int
    max_pixels: int
    kernel: Kernel = "bicubic"


@dataclass(frozen=True)
class Settings:
    """Processing settings of a checkpoint.

    Attributes:
        image: for pictures.
        video: for each frame of a clip.
        patch_size: pixels.
        merge_size: patches per token along a side.
        window: merged cells along a side of an attention window.
        fps: frames a second that are taken from a video file when the caller names none.
        min_frames, max_frames: of what is taken from a video file.
        cap_pixels_per_frame: whether a long clip's frames share a total of pixels (``max_video_tokens``).
    """

    image: Limits
    video: Limits
    patch_size: int = 14
    merge_size: int = 2
    window: int = 4
    image_mean: tuple[float, ...] = MEAN
    image_std: tuple[float, ...] = STD
    rescale_factor: float = 1 / 255
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128000

    OVERRIDES = ("min_pixels", "max_pixels", "size", "video_min_pixels", "video_max_pixels", "fps")
    """Names of settings that a keyword may set; min_pixels, max_pixels and size are the pictures'."""

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> Settings:
        """Reads the settings as the reference does: one whole object, the first that there is.

        Pictures: ``image_processor`` of processor_config.json, else preprocessor_config.json. Frames:
        ``video_processor`` of processor_config.json, else video_preprocessor_config.json, else
        preprocessor_config.json. In each, ``min_pixels`` and ``max_pixels`` beat ``size``; a keyword beats the file.

        Raises:
            CheckpointError: min over max, a keyword that contradicts another or is unknown, or a setting that is not
                implemented; the message names it.
        """
        config = Config.from_files(files)
        overrides = dict(overrides or {})
        pixels.check_overrides(overrides, cls.OVERRIDES)
        nested = files.get("processor_config.json", {})
        single = files.get("preprocessor_config.json")
        image = section(nested, "image_processor") or single
        video = section(nested, "video_processor") or files.get("video_preprocessor_config.json") or single or {}
        if image is None:
            warnings.warn(
                "no preprocessor_config.json: pictures are processed with the values of the official repositories "
                f"({PUBLISHED})",
                stacklevel=2,
            )
            image, video = PUBLISHED, video or PUBLISHED
        for raw in (image, video):
            for name, value in (("patch_size", config.patch_size), ("merge_size", config.spatial_merge_size)):
                if raw.get(name, value) != value:
                    raise CheckpointError(f"{name} is {raw[name]} in the processor's settings, {value} in config.json")
            if raw.get("do_resize") is False:
                raise CheckpointError("do_resize is false: only resized pictures are implemented")
        colours = pixels.colours_of(image, MEAN, STD)
        if pixels.colours_of(video, MEAN, STD) != colours:
            raise CheckpointError("image_mean, image_std or rescale_factor of pictures and of videos differ")
        keywords = {name: overrides.get(name) for name in ("min_pixels", "max_pixels", "size")}
        of_frames = {name: overrides.get(f"video_{name}") for name in ("min_pixels", "max_pixels")}
        fps = pixels.rate(overrides.get("fps"), video.get("fps"))
        return cls(
            _limits("", image, keywords, IMAGE_DEFAULTS),
            _limits("video_", video, of_frames, VIDEO_DEFAULTS),
            config.patch_size,
            config.spatial_merge_size,
            config.window_cells,
            *colours,
            fps=fps,
            min_frames=pixels.positive("min_frames", video.get("min_frames") or 4),
            max_frames=pixels.positive("max_frames", video.get("max_frames") or 768),
            cap_pixels_per_frame=bool(video.get("cap_pixels_per_frame")),
            max_video_tokens=pixels.positive("max_video_tokens", video.get("max_video_tokens") or 128000),
        )

    @property
    def factor(self) -> int:
        """Pixels of a token along a side."""
        return self.patch_size * self.merge_size

    @property
    def frame_values(self) -> int:
        """Values of a patch of one frame."""
        return 3 * self.patch_size**2

    @cached_property
    def table(self) -> Float32[np.ndarray, "256 3"]:
        """The normalised value of each uint8 value of each channel."""
        return pixels.normalisation_table(self.image_mean, self.image_std, self.rescale_factor)

    @cached_property
    def channels(self) -> np.ndarray:
        """int32 [588]: the colour channel of each value of a patch of one frame."""
        return np.repeat(np.arange(3, dtype=np.int32), self.patch_size**2)

    def budget_range(self) -> tuple[int, int]:
        """Tokens of the smallest and of the largest piece: a picture, or a frame pair."""
        ranges = [token_range(limits, self.factor) for limits in (self.image, self._capped())]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    def _capped(self) -> Limits:
        """The widest limits that a frame can get."""
        if not self.cap_pixels_per_frame:
            return self.video
        floor = int(self.video.min_pixels * 1.05)
        return Limits(self.video.min_pixels, max(self.video.max_pixels, floor), self.video.kernel)

    def frame_limits(self, frames: int) -> Limits:
        """The limits of each of so many frames."""
        if not self.cap_pixels_per_frame:
            return self.video
        share = int(self.max_video_tokens * self.factor**2 * 0.9) * 2 // frames
        most = max(min(self.video.max_pixels, share), int(self.video.min_pixels * 1.05))
        return Limits(self.video.min_pixels, most, self.video.kernel)

    def sample_frames(self, total: int, native: float, fps: float | None) -> list[int]:
        """Which frames of a file are taken: at ``fps``, an even number between the settings' least and most."""
        most = min(self.max_frames, total) // 2 * 2
        count = min(max(total / native * (fps or self.fps), self.min_frames), most, total)
        count = math.floor(count / 2) * 2
        if not count:
            return [0]
        step = total / count
        places = (np.arange(math.ceil(total / step)) * step).astype(np.float32)  # the reference's are float32
        return [int(place) for place in places if place < total]


def _limits(prefix: str, raw: Mapping[str, Any], keywords: Mapping[str, Any], defaults: tuple[int, int]) -> Limits:
    values = []
    asked, stored = section(keywords, "size"), section(raw, "size")
    for name, edge, default in zip(
        ("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), defaults, strict=True
    ):
        keyword, other = keywords.get(name), asked.get(edge)
        if keyword is not None and other is not None and keyword != other:
            raise CheckpointError(f"{name} = {keyword} and size[{edge!r}] = {other} contradict each other: give one")
        candidates = (keyword, other, raw.get(name), stored.get(edge), default)
        value = next(candidate for candidate in candidates if candidate is not None)
        values.append(pixels.positive(prefix + name, value))
    if values[0] > values[1]:
        raise CheckpointError(
            f"{prefix}min_pixels ({values[0]}) is more than {prefix}max_pixels ({values[1]}): no size satisfies both"
        )
    return Limits(values[0], values[1], pixels.kernel_of(raw, 3))


# Sizes ---------------------------------------------------------------------------------------------------------------


def smart_resize(height: int, width: int, limits: Limits, factor: int = 28) -> tuple[int, int]:
    """Height and width in pixels after the resize: multiples of ``factor``, within the limits where that can be.

    Raises:
        MediaError: one side is over 200 times the other.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT:
        raise MediaError(
            f"{height} x {width} pixels: one side is {ratio:.1f} times the other, the limit is {MAX_ASPECT}: "
            "crop it, or cut it into parts"
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > limits.max_pixels:
        shrink = math.sqrt(height * width / limits.max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor**2 < limits.min_pixels:
        grow = math.sqrt(limits.min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def token_range(limits: Limits, factor: int = 28) -> tuple[int, int]:
    """Least and most tokens of a picture under these limits.

    Growing and shrinking keep the area at a limit before the sides are rounded, to x and area / x tokens, with x at
    least sqrt(area / 200). So it is enough to try each number of rows up to the square root, at the x where the other
    side is longest (rounding up) or shortest (rounding down).
    """
    least, most = limits.min_pixels / factor**2, limits.max_pixels / factor**2
    low, high = math.ceil(least), math.floor(most)
    slack = 1e-9  # sides that are whole numbers may come out an ulp off
    for rows in range(1, math.ceil(math.sqrt(least)) + 2):
        longest = math.sqrt(MAX_ASPECT * least)
        if rows > 1:
            longest = min(longest, least / (rows - 1))
        if math.ceil(math.sqrt(least / MAX_ASPECT)) <= rows:
            high = max(high, rows * math.ceil(longest * (1 + slack)))
    for rows in range(max(1, math.floor(math.sqrt(most / MAX_ASPECT))), math.floor(math.sqrt(most)) + 2):
        low = min(low, rows * max(1, math.floor(most / (rows + 1) * (1 - slack))))
    if most < MAX_ASPECT:  # a side below one token is held at one
        high = max(high, math.floor(math.sqrt(MAX_ASPECT * most) * (1 + slack)))
    return max(low, 1), max(high, 1)


def kept_tokens(tokens: int, pairs: int, prune: float) -> int:
    """Tokens left of a clip: the share that is not pruned, and never fewer than its first frame pair's."""
    return max(tokens // pairs, int(tokens * (1 - prune))) if prune else tokens


# Pictures -> items ---------------------------------------------------------------------------------------------------


def prepare(picture: UInt8[np.ndarray, "height width 3"], settings: Settings) -> Item:
    """One RGB picture to an item of one piece. Raises MediaError for an aspect over 200."""
    planes = _resized(picture, settings.image, settings)
    grid = (1, planes.shape[1] // settings.patch_size, planes.shape[2] // settings.patch_size)
    return _item((_piece(grid, cut(planes, settings), settings),), grid, settings)


def prepare_video(
    frames: Sequence[UInt8[np.ndarray, "height width 3"]],
    settings: Settings,
    fps: float | None = None,
    timestamps: Sequence[float] | None = None,
    prune: float = 0.0,
) -> Item:
    """Frames of one size to an item of one piece a pair of frames; an odd last frame is paired with itself."""
    limits = settings.frame_limits(len(frames))
    planes = [_resized(frame, limits, settings) for frame in frames]
    grid = (1, planes[0].shape[1] // settings.patch_size, planes[0].shape[2] // settings.patch_size)
    pieces = []
    values = settings.frame_values
    for first in range(0, len(planes), 2):
        rows = np.empty((grid[1] * grid[2], 2 * values), np.uint8)
        rows[:, :values] = cut(planes[first], settings)
        rows[:, values:] = cut(planes[first + 1], settings) if first + 1 < len(planes) else rows[:, :values]
        pieces.append(_piece(grid, rows, settings))
    return _item(tuple(pieces), (len(pieces), *grid[1:]), settings, prune, seconds_per_grid=_seconds(fps, timestamps))


def _resized(picture: np.ndarray, limits: Limits, settings: Settings) -> np.ndarray:
    height, width = smart_resize(picture.shape[0], picture.shape[1], limits, settings.factor)
    return resize(picture, height, width, limits.kernel)


def cut(planes: UInt8[np.ndarray, "3 height width"], settings: Settings) -> UInt8[np.ndarray, "rows values"]:
    """Patches of one frame, four a merged cell, cells in window order."""
    rows, columns = planes.shape[1] // settings.factor, planes.shape[2] // settings.factor
    cells = pixels.cells(planes, settings.merge_size, settings.patch_size)
    return in_window_order(cells, rows, columns, settings).reshape(-1, settings.frame_values)


def in_window_order(cells: np.ndarray, rows: int, columns: int, settings: Settings) -> np.ndarray:
    """Row-major merged cells [cells, ...] of one frame, brought into window order."""
    merge = settings.merge_size
    return cells[windows(rows * merge, columns * merge, merge, settings.window).order]


def _piece(grid: Grid, patches: np.ndarray, settings: Settings) -> Piece:
    plan = windows(grid[1], grid[2], settings.merge_size, settings.window)
    return Piece(grid, patches, len(plan.order), len(plan.lengths))


def _item(pieces: tuple[Piece, ...], grid: Grid, settings: Settings, prune: float = 0.0, **extra: Any) -> Item:
    tokens = kept_tokens(sum(piece.tokens for piece in pieces), len(pieces), prune)
    return Item(pieces, (grid,), tokens, {"grid_thw": grid, "merge_size": settings.merge_size, **extra}, prune)


def _seconds(fps: float | None, timestamps: Sequence[float] | None) -> float:
    if fps is not None:
        return 2 / fps
    if timestamps is not None and len(timestamps) > 1 and timestamps[-1] > timestamps[0]:
        return 2 * (timestamps[-1] - timestamps[0]) / (len(timestamps) - 1)
    return 1.0


# The Hugging Face processor's output -> items ------------------------------------------------------------------------


def items(inputs: Mapping[str, Any], settings: Settings, pieces_per_item: Sequence[int] | None = None) -> list[Item]:
    """Items of ``pixel_values`` with ``image_grid_thw``, then those of ``pixel_values_videos`` with ``video_grid_thw``.

    Pixels that are the table's values bit for bit become uint8 again; others stay float32.
    """
    if pieces_per_item is not None:
        raise MediaError("pieces_per_item is not for Qwen2.5-VL: its grids say what belongs together; leave it out")
    found: list[Item] = []
    for name, grids_name in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        if inputs.get(name) is None:
            continue
        video = name.endswith("videos")
        rows = pixels.host(inputs[name], np.float32)
        if rows.ndim != 2 or rows.shape[1] != 2 * settings.frame_values:
            raise MediaError(f"{name} must be [patches, {2 * settings.frame_values}], got {list(rows.shape)}")
        grids = pixels.grids_of(inputs, grids_name, len(rows), settings.merge_size)
        seconds = inputs.get("second_per_grid_ts") if video else None
        seconds = [1.0] * len(grids) if seconds is None else [float(one) for one in seconds]
        if len(seconds) != len(grids):
            raise MediaError(f"second_per_grid_ts has {len(seconds)} values for {len(grids)} videos: give one a video")
        start = 0
        for grid, step in zip(grids, seconds, strict=True):
            count = math.prod(grid)
            extra = {"seconds_per_grid": step} if video else {}
            found.append(_from_rows(rows[start : start + count], grid, settings, collapse=not video, **extra))
            start += count
    if not found:
        there = ", ".join(sorted(map(str, inputs))) or "nothing"
        raise MediaError(f"no pixel_values and no pixel_values_videos in the inputs; there is {there}")
    return found


def _from_rows(rows: np.ndarray, grid: Grid, settings: Settings, collapse: bool, **extra: Any) -> Item:
    frames, height, width = grid
    merge, values = settings.merge_size, settings.frame_values
    # The processor interleaves the two frames inside each channel.
    rows = rows.reshape(-1, 3, 2, settings.patch_size**2).transpose(0, 2, 1, 3).reshape(-1, 2 * values)
    if collapse and np.array_equal(rows[:, :values], rows[:, values:]):
        rows = rows[:, :values]
    exact = pixels.recover(rows, settings.table, np.tile(settings.channels, rows.shape[1] // values))
    rows = rows if exact is None else exact
    cells = rows.reshape(frames, height * width // merge**2, -1)
    pieces = []
    for frame in cells:
        ordered = in_window_order(frame, height // merge, width // merge, settings)
        pieces.append(_piece((1, height, width), ordered.reshape(height * width, -1), settings))
    return _item(tuple(pieces), grid, settings, **extra)
