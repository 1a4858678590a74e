"""Two-dimensional rotary embedding, half-split rotation, angles in float32."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


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


def rotate(
    x: Float[Array, "patches heads dim"], angles: Float[Array, "patches angles"]
) -> Float[Array, "patches heads dim"]:
    """Rotates (x[i], x[i + dim/2]) by angle i, in float32.

    A head dim padded with zeros in each half has more pairs than angles; the pairs beyond are left as they are.
    """
    half = x.shape[-1] // 2
    angles = jnp.pad(angles, ((0, 0), (0, half - angles.shape[-1])))[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
