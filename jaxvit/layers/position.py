"""Learned position tables resampled to any grid: the weights come from the host, the device applies them in float32.

A resampling is linear and separable: a patch's position is the table weighed by its row's and its column's weights.
"""

from __future__ import annotations

from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxvit.layers.linear import dot

# Dense weights of every entry of a side (SigLIP2: few entries, and antialiasing may use them all)


@lru_cache(maxsize=2048)
def antialiased_linear(side: int, length: int) -> np.ndarray:
    """Weights of each of ``side`` entries for each of ``length`` places: float32 [length, side], rows adding up to 1.

    Equals PyTorch's ``interpolate(mode="bilinear", antialias=True, align_corners=False)`` along one axis: a triangle as
    wide as the larger of a place and an entry. In float32 as there: float64 would differ from it by 5e-6.
    """
    scale = np.float32(side) / np.float32(length)
    centre = (np.arange(length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distance = np.abs(np.arange(side, dtype=np.float32) - centre[:, None]) / max(scale, np.float32(1))
    weights = np.maximum(np.float32(0), np.float32(1) - distance)
    weights = weights / weights.sum(-1, keepdims=True)
    weights.flags.writeable = False
    return weights


def weigh_by_axis(
    y: Float[Array, "patches side"], x: Float[Array, "patches side"], table: Float[Array, "entries hidden"]
) -> Float[Array, "patches hidden"]:
    """The table, ``side`` rows of ``side`` entries, weighed by y and x for each patch; in float32, then in its dtype."""
    weights = (y[:, :, None] * x[:, None, :]).reshape(y.shape[0], -1)
    return dot(weights, table.astype(jnp.float32)).astype(table.dtype)
