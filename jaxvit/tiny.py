"""Checkpoints with random weights, in the hub's layout: tiny ones of every family, and real shapes from a manifest."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxvit.errors import OptionError
from jaxvit.paths import data
from jaxvit.weights import manifests
from jaxvit.weights.files import INDEX
from jaxvit.weights.writing import Shape, digest, draw, write_checkpoint, write_json

__all__ = ["TINY", "Tiny", "digest", "draw", "random_full_size", "tiny_checkpoint", "tiny_folder", "write_checkpoint"]


@dataclass(frozen=True)
class Tiny:
    """How a real checkpoint is scaled down.

    Attributes:
        manifest: of the real one.
        layers: how many are left.
        sizes: real extent -> tiny extent in the tensors' shapes.
        config: what changes in config.json.
        text: tensors of the language model that are written beside, since a loader has to step over them.
        shard: name -> its shard, None for a single file.
        shard_name: as in :func:`write_checkpoint`.
    """

    manifest: str
    layers: int
    sizes: Mapping[int, int]
    config: Mapping[str, Any]
    text: Mapping[str, Shape]
    shard: Callable[[str], int] | None = None
    shard_name: str = "model-{:05d}-of-{:05d}.safetensors"


# Position tables are 9 x 9 and 11 x 11: odd, so that no grid (all even) equals its table and skips the interpolation.
_LFM2_VISION = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 108, "num_patches": 121}
_LFM2_TEXT = {
    "model_type": "lfm2",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "vocab_size": 512,
}
_LFM2_WEIGHTS = {
    "model.language_model.embed_tokens.weight": (32, 96),
    "model.language_model.layers.0.conv.in_proj.weight": (288, 96),
    "model.language_model.embedding_norm.weight": (96,),
}
TINY: Mapping[str, Tiny] = {
    "qwen2_5_vl": Tiny(
        manifest="Qwen--Qwen2.5-VL-3B-Instruct",
        layers=4,
        sizes={1280: 64, 3840: 192, 3420: 108, 5120: 256, 2048: 96},
        config={
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "vision_config": {
                "hidden_size": 64,
                "num_heads": 4,
                "intermediate_size": 108,
                "out_hidden_size": 96,
                "fullatt_block_indexes": [1, 3],
            },
        },
        text={
            "lm_head.weight": (32, 96),
            "model.embed_tokens.weight": (32, 96),
            "model.layers.0.self_attn.q_proj.weight": (96, 96),
            "model.norm.weight": (96,),
        },
        shard=lambda name: 2 if name.startswith(("visual.blocks.3.", "visual.merger.", "lm_head")) else 1,
    ),
    "kimi_k25": Tiny(
        manifest="moonshotai--Kimi-K2.5",
        layers=3,
        sizes={1152: 64, 3456: 192, 4304: 108, 4608: 256, 7168: 96, 64: 9},
        config={
            "text_config": {"model_type": "kimi_k2", "hidden_size": 96},
            "vision_config": {
                "vt_hidden_size": 64,
                "mm_hidden_size": 64,
                "vt_num_attention_heads": 4,
                "vt_intermediate_size": 108,
                "init_pos_emb_height": 9,
                "init_pos_emb_width": 9,
                "text_hidden_size": 96,
            },
        },
        text={
            "language_model.model.embed_tokens.weight": (32, 96),
            "language_model.model.layers.0.mlp.gate_proj.weight_packed": (16, 12),
            "language_model.model.layers.0.mlp.gate_proj.weight_scale": (16, 3),
        },
        shard=lambda name: 3 if name.startswith("vision_tower.") else 2 if name.startswith("mm_projector.") else 1,
        shard_name="model-{:05d}-of-{:06d}.safetensors",
    ),
    "lfm2_vl": Tiny(
        manifest="LiquidAI--LFM2-VL-3B",
        layers=3,
        sizes={1152: 64, 4304: 108, 4608: 256, 2560: 80, 2048: 96, 256: 121},
        config={"projector_hidden_size": 80, "vision_config": _LFM2_VISION, "text_config": _LFM2_TEXT},
        text=_LFM2_WEIGHTS,
    ),
    "lfm2_5_vl": Tiny(
        manifest="LiquidAI--LFM2.5-VL-1.6B",
        layers=2,
        sizes={1152: 64, 4304: 108, 4608: 256, 2048: 96, 256: 121},
        config={"projector_hidden_size": 96, "vision_config": _LFM2_VISION, "text_config": _LFM2_TEXT},
        text=_LFM2_WEIGHTS,
    ),
}
_DEPTH = {"qwen2_5_vl": "depth", "kimi_k25": "vt_num_hidden_layers", "lfm2_vl": "num_hidden_layers"}
_LAYER = re.compile(r"\.(?:blocks|layers)\.(\d+)\.")


def tiny_folder() -> Path:
    """Where the tiny checkpoints go by default: ``weights/tiny``, or the user's cache when that cannot be written."""
    folder = data("weights") / "tiny"
    if os.access(folder if folder.is_dir() else folder.parent, os.W_OK):
        return folder
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxvit" / "tiny"


def tiny_checkpoint(name: str, folder: Path | None = None, **options: Any) -> Path:
    """Writes the tiny checkpoint of a family (a name of :data:`TINY`), a few hundred kB, and returns its folder.

    Args:
        folder: of the checkpoint itself; None for a folder of that name in :func:`tiny_folder`.
        options: for :func:`write_checkpoint`.
    """
    tiny = TINY[name]
    files, tensors = cut(tiny.manifest, tiny.layers)
    config = files["config.json"]
    for key, value in tiny.config.items():
        config[key] = {**config.get(key, {}), **value} if key == "vision_config" else value
    small = {tensor: tuple(tiny.sizes.get(extent, extent) for extent in shape) for tensor, shape in tensors.items()}
    options = {"shards": tiny.shard or 1, "shard_name": tiny.shard_name, **options}
    return write_checkpoint(folder or tiny_folder() / name, files, {**small, **tiny.text}, **options)


def random_full_size(name: str, folder: Path, layers: int | None = None, **options: Any) -> Path:
    """Writes random weights in the shapes of a real checkpoint.

    Args:
        name: of a manifest, or the repository's id.
        layers: keep only the first ones; None for all.
        options: for :func:`write_checkpoint`; by default two shards. Kimi's are the two of 64 that hold the vision
            part, beside an index that speaks of others, which are absent.
    """
    files, tensors = cut(name, layers)
    if files["config.json"]["model_type"] != "kimi_k25":
        return write_checkpoint(folder, files, tensors, **{"shards": 2, **options})
    kimi = {"shards": lambda tensor: 63 if tensor.startswith("mm_projector.") else 64, "total": 64}
    folder = write_checkpoint(folder, files, tensors, **{**kimi, "shard_name": TINY["kimi_k25"].shard_name, **options})
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["language_model.model.embed_tokens.weight"] = TINY["kimi_k25"].shard_name.format(1, 64)
    write_json(folder / INDEX, index)
    return folder


def cut(name: str, layers: int | None) -> tuple[dict[str, dict[str, Any]], dict[str, Shape]]:
    """A manifest's config files and shapes with only the first layers left.

    Raises:
        OptionError: the tower has not so many layers.
    """
    manifest = manifests.load(name)
    files = copy.deepcopy(manifest.files)
    tensors = {tensor: shape for tensor, (shape, _) in manifest.tensors.items()}
    if layers is not None:
        vision = files["config.json"]["vision_config"]
        depth = _DEPTH[files["config.json"]["model_type"].replace("-", "_")]
        if not 1 <= layers <= vision[depth]:
            raise OptionError(
                f"layers is {layers}, and the tower of {manifest.repo_id} has {vision[depth]}: "
                f"give 1 to {vision[depth]}, or leave it out for all"
            )
        vision[depth] = layers
        if "fullatt_block_indexes" in vision:
            vision["fullatt_block_indexes"] = [block for block in vision["fullatt_block_indexes"] if block < layers]
        tensors = {
            tensor: shape
            for tensor, shape in tensors.items()
            if not (match := _LAYER.search(tensor)) or int(match[1]) < layers
        }
    return files, tensors
