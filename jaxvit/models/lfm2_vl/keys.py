"""Names of the checkpoint's tensors -> parameters of ``module.py``."""

from __future__ import annotations

from functools import lru_cache

from jaxvit.models.lfm2_vl.config import Config
from jaxvit.weights.keys import Key, KeyTable, transpose

SPELLINGS = tuple(
    {f"{root}vision_tower.{inner}": "vision.", f"{root}multi_modal_projector.": "projector."}
    for root in ("model.", "")
    for inner in ("vision_model.", "")
)
"""The hub's names and those of transformers 5, which lack ``vision_model``; both with or without ``model``."""


@lru_cache(maxsize=64)
def table(config: Config) -> KeyTable:
    """The keys of one configuration: tensors of layers that do not run are known and unused."""
    layer, unused = r"(\d+)", []
    if config.layers < config.num_hidden_layers:
        layer = f"({'|'.join(str(index) for index in range(config.layers))})"
        behind = "|".join(str(index) for index in range(config.layers, config.num_hidden_layers))
        unused = [Key(rf"vision\.encoder\.layers\.({behind})\..+", None)]
    block = rf"vision\.encoder\.layers\.{layer}\."
    attention = [
        key
        for part, name in enumerate("qkv")
        for key in (
            Key(rf"{block}self_attn\.{name}_proj\.weight", r"blocks.\1.attn.qkv.kernel", transpose, part=(part, 3)),
            Key(rf"{block}self_attn\.{name}_proj\.bias", r"blocks.\1.attn.qkv.bias", part=(part, 3)),
        )
    ]
    return KeyTable(
        spellings=SPELLINGS,
        keys=(
            Key(r"vision\.embeddings\.patch_embedding\.weight", "patch_embedding.kernel", transpose),
            Key(r"vision\.embeddings\.patch_embedding\.bias", "patch_embedding.bias"),
            Key(r"vision\.embeddings\.position_embedding\.weight", "position_embedding"),
            Key(rf"{block}layer_norm([12])\.weight", r"blocks.\1.layer_norm\2.scale"),
            Key(rf"{block}layer_norm([12])\.bias", r"blocks.\1.layer_norm\2.bias"),
            *attention,
            Key(rf"{block}self_attn\.out_proj\.weight", r"blocks.\1.attn.out_proj.kernel", transpose),
            Key(rf"{block}self_attn\.out_proj\.bias", r"blocks.\1.attn.out_proj.bias"),
            Key(rf"{block}mlp\.fc([12])\.weight", r"blocks.\1.mlp.fc\2.kernel", transpose),
            Key(rf"{block}mlp\.fc([12])\.bias", r"blocks.\1.mlp.fc\2.bias"),
            *unused,
            Key(r"vision\.post_layernorm\.weight", "post_layernorm.scale"),
            Key(r"vision\.post_layernorm\.bias", "post_layernorm.bias"),
            # The pooling head stands beside the projector, not before it.
            Key(r"vision\.head\..+", None),
            Key(r"projector\.layer_norm\.weight", "projector.layer_norm.scale"),
            Key(r"projector\.layer_norm\.bias", "projector.layer_norm.bias"),
            Key(r"projector\.linear_([12])\.weight", r"projector.linear_\1.kernel", transpose),
            Key(r"projector\.linear_([12])\.bias", r"projector.linear_\1.bias"),
        ),
    )
