"""Short segments on NVIDIA Hopper: attention with the rotation included (Pallas, Mosaic GPU).

A block of threads takes one tile of rows and a few heads. A window may begin in the tile before and end in the one
behind, so the keys are those of at most three tiles; of longer segments, of as many tiles as they have. Queries and
keys are rotated in registers, where both values of a pair lie in the same thread: nothing rotated is written to
memory. Every tile of rows rotates its keys anew, which pays while they are few.
"""

# What Pallas' decorators make of a kernel's arguments is beyond the checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportReturnType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxvit.layers.attention.segments import TILE, tile_ranges
from jaxvit.layers.hopper.barriers import MULTIPROCESSORS
from jaxvit.layers.hopper.registers import rotated

HEADS = 4
"""Heads of a block of threads at most: the tile's ranges, cosines and sines are read once for all of them."""
FEW_PATCHES = 256
"""Up to so many, this kernel is the faster one for segments of any length."""


def suits(dim: int) -> bool:
    """Whether the kernel computes heads of that size: where they are as wide as a tile, jax 0.11.2 makes a kernel of it
    that is wrong as soon as a row's keys lie in two tiles."""
    return dim != TILE


@functools.partial(jax.jit, static_argnames=("scale",))
def attend(qkv: Array, tables: tuple[Array, ...], starts: Array, ends: Array, scale: float) -> Array:
    """Rotated attention over key ranges: bfloat16 [patches, heads, dim].

    Args:
        qkv: bfloat16 [patches, 3 x heads, dim]; a tile divides the patches.
        tables: float32, by row, as ``hopper.registers.rotated`` takes them.
        starts, ends: int32 [patches]: first and one past the last key of each row, never empty.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental.mosaic.gpu import utils

    patches, three, dim = qkv.shape
    heads = three // 3
    group = math.gcd(heads, HEADS)
    while group > 1 and patches // TILE * (heads // group) < MULTIPROCESSORS:
        group //= 2
    matrix, column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    swizzle = plgpu.find_swizzle(dim * 16)
    transforms = (plgpu.TilingTransform((8, 8 * swizzle // 16)), plgpu.SwizzleTransform(swizzle))
    exponent = scale * math.log2(math.e)
    everyone = plgpu.inline_mgpu()(lambda _: utils.warpgroup_barrier())

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    def integer(value: int) -> Array:
        return jnp.asarray(value, jnp.int32)

    def body(source, *refs):
        tables_all, refs = refs[: len(tables)], refs[len(tables) :]
        starts_all, ends_all, ranges, out, qs, ks, vs, outs, q_here, k_here, v_here = refs
        tile, first_head = lax.axis_index("tile"), lax.axis_index("heads") * group
        least_start, greatest_start, least_end, greatest_end = (ranges[tile, each] for each in range(4))
        low, high = lax.div(least_start, integer(TILE)), lax.div(greatest_end + (TILE - 1), integer(TILE))
        blocks = lax.max(high - low, integer(1))
        steps = blocks * group
        mine = pl.ds(tile * TILE, TILE)

        def fetch(step: Array) -> None:
            """Keys and values of a step, and the queries with a head's first."""
            slot, head = lax.rem(step, integer(2)), first_head + lax.div(step, blocks)
            block = low + lax.rem(step, blocks)
            wanted = pl.ds(block * TILE, TILE)

            @pl.when(block == low)
            def _() -> None:
                q_slot = lax.rem(lax.div(step, blocks), integer(2))
                plgpu.copy_gmem_to_smem(source.at[mine, head], qs.at[q_slot], q_here.at[q_slot])

            plgpu.copy_gmem_to_smem(source.at[wanted, heads + head], ks.at[slot], k_here.at[slot])
            plgpu.copy_gmem_to_smem(source.at[wanted, 2 * heads + head], vs.at[slot], v_here.at[slot])

        def turn_of(block: Array) -> tuple[Array, ...]:
            rows = pl.ds(block * TILE, TILE)
            return tuple(plgpu.load(of.at[rows], layout=matrix, optimized=False) for of in tables_all)

        def wide(of: Any) -> Array:
            return plgpu.load(of, layout=matrix, optimized=False).astype(jnp.float32)

        def across(x: Array, width: int) -> Array:
            return lax.broadcast_in_dim(x, (TILE, width), [0])

        fetch(integer(0))
        pl.when(steps > 1)(lambda: fetch(integer(1)))
        my_turn = turn_of(tile)
        first = plgpu.load(starts_all.at[mine], layout=column, optimized=False)
        last = plgpu.load(ends_all.at[mine], layout=column, optimized=False)

        def one_head(number: Array, _: None) -> None:
            q_slot = lax.rem(number, integer(2))
            plgpu.barrier_wait(q_here.at[q_slot])
            q = rotated(wide(qs.at[q_slot]), *my_turn).astype(jnp.bfloat16)
            top = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), column)
            weight = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), column)
            sums = plgpu.layout_cast(jnp.zeros((TILE, dim), jnp.float32), matrix)
            walk = functools.partial(one_block, number, q)
            sums, top, weight = lax.fori_loop(integer(0), blocks, walk, (sums, top, weight))
            sums = sums * across(1 / (weight + float(jnp.finfo(jnp.float32).tiny)), dim)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            everyone()
            outs[...] = sums.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(outs, out.at[mine, first_head + number])

        def one_block(number: Array, q: Array, place: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            sums, top, weight = carry
            step, block = number * blocks + place, low + place
            slot = lax.rem(step, integer(2))
            plgpu.barrier_wait(k_here.at[slot])
            turn = lax.cond(block == tile, lambda: my_turn, lambda: turn_of(block))
            ks[slot] = rotated(wide(ks.at[slot]), *turn).astype(jnp.bfloat16)
            plgpu.commit_smem()

            def multiply(accumulator: Any) -> Array:
                plgpu.wgmma(accumulator, q, ks.at[slot].T)
                return accumulator[...]

            scores = pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))
            base = block * TILE

            def masked() -> Array:
                key = base + plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=matrix)
                return jnp.where((key >= across(first, TILE)) & (key < across(last, TILE)), scores, -jnp.inf)

            scores = lax.cond((base < greatest_start) | (base + TILE > least_end), masked, lambda: scores)
            new = jnp.maximum(top, scores.max(axis=1) * exponent)
            safe = jnp.maximum(new, -1e30)  # a row that has met no key yet: exp2(-inf) is 0, never NaN
            decay = jnp.exp2(top - safe)
            shares = jnp.exp2(scores * exponent - across(safe, TILE))
            sums = sums * across(decay, dim)
            weight = weight * decay + shares.sum(axis=1)
            shares = shares.astype(jnp.bfloat16)
            plgpu.barrier_wait(v_here.at[slot])

            def add(accumulator: Any) -> None:
                plgpu.wgmma(accumulator, shares, vs.at[slot])

            sums = pl.run_state(add)(plgpu.ACC.init(sums))
            everyone()  # all warps have read this slot before the next step's rows overwrite it
            pl.when(step + 2 < steps)(lambda: fetch(step + 2))
            return sums, new, weight

        lax.fori_loop(integer(0), integer(group), one_head, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((patches, heads, dim), jnp.bfloat16),
        scratch_types=[
            shared(2, TILE, dim),
            shared(2, TILE, dim),
            shared(2, TILE, dim),
            shared(TILE, dim),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        grid=(heads // group, patches // TILE),
        grid_names=("heads", "tile"),
        num_threads=1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        kernel_name="window_attention",
    )(qkv, *tables, starts, ends, tile_ranges(starts, ends, TILE))
