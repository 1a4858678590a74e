"""The inputs of an executable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Pad = Literal["zeros", "repeat_last", "own_segment"]


@dataclass(frozen=True)
class Buffer:
    """One fixed-shape input of an executable: the only place where its shape, dtype and padding are stated.

    Attributes:
        pad: "zeros" fills the tail with 0, "repeat_last" with the last row (0 when there is none), "own_segment" means
            that the attention backend hands in the whole array, its pad rows attending to a block of their own.
        optional: a layout may leave it out; then an array of zeros that stays on the device takes its place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pad: Pad = "zeros"
    optional: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize
