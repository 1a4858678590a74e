"""Vectors that lie in a packed array, for kernels that read them there.

XLA for GPUs lets a kernel read a slice of an argument in place, but each such node of a recorded graph is then updated
at every call, some microseconds each, while the device waits. So a kernel takes the whole array, and where its vector
begins as a number in memory: as a constant of the kernel it would be another kernel for every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped


@dataclass(frozen=True)
class _Place:
    """A vector, where it lies, and the same as an array of its own, if there is one."""

    vector: Array
    packed: Array
    start: int
    own: Array


_known: ContextVar[dict[int, _Place] | None] = ContextVar("known", default=None)


@contextmanager
def remembered() -> Iterator[None]:
    """What :func:`taken` takes in here, :func:`places` finds again in here."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def taken(packed: Shaped[Array, " total"], start: int, shape: tuple[int, ...], own: Array | None = None) -> Array:
    """A vector of a packed array, in its own shape.

    Args:
        own: the same vector as an array of its own.
    """
    vector = lax.slice(packed, (start,), (start + prod(shape),)).reshape(shape)
    known = _known.get()
    if known is not None:
        # It holds the vector too: its id must not pass to another.
        known[id(vector)] = _Place(vector, packed, start, vector if own is None else own)
    return vector


def places(*vectors: Array) -> tuple[list[Array], Int32[Array, " vectors"]]:
    """The flat arrays in which vectors lie, and where each begins: packed ones, or the vectors themselves."""
    known = _known.get() or {}
    found = [known.get(id(vector)) or _Place(vector, vector.reshape(-1), 0, vector) for vector in vectors]
    return [place.packed for place in found], jnp.array([place.start for place in found], jnp.int32)


def own(vector: Array) -> Array:
    """The vector as an array of its own where there is one, for XLA's products."""
    place = (_known.get() or {}).get(id(vector))
    return vector if place is None else place.own
