"""silu(gate) x up of a gated MLP, on NVIDIA Hopper as one product (Pallas, Mosaic GPU).

A block of threads takes a tile of rows and the columns of both projections that are multiplied with each other, so that
neither projection is ever written to memory. For that the two kernels lie in one array, transposed, a tile of gate
columns and the same columns of up in turn: ``layers.fuse.Pairing`` makes it when the weights are loaded.
"""

# What Pallas' decorators make of a kernel's arguments is beyond the checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportReturnType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxvit.layers.attention.mosaic import MULTIPROCESSORS, Mosaic, arrive, sync
from jaxvit.layers.linear import Linear, precision

COLUMNS = 128
"""Columns of a tile: of gate, and of up."""
ROWS = 128
"""Rows of a tile, half of them a warp group's."""
DEPTH = 64
"""Inputs that are multiplied at a time."""
STAGES = 4
"""Of them in shared memory at a time."""
LEAST_ROWS = 1024
"""Rows from which on the kernel fills the chip. Below, a product of cuBLAS over the same array is as fast."""


def why_not(platform: str, dtype: str) -> str | None:
    """Why the kernel cannot run here, None if it can."""
    return Mosaic().why_not(platform, dtype)


def swiglu(x: Float[Array, "rows inputs"], gate: Linear, up: Linear) -> Float[Array, "rows outputs"]:
    """silu(gate(x)) * up(x). Two layers bound to one joined array (see ``layers.fuse.Pairing``) are one product."""
    kernel = gate.kernel[...]
    if kernel.ndim == 2:
        return jax.nn.silu(gate(x)) * up(x)
    bias = None if gate.bias is None else gate.bias[...]
    whole = kernel.shape[2] == COLUMNS and x.shape[0] % ROWS == 0 and x.shape[1] % DEPTH == 0
    if bias is not None and whole and x.shape[0] >= LEAST_ROWS:
        return joined(x, kernel, bias)
    return joined_plain(x, kernel, bias)


def joined_plain(
    x: Float[Array, "rows inputs"],
    kernel: Float[Array, "tiles 2 columns inputs"],
    bias: Float[Array, "tiles 2 columns"] | None,
) -> Float[Array, "rows outputs"]:
    """Without the kernel, for any number of rows: the weights are read as they lie."""
    flat = kernel.reshape(-1, kernel.shape[-1])
    dims = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x, flat, dims, precision=precision(x.dtype), preferred_element_type=x.dtype)
    y = (y if bias is None else y + bias.reshape(-1)).reshape(-1, *kernel.shape[:3])
    return (jax.nn.silu(y[:, :, 0]) * y[:, :, 1]).reshape(x.shape[0], -1)


@jax.jit
def joined(x: Array, kernel: Array, bias: Array) -> Array:
    """By the kernel: bfloat16 [rows, outputs], silu and product in float32.

    A jit of its own, so that the kernel is lowered once however many layers call it.

    Args:
        x: bfloat16 [rows, inputs], whole tiles.
        kernel: bfloat16 [tiles, 2, COLUMNS, inputs].
        bias: bfloat16 [tiles, 2, COLUMNS].
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    (rows, inputs), across = x.shape, kernel.shape[0]
    down, blocks, width, half = rows // ROWS, inputs // DEPTH, 2 * COLUMNS, ROWS // 2
    # Tiles that run at the same time share rows and columns in the cache: so many tiles down, then the next column.
    band = min(32 if down >= 128 else 16, down)
    total = down * across
    column = plgpu.Layout.WGMMA.reduce(0)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    # Hardware barriers 0 to 3 belong to Mosaic. Then: "the slot was read", and "the biases were read".
    read, bias_read, threads = 4, 4 + STAGES, 2 * 128 + 32

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    def integer(value: int) -> Array:
        return jnp.asarray(value, jnp.int32)

    def body(x_all, kernel_all, bias_all, out, xs, kernels, outs, biases, here, bias_here):
        group, processor = lax.axis_index("group"), lax.axis_index("processor")
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
            for each in range(STAGES):
                arrive(read + each, threads)
            arrive(bias_read, threads)

            def one_tile(number: Array, before: Array) -> Array:
                """``before``: blocks of inputs that this block of threads has walked so far."""
                row, tile = place(number)

                def multiply(sums: Any) -> Array:
                    @pl.loop(integer(0), integer(blocks))
                    def _(block: Array) -> None:
                        slot = lax.rem(before + block, integer(STAGES))
                        plgpu.barrier_wait(here.at[slot])
                        plgpu.wgmma(sums, xs.at[slot, pl.ds(group * half, half)], kernels.at[slot].T)
                        plgpu.wgmma_wait(1)

                        @pl.when(block > 0)
                        def _() -> None:
                            arrive(read + lax.rem(before + block - 1, integer(STAGES)), threads)

                        @pl.when((block == min(2, blocks - 1)) & (number > 0))
                        def _() -> None:  # by now the tile before has left shared memory, without anyone waiting
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            arrive(bias_read, threads)

                    plgpu.wgmma_wait(0)
                    arrive(read + lax.rem(before + blocks - 1, integer(STAGES)), threads)
                    return sums[...]

                y = pl.run_scoped(multiply, plgpu.ACC((half, width), jnp.float32))
                plgpu.barrier_wait(bias_here)

                def part(start: int) -> Array:
                    each = plgpu.load(biases.at[pl.ds(start, COLUMNS)], layout=column, optimized=False)
                    wide = lax.broadcast_in_dim(each.astype(jnp.float32), (half, COLUMNS), [1])
                    return y[:, start : start + COLUMNS] + wide

                gate, up = part(0), part(COLUMNS)
                outs[group] = (gate * (0.5 * jnp.tanh(0.5 * gate) + 0.5) * up).astype(jnp.bfloat16)
                plgpu.commit_smem()
                mine = pl.ds(row * ROWS + group * half, half)
                plgpu.copy_smem_to_gmem(outs.at[group], out.at[mine, pl.ds(tile * COLUMNS, COLUMNS)])
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
                        row, tile = place(number)

                        @pl.loop(integer(0), integer(blocks))
                        def _(block: Array) -> None:
                            slot, deep = lax.rem(before + block, integer(STAGES)), pl.ds(block * DEPTH, DEPTH)
                            sync(read + slot, threads)
                            plgpu.copy_gmem_to_smem(x_all.at[pl.ds(row * ROWS, ROWS), deep], xs.at[slot], here.at[slot])
                            columns = kernel_all.at[pl.ds(tile * width, width), deep]
                            plgpu.copy_gmem_to_smem(columns, kernels.at[slot], here.at[slot])

                        return before + blocks

                    lax.fori_loop(integer(0), count, one_tile, integer(0))

                @pl.when(warp == 1)
                def _() -> None:
                    @pl.loop(integer(0), count)
                    def _(number: Array) -> None:
                        sync(bias_read, threads)
                        columns = pl.ds(place(number)[1] * width, width)
                        plgpu.copy_gmem_to_smem(bias_all.at[columns], biases, bias_here)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, across * COLUMNS), jnp.bfloat16),
        scratch_types=[
            shared(STAGES, ROWS, DEPTH),
            shared(STAGES, width, DEPTH),
            shared(2, half, COLUMNS),
            plgpu.SMEM((width,), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1),
        ],
        grid=(MULTIPROCESSORS,),
        grid_names=("processor",),
        num_threads=3,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        kernel_name="swiglu",
    )(x, kernel.reshape(-1, inputs), bias.reshape(-1))
