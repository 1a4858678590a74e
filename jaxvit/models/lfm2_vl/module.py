"""The LFM2-VL vision tower and projector, named after the checkpoint: embeddings, blocks, norm, projector.

Source: transformers' ``Siglip2VisionModel`` and ``Lfm2VlMultiModalProjector``. The four patches of a token are
neighbouring rows (see ``layout.py``), so that the projector's pixel unshuffle is a reshape.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxvit.layers.attention import Attend
from jaxvit.layers.linear import ACTIVATIONS, Linear
from jaxvit.layers.norm import LayerNorm
from jaxvit.layers.position import weigh_by_axis
from jaxvit.models.family import Probe, no_probe
from jaxvit.models.lfm2_vl.config import Config


class Attention(nnx.Module):
    def __init__(self, config: Config):
        self.heads = config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = Linear(config.hidden_size, config.hidden_size)

    def __call__(self, x: Float[Array, "patches hidden"], attend: Attend) -> Float[Array, "patches hidden"]:
        out = attend(self.qkv(x).reshape(x.shape[0], 3, self.heads, -1), None)
        return self.out_proj(out.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    def __init__(self, config: Config):
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "patches hidden"]) -> Float[Array, "patches hidden"]:
        return self.fc2(self.activation(self.fc1(x)))


class Block(nnx.Module):
    def __init__(self, config: Config):
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def __call__(self, x: Float[Array, "patches hidden"], attend: Attend) -> Float[Array, "patches hidden"]:
        x = x + self.attn(self.layer_norm1(x, contain=True), attend)
        return x + self.mlp(self.layer_norm2(x))


class Projector(nnx.Module):
    def __init__(self, config: Config):
        self.merged = config.merged
        self.activation = ACTIVATIONS[config.projector_hidden_act]
        self.layer_norm = LayerNorm(config.merged, config.projector_eps) if config.projector_use_layernorm else None
        self.linear_1 = Linear(config.merged, config.projector_hidden_size, bias=config.projector_bias)
        self.linear_2 = Linear(config.projector_hidden_size, config.text_hidden_size, bias=config.projector_bias)

    def __call__(self, x: Float[Array, "patches hidden"]) -> Float[Array, "tokens width"]:
        merged = x.reshape(-1, self.merged)
        if self.layer_norm is not None:
            merged = self.layer_norm(merged)
        return self.linear_2(self.activation(self.linear_1(merged)))


class VisionTower(nnx.Module):
    def __init__(self, config: Config):
        self.patch_embedding = Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nnx.Param(jnp.zeros((config.num_patches, config.hidden_size), jnp.float32))
        self.blocks = nnx.List([Block(config) for _ in range(config.layers)])
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.projector = Projector(config)

    def __call__(
        self, arrays: Mapping[str, Array], attend: Mapping[str, Attend], probe: Probe = no_probe
    ) -> Float[Array, "tokens width"]:
        """The arrays of ``layout.buffers``, pixels normalised."""
        x = self.patch_embedding(arrays["pixels"])
        positions = weigh_by_axis(arrays["position_y"], arrays["position_x"], self.position_embedding[...])
        x = probe("patch_embed", x + positions)
        for index, block in enumerate(self.blocks):
            x = probe(f"blocks.{index}", block(x, attend["full"]))
        x = probe("final_norm", self.post_layernorm(x))
        return probe("projector", self.projector(x))
