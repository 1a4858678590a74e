"""Tiles and views packed into a bucket: the fixed-shape arrays of the LFM2-VL executable.

| buffer     | vLLM's name         | holds                                                   | pad           |
|------------|---------------------|---------------------------------------------------------|---------------|
| pixels     | pixel_values_packed | the patches, (py, px, C) each, uint8                    | zeros         |
| position_y | pos_embeds          | weight of each row of the position table, per patch     | zeros         |
| position_x | pos_embeds          | weight of each column of the position table, per patch  | zeros         |
| full/*     | cu_seqlens          | attention segments: tiles and views                     | the backend's |

vLLM hands its graph the interpolated positions, computed eagerly at each replay; here the executable takes the weights
and interpolates. vLLM's ``gather_idx`` has no buffer: the patches of a token are brought together when they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from jaxvit.buffer import Buffer
from jaxvit.layers.position import antialiased_linear, cell_coordinates
from jaxvit.models.family import Bucket, Piece, Rows
from jaxvit.models.lfm2_vl.config import Config


class Positions(NamedTuple):
    """For each patch of a piece, the weights of the position table's rows and columns: float32 [patches, side] each."""

    y: np.ndarray
    x: np.ndarray


@lru_cache(maxsize=256)
def positions(height: int, width: int, merge: int, side: int) -> Positions:
    """Weights for a grid of height x width patches, cell by cell."""
    y, x = cell_coordinates(height, width, merge).T
    rows, columns = antialiased_linear(side, height), antialiased_linear(side, width)
    weights = Positions(rows.take(y, axis=0), columns.take(x, axis=0))
    for array in weights:
        array.flags.writeable = False
    return weights


def buffers(config: Config, bucket: Bucket, pixels: Literal["uint8", "float32"]) -> tuple[Buffer, ...]:
    """The buffers of the table above but the attention backends' own."""
    weights = (bucket.patches, config.table_side)
    return (
        Buffer("pixels", (bucket.patches, config.num_channels * config.patch_size**2), np.dtype(pixels)),
        Buffer("position_y", weights, np.dtype(np.float32)),
        Buffer("position_x", weights, np.dtype(np.float32)),
    )


def layout(config: Config, pieces: Sequence[Piece]) -> dict[str, Rows]:
    """Rows for those buffers, as long as the pieces are."""
    plans = [positions(*piece.grid[1:], config.downsample_factor, config.table_side) for piece in pieces]
    return {
        "pixels": [piece.patches for piece in pieces],
        "position_y": [plan.y for plan in plans],
        "position_x": [plan.x for plan in plans],
    }


def lengths(pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
    """Segments: int32 patches each."""
    return {"full": np.array([piece.rows for piece in pieces], np.int32)}
