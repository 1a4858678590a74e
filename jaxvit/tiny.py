"""Checkpoints with random weights, in the hub's layout: tiny ones of every family, and real shapes from a manifest.

Every element is a hash of its tensor's name and its index, in integer arithmetic up to one exact product, so that a
checkpoint has the same bytes on every machine. :func:`digest` says whether it has.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxvit.paths import data
from jaxvit.weights import manifests
from jaxvit.weights.files import INDEX, SINGLE, read_header

Shape = tuple[int, ...]
STD = 0.02
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "I32": np.int32}
CHUNK = 2**20


def draw(name: str, shape: Shape, *, seed: int = 0, outliers: bool = False) -> np.ndarray:
    """A whole tensor, bfloat16: N(0, 0.02), around 1 for the weight of a norm (one-dimensional ``*.weight``).

    Args:
        outliers: 50 times as large in two channels of each norm's weight.
    """
    parts = list(_draw(name, shape, seed, outliers))
    return np.concatenate(parts).reshape(shape) if parts else np.empty(shape, ml_dtypes.bfloat16)


def write_checkpoint(
    folder: Path,
    config_files: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, Shape],
    *,
    seed: int = 0,
    shards: int | Callable[[str], int] = 1,
    total: int | None = None,
    shard_name: str = "model-{:05d}-of-{:05d}.safetensors",
    dtype: str = "BF16",
    outliers: bool = False,
) -> Path:
    """Writes a checkpoint with random weights.

    Args:
        folder: made if needed; files of the same names are replaced.
        config_files: file name -> content.
        tensors: name -> shape; names that end in ``_packed`` become int32, as in a quantised language model.
        shards: how many of about equal size, in the order of the names; 1 means ``model.safetensors`` without an
            index. Or a function that gives each name its shard, counted from 1.
        total: shards that the files' names speak of, when only some of them are written.
        shard_name: format of a shard's name, given its number and the total.
        dtype: of the file, "BF16", "F16" or "F32"; the values are those of bfloat16 in each.
        outliers: see :func:`draw`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in config_files.items():
        _write_json(folder / name, content)
    place = _even(tensors, shards) if isinstance(shards, int) else shards
    groups: dict[int, dict[str, Shape]] = {}
    for name in sorted(tensors):
        groups.setdefault(place(name), {})[name] = tuple(tensors[name])
    files = {number: shard_name.format(number, total or len(groups)) for number in groups}
    if shards == 1:
        files = dict.fromkeys(groups, SINGLE)
    else:
        size = sum(prod(shape) * _itemsize(name, dtype) for name, shape in tensors.items())
        weight_map = {name: files[number] for number, group in groups.items() for name in group}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        _write_json(folder / INDEX, index)
    for number, group in groups.items():
        _write(folder / files[number], group, seed, dtype, outliers)
    return folder


def digest(folder: Path) -> str:
    """SHA-256 over every tensor of a folder's safetensors files, in the order of the names, whatever the sharding."""
    tensors = {
        name: stored for path in Path(folder).glob("*.safetensors") for name, stored in read_header(path).items()
    }
    result = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        result.update(f"{name} {stored.dtype} {list(stored.shape)}\n".encode())
        with stored.file.open("rb") as file:
            file.seek(stored.start)
            for start in range(0, stored.size, CHUNK):
                result.update(file.read(min(CHUNK, stored.size - start)))
    return result.hexdigest()


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
    files, tensors = _cut(tiny.manifest, tiny.layers)
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
    files, tensors = _cut(name, layers)
    if files["config.json"]["model_type"] != "kimi_k25":
        return write_checkpoint(folder, files, tensors, **{"shards": 2, **options})
    kimi = {"shards": lambda tensor: 63 if tensor.startswith("mm_projector.") else 64, "total": 64}
    folder = write_checkpoint(folder, files, tensors, **{**kimi, "shard_name": TINY["kimi_k25"].shard_name, **options})
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["language_model.model.embed_tokens.weight"] = TINY["kimi_k25"].shard_name.format(1, 64)
    _write_json(folder / INDEX, index)
    return folder


def _cut(name: str, layers: int | None) -> tuple[dict[str, dict[str, Any]], dict[str, Shape]]:
    """A manifest's config files and shapes with only the first layers left."""
    manifest = manifests.load(name)
    files = copy.deepcopy(manifest.files)
    tensors = {tensor: shape for tensor, (shape, _) in manifest.tensors.items()}
    if layers is not None:
        vision = files["config.json"]["vision_config"]
        vision[_DEPTH[files["config.json"]["model_type"].replace("-", "_")]] = layers
        if "fullatt_block_indexes" in vision:
            vision["fullatt_block_indexes"] = [block for block in vision["fullatt_block_indexes"] if block < layers]
        tensors = {
            tensor: shape
            for tensor, shape in tensors.items()
            if not (match := _LAYER.search(tensor)) or int(match[1]) < layers
        }
    return files, tensors


def _draw(name: str, shape: Shape, seed: int, outliers: bool) -> Iterator[np.ndarray]:
    """A tensor's elements, flat, a chunk at a time."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    norm = len(shape) == 1 and name.endswith(".weight")
    size = prod(shape)
    for start in range(0, size, CHUNK):
        counter = np.arange(start + 1, min(start + CHUNK, size) + 1, dtype=np.uint64)
        bits = _splitmix64(counter, key).view(np.uint16).reshape(-1, 4)
        total = bits[:, 0].astype(np.int32) + bits[:, 1] + bits[:, 2] + bits[:, 3]
        # four uniform numbers of 16 bits: mean 4 x 65535 / 2, variance 4 x (65536^2 - 1) / 12
        values = (total - 131070) * (STD / 37837.22)
        if norm:
            values += 1.0
        if norm and outliers:
            values[[5 * size // 16 - start, 11 * size // 16 - start]] *= 50.0
        yield values.astype(np.float32).astype(ml_dtypes.bfloat16)


def _splitmix64(counter: np.ndarray, key: int) -> np.ndarray:
    """The output of the SplitMix64 generator with state ``key`` after ``counter`` steps, uint64."""
    state = counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _itemsize(name: str, dtype: str) -> int:
    return 4 if name.endswith("_packed") else np.dtype(DTYPES[dtype]).itemsize


def _even(tensors: Mapping[str, Shape], shards: int) -> Callable[[str], int]:
    """Cuts the names, in order, into shards of about equal size."""
    whole, before, places = sum(map(prod, tensors.values())), 0, {}
    for name in sorted(tensors):
        places[name] = min(shards, 1 + before * shards // max(1, whole))
        before += prod(tensors[name])
    return places.__getitem__


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _write(path: Path, tensors: Mapping[str, Shape], seed: int, dtype: str, outliers: bool) -> None:
    """A safetensors file, drawn and written a chunk at a time, and moved into place when it is whole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + prod(shape) * _itemsize(name, dtype)
        stored = "I32" if name.endswith("_packed") else dtype
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            for part in _draw(name, shape, seed, outliers):
                file.write(part.astype(DTYPES[header[name]["dtype"]]).tobytes())
    partial.replace(path)
