"""A toy model and a writer of safetensors files that, unlike the library's, also writes what is wrong or exotic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxvit.weights.keys import Key, KeyTable, transpose

NAMES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int8": "I8", "uint8": "U8", "int32": "I32",
}  # fmt: skip
Tensors = Mapping[str, np.ndarray]


def save(path: Path, tensors: Tensors) -> None:
    """A safetensors file with the tensors in the order given."""
    header, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    raw(path, header, b"".join(array.tobytes() for array in tensors.values()))


def raw(path: Path, header: object, data: bytes = b"") -> None:
    """A file whose header says whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_shards(folder: Path, shards: Mapping[str, Tensors], index: Mapping[str, str] | None = None) -> None:
    """Shards and their index, or an index that says something else."""
    for name, tensors in shards.items():
        save(folder / name, tensors)
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    content = {"metadata": {}, "weight_map": places if index is None else dict(index)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@dataclass(frozen=True)
class Toy:
    """A model of two blocks with a projector; q, k and v may be stored as one tensor or as three."""

    table: KeyTable
    shapes: dict[str, tuple[int, ...]]

    def parameters(self) -> dict[str, np.ndarray]:
        """Values that bfloat16, float16 and float32 all hold exactly."""
        rng = np.random.default_rng(0)
        return {path: rng.integers(-128, 128, shape).astype(np.float32) / 64 for path, shape in self.shapes.items()}

    def tensors(self, vision: str = "visual.", projector: str = "projector.", *, dtype: type = ml_dtypes.bfloat16,
                split: bool = False) -> dict[str, np.ndarray]:  # fmt: skip
        """Those parameters as a checkpoint holds them."""
        result = {}
        for path, value in self.parameters().items():
            stem, leaf = path.rsplit(".", 1)
            prefix = projector if stem.startswith("p.") else vision
            stem = stem.removeprefix("p.")
            value = np.ascontiguousarray(value.T) if leaf == "kernel" else value
            leaf = {"kernel": "weight", "scale": "weight"}.get(leaf, leaf)
            if split and stem.endswith("qkv"):
                for letter, part in zip("qkv", np.split(value, 3), strict=True):
                    result[f"{prefix}{stem[:-3]}{letter}_proj.{leaf}"] = part.astype(dtype)
            else:
                result[f"{prefix}{stem}.{leaf}"] = value.astype(dtype)
        return result


TEXT = {
    "model.layers.0.mlp.weight": np.ones((3, 4), ml_dtypes.bfloat16),
    "lm_head.weight_packed": np.ones((2, 2), np.int32),
    "lm_head.weight_scale": np.ones(2, ml_dtypes.bfloat16),
}


@pytest.fixture(scope="session")
def toy() -> Toy:
    keys = [
        Key(r"blocks\.(\d+)\.norm\.weight", r"blocks.\1.norm.scale"),
        Key(r"blocks\.(\d+)\.attn\.qkv\.weight", r"blocks.\1.attn.qkv.kernel", transpose),
        Key(r"blocks\.(\d+)\.attn\.qkv\.bias", r"blocks.\1.attn.qkv.bias"),
        Key(r"p\.fc\.weight", "p.fc.kernel", transpose),
        Key(r"rotary\.inv_freq", None),
    ]
    for index, letter in enumerate("qkv"):
        stem = rf"blocks\.(\d+)\.attn\.{letter}_proj"
        keys.append(Key(stem + r"\.weight", r"blocks.\1.attn.qkv.kernel", transpose, (index, 3)))
        keys.append(Key(stem + r"\.bias", r"blocks.\1.attn.qkv.bias", part=(index, 3)))
    spellings = (
        {"visual.": "", "projector.": "p."},
        {"model.visual.": "", "model.projector.": "p."},
        {"model.visual.inner.": "", "model.projector.": "p."},
    )
    shapes: dict[str, tuple[int, ...]] = {"p.fc.kernel": (8, 6)}
    for block in range(2):
        shapes[f"blocks.{block}.norm.scale"] = (8,)
        shapes[f"blocks.{block}.attn.qkv.kernel"] = (8, 24)
        shapes[f"blocks.{block}.attn.qkv.bias"] = (24,)
    return Toy(KeyTable(spellings, tuple(keys)), shapes)


@pytest.fixture(scope="session")
def write() -> Callable[[Path, Tensors], None]:
    return save


@pytest.fixture(scope="session")
def write_raw() -> Callable[..., None]:
    return raw


@pytest.fixture(scope="session")
def write_shards() -> Callable[..., None]:
    return save_shards


@pytest.fixture(scope="session")
def text() -> dict[str, np.ndarray]:
    """Tensors of a quantised language model."""
    return dict(TEXT)
