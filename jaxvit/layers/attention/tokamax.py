"""tokamax's Hopper kernel with key ranges of rows (optional extra ``tokamax``).

The kernel that takes ranges is not exported, so the one adapter that touches it is here, and ``why_not`` says so where
it is not as this was written for (tokamax 0.0.17).
"""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxvit.layers.attention.segments import Metadata, Ranges, misfit
from jaxvit.layers.hopper import capability

KERNEL = "tokamax._src.ops.attention.pallas_mosaic_gpu_kernel_sm90"
CALLS = {
    "Config": ((), ("block_q", "block_kv", "num_stages", "persistent")),
    "flash_attention_kernel": (
        ("q", "k", "v", "bias", "mask", "k_start", "k_end"),
        (
            *("is_causal", "logits_soft_cap", "logits_scale", "out_dtype", "normalize_output"),
            *("return_residuals", "use_stable_softmax", "rescale_threshold", "config"),
        ),
    ),
}
"""What is called -> arguments by place, and by name."""


@cache
def _kernel() -> tuple[Any, str | None]:
    """(module, None), or (None, why it cannot be used)."""
    try:
        module = importlib.import_module(KERNEL)
    except Exception as error:  # of a jax that it was not written for, anything
        return None, f"the extra tokamax is not installed or fails to import ({error}): pip install 'jaxvit[tokamax]'"
    for name, (places, keywords) in CALLS.items():
        entry = getattr(module, name, None)
        reason = "it is not there" if entry is None else misfit(entry, places, keywords)
        if reason:
            return None, f"{KERNEL}.{name} of this tokamax: {reason}"
    return module, None


class Tokamax(Ranges):
    """Key ranges; padding attends within tiles of its own."""

    name = "tokamax"
    version = "1"

    def __call__(self, q: Array, k: Array, v: Array, metadata: Metadata, scale: float) -> Array:
        return _flash(q, k, v, metadata["starts"], metadata["ends"], scale)

    def why_not(self, platform: str, dtype: str) -> str | None:
        if platform not in ("cuda", "gpu"):
            return "needs an NVIDIA GPU"
        if dtype != "bfloat16":
            return f"the kernel takes bfloat16, not {dtype}"
        if not 9.0 <= capability(platform) < 10.0:
            return f"the kernel is for compute capability 9.0 (Hopper), this GPU has {capability(platform)}"
        return _kernel()[1]


@partial(jax.jit, static_argnames=("scale",))
def _flash(q: Array, k: Array, v: Array, starts: Array, ends: Array, scale: float) -> Array:
    """A jit of its own, so that the kernel is lowered once however many layers call it.

    Block sizes were measured on an H200: 64 x 128, two stages, persistent; few rows run faster in smaller blocks.
    """
    module, _ = _kernel()
    large = q.shape[0] > 512
    config = module.Config(block_q=64, block_kv=128 if large else 64, num_stages=2, persistent=large)
    out, *_ = module.flash_attention_kernel(
        q, k, v, None, None, starts[None], ends[None],
        is_causal=False, logits_soft_cap=None, logits_scale=scale, out_dtype=jnp.dtype(jnp.bfloat16),
        normalize_output=True, return_residuals=False, use_stable_softmax=True, rescale_threshold=1.0, config=config,
    )  # fmt: skip
    return out
