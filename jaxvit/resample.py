"""The one resize of all families: uint8, antialiased, bit-equal to torchvision's uint8 resize on the CPU.

Weights are integers of at most 15 bits, as in the reference: ``(sum of weight * pixel + half) >> precision``, first
along the rows (horizontal pass), whose result is rounded to uint8, then along the columns. Here each pass is a product
with a band matrix, a block of outputs at a time, of pixels less 128, which halves the sums. They are exact in float32
while they stay below 2**24 (up to shrinking by about four), so the order in which BLAS adds does not matter; beyond
that the same products run in float64.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

Kernel = Literal["bilinear", "bicubic"]

SUPPORT: dict[str, float] = {"bilinear": 1.0, "bicubic": 2.0}
"""Half width of each kernel, in pixels of the coarser of the two grids."""

BLOCK = 32
"""Outputs of a band at most: few enough that the band is dense, many enough for BLAS."""

WINDOW = 64
"""Inputs under the outputs of a band, about."""

CHUNK = 32
"""Rows that are resized together: their float copies stay in the processor's cache."""

PRODUCT = 1 << 18
"""Multiplications of one product at most. OpenBLAS wakes its threads beyond it, which costs more than it brings, and
many times more on a busy machine."""


class Band(NamedTuple):
    """Outputs start..stop of an axis as a dense matrix over the inputs low..high."""

    start: int
    stop: int
    low: int
    high: int
    weights: Float[np.ndarray, "outputs inputs"]


class Axis(NamedTuple):
    """The resize of one axis.

    Attributes:
        bias: for each output, what its sum of centred pixels lacks to be a centred pixel, and half for the rounding.
        dtype: in which the sums are exact.
    """

    bands: tuple[Band, ...]
    bias: Float[np.ndarray, " outputs"]
    dtype: type[np.floating]


def filter_weights(distance: np.ndarray, kernel: Kernel) -> np.ndarray:
    """The kernel's value at each distance: a triangle, or Keys' cubic with a = -0.5. float64, any shape."""
    x = np.abs(distance)
    if kernel == "bilinear":
        return np.maximum(0.0, 1.0 - x)
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def integer_weights(n_in: int, n_out: int, kernel: Kernel) -> tuple[np.ndarray, np.ndarray, int]:
    """First input int64 [n_out], integer weights int64 [n_out, taps] (zero past the end) and the precision in bits."""
    scale = n_in / n_out
    stretch = max(scale, 1.0)
    support = SUPPORT[kernel] * stretch
    centre = scale * (np.arange(n_out) + 0.5)
    low = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    size = np.minimum((centre + support + 0.5).astype(np.int64), n_in) - low
    taps = np.arange(int(size.max()))
    # The order of these operations is the reference's: another one moves ties of the rounding below.
    weights = filter_weights((taps + low[:, None] - centre[:, None] + 0.5) * (1.0 / stretch), kernel)
    weights[taps >= size[:, None]] = 0.0
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # cumsum adds one by one, as the reference does; sum adds pairwise
    largest = weights.max()
    precision = 0
    while precision < 22 and int(0.5 + largest * (1 << (precision + 1))) < 1 << 15:
        precision += 1
    scaled = weights * (1 << precision)
    return low, np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int64), precision


@lru_cache(maxsize=32)
def axis_table(n_in: int, n_out: int, kernel: Kernel) -> Axis:
    """The band matrices of an axis, weights divided by 2**precision (exact in either float type)."""
    low, weights, precision = integer_weights(n_in, n_out, kernel)
    # 16 bits, since a pixel has 8 before the point and float32 has 24.
    exact = precision <= 16 and 128 * int(np.abs(weights).sum(axis=1).max()) <= 1 << 24
    dtype = np.float32 if exact else np.float64
    bias = 0.5 + 128 * (weights.sum(axis=1) / (1 << precision) - 1)
    bands = []
    taps = weights.shape[1]
    block = max(4, min(BLOCK, WINDOW * n_out // n_in))
    for start in range(0, n_out, block):
        stop = min(start + block, n_out)
        first = int(low[start])
        dense = np.zeros((stop - start, int(low[stop - 1]) - first + taps), dtype)
        columns = (low[start:stop] - first)[:, None] + np.arange(taps)
        np.put_along_axis(dense, columns, weights[start:stop] / (1 << precision), axis=1)
        high = min(first + dense.shape[1], n_in)  # weights past the end are zero
        bands.append(Band(start, stop, first, high, dense[:, : high - first]))
    return Axis(tuple(bands), bias.astype(dtype), dtype)


def resize(
    picture: UInt8[np.ndarray, "height width 3"], height: int, width: int, kernel: Kernel
) -> UInt8[np.ndarray, "3 new_height new_width"]:
    """Resizes a picture to height x width pixels with antialiasing.

    An axis of unchanged length is left alone. The picture is only read. The result is a new array, channels first,
    which is the order that most patches want.
    """
    n_rows, n_columns, channels = picture.shape
    planes = picture.transpose(2, 0, 1)
    across = axis_table(n_columns, width, kernel) if width != n_columns else None
    out = np.empty((channels, height, width), np.uint8)
    if height != n_rows:
        resize_down(planes, across, axis_table(n_rows, height, kernel), out)
    elif across is not None:
        for start in range(0, n_rows, CHUNK):
            out[:, start : start + CHUNK] = centred_rows(planes[:, start : start + CHUNK], across) + 128
    else:
        out[...] = planes
    return out


def resize_down(planes: np.ndarray, across: Axis | None, down: Axis, out: np.ndarray) -> None:
    """Both passes, a band of rows of ``out`` at a time."""
    deepest = max(band.high - band.low for band in down.bands)
    rows = np.empty((len(out), deepest, out.shape[2]), down.dtype)
    sums = np.empty((BLOCK, out.shape[2]), down.dtype)
    bias = (down.bias + 128)[:, None]
    have_low = have_high = 0
    for band in down.bands:
        kept = max(have_high - band.low, 0)
        if kept:
            # Consecutive bands overlap: these rows are resized already.
            rows[:, :kept] = rows[:, band.low - have_low : have_high - have_low].copy()
        for start in range(band.low + kept, band.high, CHUNK):
            stop = min(start + CHUNK, band.high)
            rows[:, start - band.low : stop - band.low] = centred_rows(planes[:, start:stop], across)
        have_low, have_high = band.low, band.high
        part = sums[: band.stop - band.start]
        step = max(PRODUCT // band.weights.size, 1)
        for channel, plane in enumerate(out):
            for left in range(0, out.shape[2], step):
                columns = slice(left, left + step)
                np.matmul(band.weights, rows[channel, : band.high - band.low, columns], out=part[:, columns])
            part += bias[band.start : band.stop]
            plane[band.start : band.stop] = np.clip(part, 0, 255, out=part)  # the cast cuts the fraction


def centred_rows(rows: UInt8[np.ndarray, "channels rows columns"], axis: Axis | None) -> np.ndarray:
    """Rows resized horizontally: whole floats [channels, rows, n_out], pixels less 128."""
    chunk = rows.astype(np.float32 if axis is None else axis.dtype, order="C")
    chunk -= 128
    if axis is None:
        return chunk
    flat = chunk.reshape(-1, rows.shape[2])
    sums = np.empty((len(flat), len(axis.bias)), axis.dtype)
    for band in axis.bands:
        step = max(PRODUCT // band.weights.size, 1)
        for top in range(0, len(flat), step):
            part = flat[top : top + step, band.low : band.high]
            np.matmul(part, band.weights.T, out=sums[top : top + step, band.start : band.stop])
    sums += axis.bias
    np.clip(sums, -128, 127, out=sums)
    return np.floor(sums, out=sums).reshape(*rows.shape[:2], -1)
