"""Launching a compiled program with less of Python in between: what private names of JAX are needed for it is here.

``jax.stages.Compiled`` walks over all arguments at each call: their tree, their shapes, their devices. With hundreds of
weights that takes longer than the launch itself. The runtime's own executable takes a flat list of arrays and checks
their number and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

Launch = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


def launcher(compiled: Any) -> Launch | None:
    """Flat arguments -> flat results, on the executable's one device; None where this JAX does not offer it.

    Args:
        compiled: ``jax.stages.Compiled``, made here or loaded.
    """
    try:
        inner, runtime = compiled._executable, compiled.runtime_executable()
        call = inner.unsafe_call
        special = call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks or call.mut
        kept, execute = tuple(sorted(inner._kept_var_idx)), runtime.execute_sharded
        if special or len(runtime.local_devices()) != 1:
            return None
    except (AttributeError, TypeError, NotImplementedError):
        return None

    def launch(arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        results = execute([arguments[index] for index in kept])
        return [shards[0] for shards in results.disassemble_into_single_device_arrays()]

    return launch


@contextmanager
def own_settings() -> Iterator[None]:
    """Settings of this package's own programs. Those of the process are neither used nor changed.

    Non-finite results are found by the program itself and reported by item, so JAX's own check must not stop a call.
    """
    with ExitStack() as stack:
        if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            stack.enter_context(jax.enable_x64(False))
        if jax.config.jax_debug_nans or jax.config.jax_debug_infs:  # pyright: ignore[reportAttributeAccessIssue]
            stack.enter_context(jax.debug_nans(False))
            stack.enter_context(jax.debug_infs(False))
        if jax.config.jax_numpy_rank_promotion != "allow":  # pyright: ignore[reportAttributeAccessIssue]
            stack.enter_context(jax.numpy_rank_promotion("allow"))
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            stack.enter_context(jax.disable_jit(False))
        yield
