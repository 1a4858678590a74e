"""Attention over packed segments: one signature, several backends, all fed from the same segment lengths.

A segment is a run of rows that attend to each other and to nothing else. Segments lie one behind the other from row 0;
the rows behind the last one are padding and attend within aligned tiles of their own, so that they stay finite and cost
no more than their number.

A backend has three faces: ``buffers`` declares its metadata, ``metadata`` fills it from segment lengths on the host
(numpy), and calling it runs on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxvit.layers.linear import precision
from jaxvit.models.family import Buffer

TILE = 64
"""Rows of padding that attend to each other at most."""

Attend = Callable[[Array, Array, Array], Array]
Metadata = Mapping[str, Array]


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
        """[patches, heads, dim] each, scores times ``scale``, softmax in float32; result in q's dtype."""
        ...

    def why_not(self, platform: str, dtype: str) -> str | None:
        """Why this backend cannot run there, None if it can."""
        ...


def key_ranges(lengths: np.ndarray, patches: int) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last key of every row: int32 [patches] each. Padding rows get their aligned tile's padding."""
    ends_of = np.cumsum(lengths)
    used = int(ends_of[-1]) if len(lengths) else 0
    rows = np.arange(used, patches, dtype=np.int32)
    tile = rows // TILE * TILE
    starts = np.concatenate([np.repeat(ends_of - lengths, lengths).astype(np.int32), np.maximum(tile, used)])
    ends = np.concatenate([np.repeat(ends_of, lengths).astype(np.int32), np.minimum(tile + TILE, patches)])
    return starts.astype(np.int32, copy=False), ends.astype(np.int32, copy=False)


def contain(q: Array, v: Array) -> tuple[Array, Array]:
    """Keeps a non-finite value inside its own row.

    A probability of exactly 0 times NaN is NaN, so foreign rows of v must be finite. The row itself must not be healed
    by that: its q becomes NaN instead, and through it the row's own result.
    """
    finite = jnp.isfinite(v)
    return jnp.where(finite, q, jnp.nan), jnp.where(finite, v, 0)


class _Ranges:
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


class Dense(_Ranges):
    """Every row against every row, then a mask: the oracle, and the fastest for small buckets."""

    name = "dense"

    def __call__(self, q: Array, k: Array, v: Array, metadata: Metadata, scale: float) -> Array:
        q, v = contain(q, v)
        keys = jnp.arange(q.shape[0], dtype=jnp.int32)
        mask = (metadata["starts"][:, None] <= keys) & (keys < metadata["ends"][:, None])
        exact = precision(q.dtype)
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision=exact, preferred_element_type=jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(q.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, v, precision=exact, preferred_element_type=q.dtype)


class Blockwise(_Ranges):
    """Blocks of rows against blocks of keys with a running softmax: memory linear in patches, foreign blocks skipped.

    Runs on any platform. Rows are padded inside to whole blocks.
    """

    name = "xla"
    block = 256

    def __call__(self, q: Array, k: Array, v: Array, metadata: Metadata, scale: float) -> Array:
        patches, heads, dim = q.shape
        q, v = contain(q, v)
        size = min(self.block, patches)
        count = -(-patches // size)
        tail = count * size - patches

        def blocks(x: Array) -> Array:  # [patches, heads, dim] -> [count, heads, size, dim]
            return jnp.pad(x, ((0, tail), (0, 0), (0, 0))).reshape(count, size, heads, dim).transpose(0, 2, 1, 3)

        keys, values, queries = blocks(k), blocks(v), blocks(q)
        starts = jnp.pad(metadata["starts"], (0, tail)).reshape(count, size)
        ends = jnp.pad(metadata["ends"], (0, tail)).reshape(count, size)
        first = jnp.where(starts < ends, starts, patches).min(-1) // size
        last = -(-ends.max(-1) // size)
        exact = precision(q.dtype)

        def row_block(inputs: tuple[Array, ...]) -> Array:
            rows, low, high, begin, end = inputs

            def key_block(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                top, total, sums = carry
                scores = jnp.einsum(
                    "hqd,hkd->hqk", rows, keys[index], precision=exact, preferred_element_type=jnp.float32
                )
                position = index * size + jnp.arange(size, dtype=jnp.int32)
                mask = (low[:, None] <= position) & (position < high[:, None])
                scores = jnp.where(mask, scores * scale, -jnp.inf)
                new = jnp.maximum(top, scores.max(-1))
                # A row that has met none of its keys yet has the maximum -inf, and -inf - -inf is NaN.
                safe = jnp.where(new == -jnp.inf, 0.0, new)
                weights, decay = jnp.exp(scores - safe[..., None]), jnp.exp(top - safe)
                added = jnp.einsum(
                    "hqk,hkd->hqd",
                    weights.astype(v.dtype),
                    values[index],
                    precision=exact,
                    preferred_element_type=jnp.float32,
                )
                return new, total * decay + weights.sum(-1), sums * decay[..., None] + added

            start = (
                jnp.full((heads, size), -jnp.inf, jnp.float32),
                jnp.zeros((heads, size), jnp.float32),
                jnp.zeros((heads, size, dim), jnp.float32),
            )
            _, total, sums = lax.fori_loop(begin, end, key_block, start)
            return (sums / jnp.where(total == 0, 1.0, total)[..., None]).astype(q.dtype)

        out = lax.map(row_block, (queries, starts, ends, first, last))
        return out.transpose(0, 2, 1, 3).reshape(count * size, heads, dim)[:patches]


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Dense(), Blockwise())}


def choose(name: str, platform: str, dtype: str, patches: int) -> Backend:
    """The backend a bucket runs on: the one its ladder names, else the best available."""
    if name != "auto":
        return BACKENDS[name]
    return BACKENDS["dense" if patches <= 512 else "xla"]
