"""Steps on float32 tiles in registers, in the layout in which the tensor core leaves its results.

There a thread holds two neighbouring columns of a row, and the same two of every eight.
"""

# What Pallas' decorators make of a kernel's arguments is beyond the checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportReturnType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def rotated(x: Array, *tables: Array) -> Array:
    """[rows, dim], rotated: by halves with cosines and sines [rows, dim / 2], by neighbours with one table of both.

    Args:
        tables: (cos, sin) or (``layers.rope.Neighbours.table``,).
    """
    return _by_halves(x, *tables) if len(tables) == 2 else _by_neighbours(x, *tables)


def _by_halves(x: Array, cos: Array, sin: Array) -> Array:
    """A value's partner is dim / 16 column tiles away."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import arith

    matrix, (rows, dim) = plgpu.Layout.WGMMA, x.shape
    columns = dim // 8

    @plgpu.inline_mgpu(arg_types=(matrix,) * 3, return_type=plgpu.ShapeDtypeStruct((rows, dim), jnp.float32, matrix))
    def turned(_: Any, x: Any, cos: Any, sin: Any) -> Any:
        out, half = np.empty_like(x.registers), columns // 2
        for place in range(columns):
            pair, partner = place % half, (place + half) % columns
            for rest in np.ndindex(x.registers[:, place].shape):
                here, there, angle = ((rest[0], each, *rest[1:]) for each in (place, partner, pair))
                near = arith.mulf(x.registers[here], cos.registers[angle])
                far = arith.mulf(x.registers[there], sin.registers[angle])
                out[here] = arith.subf(near, far) if place < half else arith.addf(near, far)
        return mgpu.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return turned(x, cos, sin)


def _by_neighbours(x: Array, table: Array) -> Array:
    """A value's partner is beside it."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import arith, math, vector

    matrix = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(matrix,) * 2, return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, matrix))
    def turned(_: Any, x: Any, table: Any) -> Any:
        out = np.empty_like(x.registers)
        for place in np.ndindex(out.shape):
            (first, second), (cos, sin) = (
                [vector.extract(each.registers[place], [], [column]) for column in range(2)] for each in (x, table)
            )
            pair = [
                math.fma(first, cos, arith.negf(arith.mulf(second, sin))),
                math.fma(second, cos, arith.mulf(first, sin)),
            ]
            out[place] = vector.from_elements(x.registers[place].type, pair)
        return mgpu.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return turned(x, table)


def with_zeros(x: Array, width: int) -> Array:
    """[rows, dim] -> [rows, width], zeros behind; both are multiples of 8."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils

    matrix, (rows, dim) = plgpu.Layout.WGMMA, x.shape
    if dim == width:
        return x

    @plgpu.inline_mgpu(arg_types=(matrix,), return_type=plgpu.ShapeDtypeStruct((rows, width), jnp.float32, matrix))
    def wide(_: Any, x: Any) -> Any:
        zeros = mgpu.FragmentedArray.splat(utils.c(0.0, x.mlir_dtype), (rows, width - dim)).to_layout(x.layout)
        registers = np.concatenate([x.registers, zeros.registers], axis=1)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return wide(x)
