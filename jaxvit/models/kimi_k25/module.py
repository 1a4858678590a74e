"""The Kimi-K2.5 vision tower (MoonViT3d) and projector, named after transformers' own checkpoints.

Source: transformers' ``Kimi_K25VisionModel`` and ``Kimi_K25MultimodalProjection``. A chunk of frames is one attention
segment; the four patches of a token are neighbouring rows (see ``layout.py``), so that merging is a reshape.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jaxvit.layers.attention import Attend
from jaxvit.layers.linear import ACTIVATIONS, Linear
from jaxvit.layers.norm import LayerNorm
from jaxvit.layers.position import gather_by_axis
from jaxvit.layers.qkv import project
from jaxvit.layers.rope import Rotation, angles_interleaved, rotation
from jaxvit.models.family import Probe, no_probe
from jaxvit.models.kimi_k25.config import Config


class Attention(nnx.Module):
    def __init__(self, config: Config):
        self.heads = config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def __call__(
        self, x: Float[Array, "patches hidden"], turn: Rotation, attend: Attend
    ) -> Float[Array, "patches hidden"]:
        out = attend(*project(x, self.qkv, self.heads, turn))
        return self.proj(out.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    def __init__(self, config: Config):
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: Float[Array, "patches hidden"]) -> Float[Array, "patches hidden"]:
        return self.fc2(self.activation(self.fc1(x)))


class Block(nnx.Module):
    def __init__(self, config: Config):
        self.norm1 = LayerNorm(config.hidden_size, config.eps)
        self.norm2 = LayerNorm(config.hidden_size, config.eps)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def __call__(
        self, x: Float[Array, "patches hidden"], turn: Rotation, attend: Attend
    ) -> Float[Array, "patches hidden"]:
        x = x + self.attn(self.norm1(x, contain=True), turn, attend)
        return x + self.mlp(self.norm2(x))


class Projector(nnx.Module):
    def __init__(self, config: Config):
        merged = config.hidden_size * config.cell
        self.activation = ACTIVATIONS[config.projector_hidden_act]
        self.pre_norm = LayerNorm(config.hidden_size, config.projector_ln_eps)
        self.in_proj = Linear(merged, merged)
        self.out_proj = Linear(merged, config.text_hidden_size)

    def __call__(self, x: Float[Array, "tokens cell hidden"]) -> Float[Array, "tokens width"]:
        merged = self.pre_norm(x.reshape(-1, x.shape[-1])).reshape(x.shape[0], -1)
        return self.out_proj(self.activation(self.in_proj(merged)))


class VisionTower(nnx.Module):
    def __init__(self, config: Config):
        self.config = config
        table = (config.pos_emb_height, config.pos_emb_width, config.hidden_size)
        self.patch_embed = Linear(config.patch_values, config.hidden_size)
        self.position_embeddings = nnx.Param(jnp.zeros(table, jnp.float32))
        self.blocks = nnx.List([Block(config) for _ in range(config.num_hidden_layers)])
        self.final_layernorm = LayerNorm(config.hidden_size, config.eps)
        self.projector = Projector(config)

    def __call__(
        self, arrays: Mapping[str, Array], attend: Mapping[str, Attend], probe: Probe = no_probe
    ) -> Float[Array, "tokens width"]:
        """The arrays of ``layout.buffers``, pixels normalised. The probe's "patch_embed" has the positions in it."""
        config = self.config
        pixels = arrays["pixels"]
        wider = self.patch_embed.kernel.shape[0] - pixels.shape[1]  # XLA would pad both at each call
        x = self.patch_embed(jnp.pad(pixels, ((0, 0), (0, wider))))
        positions = gather_by_axis(arrays["tap_index"], arrays["tap_weight"], self.position_embeddings[...])
        positions += time_table(config.pos_emb_time, config.hidden_size)[arrays["frame"]]
        x = probe("patch_embed", x + positions.astype(x.dtype))
        turn = rotation(angles_interleaved(arrays["coordinates"], config.head_dim // 4, config.rope_theta))
        for index, block in enumerate(self.blocks):
            x = probe(f"blocks.{index}", block(x, turn, attend["full"]))
        x = probe("final_norm", self.final_layernorm(x))
        cells = x.reshape(-1, config.cell, config.hidden_size)
        pooled = mean_over_frames(cells, arrays["mean_index"], arrays["mean_weight"])
        return probe("projector", self.projector(pooled.astype(x.dtype)))


def time_table(frames: int, hidden: int) -> Float32[Array, "rows hidden"]:
    """Row 0 is zero, for pieces of one frame; row f + 1 is [sin(f w_i).., cos(f w_i)..], w_i = 10000^(-2i / hidden)."""
    angles = np.arange(frames)[:, None] * 10000.0 ** (-np.arange(0, hidden, 2) / hidden)
    rows = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return jnp.asarray(np.concatenate([np.zeros((1, hidden)), rows]), jnp.float32)


def mean_over_frames(
    cells: Float[Array, "cells cell hidden"],
    index: Int[Array, "tokens frames"],
    weight: Float32[Array, "tokens frames"],
) -> Float32[Array, "tokens cell hidden"]:
    """For each token the weighted sum of its cells, one a frame; a slot of weight 0 names a cell of the same piece."""
    read = (cells.at[index[:, frame]].get(mode="clip").astype(jnp.float32) for frame in range(index.shape[1]))
    return reduce(add, (weight[:, frame, None, None] * cell for frame, cell in enumerate(read)))
