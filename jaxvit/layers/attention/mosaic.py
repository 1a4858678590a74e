"""This package's own kernel for NVIDIA Hopper: flash attention over packed segments (Pallas, Mosaic GPU).

A block of threads takes a tile of rows of one head, and walks only the blocks of keys between the first and the last
key that any of its rows may see. One warp loads keys and values ahead through shared memory; the others multiply and
keep a running softmax. With two warp groups one multiplies while the other takes exponentials. Key ranges of rows are
applied as a mask, and only in blocks where some range begins or ends.

q, k and v are read in place: they may be heads of one array.
"""

# What Pallas' decorators make of a kernel's arguments is beyond the checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportReturnType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxvit.layers import hopper
from jaxvit.layers.attention import windows
from jaxvit.layers.attention.segments import TILE, Metadata, Ranges, copied_ranges, tile_ranges
from jaxvit.layers.hopper.barriers import MULTIPROCESSORS, arrive, sync
from jaxvit.layers.rope import Neighbours, Rotation, rotate, widened


@dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    Attributes:
        groups: warp groups that compute, each with ``TILE`` rows; two take turns.
        keys: keys of a block.
        stages: blocks of keys in shared memory at a time.
        persistent: one block of threads a multiprocessor walks over all tiles, instead of one block a tile.
        halves: maxima and sums of a row are taken by halves of its columns, and the sum's last steps behind the loop:
            shorter chains of dependent steps, more registers.
    """

    groups: int = 2
    keys: int = 128
    stages: int = 2
    persistent: bool = True
    halves: bool = False

    def __post_init__(self) -> None:
        if self.groups == 2 and not self.persistent:
            raise ValueError("two warp groups take turns over all tiles of a persistent block of threads")

    @property
    def rows(self) -> int:
        return self.groups * TILE


LARGE = Tiling()
LONG = Tiling(halves=True)
"""For many rows."""
LONG_FROM = 8192
"""Patches of a bucket from which that is faster."""
SMALL = Tiling(groups=1, persistent=False)
"""For few rows: more and smaller tiles fill more of the chip."""


class Mosaic(Ranges):
    """Key ranges; padding attends within tiles of its own."""

    name = "mosaic"
    version = "1"

    def __call__(self, q: Array, k: Array, v: Array, metadata: Metadata, scale: float) -> Array:
        heads = q.shape[1]
        return flash(q, k, v, metadata["starts"], metadata["ends"], heads, (0, 0, 0), scale, tiling(q.shape[0]))

    def fused(
        self, qkv: Array, rotation: Rotation | None, metadata: Metadata, scale: float, longest: int | None
    ) -> Array:
        """From the projection in place: values are never copied, q and k are rotated in one pass, or in the kernel."""
        patches, _, heads, dim = qkv.shape
        together = qkv.reshape(patches, 3 * heads, dim)
        short = patches <= windows.FEW_PATCHES or (longest is not None and longest <= TILE)
        if rotation is not None and short and windows.suits(dim):
            tables = (rotation.table(dim),) if isinstance(rotation, Neighbours) else widened(rotation, dim // 2)
            return windows.attend(together, tables, metadata["starts"], metadata["ends"], scale)
        turned = together if rotation is None else rotate(together[:, : 2 * heads], rotation)
        places = (0, heads, 2 * heads)
        starts, ends = metadata["starts"], metadata["ends"]
        return flash(turned, turned, together, starts, ends, heads, places, scale, tiling(patches))

    def copied(self, metadata: Metadata) -> Metadata:
        return copied_ranges(metadata)

    def why_not(self, platform: str, dtype: str) -> str | None:
        return hopper.why_not(platform, dtype)


def folded(x: Array, combine: Callable[[Array, Array], Array], width: int) -> Array:
    """Columns combined with those half a row away, until a row has so many."""
    while x.shape[1] > width:
        half = x.shape[1] // 2
        x = combine(x[:, :half], x[:, half:])
    return x


def tiling(patches: int) -> Tiling:
    """The tiling for a bucket of so many patches."""
    if patches % LARGE.rows or patches <= 512:
        return SMALL
    return LONG if patches >= LONG_FROM else LARGE


@functools.partial(jax.jit, static_argnames=("heads", "places", "scale", "tiling"))
def flash(
    q: Array,
    k: Array,
    v: Array,
    starts: Array,
    ends: Array,
    heads: int,
    places: tuple[int, int, int],
    scale: float,
    tiling: Tiling,
) -> Array:
    """Attention over key ranges: bfloat16 [patches, heads, dim].

    A jit of its own, so that the kernel is lowered once however many layers call it.

    Args:
        q, k, v: bfloat16 [patches, any heads, dim]; they may be one array. The tile's rows divide the patches.
        starts, ends: int32 [patches]: first and one past the last key of each row, never empty.
        heads: how many heads to compute.
        places: the first head of each in its array.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    patches, _, dim = q.shape
    groups, keys, stages, rows = tiling.groups, tiling.keys, tiling.stages, tiling.rows
    if patches % rows:
        raise ValueError(f"{patches} patches are not whole tiles of {rows} rows")
    tiles, slots = patches // rows, 2 if tiling.persistent else 1
    total = heads * tiles
    turns = groups == 2
    q_place, k_place, v_place = places
    matrix, column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    swizzle = plgpu.find_swizzle(dim * 16)
    transforms = (plgpu.TilingTransform((8, 8 * swizzle // 16)), plgpu.SwizzleTransform(swizzle))
    exponent = scale * math.log2(math.e)
    partial_sums = 8 if tiling.halves else 0
    """Columns of a row's running sum, 0 for one number."""

    # Hardware barriers 0 to 3 belong to Mosaic. Then: whose turn it is, and "the slot was read" of q, k and v.
    turn = 4
    q_read = turn + (2 if turns else 0)
    k_read = q_read + slots
    v_read = k_read + stages
    threads = 128 * groups + 32
    registers = {1: 232, 2: 232}[groups]

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    def integer(value: int) -> Array:
        return jnp.asarray(value, jnp.int32)

    def body(q_all, k_all, v_all, starts_all, ends_all, ranges, out, qs, ks, vs, outs, q_here, k_here, v_here):
        group = lax.axis_index("group")

        def range_of(index: Array) -> tuple[Array, ...]:
            tile = lax.rem(lax.min(index, integer(total - 1)), integer(tiles))
            return tuple(ranges[tile, each] for each in range(4))

        def one_tile(number: Any, index: Array, bounds: tuple[Array, ...], before: Any) -> Array:
            """One tile of rows of one head. ``before``: blocks of keys that this block of threads has walked so far."""
            head, tile = lax.div(index, integer(tiles)), lax.rem(index, integer(tiles))
            least_start, greatest_start, least_end, greatest_end = bounds
            low = lax.div(least_start, integer(keys))
            high = lax.div(greatest_end + (keys - 1), integer(keys))
            q_slot = 0 if slots == 1 else lax.rem(number, integer(slots))

            def slot(block: Array) -> Array:
                return lax.rem(before + block - low, integer(stages))

            def compute() -> None:
                plgpu.set_max_registers(registers, action="increase")
                mine = pl.ds(tile * rows + group * TILE, TILE)

                def all_slots_are_free() -> None:
                    for each in range(stages):
                        arrive(k_read + each, threads)
                        arrive(v_read + each, threads)
                    for each in range(slots):
                        arrive(q_read + each, threads)

                if isinstance(number, int):
                    all_slots_are_free()
                else:
                    pl.when(number == 0)(all_slots_are_free)

                top = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), column)
                if partial_sums:
                    weight = plgpu.layout_cast(jnp.zeros((TILE, partial_sums), jnp.float32), matrix)
                else:
                    weight = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), column)
                sums = plgpu.layout_cast(jnp.zeros((TILE, dim), jnp.float32), matrix)
                first = plgpu.load(starts_all.at[mine], layout=column, optimized=False)
                last = plgpu.load(ends_all.at[mine], layout=column, optimized=False)

                def across(x: Array, width: int) -> Array:
                    return lax.broadcast_in_dim(x, (TILE, width), [0])

                def masked(scores: Array, block: Array) -> Array:
                    base = block * keys

                    def apply() -> Array:
                        key = base + plgpu.broadcasted_iota(jnp.int32, (TILE, keys), 1, layout=matrix)
                        seen = (key >= across(first, keys)) & (key < across(last, keys))
                        return jnp.where(seen, scores, -jnp.inf)

                    return lax.cond((base < greatest_start) | (base + keys > least_end), apply, lambda: scores)

                def softmax(scores: Array, top: Array, weight: Array, sums: Array) -> tuple[Array, ...]:
                    highest = folded(scores, jnp.maximum, 16) if partial_sums else scores
                    new = jnp.maximum(top, highest.max(axis=1) * exponent)
                    safe = jnp.maximum(new, -1e30)  # a row that has met no key yet: exp2(-inf) is 0, never NaN
                    decay = jnp.exp2(top - safe)
                    shares = jnp.exp2(scores * exponent - across(safe, keys))
                    if partial_sums:
                        weight = weight * across(decay, partial_sums) + folded(shares, jnp.add, partial_sums)
                    else:
                        weight = weight * decay + shares.sum(axis=1)
                    return shares.astype(jnp.bfloat16), new, weight, sums * across(decay, dim)

                def others_turn() -> None:
                    if turns:
                        arrive(turn + 1 - group, 256)

                def await_turn() -> None:
                    if turns:
                        sync(turn + group, 256)

                plgpu.barrier_wait(q_here.at[q_slot])
                if turns:
                    # The turns run on from tile to tile: group 0 begins the first one and never waits at a tile's end.
                    # A signal at the end of each tile could come twice before group 1 takes the first, and two signals
                    # of one group fill the barrier without the other.
                    pl.when((group == 1) & (number == 0))(await_turn)
                my_q = qs.at[q_slot, pl.ds(group * TILE, TILE)]
                pl.when(high > low)(lambda: plgpu.barrier_wait(k_here.at[slot(low)]))

                def step(block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                    sums, top, weight = carry
                    here = slot(block)

                    def multiply(accumulator: Any) -> Array:
                        plgpu.wgmma(accumulator, my_q, ks.at[here].T)
                        others_turn()
                        return accumulator[...]

                    scores = pl.run_scoped(multiply, plgpu.ACC((TILE, keys), jnp.float32))
                    arrive(k_read + here, threads)
                    shares, top, weight, sums = softmax(masked(scores, block), top, weight, sums)
                    sums, shares = lax.optimization_barrier((sums, shares))
                    weight, top = lax.optimization_barrier((weight, top))
                    plgpu.barrier_wait(v_here.at[here])
                    await_turn()

                    def add(accumulator: Any) -> None:
                        plgpu.wgmma(accumulator, shares, vs.at[here])
                        pl.when(block + 1 < high)(lambda: plgpu.barrier_wait(k_here.at[slot(block + 1)]))

                    sums = pl.run_state(add)(plgpu.ACC.init(sums))
                    arrive(v_read + here, threads)
                    return sums, top, weight

                sums, top, weight = lax.fori_loop(low, high, step, (sums, top, weight))
                arrive(q_read + q_slot, threads)
                weight = weight.sum(axis=1) if partial_sums else weight
                sums = sums * across(1 / (weight + float(jnp.finfo(jnp.float32).tiny)), dim)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                outs[group] = sums.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(outs.at[group], out.at[mine, head])
                if not tiling.persistent:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def load() -> None:
                plgpu.set_max_registers(40, action="decrease")

                @plgpu.warp_map
                def _(warp: Array) -> None:
                    @pl.when(warp == 1)
                    def _() -> None:
                        sync(q_read + q_slot, threads)
                        source = q_all.at[pl.ds(tile * rows, rows), q_place + head]
                        plgpu.copy_gmem_to_smem(source, qs.at[q_slot], q_here.at[q_slot])

                    @pl.when(warp == 0)
                    def _() -> None:
                        @pl.loop(low, high)
                        def _(block: Array) -> None:
                            here, wanted = slot(block), pl.ds(block * keys, keys)
                            sync(k_read + here, threads)
                            plgpu.copy_gmem_to_smem(k_all.at[wanted, k_place + head], ks.at[here], k_here.at[here])
                            sync(v_read + here, threads)
                            plgpu.copy_gmem_to_smem(v_all.at[wanted, v_place + head], vs.at[here], v_here.at[here])

            lax.cond(group < groups, compute, load)
            return before + lax.max(integer(0), high - low)

        if not tiling.persistent:
            index = lax.axis_index("tile")
            one_tile(0, index, range_of(index), 0)
            return
        processor = lax.axis_index("tile")

        def walk(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            before, *bounds = carry
            index = processor + number * MULTIPROCESSORS
            following = range_of(index + MULTIPROCESSORS)
            return (one_tile(number, index, tuple(bounds), before), *following)

        count = lax.div(integer(total - 1 + MULTIPROCESSORS) - processor, integer(MULTIPROCESSORS))
        lax.fori_loop(integer(0), count, walk, (integer(0), *range_of(processor)))
        if turns:
            pl.when((group == 0) & (count > 0))(lambda: arrive(turn + 1, 256))  # for group 1's last turn
        pl.when(group < groups)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((patches, heads, dim), jnp.bfloat16),
        scratch_types=[
            shared(slots, rows, dim),
            shared(stages, keys, dim),
            shared(stages, keys, dim),
            shared(groups, TILE, dim),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(MULTIPROCESSORS if tiling.persistent else total,),
        grid_names=("tile",),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        kernel_name="packed_attention",
    )(q, k, v, starts, ends, tile_ranges(starts, ends, rows))
