"""Matrix products with the precision stated at every call, so that no process-wide setting changes a result."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


def precision(dtype: jnp.dtype) -> lax.Precision:
    """float32 means float32 on every device; bfloat16 takes the device's own product."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def dot(x: Float[Array, "... inputs"], kernel: Float[Array, "inputs outputs"]) -> Float[Array, "... outputs"]:
    """x @ kernel over the last axis, accumulated in float32, in x's dtype."""
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, kernel, dims, precision=precision(x.dtype), preferred_element_type=x.dtype)


class Linear(nnx.Module):
    """y = x @ kernel + bias, kernel [inputs, outputs]: the transpose of PyTorch's weight."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True):
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        if self.bias is None:
            return dot(x, self.kernel[...])
        # An accelerator's product adds the bias before it rounds to x's dtype; XLA's on the CPU has to be told.
        return by_platform(x, self.kernel[...], self.bias[...], cpu=_rounded_once, default=_fusable)


def by_platform(*arrays: Array, cpu: Callable[..., Array], default: Callable[..., Array]) -> Array:
    """``lax.platform_dependent``, without what JAX would remember of it: it keeps every trace of a function for as long
    as that function lives, and those of a module live for ever."""
    return lax.platform_dependent(*arrays, cpu=lambda *each: cpu(*each), default=lambda *each: default(*each))


def _fusable(x: Array, kernel: Array, bias: Array) -> Array:
    return dot(x, kernel) + bias


def _rounded_once(x: Array, kernel: Array, bias: Array) -> Array:
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    y = lax.dot_general(x, kernel, dims, precision=precision(x.dtype), preferred_element_type=jnp.float32)
    return (y + bias.astype(jnp.float32)).astype(x.dtype)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation: MLPs of MoonViT and SigLIP2 ("gelu_pytorch_tanh")."""
    return jax.nn.gelu(x, approximate=True)


def gelu_exact(x: Array) -> Array:
    """The exact GELU, by erf: all projectors ("gelu")."""
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS = {"gelu": gelu_exact, "gelu_pytorch_tanh": gelu_tanh, "silu": jax.nn.silu, "relu": jax.nn.relu}
"""Hugging Face's activation names. A config with another name is refused, never approximated."""
