"""cuDNN's fused attention over packed segments, through a private entry of JAX behind this one adapter.

JAX has no public way to hand cuDNN segment offsets. Everything that touches the private module is here, and ``why_not``
says so where its signature is not the one this was written for (jax 0.10 to 0.12).
"""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxvit.buffer import Buffer
from jaxvit.errors import LadderError
from jaxvit.layers.attention.segments import Metadata, misfit
from jaxvit.layers.hopper import capability

ENTRY = "jax._src.cudnn.fused_attention_stablehlo"
PLACES = ("query", "key", "value")
KEYWORDS = ("scale", "mask_type", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets")


@cache
def _entry() -> tuple[object | None, str | None]:
    """(module, None), or (None, why it cannot be used)."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        entry, _ = module.dot_product_attention, module.MaskType.PADDING
    except (ImportError, AttributeError) as error:
        return None, f"{ENTRY} of this jax is not as this was written for: {error}"
    if reason := misfit(entry, PLACES, KEYWORDS):
        return None, f"{ENTRY}.dot_product_attention of this jax: {reason}"
    return module, None


class Cudnn:
    """Lengths and offsets of the segments; rows in no segment are not written, and read as zero."""

    name = "cudnn"
    version = "1"

    def buffers(self, patches: int, segments: int) -> tuple[Buffer, ...]:
        slots, dtype = max(segments, 2), np.dtype(np.int32)  # with one slot cuDNN's call counts as not packed
        return (
            Buffer("lengths", (1, slots), dtype, "own_segment"),
            Buffer("offsets", (1, slots + 1), dtype, "own_segment"),
        )

    def metadata(self, lengths: np.ndarray, patches: int, segments: int) -> dict[str, np.ndarray]:
        slots, used = max(segments, 2), len(lengths)
        all_lengths = np.full((1, slots), -1, np.int32)
        offsets = np.full((1, slots + 1), -1, np.int32)
        all_lengths[0, :used] = lengths
        offsets[0, : used + 1] = np.concatenate([[0], np.cumsum(lengths)])
        return {"lengths": all_lengths, "offsets": offsets}

    def __call__(self, q: Array, k: Array, v: Array, metadata: Metadata, scale: float) -> Array:
        module, reason = _entry()
        if module is None:
            raise LadderError(f"attention 'cudnn' cannot run here: {reason}")
        lengths, offsets = metadata["lengths"], metadata["offsets"]
        out = module.dot_product_attention(  # pyright: ignore[reportAttributeAccessIssue]
            q[None], k[None], v[None], scale=scale, mask_type=module.MaskType.PADDING,  # pyright: ignore
            q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
        )[0]  # fmt: skip
        rows = jnp.arange(q.shape[0], dtype=jnp.int32)
        return jnp.where((rows < offsets.max())[:, None, None], out, 0)

    def copied(self, metadata: Metadata) -> Metadata:
        return {name: lax.max(value, -1) for name, value in metadata.items()}  # nothing is below -1, XLA knows not

    def why_not(self, platform: str, dtype: str) -> str | None:
        if platform not in ("cuda", "gpu"):
            return "needs an NVIDIA GPU"
        if dtype != "bfloat16":
            return f"cuDNN's fused attention takes bfloat16, not {dtype}"
        if capability(platform) < 9.0:
            return f"packed segments need compute capability 9.0, this GPU has {capability(platform)}"
        return _entry()[1]
