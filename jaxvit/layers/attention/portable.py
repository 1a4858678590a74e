"""The backends that run on every platform: dense with a mask, and blockwise with a running softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxvit.layers.attention.segments import Metadata, Ranges
from jaxvit.layers.linear import precision


class Dense(Ranges):
    """Every row against every row, then a mask: the oracle, and the fastest for small buckets."""

    name = "dense"

    def __call__(self, q: Array, k: Array, v: Array, metadata: Metadata, scale: float) -> Array:
        keys = jnp.arange(q.shape[0], dtype=jnp.int32)
        mask = (metadata["starts"][:, None] <= keys) & (keys < metadata["ends"][:, None])
        exact = precision(q.dtype)
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision=exact, preferred_element_type=jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(q.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, v, precision=exact, preferred_element_type=q.dtype)


class Blockwise(Ranges):
    """Blocks of rows against blocks of keys with a running softmax: memory linear in patches, foreign blocks skipped.

    Runs on any platform. Rows are padded inside to whole blocks.
    """

    name = "xla"
    block = 256

    def __call__(self, q: Array, k: Array, v: Array, metadata: Metadata, scale: float) -> Array:
        patches, heads, dim = q.shape
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
