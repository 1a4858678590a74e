"""Results that nothing is written to: memory which an executable gives back in place."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxvit.layers.hopper import allowed


def untouched(after: Array, like: Sequence[jax.ShapeDtypeStruct | Array]) -> list[Array]:
    """Arrays of those shapes, once ``after`` is there: whatever is in their memory, zeros without the kernel."""
    if not allowed():
        zero = jnp.where(after.ravel()[0] == 0, 0, 0)
        return [jnp.full(each.shape, zero, each.dtype) for each in like]
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return plgpu.kernel(
        lambda *_: None,
        out_type=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in like],
        grid=(1,),
        grid_names=("one",),
        num_threads=1,
        thread_name="group",
        kernel_name="hold",
    )(after)
