"""The fused projection of attention, with q and k rotated: on NVIDIA Hopper in the product's last step.

For that the projection's kernel lies transposed and cut by heads, [3 x heads, dim, inputs]: ``layers.fuse.ByHead`` does
it when the weights are loaded. A head's two halves then meet in one thread, and nothing is written that is not rotated.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jaxtyping import Array, Float

from jaxvit.layers.attention.windows import rotated
from jaxvit.layers.hopper.packed import own, places
from jaxvit.layers.hopper.product import Part, Put, fills, fits, product
from jaxvit.layers.linear import Linear, precision
from jaxvit.layers.rope import Rotation, widened

WIDEST = 256
"""Columns of a tile at most."""
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
    if bias is not None and (count := rotates(x.shape[0], kernel.shape)):
        cos, sin = widened(turn, dim // 2)
        [packed], start = places(bias[...])
        y = turned(x, kernel, packed, start, cos, sin, heads=heads, count=count)
        return y.reshape(x.shape[0], 3, heads, dim), None
    dims = (((1,), (1,)), ((), ()))
    flat = kernel.reshape(-1, inputs)
    y = lax.dot_general(x, flat, dims, precision=precision(x.dtype), preferred_element_type=x.dtype)
    y = y if bias is None else y + own(bias[...]).astype(y.dtype)
    return y.reshape(x.shape[0], 3, heads, dim), turn


def rotates(rows: int, kernel: tuple[int, ...]) -> int:
    """Heads of a tile if the product of so many rows rotates in its last step here, else 0.

    Args:
        kernel: its shape, cut by heads.
    """
    together, dim, inputs = kernel
    count = tile_heads(together, dim)
    return count if count and fits(rows, inputs, together, count) and fills(rows, together // count) else 0


def tile_heads(together: int, dim: int) -> int:
    """Heads of a tile: as many as are whole tiles; 0 where the kernel's tiles do not suit the head dim."""
    if dim % 16:
        return 0
    return max((count for count in range(1, WIDEST // dim + 1) if together % count == 0), default=0)


@functools.partial(jax.jit, static_argnames=("heads", "count"))
def turned(x: Array, kernel: Array, bias: Array, start: Array, cos: Array, sin: Array, heads: int, count: int) -> Array:
    """By the kernel: bfloat16 [patches, 3 x heads x dim], q and k rotated in float32.

    A jit of its own, so that the kernel is lowered once however many layers call it.

    Args:
        x: bfloat16 [patches, inputs], whole tiles.
        kernel: bfloat16 [3 x heads, dim, inputs].
        bias, start: bfloat16 or float32 [3 x heads x dim], from there on.
        cos, sin: float32 [patches, dim / 2].
        count: heads of a tile.
    """
    _, dim, inputs = kernel.shape

    def finish(part: Part, put: Put, tile: Array, known: list[Array]) -> None:
        cosines, sines = known
        for each in range(count):
            values = part(each * dim, dim)
            head = tile * count + each
            turn = functools.partial(rotated, values, cosines, sines)
            put(each * dim, lax.cond(head < 2 * heads, turn, lambda values=values: values))

    columns = count * dim
    flat, tables = kernel.reshape(-1, inputs), (cos, sin)
    return product(
        x, flat, bias, start, finish, columns=columns, written=columns, stages=STAGES, tables=tables, name="qkv_rotated"
    )
