"""silu(gate) x up of a gated MLP, on NVIDIA Hopper as one product (Pallas, Mosaic GPU).

A block of threads takes a tile of rows and the columns of both projections that are multiplied with each other, so that
neither projection is ever written to memory. For that the two kernels lie in one array, transposed, a tile of gate
columns and the same columns of up in turn: ``layers.fuse.Pairing`` makes it when the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxvit.layers.hopper.packed import own, places
from jaxvit.layers.hopper.product import Part, Put, Tile, fills, fits, product
from jaxvit.layers.linear import Linear, precision

COLUMNS = 128
"""Columns of a tile: of gate, and of up."""
STAGES = 4
"""Blocks of inputs in shared memory at a time."""


def swiglu(x: Float[Array, "rows inputs"], gate: Linear, up: Linear) -> Float[Array, "rows outputs"]:
    """silu(gate(x)) * up(x). Two layers bound to one joined array (see ``layers.fuse.Pairing``) are one product."""
    kernel = gate.kernel[...]
    if kernel.ndim == 2:
        return jax.nn.silu(gate(x)) * up(x)
    bias = None if gate.bias is None else gate.bias[...]
    rows, inputs = x.shape
    whole = kernel.shape[2] == COLUMNS and fits(rows, inputs, COLUMNS, COLUMNS)
    if bias is not None and whole and fills(rows, len(kernel)):
        [packed], start = places(bias)
        return joined(x, kernel, packed, start)
    return joined_plain(x, kernel, None if bias is None else own(bias))


def joined_plain(
    x: Float[Array, "rows inputs"],
    kernel: Float[Array, "tiles 2 columns inputs"],
    bias: Float[Array, "tiles 2 columns"] | None,
) -> Float[Array, "rows outputs"]:
    """Without the kernel, for any number of rows: the weights are read as they lie."""
    flat = kernel.reshape(-1, kernel.shape[-1])
    dims = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x, flat, dims, precision=precision(x.dtype), preferred_element_type=x.dtype)
    y = (y if bias is None else y + bias.reshape(-1).astype(y.dtype)).reshape(-1, *kernel.shape[:3])
    return (jax.nn.silu(y[:, :, 0]) * y[:, :, 1]).reshape(x.shape[0], -1)


@jax.jit
def joined(x: Array, kernel: Array, bias: Array, start: Array) -> Array:
    """By the kernel: bfloat16 [rows, outputs], silu and product in float32.

    A jit of its own, so that the kernel is lowered once however many layers call it.

    Args:
        x: bfloat16 [rows, inputs], whole tiles.
        kernel: bfloat16 [tiles, 2, COLUMNS, inputs].
        bias, start: bfloat16 or float32 [tiles, 2, COLUMNS], flat from there on.
    """

    def finish(part: Part, put: Put, tile: Array, known: Sequence[Array]) -> None:
        gate, up = part(0), part(1)
        put(0, gate * (0.5 * jnp.tanh(0.5 * gate) + 0.5) * up)

    flat, tile = kernel.reshape(-1, x.shape[1]), Tile(2, COLUMNS, COLUMNS)
    return product(x, flat, bias, start, finish, tile=tile, written=COLUMNS, stages=STAGES, name="swiglu")
