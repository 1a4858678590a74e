"""Named barriers of the hardware, and how many multiprocessors there are: what the kernels share."""

# What Pallas' decorators make of a kernel's arguments is beyond the checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportReturnType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from typing import Any

MULTIPROCESSORS = 132
"""Blocks of threads of a persistent grid: the multiprocessors of an H100 or H200."""


def _barrier(operation: str, index: Any, threads: int) -> None:
    """One of the hardware's named barriers: "sync" waits for all its threads, "arrive" only counts as one."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental.mosaic.gpu import utils

    if isinstance(index, int):

        @plgpu.inline_mgpu()
        def constant(_: Any) -> None:
            utils.inline_ptx(f"bar.{operation} {index}, {threads};")

        constant()
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def variable(_: Any, where: Any) -> None:
        utils.inline_ptx(f"bar.{operation} $0, {threads};", where.registers[()])

    variable(index)


arrive = functools.partial(_barrier, "arrive")
sync = functools.partial(_barrier, "sync")
