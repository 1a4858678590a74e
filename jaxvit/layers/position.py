"""Learned position tables resampled to any grid: the weights come from the host, the device applies them in float32.

A resampling is linear and separable: a patch's position is the table weighed by its row's and its column's weights.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxvit.layers.linear import by_platform, dot


def cell_order(height: int, width: int, merge: int) -> np.ndarray:
    """The row-major number of each patch of a frame, cell by cell, (kh, kw) inside a cell: int64 [patches]."""
    numbers = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    return numbers.swapaxes(1, 2).reshape(-1)


def cell_coordinates(height: int, width: int, merge: int) -> np.ndarray:
    """(y, x) of each patch of a frame, in the order of :func:`cell_order`: int32 [patches, 2].

    Written a row of cells at a time: all such rows have the same x, and the same y but for a constant.
    """
    y, x = np.divmod(cell_order(merge, width, merge).astype(np.int32), np.int32(width))
    coordinates = np.empty((height // merge, merge * width, 2), np.int32)
    coordinates[..., 0] = np.arange(0, height, merge, dtype=np.int32)[:, None] + y
    coordinates[..., 1] = x
    return coordinates.reshape(-1, 2)


# Dense weights of every entry of a side (SigLIP2: few entries, and antialiasing may use them all)


@lru_cache(maxsize=2048)
def antialiased_linear(side: int, length: int) -> np.ndarray:
    """Weights of each of ``side`` entries for each of ``length`` places: float32 [length, side], rows adding up to 1.

    Equals PyTorch's ``interpolate(mode="bilinear", antialias=True, align_corners=False)`` along one axis: a triangle as
    wide as the larger of a place and an entry. In float32 as there: float64 would differ from it by 5e-6.
    """
    scale = np.float32(side) / np.float32(length)
    centre = (np.arange(length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distance = np.abs(np.arange(side, dtype=np.float32) - centre[:, None]) / max(scale, np.float32(1))
    weights = np.maximum(np.float32(0), np.float32(1) - distance)
    weights = weights / weights.sum(-1, keepdims=True)
    weights.flags.writeable = False
    return weights


def weigh_by_axis(
    y: Float[Array, "patches side"], x: Float[Array, "patches side"], table: Float[Array, "entries hidden"]
) -> Float[Array, "patches hidden"]:
    """For each patch the table, ``side`` rows of ``side`` entries, weighed by y and x in float32, cast to its dtype."""
    weights = (y[:, :, None] * x[:, None, :]).reshape(y.shape[0], -1)
    if table.dtype != jnp.bfloat16:
        return dot(weights, table)
    return by_platform(weights, table, cpu=_weighed, default=_weighed_in_halves)


def _weighed(weights: Array, table: Array) -> Array:
    return dot(weights, table.astype(jnp.float32)).astype(table.dtype)


def _weighed_in_halves(weights: Array, table: Array) -> Array:
    """With products of bfloat16, which an accelerator is made for: a weight is the sum of two of them, to 2^-17."""
    high = lax.reduce_precision(weights, exponent_bits=8, mantissa_bits=7)  # XLA would drop a cast there and back
    parts = jnp.concatenate([high, weights - high], axis=-1).astype(table.dtype)
    return dot(parts, jnp.concatenate([table, table]))


# Four taps a place (MoonViT: 64 entries a side, of which a place reads four)


class Taps(NamedTuple):
    """For each place along one axis, the entries it reads and their weights.

    Attributes:
        index: int32 [length, 4].
        weight: float32 [length, 4].
    """

    index: np.ndarray
    weight: np.ndarray


@lru_cache(maxsize=512)
def bicubic(side: int, length: int) -> Taps:
    """Taps of ``length`` places on ``side`` entries.

    Equals PyTorch's ``interpolate(mode="bicubic", antialias=False, align_corners=False)`` along one axis: cubic
    convolution with a = -0.75; taps beyond the border read the border's entry, and the weights stay as they are. With
    as many places as entries the weights are exactly 0 and 1.
    """
    a = -0.75
    source = (np.arange(length) + 0.5) * side / length - 0.5
    first = np.floor(source).astype(np.int64) - 1
    taps = first[:, None] + np.arange(4)
    d = np.abs(source[:, None] - taps)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    result = Taps(np.clip(taps, 0, side - 1).astype(np.int32), np.where(d <= 1, near, far).astype(np.float32))
    for array in result:
        array.flags.writeable = False
    return result


def gather_by_axis(
    index: Int[Array, "patches 2 taps"],
    weight: Float[Array, "patches 2 taps"],
    table: Float[Array, "rows columns hidden"],
) -> Float[Array, "patches hidden"]:
    """For each patch the sum over its taps of y weight, x weight and the table's entry multiplied: float32.

    Axis 1 of index and weight holds y, then x.
    """
    flat = table.reshape(-1, table.shape[-1])
    taps = range(index.shape[-1])

    def along_x(row: int) -> Array:
        entries = index[:, 0, row] * table.shape[1]
        read = (flat.at[entries + index[:, 1, column]].get(mode="clip").astype(jnp.float32) for column in taps)
        return reduce(add, (weight[:, 1, column, None] * entry for column, entry in enumerate(read)))

    return reduce(add, (weight[:, 0, row, None] * along_x(row) for row in taps))
