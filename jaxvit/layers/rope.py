"""Two-dimensional rotary embedding, angles in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

Rotation = tuple[Array, Array]
"""(cos, sin), float32 [patches, pairs] each: of the values i and i + dim/2 of a head."""


class Neighbours(NamedTuple):
    """A rotation of the values 2i and 2i + 1 instead. ``layers.fuse.Interleaving`` brings them there."""

    cos: Array
    sin: Array

    def table(self, columns: int) -> Array:
        """float32 [patches, columns]: a pair's cosine and sine in its places. Pairs beyond turn by nothing."""
        return jnp.stack(widened(self, columns // 2), axis=-1).reshape(self.cos.shape[0], columns)


def frequencies(count: int, theta: float) -> np.ndarray:
    """theta ** (-i / count) for i < count: float32 [count], rounded as the reference does, power and quotient."""
    exponents = np.arange(count, dtype=np.float32) / np.float32(count)
    powers = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / powers


def angles_by_axis(coordinates: Int[Array, "patches 2"], count: int, theta: float) -> Float[Array, "patches angles"]:
    """[y * f_0 .. y * f_n, x * f_0 .. x * f_n] (Qwen2.5-VL)."""
    y, x = _axes(coordinates, count, theta)
    return jnp.concatenate([y, x], axis=-1)


def angles_interleaved(
    coordinates: Int[Array, "patches 2"], count: int, theta: float
) -> Float[Array, "patches angles"]:
    """[x * f_0, y * f_0, x * f_1, y * f_1, ..] (MoonViT)."""
    y, x = _axes(coordinates, count, theta)
    return jnp.stack([x, y], axis=-1).reshape(coordinates.shape[0], 2 * count)


def _axes(coordinates: Int[Array, "patches 2"], count: int, theta: float):
    scaled = coordinates.astype(jnp.float32)[:, :, None] * frequencies(count, theta)
    return scaled[:, 0], scaled[:, 1]


def rotation(angles: Float[Array, "patches pairs"]) -> Rotation:
    """Cosines and sines, computed once for all layers: XLA would else compute them again in every layer."""
    return lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(x: Float[Array, "patches heads dim"], turn: Rotation) -> Float[Array, "patches heads dim"]:
    """Rotates (x[i], x[i + dim/2]) by angle i, in float32; a rotation of neighbours turns (x[2i], x[2i + 1])."""
    half = x.shape[-1] // 2
    cos, sin = (each[:, None, :] for each in widened(turn, half))
    wide = x.astype(jnp.float32)
    if isinstance(turn, Neighbours):  # each value by itself: one loop for XLA, where slices and a stack would be more
        other = wide.reshape(*x.shape[:-1], half, 2)[..., ::-1].reshape(x.shape)
        signed = jnp.stack([-sin, sin], axis=-1).reshape(*sin.shape[:-1], 2 * half)
        return (wide * jnp.repeat(cos, 2, axis=-1) + other * signed).astype(x.dtype)
    first, second = wide[..., :half], wide[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def widened(turn: Rotation, half: int) -> Rotation:
    """The rotation of a head whose pairs were padded with zeros to ``half``: pairs beyond turn by nothing."""
    cos, sin = turn
    extra = ((0, 0), (0, half - cos.shape[-1]))
    return jnp.pad(cos, extra, constant_values=1), jnp.pad(sin, extra)
