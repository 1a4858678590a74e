"""What every attention backend shares: its interface, and key ranges of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxvit.buffer import Buffer
from jaxvit.layers.rope import Rotation

TILE = 64
"""Rows of padding that attend to each other at most."""

LINE = 32
"""Integers of a cache line."""

Metadata = Mapping[str, Array]

Attend = Callable[[Array, Rotation | None], Array]
"""``attend(qkv, rotation)``: [patches, 3, heads, dim] -> [patches, heads, dim], q and k rotated where there is one."""


@runtime_checkable
class Backend(Protocol):
    """One way to compute packed attention."""

    name: str
    version: str

    def buffers(self, patches: int, segments: int) -> tuple[Buffer, ...]:
        """Metadata of one segment set in a bucket of so many patches and segments."""
        ...

    def metadata(self, lengths: np.ndarray, patches: int, segments: int) -> dict[str, np.ndarray]:
        """Whole arrays for those buffers: int32 [patches, ...], padding included."""
        ...

    def __call__(self, q: Array, k: Array, v: Array, metadata: Metadata, scale: float) -> Array:
        """[patches, heads, dim] each, finite, scores times ``scale``, softmax in float32; result in q's dtype."""
        ...

    def why_not(self, platform: str, dtype: str) -> str | None:
        """Why this backend cannot run there, None if it can."""
        ...


def misfit(entry: Any, places: Sequence[str], keywords: Iterable[str]) -> str | None:
    """Why a private entry does not take the arguments that this package passes it, None if it does.

    Args:
        places: names of its first parameters, which are passed by place.
        keywords: what is passed by name.
    """
    try:
        signature = inspect.signature(entry)
        signature.bind(*places, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        return f"it takes other arguments than it is given here: {error}"
    names = list(signature.parameters)[: len(places)]
    return None if names == list(places) else f"its first arguments are {', '.join(names)}, not {', '.join(places)}"


def key_ranges(lengths: np.ndarray, patches: int) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last key of every row: int32 [patches] each. Padding rows get their aligned tile's padding."""
    edges = [0, *accumulate(lengths.tolist())]
    edges += [*range((edges[-1] // TILE + 1) * TILE, patches, TILE), patches]  # padding: segments that end with a tile
    limits = np.array(edges, np.int32)
    starts, ends = limits[:-1], limits[1:]
    sizes = ends - starts
    return starts.repeat(sizes), ends.repeat(sizes)


class Ranges:
    """Metadata as key ranges, shared by the backends that mask by row."""

    version = "1"

    def buffers(self, patches: int, segments: int) -> tuple[Buffer, ...]:
        dtype = np.dtype(np.int32)
        return (Buffer("starts", (patches,), dtype, "own_segment"), Buffer("ends", (patches,), dtype, "own_segment"))

    def metadata(self, lengths: np.ndarray, patches: int, segments: int) -> dict[str, np.ndarray]:
        starts, ends = key_ranges(lengths, patches)
        return {"starts": starts, "ends": ends}

    def why_not(self, platform: str, dtype: str) -> str | None:
        return None


def copied_ranges(metadata: Metadata) -> Metadata:
    """Copies that XLA cannot leave out, in one kernel: no range is empty, but that is not for XLA to know."""
    starts, ends = metadata["starts"], metadata["ends"]
    return {"starts": lax.min(starts, ends), "ends": lax.max(starts, ends)}


def tile_ranges(starts: Array, ends: Array, rows: int) -> Array:
    """(least start, greatest start, least end, greatest end) of every tile of rows: int32 [tiles, LINE].

    A tile's lie in a cache line of their own. Together they are then larger than a call's flags, and XLA does not lay
    them where the flags will be: all layers read them, and results move from call to call.
    """
    starts, ends = starts.reshape(-1, rows), ends.reshape(-1, rows)
    found = jnp.stack([starts.min(1), starts.max(1), ends.min(1), ends.max(1)], axis=1)
    return jnp.pad(found, ((0, 0), (0, LINE - found.shape[1])))
