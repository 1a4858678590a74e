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

CHUNK = 128
"""Rows that are resized together. Threads that resize side by side hand Python's lock to one another at every step, so
few large steps are quicker than many whose floats stay in the processor's nearest cache."""

WIDE = 1 << 24
"""Bytes of such rows as floats at most, but for a single row."""

PRODUCT, NARROW = 1 << 18, 8
"""Multiplications of one product at most: OpenBLAS wakes its threads beyond it, which costs more than it brings, and
many times more on a busy machine. But so many rows or columns are multiplied in any case."""


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
    chunk, across = min(CHUNK, n_rows), None
    if width != n_columns:
        axis = axis_table(n_columns, width, kernel)
        chunk = max(1, min(chunk, WIDE // (channels * n_columns * np.dtype(axis.dtype).itemsize)))
        across = Across(axis, channels * chunk, n_columns)
    out = np.empty((channels, height, width), np.uint8)
    if height != n_rows:
        resize_down(planes, across, axis_table(n_rows, height, kernel), out, chunk)
    elif across is not None:
        for start in range(0, n_rows, chunk):
            out[:, start : start + chunk] = across.centred(planes[:, start : start + chunk]) + 128
    else:
        out[...] = planes
    return out


def resize_down(planes: np.ndarray, across: Across | None, down: Axis, out: np.ndarray, chunk: int) -> None:
    """Both passes, a band of rows of ``out`` at a time, ``chunk`` rows of the picture at a time."""
    channels, _, width = out.shape
    deepest = max(band.high - band.low for band in down.bands)
    parts, step = split(width, max(band.weights.size for band in down.bands))
    rows = np.empty((channels, deepest + chunk, parts, step), down.dtype)
    rows[:, :, -1] = 0  # the last columns may be none of the picture's
    sums = np.empty((channels, BLOCK, parts, step), down.dtype)
    whole_rows, whole_sums = (each.reshape(channels, -1, parts * step)[..., :width] for each in (rows, sums))
    bias = (down.bias + 128)[:, None]
    first = have = 0  # of the picture's rows, those in ``rows``
    for band in down.bands:
        if have < band.high:
            kept = max(have - band.low, 0)
            if kept:
                rows[:, :kept] = rows[:, band.low - first : have - first].copy()
            first, have = band.low, band.low + kept
        while have < band.high:
            given = planes[:, have : have + chunk]
            made = whole_rows[:, have - first : have - first + given.shape[1]]
            if across is None:
                np.subtract(given, 128, out=made, dtype=down.dtype)
            else:
                made[...] = across.centred(given)
            have += given.shape[1]
        count = band.stop - band.start
        wanted = rows[:, band.low - first : band.high - first].swapaxes(1, 2)
        np.matmul(band.weights, wanted, out=sums[:, :count].swapaxes(1, 2))
        part = whole_sums[:, :count]
        part += bias[band.start : band.stop]
        out[:, band.start : band.stop] = np.clip(part, 0, 255, out=part)  # the cast cuts the fraction


class Across:
    """The horizontal pass of at most so many rows at a time, always in the same memory."""

    def __init__(self, axis: Axis, rows: int, columns: int):
        self.axis = axis
        parts, step = split(rows, max(band.weights.size for band in axis.bands))
        self.flat = np.zeros((parts, step, columns), axis.dtype)
        self.sums = np.empty((parts, step, len(axis.bias)), axis.dtype)

    def centred(self, rows: UInt8[np.ndarray, "channels rows columns"]) -> np.ndarray:
        """Whole floats [channels, rows, n_out], pixels less 128, until the next call."""
        count = rows.shape[0] * rows.shape[1]
        flat, sums = (each.reshape(-1, each.shape[2])[:count] for each in (self.flat, self.sums))
        np.subtract(rows, 128, out=flat.reshape(rows.shape), dtype=flat.dtype)
        for band in self.axis.bands:
            window = self.flat[:, :, band.low : band.high]
            np.matmul(window, band.weights.T, out=self.sums[:, :, band.start : band.stop])
        sums += self.axis.bias
        np.clip(sums, -128, 127, out=sums)
        return np.floor(sums, out=sums).reshape(*rows.shape[:2], -1)


def split(length: int, size: int) -> tuple[int, int]:
    """(parts, length of each) of rows or columns that are multiplied with matrices of so many elements.

    Together they are longer than ``length`` by less than one part.
    """
    parts = -(-length // max(PRODUCT // size, NARROW))
    return parts, -(-length // parts)
