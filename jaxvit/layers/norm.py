"""Normalisation over the last axis, computed in float32 whatever the dtype.

A row whose squares overflow float32 becomes NaN: the quotient would be 0, and a broken result would look whole.

Before attention a norm is called with ``contain``: a row that is not finite then comes out as zeros. Packed attention
gives foreign rows the weight 0, but 0 x NaN is NaN, so no such row may reach it. The row itself stays what it is on the
residual path, and is reported at the end.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxvit.layers.hopper import norms


class LayerNorm(nnx.Module):
    """Biased variance of the centred values, as in PyTorch: E[x^2] - E[x]^2 loses digits on flat rows."""

    def __init__(self, width: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, x: Float[Array, "... width"], contain: bool = False) -> Float[Array, "... width"]:
        if norms.suits(x):
            return norms.layer_norm(x, self.scale[...], self.bias[...], self.eps, contain)
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        root = inverse_root(jnp.square(centred).mean(-1, keepdims=True), self.eps)
        y = centred * root * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return (without_nan(y) if contain else y).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x), cast to x's dtype, then times the scale: the order of casts is the reference's."""

    def __init__(self, width: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(self, x: Float[Array, "... width"], contain: bool = False) -> Float[Array, "... width"]:
        if norms.suits(x):
            return norms.rms_norm(x, self.scale[...], self.eps, contain)
        wide = x.astype(jnp.float32)
        root = inverse_root(jnp.square(wide).mean(-1, keepdims=True), self.eps)
        y = wide * root
        return (without_nan(y) if contain else y).astype(x.dtype) * self.scale[...]


def without_nan(y: Float[Array, "... width"]) -> Float[Array, "... width"]:
    """0 for NaN. A row with one value that is not finite is NaN throughout here. (XLA fuses this, and not isfinite.)"""
    return jnp.where(y == y, y, 0)


def inverse_root(square: Float[Array, "... 1"], eps: float) -> Float[Array, "... 1"]:
    """1 / sqrt(mean square + eps), NaN where the mean square is infinite."""
    # The remainder by the greatest float is the number itself, and NaN for infinity. A comparison would use the mean
    # square twice, and XLA for GPUs would make three kernels of an RMSNorm instead of one.
    return lax.rsqrt(lax.rem(square, jnp.full_like(square, jnp.finfo(square.dtype).max)) + eps)
