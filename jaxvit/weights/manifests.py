"""What the files of real checkpoints hold: config files, and names, shapes and dtypes of tensors, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxvit.paths import data

_FILES = ("config", "preprocessor_config", "processor_config")


@dataclass(frozen=True)
class Manifest:
    """A real checkpoint on paper.

    Attributes:
        repo_id: of its repository on the hub.
        files: config files, name -> parsed JSON, as a snapshot's folder holds them.
        tensors: name -> (shape, dtype) of every tensor of the vision tower and projector.
        raw: the whole manifest: where the tensors lie, how certain it is, notes.
    """

    repo_id: str
    files: dict[str, dict[str, Any]]
    tensors: dict[str, tuple[tuple[int, ...], str]]
    raw: dict[str, Any]


def names() -> list[str]:
    """The manifests there are, such as ``Qwen--Qwen2.5-VL-7B-Instruct``: in a repository's id the dashes are a "/"."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def load(name: str) -> Manifest:
    """One manifest, by its name or by the repository's id."""
    path = _folder() / f"{name.replace('/', '--')}.json"
    if not path.is_file():
        raise KeyError(f"no manifest {name!r}; there are {', '.join(names()).replace('--', '/')}")
    raw = json.loads(path.read_text(encoding="utf-8"))
    files = {f"{field}.json": raw[field] for field in _FILES if field in raw}
    tensors = {tensor: (tuple(shape), dtype) for tensor, (shape, dtype) in raw["tensors"].items()}
    return Manifest(raw["repo_id"], files, tensors, raw)


def _folder() -> Path:
    return data("weights") / "manifests"
