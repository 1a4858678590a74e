"""What the tower sees of an item, and where its tokens lie on it: for pictures that explain.

The pixels are put together again from the patches, so they are those that the tower gets: resized, filled up, tiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np

from jaxvit.errors import MediaError
from jaxvit.models.family import Family, Item, Piece


@dataclass(frozen=True, eq=False)
class View:
    """A picture, or the tiles of one side by side.

    Attributes:
        name: "picture", "thumbnail", or "3 of 8" for the pieces of a clip.
        pixels: uint8 [height, width, 3].
        tokens: int [rows, columns]: which of the item's tokens, pruned ones included, lies there.
        tile: tokens along the (rows, columns) of a tile; None for a picture in one piece.
        window: tokens along a side of an attention window, 0 where the family has none.
        side: pixels along a side of a token.
        frames: of a clip, the first and the last frame of the piece, counted from 1; its first is the picture.
    """

    name: str
    pixels: np.ndarray
    tokens: np.ndarray
    tile: tuple[int, int] | None
    window: int
    side: int
    frames: tuple[int, int] | None = None


def views(family: Family, item: Item) -> list[View]:
    """The item's views, in the order of its tokens: one, a tiled picture and its thumbnail, or one a piece of a clip.

    Raises:
        MediaError: the item was handed in with pixels that are no longer uint8.
    """
    starts = np.cumsum([0] + [piece.tokens for piece in item.pieces])
    pixels = [first_frame(family, piece) for piece in item.pieces]
    tokens = []
    for piece, start in zip(item.pieces, starts, strict=False):
        rows, columns = (length // family.merge for length in piece.grid[1:])
        tokens.append(start + np.arange(rows * columns).reshape(rows, columns))
    window = getattr(family.config, "window_cells", 0)
    side = pixels[0].shape[0] // tokens[0].shape[0]
    rows, columns = item.layout.get("rows") or 1, item.layout.get("columns") or 1
    found: list[View] = []
    tiles = rows * columns
    if tiles > 1:
        frame, places = (_side_by_side(each[:tiles], columns) for each in (pixels, tokens))
        found.append(View("picture", frame, places, tokens[0].shape, window, side))
        pixels, tokens = pixels[tiles:], tokens[tiles:]
    ends = np.cumsum([frames_of(family, piece) for piece in item.pieces])
    for index, (frame, places) in enumerate(zip(pixels, tokens, strict=True)):
        name = "thumbnail" if tiles > 1 else "picture" if len(pixels) == 1 else f"{index + 1} of {len(pixels)}"
        first = int(ends[index - 1]) + 1 if index else 1
        frames = (first, int(ends[index])) if tiles == 1 and ends[-1] > 1 else None
        found.append(View(name, frame, places, None, window, side, frames))
    return found


def frames_of(family: Family, piece: Piece) -> int:
    """Frames that a piece holds, 1 for a still; the last frame of an odd clip in pairs stands there twice."""
    return piece.grid[0] * piece.patches.shape[1] // len(family.channels)


def first_frame(family: Family, piece: Piece) -> np.ndarray:
    """The pixels of a piece, of its first frame if it has several: uint8 [height, width, 3]."""
    if piece.patches.dtype != np.uint8:
        raise MediaError("this item was handed in with normalised pixels, of which no picture can be made")
    _, height, width = piece.grid
    merge, channels = family.merge, family.channels
    rows, columns, side = height // merge, width // merge, isqrt(len(channels) // 3)
    patches = piece.patches[: height * width, : len(channels)].reshape(rows * columns, merge, merge, -1)
    cells = np.empty_like(patches)
    cells[family.cells(piece)] = patches
    planes = [
        cells[..., channels == channel]
        .reshape(rows, columns, merge, merge, side, side)
        .transpose(0, 2, 4, 1, 3, 5)
        .reshape(height * side, width * side)
        for channel in range(3)
    ]
    return np.stack(planes, axis=-1)


def _side_by_side(tiles: list[np.ndarray], columns: int) -> np.ndarray:
    """Arrays [height, width, ...] of one shape as one, ``columns`` in a row."""
    return np.concatenate(
        [np.concatenate(tiles[start : start + columns], axis=1) for start in range(0, len(tiles), columns)]
    )
