"""What a family's tower is made of, in words that hold for all: for the packed peer and for counting its work.

Paths are those of the canonical parameters ("blocks.0.attn.qkv"). What a tower lacks has no parameters: a norm without
a bias is an RMSNorm, an MLP without a gate is not gated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxvit.layers.position import gather_by_axis, weigh_by_axis
from jaxvit.layers.rope import angles_by_axis, angles_interleaved
from jaxvit.models.family import Bucket, Demand, Family, Piece
from jaxvit.models.kimi_k25.module import time_table

Arrays = Mapping[str, np.ndarray]
Positions = Callable[[Arrays, Arrays], np.ndarray]


@dataclass(frozen=True)
class Tower:
    """A vision tower with its projector.

    Attributes:
        heads: attention heads.
        reaches: for each block, the segment set that it attends over.
        embed: the patch embedding.
        norm1, norm2, qkv, out, up, down, gate: inside ``blocks.{i}``.
        activation: of the MLP, by its Hugging Face name.
        eps: of the blocks' norms and the final one.
        final_norm: behind the blocks, if there is one.
        merge_norm: of the projector; over a token's joined patches where it is as wide, else over each patch.
        merge_eps, merge_activation, first, second: of the projector.
        positions: (parameters, layout arrays) -> what is added to the embedded patches: float32 [patches, hidden].
        angles: layout arrays -> angles of the rotation: float32 [patches, head_dim / 2].
    """

    heads: int
    reaches: tuple[str, ...]
    embed: str
    norm1: str
    norm2: str
    qkv: str
    out: str
    up: str
    down: str
    activation: str
    eps: float
    merge_norm: str
    merge_eps: float
    first: str
    second: str
    merge_activation: str = "gelu"
    gate: str | None = None
    final_norm: str | None = None
    positions: Positions | None = None
    angles: Callable[[Arrays], np.ndarray] | None = None


def tower_of(family: Family) -> Tower:
    """The tower of a family with its configuration."""
    return _TOWERS[family.name](family.config)


def _qwen2_5_vl(config: Any) -> Tower:
    return Tower(
        heads=config.num_heads,
        reaches=tuple("full" if i in config.fullatt_block_indexes else "window" for i in range(config.depth)),
        embed="patch_embed",
        norm1="norm1", norm2="norm2", qkv="attn.qkv", out="attn.proj",
        up="mlp.up_proj", gate="mlp.gate_proj", down="mlp.down_proj",
        activation="silu",
        eps=config.eps,
        merge_norm="merger.ln_q", merge_eps=config.eps, first="merger.fc0", second="merger.fc2",
        angles=lambda arrays: np.asarray(
            angles_by_axis(jnp.asarray(arrays["coordinates"]), config.head_dim // 4, config.rope_theta)
        ),
    )  # fmt: skip


def _kimi_k25(config: Any) -> Tower:
    def positions(parameters: Arrays, arrays: Arrays) -> np.ndarray:
        index, weight = jnp.asarray(arrays["tap_index"]), jnp.asarray(arrays["tap_weight"])
        space = gather_by_axis(index, weight, jnp.asarray(parameters["position_embeddings"]))
        return np.asarray(space) + np.asarray(time_table(config.pos_emb_time, config.hidden_size))[arrays["frame"]]

    return Tower(
        heads=config.num_attention_heads,
        reaches=("full",) * config.num_hidden_layers,
        embed="patch_embed",
        norm1="norm1", norm2="norm2", qkv="attn.qkv", out="attn.proj", up="mlp.fc1", down="mlp.fc2",
        activation=config.hidden_act,
        eps=config.eps,
        final_norm="final_layernorm",
        merge_norm="projector.pre_norm", merge_eps=config.projector_ln_eps,
        first="projector.in_proj", second="projector.out_proj", merge_activation=config.projector_hidden_act,
        positions=positions,
        angles=lambda arrays: np.asarray(
            angles_interleaved(jnp.asarray(arrays["coordinates"]), config.head_dim // 4, config.rope_theta)
        ),
    )  # fmt: skip


def _lfm2_vl(config: Any) -> Tower:
    def positions(parameters: Arrays, arrays: Arrays) -> np.ndarray:
        y, x = jnp.asarray(arrays["position_y"]), jnp.asarray(arrays["position_x"])
        return np.asarray(weigh_by_axis(y, x, jnp.asarray(parameters["position_embedding"]))).astype(np.float32)

    return Tower(
        heads=config.num_attention_heads,
        reaches=("full",) * config.layers,
        embed="patch_embedding",
        norm1="layer_norm1", norm2="layer_norm2", qkv="attn.qkv", out="attn.out_proj", up="mlp.fc1", down="mlp.fc2",
        activation=config.hidden_act,
        eps=config.layer_norm_eps,
        final_norm="post_layernorm",
        merge_norm="projector.layer_norm", merge_eps=config.projector_eps,
        first="projector.linear_1", second="projector.linear_2", merge_activation=config.projector_hidden_act,
        positions=positions,
    )  # fmt: skip


_TOWERS: Mapping[str, Callable[[Any], Tower]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "kimi_k25": _kimi_k25,
    "lfm2_vl": _lfm2_vl,
}


def flops(
    tower: Tower, shapes: Mapping[str, tuple[int, ...]], lengths: Mapping[str, np.ndarray], pieces: Sequence[Piece]
) -> float:
    """Operations of the matrix products of a call, at the checkpoint's own widths: the work that no encoder avoids.

    Args:
        shapes: of the canonical parameters.
        lengths: patches of each attention segment, by segment set.
    """
    patches, tokens = sum(piece.rows for piece in pieces), sum(piece.tokens for piece in pieces)
    projector = (f"{tower.first}.kernel", f"{tower.second}.kernel")
    products = sum(
        2.0 * (tokens if name in projector else patches) * shape[0] * shape[1]
        for name, shape in shapes.items()
        if name.endswith(".kernel")
    )
    hidden = shapes[f"{tower.embed}.kernel"][1]
    squares = {reach: float((values.astype(np.float64) ** 2).sum()) for reach, values in lengths.items()}
    return products + sum(4.0 * hidden * squares[reach] for reach in tower.reaches)


def bucket_of(pieces: Sequence[Piece]) -> Bucket:
    """The bucket that these pieces fill to the last row."""
    total = Demand(*(sum(axis) for axis in zip(*(piece.demand for piece in pieces), strict=True)))
    return Bucket(total.tokens, total.patches, total.segments, total.windows)
