"""Frame pairs packed into a bucket: the fixed-shape arrays of the Qwen2.5-VL executable.

| buffer        | vLLM's name            | holds                                               | pad          |
|---------------|------------------------|-----------------------------------------------------|--------------|
| pixels        | pixel_values           | the first frame of each patch, uint8                | zeros        |
| pixels_second | pixel_values           | the second frame; absent when every piece is a still | zeros       |
| still         | -                      | 1 where the second frame is the first again         | zeros        |
| coordinates   | rotary cos/sin         | (y, x) of each patch in its frame                   | zeros        |
| reverse       | reverse_indices        | for each token in image order, its row              | zeros        |
| full/*        | cu_seqlens             | attention segments: frame pairs                     | the backend's |
| window/*      | cu_window_seqlens      | attention segments: windows                         | the backend's |

vLLM's ``window_index`` has no buffer here: the patches are brought into window order when they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from jaxvit.buffer import Buffer
from jaxvit.models.family import Bucket, Piece, Rows
from jaxvit.models.qwen2_5_vl.config import Config


class Windows(NamedTuple):
    """The window order of one frame.

    Attributes:
        order: int32 [cells]: the merged cell (row-major) that stands at each place of the window order.
        reverse: int32 [cells]: the place of each merged cell.
        lengths: int32 [windows]: patches of each window; windows at the edge are smaller, none is empty.
        coordinates: int32 [patches, 2]: (y, x) of each patch.
    """

    order: np.ndarray
    reverse: np.ndarray
    lengths: np.ndarray
    coordinates: np.ndarray


@lru_cache(maxsize=256)
def windows(height: int, width: int, merge: int, side: int) -> Windows:
    """Window order of a frame of height x width patches, windows of side x side merged cells."""
    rows, columns = height // merge, width // merge
    y, x = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
    window = y // side * -(-columns // side) + x // side
    order = np.argsort(window, kind="stable").astype(np.int32)
    reverse = np.empty_like(order)
    reverse[order] = np.arange(len(order), dtype=np.int32)
    dy, dx = np.divmod(np.arange(merge * merge, dtype=np.int32), merge)
    coordinates = np.stack(
        [(y[order, None] * merge + dy).reshape(-1), (x[order, None] * merge + dx).reshape(-1)], axis=-1
    ).astype(np.int32)
    lengths = (np.bincount(window) * merge * merge).astype(np.int32)
    for array in (order, reverse, lengths, coordinates):
        array.flags.writeable = False
    return Windows(order, reverse, lengths, coordinates)


def of_piece(piece: Piece, config: Config) -> Windows:
    return windows(piece.grid[1], piece.grid[2], config.spatial_merge_size, config.window_cells)


def buffers(config: Config, bucket: Bucket, pixels: Literal["uint8", "float32"]) -> tuple[Buffer, ...]:
    """The buffers of the table above but the attention backends' own."""
    values = config.in_channels * config.patch_size**2
    integers = np.dtype(np.int32)
    return (
        Buffer("pixels", (bucket.patches, values), np.dtype(pixels)),
        Buffer("pixels_second", (bucket.patches, values), np.dtype(pixels), optional=True),
        Buffer("still", (bucket.patches,), np.dtype(np.uint8)),
        Buffer("coordinates", (bucket.patches, 2), integers),
        Buffer("reverse", (bucket.tokens,), integers),
    )


def layout(config: Config, pieces: Sequence[Piece]) -> dict[str, Rows]:
    """Rows for those buffers, as long as the pieces are."""
    values = config.in_channels * config.patch_size**2
    plans = [of_piece(piece, config) for piece in pieces]
    stills = [is_still(piece, values) for piece in pieces]
    offsets = accumulate([piece.tokens for piece in pieces[:-1]], initial=0)
    arrays: dict[str, Rows] = {
        "pixels": [piece.patches[:, :values] for piece in pieces],
        "still": np.array(stills, np.uint8).repeat([piece.rows for piece in pieces]),
        "coordinates": [plan.coordinates for plan in plans],
        "reverse": [plan.reverse + offset for plan, offset in zip(plans, offsets, strict=True)],
    }
    if not all(stills):
        # A still's second frame is never read, so any rows of the right shape will do.
        arrays["pixels_second"] = [piece.patches[:, -values:] for piece in pieces]
    return arrays


def is_still(piece: Piece, values: int) -> bool:
    """A still's piece holds one frame; a frame pair's holds two side by side."""
    return piece.patches.shape[1] == values


def lengths(config: Config, pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
    """Segments of the full and of the window blocks: int32 patches each."""
    return {
        "full": np.array([piece.rows for piece in pieces], np.int32),
        "window": np.concatenate([of_piece(piece, config).lengths for piece in pieces])
        if pieces
        else np.zeros(0, np.int32),
    }
