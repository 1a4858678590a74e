"""Norms on NVIDIA Hopper (Pallas, Mosaic GPU): a warp a row, which it keeps in registers. What they compute stands in
``layers.norm``; XLA's kernel takes a block of threads a row, and half as long again on many rows."""

# What Pallas' decorators make of a kernel's arguments is beyond the checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportReturnType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxvit.layers.hopper import allowed
from jaxvit.layers.hopper.packed import places

ROWS = 4
"""Rows of a block of threads, one a warp."""
VALUES = 4
"""Neighbouring values of a row that a thread reads at once."""
LEAST_ROWS = 1024
"""Below, neither is faster."""


def suits(x: Array) -> bool:
    """Whether the kernel may be used here, and takes these rows."""
    whole = x.ndim == 2 and x.shape[0] % ROWS == 0 and x.shape[-1] % (32 * VALUES) == 0
    return allowed() and whole and x.shape[0] >= LEAST_ROWS


def layer_norm(x: Array, scale: Array, bias: Array, eps: float, contain: bool) -> Array:
    """As ``layers.norm.LayerNorm``: bfloat16 [rows, width]."""
    return _layer_norm(x, *places(scale, bias), eps=eps, contain=contain)


def rms_norm(x: Array, scale: Array, eps: float, contain: bool) -> Array:
    """As ``layers.norm.RMSNorm``: bfloat16 [rows, width]."""
    return _rms_norm(x, *places(scale), eps=eps, contain=contain)


@functools.partial(jax.jit, static_argnames=("eps", "contain"))
def _layer_norm(x: Array, arrays: list[Array], starts: Array, eps: float, contain: bool) -> Array:
    """A jit of its own, so that the kernel is lowered once however many layers call it."""

    def normal(wide: Array, mean: Any, down: Any, across: Any, scale: Array, bias: Array) -> Array:
        centred = wide - down(mean(wide))
        y = centred * down(_inverse_root(mean(centred * centred), eps))
        y = y * across(scale.astype(jnp.float32)) + across(bias.astype(jnp.float32))
        return (jnp.where(y == y, y, 0.0) if contain else y).astype(jnp.bfloat16)

    return _rows(x, arrays, starts, normal, "layer_norm")


@functools.partial(jax.jit, static_argnames=("eps", "contain"))
def _rms_norm(x: Array, arrays: list[Array], starts: Array, eps: float, contain: bool) -> Array:
    """See ``_layer_norm``."""

    def normal(wide: Array, mean: Any, down: Any, across: Any, scale: Array) -> Array:
        y = wide * down(_inverse_root(mean(wide * wide), eps))
        y = jnp.where(y == y, y, 0.0) if contain else y
        return y.astype(jnp.bfloat16) * across(scale)

    return _rows(x, arrays, starts, normal, "rms_norm")


def _inverse_root(square: Array, eps: float) -> Array:
    return jnp.where(square < jnp.inf, lax.rsqrt(square + eps), jnp.nan)


def _rows(x: Array, arrays: list[Array], starts: Array, normal: Any, name: str) -> Array:
    """Each row through ``normal(wide, mean, down, across, *vectors)``.

    ``mean`` is a row's mean, ``down`` repeats a number for each row over the row, ``across`` a vector over all rows.
    The vectors begin at ``starts`` of the arrays.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    rows, width = x.shape
    tiling = plgpu.Tiling(((ROWS, 32 * VALUES), (VALUES,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def mean(wide: Array) -> Array:
        return wide.sum(axis=1) * (1.0 / width)

    def down(numbers: Array) -> Array:
        return lax.broadcast_in_dim(numbers, (ROWS, width), [0])

    def across(vector: Array) -> Array:
        return lax.broadcast_in_dim(vector, (ROWS, width), [1])

    def body(source: Any, starts: Any, *refs: Any) -> None:
        *whole, out = refs
        vectors = [each.at[pl.ds(starts[index], width)] for index, each in enumerate(whole)]
        mine = pl.ds(lax.axis_index("block") * ROWS, ROWS)
        wide = plgpu.load(source.at[mine], layout=layout, optimized=False).astype(jnp.float32)
        known = [plgpu.load(each, layout=layout.reduce(0), optimized=False) for each in vectors]
        out[mine] = normal(wide, mean, down, across, *known)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // ROWS,),
        grid_names=("block",),
        num_threads=1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=False, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        kernel_name=name,
    )(x, starts, *arrays)
