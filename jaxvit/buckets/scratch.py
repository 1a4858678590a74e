"""Memory for a bucket's intermediates that stays where it is from call to call.

A recorded graph is updated wherever a buffer has moved since the last call, at most nodes some ten microseconds each,
before the device begins. XLA allocates its temporaries anew at each call, and they move as soon as a caller keeps
results or hands over fresh inputs. Arrays that an executable takes, and gives back in the same memory, do not move; and
XLA lays intermediates into such memory while nobody needs what is in it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from jaxvit.buckets.launch import Launch

ROWS = (1024, 2048)
"""Patches for which there is such memory: a bucket takes the smallest that suffices, so that buckets of about one size
share theirs. Larger buckets run for longer than a graph's update takes, which is then over before the call ahead, and
have fewer arguments without."""
WORKSPACE = 32 * 2**20
"""Bytes that a product of cuBLAS may use."""
NARROW = 3
"""Arrays of the residual stream's width that are alive together."""
TABLES, TABLE_WIDTH = 6, 64
"""Arrays that all layers read, of so many words a row at most: cosines, sines, key ranges."""
WORD = np.dtype(np.int32)

_shared: WeakValueDictionary[tuple[jax.Device, tuple[int, ...]], Scratch] = WeakValueDictionary()
_sharing = threading.Lock()


def words(matrices: Sequence[tuple[str, tuple[int, ...]]], patches: int, itemsize: int) -> tuple[int, ...]:
    """Length of each array, in int32, for a bucket of so many patches; none for a large bucket.

    A block's intermediates are as wide as its products' inputs and outputs. One of the widest is alive at a time,
    beside one of a gated MLP's, which is narrower than the product that it comes of, and the residual stream.

    Args:
        matrices: (path, shape) of the parameters, see ``layers.fuse.Weights``.
        itemsize: bytes of the compute dtype.
    """
    rows = next((rows for rows in ROWS if patches <= rows), 0)
    shapes = [shape for name, shape in matrices if re.fullmatch(r"blocks\.0\..*kernel", name)]
    if not rows or len(shapes) < 3:
        return ()
    # A kernel is [inputs, outputs], or where the package multiplies it [.. outputs .., inputs].
    inputs = sorted(shape[0] if len(shape) == 2 else shape[-1] for shape in shapes)
    outputs = max(shape[1] if len(shape) == 2 else prod(shape[:-1]) for shape in shapes)
    widths = [outputs, *([inputs[-1]] if inputs[-1] != outputs else []), *[inputs[-2]] * NARROW]
    tables = [rows * TABLE_WIDTH] * TABLES
    return (WORKSPACE // WORD.itemsize, *(rows * width * itemsize // WORD.itemsize for width in widths), *tables)


class Scratch:
    """Arrays on one device that executables pass on to each other. Calls that use them are issued one at a time."""

    def __init__(self, device: jax.Device, lengths: Sequence[int]):
        self.device, self.lengths = device, lengths
        self._arrays: list[jax.Array] | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, device: jax.Device, lengths: tuple[int, ...]) -> Scratch:
        """The device's own of these lengths; it lives as long as an executable that uses it."""
        with _sharing:
            found = _shared.get((device, lengths))
            if found is None:
                found = _shared[device, lengths] = cls(device, lengths)
            return found

    def run(
        self, launch: Launch, weights: Sequence[jax.Array], placed: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Issues a call: weights, these arrays, inputs -> embeddings, flags, these arrays."""
        with self._lock:
            # If the call fails, or is interrupted, nobody knows what became of them: the next one makes new ones.
            arrays, self._arrays = self._sound(), None
            if arrays is None:
                # Not by jnp.zeros, which compiles a program for each length.
                arrays = jax.device_put([np.zeros(length, WORD) for length in self.lengths], self.device)
            embeddings, finite, *self._arrays = launch([*weights, *arrays, *placed])
        return embeddings, finite

    def _sound(self) -> list[jax.Array] | None:
        """The arrays, unless the last call has failed on the device meanwhile: what takes them would fail as well."""
        if self._arrays is None:
            return None
        first: Any = self._arrays[0]
        if not first.is_ready():
            return self._arrays
        try:
            first.block_until_ready()
        except Exception:  # of the call before, where it is reported
            return None
        return self._arrays
