"""Checkpoints with random weights that have the same bytes on every machine.

Every element is a hash of its tensor's name and its index, in integer arithmetic up to one exact product.
:func:`digest` says whether a checkpoint has the bytes that it should have.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jaxvit.weights.files import INDEX, SINGLE, read_header

Shape = tuple[int, ...]
STD = 0.02
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "I32": np.int32}
CHUNK = 2**20
RANDOM = {"format": "pt", "weights": "random"}
"""Metadata of the files that are written here: pictures and reports made with such weights say so."""


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
        write_json(folder / name, content)
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
        write_json(folder / INDEX, index)
    with ThreadPoolExecutor(min(len(groups), os.cpu_count() or 1) or 1) as pool:
        written = [
            pool.submit(_write, folder / files[number], group, seed, dtype, outliers)
            for number, group in groups.items()
        ]
    for each in written:
        each.result()
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


def is_random(folder: Path) -> bool:
    """Whether a folder's weights say that they were drawn here. Others may be random without saying so."""
    found = sorted(Path(folder).glob("*.safetensors"))
    if not found:
        return False
    with safe_open(found[0], "numpy") as file:
        return (file.metadata() or {}).get("weights") == RANDOM["weights"]


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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, moved into place when it is whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _write(path: Path, tensors: Mapping[str, Shape], seed: int, dtype: str, outliers: bool) -> None:
    """A safetensors file, drawn and written a chunk at a time, and moved into place when it is whole."""
    header: dict[str, Any] = {"__metadata__": RANDOM}
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
