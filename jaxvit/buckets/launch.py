"""Launching a compiled program with less of Python in between: what private names of JAX are needed for it is here.

``jax.stages.Compiled`` walks over all arguments at each call: their tree, their shapes, their devices. With hundreds of
weights that takes longer than the launch itself. The runtime's own executable takes a flat list of arrays and checks
their number and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
