"""The Qwen2.5-VL vision tower, named after the checkpoint: patch embedding, blocks, merger.

Source: transformers' ``Qwen2_5_VisionTransformerPretrainedModel``. Patches come in window order (see ``layout.py``), so
that a window is a run of rows and a token's patches are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxvit.layers.attention import Attend
from jaxvit.layers.linear import Linear, gelu_exact
from jaxvit.layers.norm import RMSNorm
from jaxvit.layers.rope import Rotation, angles_by_axis, rotation
from jaxvit.layers.swiglu import swiglu
from jaxvit.models.family import Probe, no_probe
from jaxvit.models.qwen2_5_vl.config import Config


class Attention(nnx.Module):
    def __init__(self, config: Config):
        self.heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def __call__(
        self, x: Float[Array, "patches hidden"], turn: Rotation, attend: Attend
    ) -> Float[Array, "patches hidden"]:
        out = attend(self.qkv(x).reshape(x.shape[0], 3, self.heads, -1), turn)
        return self.proj(out.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    def __init__(self, config: Config):
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "patches hidden"]) -> Float[Array, "patches hidden"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class Block(nnx.Module):
    def __init__(self, config: Config):
        self.norm1 = RMSNorm(config.hidden_size, config.eps)
        self.norm2 = RMSNorm(config.hidden_size, config.eps)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def __call__(
        self, x: Float[Array, "patches hidden"], turn: Rotation, attend: Attend
    ) -> Float[Array, "patches hidden"]:
        x = x + self.attn(self.norm1(x, contain=True), turn, attend)
        return x + self.mlp(self.norm2(x))


class Merger(nnx.Module):
    def __init__(self, config: Config):
        merged = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, config.eps)
        self.fc0 = Linear(merged, merged)
        self.fc2 = Linear(merged, config.out_hidden_size)

    def __call__(self, x: Float[Array, "patches hidden"]) -> Float[Array, "tokens width"]:
        merged = self.ln_q(x).reshape(-1, self.fc0.kernel.shape[0])
        return self.fc2(gelu_exact(self.fc0(merged)))


class VisionTower(nnx.Module):
    def __init__(self, config: Config):
        self.config = config
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = Linear(values, config.hidden_size, bias=False)
        self.blocks = nnx.List([Block(config) for _ in range(config.depth)])
        self.merger = Merger(config)

    def __call__(
        self, arrays: Mapping[str, Array], attend: Mapping[str, Attend], probe: Probe = no_probe
    ) -> Float[Array, "tokens width"]:
        """The arrays of ``layout.buffers``, pixels normalised. A still's second frame is its first again."""
        first = arrays["pixels"]
        second = jnp.where(arrays["still"][:, None] != 0, first, arrays["pixels_second"])
        x = probe("patch_embed", self.patch_embed(jnp.concatenate([first, second], axis=-1)))
        turn = rotation(angles_by_axis(arrays["coordinates"], self.config.head_dim // 4, self.config.rope_theta))
        for index, block in enumerate(self.blocks):
            reach = "full" if index in self.config.fullatt_block_indexes else "window"
            x = probe(f"blocks.{index}", block(x, turn, attend[reach]))
        return probe("merger", self.merger(x))[arrays["reverse"]]
