"""A matrix product whose last step is the caller's, on NVIDIA Hopper (Pallas, Mosaic GPU).

XLA's products end in a bias, an activation or a residual. What else follows one, a gate, a rotation, would be a pass of
its own over memory; here it happens to a tile that is still in registers.

A persistent grid walks over tiles of 128 rows. Two warp groups multiply 64 rows each, one warp loads ahead. The second
group begins a block of inputs after the first, so that one's last steps run beside the other's products. The kernel is
read with its inputs innermost: [outputs, inputs].
"""

# What Pallas' decorators make of a kernel's arguments is beyond the checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportReturnType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxvit.layers.hopper import allowed
from jaxvit.layers.hopper.barriers import MULTIPROCESSORS, arrive, sync

ROWS = 128
"""Rows of a tile, half of them a warp group's."""
DEPTH = 64
"""Inputs that are multiplied at a time."""
Part = Callable[[int], Array]
"""``part(run)``: the columns of one of the tile's runs with their bias: float32 [64, width]."""
Put = Callable[[int, Array], None]
"""``put(start, values)``: writes columns of the result's tile."""


@dataclass(frozen=True)
class Tile:
    """The columns that a block of threads computes at a time.

    Attributes:
        runs: so many runs of columns, one behind the other.
        width: columns of a run, a multiple of 8; of all together at most 256.
        pitch: a run begins so many columns of the kernel behind the one before. Those between are not multiplied.
    """

    runs: int
    width: int
    pitch: int

    @property
    def columns(self) -> int:
        return self.runs * self.width

    @property
    def span(self) -> int:
        return self.runs * self.pitch


def fits(rows: int, inputs: int, outputs: int, columns: int) -> bool:
    """Whether the kernel may be used here, and the operands are whole tiles."""
    return allowed() and rows % ROWS == 0 and inputs % DEPTH == 0 and outputs % columns == 0


def fills(rows: int, tiles: int) -> bool:
    """Whether so many rows and tiles of columns give most multiprocessors something to do."""
    return rows // ROWS * tiles >= MULTIPROCESSORS // 2


def product(
    x: Array,
    kernel: Array,
    bias: Array,
    start: Array,
    finish: Callable[[Part, Put, Array, Sequence[Array]], None],
    *,
    tile: Tile,
    written: int,
    stages: int,
    tables: Sequence[Array] = (),
    needed: Callable[[Array], Array] | None = None,
    name: str,
) -> Array:
    """x @ kernel.T + bias, tile by tile through ``finish``: bfloat16 [rows, tiles x written].

    Call it in a jit of its own, so that the kernel is lowered once however many layers call it.

    Args:
        x: bfloat16 [rows, inputs], whole tiles.
        kernel: bfloat16 [tiles x tile.span, inputs].
        bias: bfloat16 or float32, flat: [tiles x tile.span] of it, or of a packed array.
        start: int32 [1], where the bias begins.
        finish: takes a tile's columns by ``part``, hands the result's to ``put``; it also gets the tile's number, and
            what it needs of the tables: float32 [64, width] each.
        tile: the columns of the kernel in a tile.
        written: columns of the result that come of a tile.
        stages: blocks of inputs in shared memory at a time.
        tables: float32 [rows, width]: read by row, before the product.
        needed: whether a tile needs the tables, by its number; where it does not, it gets zeros.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    (rows, inputs), across, columns = x.shape, kernel.shape[0] // tile.span, tile.columns
    down, blocks, half = rows // ROWS, inputs // DEPTH, ROWS // 2
    # Tiles that run at the same time share rows and columns in the cache: so many tiles down, then the next column.
    band = min(32 if down >= 128 else 16, down)
    total = down * across
    matrix, column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)

    # Hardware barriers 0 to 3 belong to Mosaic. Then: "the slot was read", "the biases were read", "the first group has
    # begun". With fewer blocks than slots the first could begin twice before the second takes notice.
    read, bias_read, begun, threads = 4, 4 + stages, 5 + stages, 2 * 128 + 32
    staggered = blocks >= stages
    copies = 1 if tile.width == tile.pitch else tile.runs

    def shared(*shape: int) -> Any:
        swizzle = plgpu.find_swizzle(shape[-1] * 16)
        transforms = (plgpu.TilingTransform((8, 8 * swizzle // 16)), plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    def integer(value: int) -> Array:
        return jnp.asarray(value, jnp.int32)

    def body(*refs: Any) -> None:
        x_all, kernel_all, bias_all, start, *rest = refs
        tables_all, (out, xs, kernels, outs, biases, here, bias_here) = rest[: len(tables)], rest[len(tables) :]
        group, processor = lax.axis_index("group"), lax.axis_index("processor")
        bias_start = start[0]
        count = lax.div(integer(total - 1 + MULTIPROCESSORS) - processor, integer(MULTIPROCESSORS))

        def place(number: Array) -> tuple[Array, Array]:
            """(row, column) of this block's tile of that number."""
            index = processor + number * MULTIPROCESSORS
            first = lax.div(index, integer(band * across)) * band
            height = lax.min(integer(band), down - first)
            rest = lax.rem(index, integer(band * across))
            return first + lax.rem(rest, height), lax.div(rest, height)

        @pl.when(group < 2)
        def compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            for each in range(stages):
                arrive(read + each, threads)
            arrive(bias_read, threads)

            def one_tile(number: Array, before: Array) -> Array:
                """``before``: blocks of inputs that this block of threads has walked so far."""
                row, column_tile = place(number)
                mine = pl.ds(row * ROWS + group * half, half)

                def from_tables() -> tuple[Array, ...]:
                    return tuple(plgpu.load(each.at[mine], layout=matrix, optimized=False) for each in tables_all)

                def nothing() -> tuple[Array, ...]:
                    shapes = [(half, each.shape[1]) for each in tables_all]
                    return tuple(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), matrix) for shape in shapes)

                known = from_tables() if needed is None else lax.cond(needed(column_tile), from_tables, nothing)

                def multiply(sums: Any) -> Array:
                    if staggered:
                        pl.when(group == 1)(lambda: sync(begun, 2 * 128))

                    @pl.loop(integer(0), integer(blocks))
                    def _(block: Array) -> None:
                        slot = lax.rem(before + block, integer(stages))
                        plgpu.barrier_wait(here.at[slot])
                        plgpu.wgmma(sums, xs.at[slot, pl.ds(group * half, half)], kernels.at[slot].T)
                        plgpu.wgmma_wait(1)
                        if staggered:
                            pl.when((block == 0) & (group == 0))(lambda: arrive(begun, 2 * 128))

                        @pl.when(block > 0)
                        def _() -> None:
                            arrive(read + lax.rem(before + block - 1, integer(stages)), threads)

                        @pl.when((block == min(2, blocks - 1)) & (number > 0))
                        def _() -> None:  # by now the tile before has left shared memory, without anyone waiting
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            arrive(bias_read, threads)

                    plgpu.wgmma_wait(0)
                    arrive(read + lax.rem(before + blocks - 1, integer(stages)), threads)
                    return sums[...]

                y = pl.run_scoped(multiply, plgpu.ACC((half, columns), jnp.float32))
                plgpu.barrier_wait(bias_here)

                def part(run: int) -> Array:
                    start, width = run * tile.width, tile.width
                    each = plgpu.load(biases.at[pl.ds(run * tile.pitch, width)], layout=column, optimized=False)
                    wide = lax.broadcast_in_dim(each.astype(jnp.float32), (half, width), [1])
                    return y[:, start : start + width] + wide

                def put(start: int, values: Array) -> None:
                    outs[group, :, pl.ds(start, values.shape[1])] = values.astype(jnp.bfloat16)

                finish(part, put, column_tile, known)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(outs.at[group], out.at[mine, pl.ds(column_tile * written, written)])
                return before + blocks

            lax.fori_loop(integer(0), count, one_tile, integer(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(group == 2)
        def load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                @pl.when(warp == 0)
                def _() -> None:
                    def one_tile(number: Array, before: Array) -> Array:
                        row, column_tile = place(number)

                        @pl.loop(integer(0), integer(blocks))
                        def _(block: Array) -> None:
                            slot, deep = lax.rem(before + block, integer(stages)), pl.ds(block * DEPTH, DEPTH)
                            sync(read + slot, threads)
                            plgpu.copy_gmem_to_smem(x_all.at[pl.ds(row * ROWS, ROWS), deep], xs.at[slot], here.at[slot])
                            for each in range(copies):
                                start = (column_tile * copies + each) * (tile.span // copies)
                                wanted = kernel_all.at[pl.ds(start, columns // copies), deep]
                                room = kernels.at[slot, pl.ds(each * (columns // copies), columns // copies)]
                                plgpu.copy_gmem_to_smem(wanted, room, here.at[slot])

                        return before + blocks

                    lax.fori_loop(integer(0), count, one_tile, integer(0))

                @pl.when(warp == 1)
                def _() -> None:
                    @pl.loop(integer(0), count)
                    def _(number: Array) -> None:
                        sync(bias_read, threads)
                        wanted = pl.ds(bias_start + place(number)[1] * tile.span, tile.span)
                        plgpu.copy_gmem_to_smem(bias_all.at[wanted], biases, bias_here)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, across * written), jnp.bfloat16),
        scratch_types=[
            shared(stages, ROWS, DEPTH),
            shared(stages, columns, DEPTH),
            shared(2, half, written),
            plgpu.SMEM((tile.span,), bias.dtype),
            plgpu.Barrier(num_arrivals=1 + copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1),
        ],
        grid=(MULTIPROCESSORS,),
        grid_names=("processor",),
        num_threads=3,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        kernel_name=name,
    )(x, kernel, bias, start, *tables)
