"""Names of the checkpoint's tensors -> parameters of ``module.py``, from the hub's layout and from transformers' own.

The hub has q, k and v in one ``wqkv`` whose rows are ordered for a rotation of neighbours, (0, 1), (2, 3), ..;
transformers has them apart, rows of q and k ordered for the rotation of halves, (0, d/2), (1, d/2 + 1), .., which is
canonical here. What transformers re-saves "in the original format" is the hub's layout with two prefixes changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from jaxvit.weights.keys import Key, KeyTable, as_is, convolution, transpose

SPELLINGS = (
    {"vision_tower.": "hub.", "mm_projector.": "hub.projector."},
    {
        "vision_tower.": "hub.",
        "vision_tower.encoder.patch_embed.": "hub.patch_embed.",
        "mm_projector.": "hub.projector.",
        "model.mm_projector.pre_norm.": "hub.projector.pre_norm.",
    },
    {
        "model.vision_tower.": "own.",
        "model.mm_projector.": "own.projector.",
        "model.mm_projector.pre_norm.": "own.projector.pre_norm.",
    },
)

HUB = {
    r"hub\.patch_embed\.proj": "patch_embed",
    r"hub\.encoder\.blocks\.(\d+)\.norm0": r"blocks.\1.norm1",
    r"hub\.encoder\.blocks\.(\d+)\.norm1": r"blocks.\1.norm2",
    r"hub\.encoder\.blocks\.(\d+)\.wo": r"blocks.\1.attn.proj",
    r"hub\.encoder\.blocks\.(\d+)\.mlp\.fc0": r"blocks.\1.mlp.fc1",
    r"hub\.encoder\.blocks\.(\d+)\.mlp\.fc1": r"blocks.\1.mlp.fc2",
    r"hub\.encoder\.final_layernorm": "final_layernorm",
    r"hub\.projector\.pre_norm": "projector.pre_norm",
    r"hub\.projector\.proj\.0": "projector.in_proj",
    r"hub\.projector\.proj\.2": "projector.out_proj",
}
OWN = {
    r"own\.patch_embed\.proj": "patch_embed",
    r"own\.layers\.(\d+)\.norm([12])": r"blocks.\1.norm\2",
    r"own\.layers\.(\d+)\.attn\.proj": r"blocks.\1.attn.proj",
    r"own\.layers\.(\d+)\.mlp\.fc([12])": r"blocks.\1.mlp.fc\2",
    r"own\.final_layernorm": "final_layernorm",
    r"own\.projector\.pre_norm": "projector.pre_norm",
    r"own\.projector\.(in|out)_proj": r"projector.\1_proj",
}
"""Modules, each with a weight and a bias -> modules of ``module.py``."""


@lru_cache(maxsize=16)
def table(heads: int) -> KeyTable:
    """The keys of a tower with so many attention heads, on which the order of the rows of q and k depends."""
    keys = [
        Key(r"hub\.patch_embed\.pos_emb\.weight", "position_embeddings"),
        Key(r"own\.patch_embed\.pos_emb\.position_embeddings", "position_embeddings"),
    ]
    for source, target in (HUB | OWN).items():
        keys += _module(source, target)
    for part, name in enumerate("qkv"):
        keys += _module(rf"own\.layers\.(\d+)\.attn\.{name}_proj", r"blocks.\1.attn.qkv", part=(part, 3))
    keys += _module(r"hub\.encoder\.blocks\.(\d+)\.wqkv", r"blocks.\1.attn.qkv", partial(halves_of_fused, heads=heads))
    return KeyTable(SPELLINGS, tuple(keys))


def _module(
    source: str, target: str, rows: Callable[[np.ndarray], np.ndarray] = as_is, part: tuple[int, int] | None = None
) -> list[Key]:
    if "norm" in target:
        return [Key(rf"{source}\.weight", f"{target}.scale"), Key(rf"{source}\.bias", f"{target}.bias")]
    kernel = convolution if target == "patch_embed" else transpose
    return [
        Key(rf"{source}\.weight", f"{target}.kernel", lambda weight: kernel(rows(weight)), part),
        Key(rf"{source}\.bias", f"{target}.bias", rows, part),
    ]


def halves_of_fused(fused: np.ndarray, heads: int) -> np.ndarray:
    """[q; k; v] rows, pairs of neighbours -> rows of q and k as pairs of halves, v as it is.

    Args:
        fused: [3 * heads * dim] or [3 * heads * dim, in].
    """
    q, k, v = np.split(fused, 3)
    return np.concatenate([halves(q, heads), halves(k, heads), v])


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """In each head, the even rows and then the odd ones."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
