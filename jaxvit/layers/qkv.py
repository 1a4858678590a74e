"""The fused projection of attention, with q and k rotated: on NVIDIA Hopper in the product's last step.

For that the projection's kernel lies transposed and cut by heads, [3 x heads, dim, inputs], and what a rotation turns
lies beside each other: ``layers.fuse.Interleaving`` and ``layers.fuse.ByHead`` do it when the weights are loaded. Both
values of a pair are then in one thread, and q and k are never written unrotated. A head's padding lies behind its
values: it is written, since attention reads heads of whole tiles, but not multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array, Float

from jaxvit.layers.hopper.packed import own, places
from jaxvit.layers.hopper.product import Part, Put, Tile, fills, fits, product
from jaxvit.layers.hopper.registers import rotated, with_zeros
from jaxvit.layers.linear import Linear, precision
from jaxvit.layers.rope import Neighbours, Rotation

WIDEST = 256
"""Columns of a tile at most."""
STEP = 8
"""The columns multiplied of a head are a multiple of this."""
STAGES = 3
"""Blocks of inputs in shared memory at a time."""


def project(
    x: Float[Array, "patches hidden"], layer: Linear, heads: int, turn: Rotation
) -> tuple[Float[Array, "patches 3 heads dim"], Rotation | None]:
    """q, k and v, and the rotation that is still due: None where the product has rotated them."""
    kernel, bias = layer.kernel[...], layer.bias
    if kernel.ndim == 2:
        return layer(x).reshape(x.shape[0], 3, heads, -1), turn
    _, dim, inputs = kernel.shape
    turn = Neighbours(*turn)
    if bias is not None and (tile := rotates(x.shape[0], kernel.shape, turn.cos.shape[1])):
        [packed], start = places(bias[...])
        y = turned(x, kernel, packed, start, turn.table(tile.width), heads=heads, tile=tile)
        return y.reshape(x.shape[0], 3, heads, dim), None
    dims = (((1,), (1,)), ((), ()))
    flat = kernel.reshape(-1, inputs)
    y = lax.dot_general(x, flat, dims, precision=precision(x.dtype), preferred_element_type=x.dtype)
    y = y if bias is None else y + own(bias[...]).astype(y.dtype)
    return y.reshape(x.shape[0], 3, heads, dim), turn


def rotates(rows: int, kernel: tuple[int, ...], pairs: int) -> Tile | None:
    """The tile, if the product of so many rows rotates in its last step here.

    Args:
        kernel: its shape, cut by heads.
        pairs: of a head's values that are turned; the rest of a head is padding.
    """
    together, dim, inputs = kernel
    tile = tile_of(together, dim, pairs)
    return tile if tile and fits(rows, inputs, together, tile.runs) and fills(rows, together // tile.runs) else None


def tile_of(together: int, dim: int, pairs: int) -> Tile | None:
    """As many heads as are whole tiles; None where the kernel's tiles do not suit the head dim."""
    width = -(-2 * pairs // STEP) * STEP
    count = max((count for count in range(1, WIDEST // dim + 1) if together % count == 0), default=0)
    return Tile(count, width, dim) if count and dim % (2 * STEP) == 0 else None


@functools.partial(jax.jit, static_argnames=("heads", "tile"))
def turned(x: Array, kernel: Array, bias: Array, start: Array, table: Array, heads: int, tile: Tile) -> Array:
    """By the kernel: bfloat16 [patches, 3 x heads x dim], q and k rotated in float32.

    A jit of its own, so that the kernel is lowered once however many layers call it.

    Args:
        x: bfloat16 [patches, inputs], whole tiles.
        kernel: bfloat16 [3 x heads, dim, inputs], zeros behind the tile's width of each head.
        bias, start: bfloat16 or float32 [3 x heads x dim], from there on.
        table: float32 [patches, width], see ``layers.rope.Neighbours``.
    """
    _, dim, inputs = kernel.shape
    count, last = tile.runs, 2 * heads // tile.runs  # the tile with the first head of v, and the last of k before it

    def finish(part: Part, put: Put, number: Array, known: Sequence[Array]) -> None:
        def heads_with(rotations: int) -> tuple[Array, ...]:
            return tuple(rotated(part(each), *known) if each < rotations else part(each) for each in range(count))

        mixed = functools.partial(heads_with, 2 * heads % count)
        values = lax.cond(
            number < last, lambda: heads_with(count), lambda: lax.cond(number > last, lambda: heads_with(0), mixed)
        )
        for each, value in enumerate(values):
            put(each * dim, with_zeros(value, dim))

    return product(
        x, kernel.reshape(-1, inputs), bias, start, finish, tile=tile, written=tile.span, stages=STAGES,
        tables=(table,), needed=lambda number: number * count < 2 * heads, name="qkv_rotated",
    )  # fmt: skip
