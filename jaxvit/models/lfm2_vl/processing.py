"""Pictures -> items of LFM2-VL, with the sizes, tiles and pixels of its Hugging Face processor.

A picture is one view of its own shape or, when it is large, rows x columns of square tiles and, where the settings ask
for it, a thumbnail behind them. Each view is a piece. Patches are [rows, 768] uint8, (y, x, channel); rows stand cell
by cell, four patches a merged cell, cells row-major.

``Item.layout``: ``rows``, ``columns`` and ``thumbnail`` (whether the last piece is one). Tokens are counted from the
views; the reference counts some nearly square pictures of ``min_tiles`` 1 from another size, and then fails.
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
from jaxvit.layers.position import cell_order
from jaxvit.models import pixels
from jaxvit.models.family import Item, Piece
from jaxvit.models.lfm2_vl.config import Config
from jaxvit.models.options import section
from jaxvit.resample import Kernel, resize

HALF = (0.5, 0.5, 0.5)
MOST_TILES = 256
"""Tiles of a picture that a checkpoint may allow, at most: the candidate ratios are the cube of it."""


@dataclass(frozen=True)
class Settings:
    """Processing settings of a checkpoint; the names are the checkpoints', ``kernel`` is their ``resample``.

    Attributes:
        encoder_patch_size: pixels.
        downsample_factor: patches per token along a side.
        tile_size: pixels of a tile's side.
        max_pixels_tolerance: a picture of more than max_image_tokens x this is tiled.
    """

    downsample_factor: int = 2
    encoder_patch_size: int = 16
    tile_size: int = 512
    min_tiles: int = 2
    max_tiles: int = 10
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    max_pixels_tolerance: float = 2.0
    do_image_splitting: bool = True
    use_thumbnail: bool = True
    kernel: Kernel = "bilinear"
    image_mean: tuple[float, ...] = HALF
    image_std: tuple[float, ...] = HALF
    rescale_factor: float = 1 / 255

    OVERRIDES = (
        "tile_size",
        "min_tiles",
        "max_tiles",
        "min_image_tokens",
        "max_image_tokens",
        "max_pixels_tolerance",
        "do_image_splitting",
        "use_thumbnail",
        "resample",
    )
    """Names of settings that a keyword may set."""

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> Settings:
        """Reads each field where it is found first; null counts as absent.

        The order: keywords, ``image_processor`` of processor_config.json, preprocessor_config.json,
        processor_config.json itself, config.json, the defaults above.

        Raises:
            CheckpointError: values that contradict each other, an unknown keyword, or a setting that is not
                implemented; the message names it.
        """
        config = Config.from_files(files)
        overrides = dict(overrides or {})
        pixels.check_overrides(overrides, cls.OVERRIDES)
        nested = files.get("processor_config.json", {})
        single = files.get("preprocessor_config.json")
        if single is None and not section(nested, "image_processor"):
            warnings.warn("no preprocessor_config.json: its settings are the family's defaults", stacklevel=2)
        sources = [overrides, section(nested, "image_processor"), single or {}, nested, files["config.json"]]
        raw: dict[str, Any] = {}
        for source in sources:
            for name, value in source.items():
                if value is not None:
                    raw.setdefault(name, value)
        for name, ours in (
            ("encoder_patch_size", config.patch_size),
            ("downsample_factor", config.downsample_factor),
        ):
            if raw.setdefault(name, ours) != ours:
                raise CheckpointError(f"{name} is {raw[name]} in the processor's settings, {ours} in config.json")
        numbers = {name: pixels.field(raw, name, getattr(cls, name)) for name in _NUMBERS}
        pixels.positive("max_tiles", numbers["max_tiles"], MOST_TILES)
        tolerance = raw.get("max_pixels_tolerance", cls.max_pixels_tolerance)
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < pixels.HUGE:
            raise CheckpointError(f"max_pixels_tolerance must be a positive number, got {tolerance!r}")
        flags = {name: raw.get(name, True) for name in ("do_image_splitting", "use_thumbnail")}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise CheckpointError(f"{name} must be true or false, got {flag!r}")
        mean, std, rescale_factor = pixels.colours_of(raw, HALF, HALF)
        settings = cls(
            **numbers,
            **flags,
            max_pixels_tolerance=float(tolerance),
            kernel=pixels.kernel_of(raw, 2),
            image_mean=mean,
            image_std=std,
            rescale_factor=rescale_factor,
        )
        settings._check()
        return settings

    def _check(self) -> None:
        for low, high in (("min_tiles", "max_tiles"), ("min_image_tokens", "max_image_tokens")):
            if getattr(self, low) > getattr(self, high):
                raise CheckpointError(f"{low} ({getattr(self, low)}) is more than {high} ({getattr(self, high)})")
        if self.tile_size % self.factor:
            raise CheckpointError(
                f"tile_size ({self.tile_size}) is no multiple of {self.factor}, the pixels of a token"
            )

    @property
    def factor(self) -> int:
        """Pixels of a token along a side."""
        return self.encoder_patch_size * self.downsample_factor

    @property
    def tile_tokens(self) -> int:
        return (self.tile_size // self.factor) ** 2

    @property
    def splits(self) -> bool:
        """Whether large pictures are tiled at all."""
        return self.do_image_splitting and not self.min_tiles == self.max_tiles == 1

    @property
    def max_num_patches(self) -> int:
        """Patches of a view at most."""
        tile = self.tile_tokens if self.do_image_splitting else 0
        return max(self.max_image_tokens, tile) * self.downsample_factor**2

    @cached_property
    def table(self) -> Float32[np.ndarray, "256 3"]:
        """The normalised value of each uint8 value of each channel."""
        return pixels.normalisation_table(self.image_mean, self.image_std, self.rescale_factor)

    @cached_property
    def channels(self) -> np.ndarray:
        """int32 [768]: the colour channel of each value of a patch."""
        return np.tile(np.arange(3, dtype=np.int32), self.encoder_patch_size**2)

    def budget_range(self) -> tuple[int, int]:
        """Tokens of the smallest and of the largest piece: a view or a tile."""
        most = self.max_image_tokens
        # A view shrinks to x and most / x tokens, x at least 1, and both are rounded down.
        shrunk = [rows * max(1, math.floor(most / (rows + 1) * (1 - 1e-9))) for rows in range(1, math.isqrt(most) + 1)]
        low = min(self.min_image_tokens, *shrunk)
        return (min(low, self.tile_tokens) if self.splits else low), self.max_num_patches // self.downsample_factor**2


_NUMBERS = (
    "downsample_factor",
    "encoder_patch_size",
    "tile_size",
    "min_tiles",
    "max_tiles",
    "min_image_tokens",
    "max_image_tokens",
)


# Sizes ---------------------------------------------------------------------------------------------------------------


def smart_resize(height: int, width: int, settings: Settings) -> tuple[int, int]:
    """Height and width in pixels of a picture's single view or thumbnail: multiples of a token's pixels."""
    factor = settings.factor
    least, most = settings.min_image_tokens * factor**2, settings.max_image_tokens * factor**2
    rows, columns = max(1, round(height / factor)), max(1, round(width / factor))
    if rows * columns * factor**2 > most:
        shrink = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor**2 < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def too_large(height: int, width: int, settings: Settings) -> bool:
    """Whether one view would lose too much of the picture, so that it is tiled."""
    factor = settings.factor
    sides = [max(settings.encoder_patch_size, round(side / factor) * factor) for side in (height, width)]
    return sides[0] * sides[1] > settings.max_image_tokens * factor**2 * settings.max_pixels_tolerance


@lru_cache(maxsize=64)
def ratios(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Candidate (columns, rows), by their product; equal products stand in the order of a Python set.

    The reference keeps that order, and it decides between equally close ratios, so the set is built as it builds it.
    """
    candidates = [
        (columns, rows)
        for count in range(min_tiles, max_tiles + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if min_tiles <= columns * rows <= max_tiles
    ]
    return tuple(sorted(set(candidates), key=lambda ratio: ratio[0] * ratio[1]))


def tiling(height: int, width: int, settings: Settings) -> tuple[int, int]:
    """(rows, columns) of tiles: (1, 1) for a picture that is one view of its own shape, or one tile."""
    if not settings.splits or not too_large(height, width, settings):
        return 1, 1
    best, distance = (1, 1), math.inf
    for columns, rows in ratios(settings.min_tiles, settings.max_tiles):
        gap = abs(width / height - columns / rows)
        fills = width * height > 0.5 * settings.tile_size**2 * columns * rows
        if gap < distance or (gap == distance and fills):
            best, distance = (rows, columns), gap
    return best


# Pictures -> items ---------------------------------------------------------------------------------------------------


def prepare(picture: UInt8[np.ndarray, "height width 3"], settings: Settings) -> Item:
    """One RGB picture to an item of one piece a view.

    Raises:
        MediaError: so thin that its view would have more patches than the reference's mask holds.
    """
    height, width = picture.shape[:2]
    rows, columns = tiling(height, width, settings)
    tiled = settings.splits and too_large(height, width, settings)
    thumbnail = tiled and settings.use_thumbnail and rows * columns > 1
    view = smart_resize(height, width, settings)
    patches = view[0] * view[1] // settings.encoder_patch_size**2
    if (thumbnail or not tiled) and patches > settings.max_num_patches:
        raise MediaError(
            f"{height} x {width} pixels: one side is {max(height, width) / min(height, width):.1f} times the other, so "
            f"its view has {patches} patches, the limit is {settings.max_num_patches}: crop it, or cut it into parts"
        )
    pieces = []
    if tiled:
        side = settings.tile_size
        planes = resize(picture, rows * side, columns * side, settings.kernel)
        for row in range(rows):
            for column in range(columns):
                tile = planes[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
                pieces.append(cut(tile, settings))
    if thumbnail or not tiled:
        pieces.append(cut(resize(picture, *view, settings.kernel), settings))
    return _item(pieces, rows, columns, thumbnail)


def cut(planes: UInt8[np.ndarray, "3 height width"], settings: Settings) -> Piece:
    """One view cut into the patches of a piece."""
    side, merge = settings.encoder_patch_size, settings.downsample_factor
    rows, columns = (length // settings.factor for length in planes.shape[1:])
    patches = np.empty((rows, columns, merge, merge, side, side, 3), np.uint8)
    for channel, plane in enumerate(planes):  # channels last in the result: a copy a channel has longer runs
        split = plane.reshape(rows, merge, side, columns, merge, side)
        patches[..., channel] = split.transpose(0, 3, 1, 4, 2, 5)
    return Piece((1, rows * merge, columns * merge), patches.reshape(-1, 3 * side**2), rows * columns)


def _item(pieces: Sequence[Piece], rows: int | None, columns: int | None, thumbnail: bool) -> Item:
    return Item(
        tuple(pieces),
        tuple(piece.grid for piece in pieces),
        sum(piece.tokens for piece in pieces),
        {"rows": rows, "columns": columns, "thumbnail": thumbnail},
    )


# The Hugging Face processor's output -> items ------------------------------------------------------------------------


def items(inputs: Mapping[str, Any], settings: Settings, pieces_per_item: Sequence[int] | None = None) -> list[Item]:
    """Items of ``pixel_values`` with ``spatial_shapes`` (and ``pixel_attention_mask``).

    ``image_rows`` and ``image_cols`` say which views are one picture. Without them ``pieces_per_item`` must; then rows
    and columns of a tiled picture are None in ``Item.layout``, and its last view counts as a thumbnail if the settings
    have thumbnails. Pixels that are the table's values bit for bit become uint8 again.
    """
    pieces = _pieces(inputs, settings)
    layouts = _layouts(inputs, settings, pieces_per_item, len(pieces))
    found = []
    start = 0
    for count, rows, columns, thumbnail in layouts:
        found.append(_item(pieces[start : start + count], rows, columns, thumbnail))
        start += count
    return found


def _layouts(
    inputs: Mapping[str, Any], settings: Settings, pieces_per_item: Sequence[int] | None, views: int
) -> list[tuple[int, int | None, int | None, bool]]:
    """(views, rows, columns, whether the last is a thumbnail) of each picture."""
    rows, columns = inputs.get("image_rows"), inputs.get("image_cols")
    if rows is None or columns is None:
        if pieces_per_item is None:
            raise MediaError(
                "inputs have no image_rows and image_cols: call the processor with return_row_col_info=True, or hand "
                "in pieces_per_item, the views of each picture"
            )
        counts = pixels.whole_pieces("pieces_per_item", pieces_per_item, views)
        return [(n, 1, 1, False) if n == 1 else (n, None, None, settings.use_thumbnail) for n in counts]
    grid = [[int(one) for one in pixels.host(value, np.int64).reshape(-1)] for value in (rows, columns)]
    if len(grid[0]) != len(grid[1]):
        raise MediaError(f"image_rows has {len(grid[0])} values, image_cols {len(grid[1])}: they belong together")
    tiles = [r * c for r, c in zip(*grid, strict=True)]
    with_thumbnails = [count + (count > 1) for count in tiles]
    thumbnails = settings.use_thumbnail if sum(with_thumbnails) == views else False
    counts = with_thumbnails if thumbnails else tiles
    if pieces_per_item is not None and list(pieces_per_item) != counts:
        raise MediaError(f"pieces_per_item is {list(pieces_per_item)}, image_rows and image_cols say {counts}")
    pixels.whole_pieces("image_rows x image_cols", counts, views)
    return [(n, r, c, thumbnails and t > 1) for n, r, c, t in zip(counts, *grid, tiles, strict=True)]


def _pieces(inputs: Mapping[str, Any], settings: Settings) -> list[Piece]:
    for name in ("pixel_values", "spatial_shapes"):
        if inputs.get(name) is None:
            raise MediaError(f"inputs have no {name}: hand in the processor's whole output")
    values, merge = 3 * settings.encoder_patch_size**2, settings.downsample_factor
    views = pixels.host(inputs["pixel_values"], np.float32)
    shapes = pixels.host(inputs["spatial_shapes"], np.int64)
    if views.ndim != 3 or views.shape[2] != values or shapes.shape != (len(views), 2):
        raise MediaError(
            f"pixel_values must be [views, patches, {values}] and spatial_shapes [views, 2], got {list(views.shape)} "
            f"and {list(shapes.shape)}"
        )
    mask = inputs.get("pixel_attention_mask")
    used = None if mask is None else pixels.host(mask, np.int64).sum(axis=-1)
    pieces = []
    for place, (height, width) in enumerate(shapes.tolist()):
        count = height * width
        if min(height, width) < merge or height % merge or width % merge or count > views.shape[1]:
            raise MediaError(
                f"spatial_shapes[{place}] is {height} x {width}: sides must be multiples of {merge}, patches at most "
                f"{views.shape[1]}"
            )
        if used is not None and used[place] != count:
            raise MediaError(f"pixel_attention_mask[{place}] has {used[place]} patches, spatial_shapes say {count}")
        rows = views[place, :count][cell_order(height, width, merge)]
        exact = pixels.recover(rows, settings.table, settings.channels)
        pieces.append(Piece((1, height, width), rows if exact is None else exact, count // merge**2))
    return pieces
