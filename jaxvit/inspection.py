"""What ``jaxvit inspect`` tells of a checkpoint on this machine; what a user pastes into a bug report.

No weights are read: tensors are known from their headers, memory from the headers of the store's entries. What is wrong
with a checkpoint is part of the answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from flax import nnx

from jaxvit import machine
from jaxvit.buckets import ladder as ladders
from jaxvit.buckets.executable import Program
from jaxvit.buckets.store import MAX_HEADER, Store, default_folder
from jaxvit.errors import CheckpointError, LadderError, StoreError
from jaxvit.layers.fuse import parameter_shapes
from jaxvit.likeness import Likeness, likeness
from jaxvit.models import family_of
from jaxvit.models.family import Bucket, Family
from jaxvit.weights import hub, load
from jaxvit.weights.files import BITS, CONFIGS, INDEX, read_config_files, vision_tensors
from jaxvit.weights.writing import is_random


@dataclass(frozen=True)
class Weights:
    """The vision part's tensors as the files hold them.

    Attributes:
        dtypes: dtype in the files -> tensors.
        dtype: of most of them; "" when it is not known.
        random: they say of themselves that they were drawn by this package.
        fault: why they cannot be loaded, "" when they can.
        absent: there are none, which is no fault of theirs.
    """

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = ""
    random: bool = False
    fault: str = ""
    absent: bool = False
    likeness: Likeness | None = None


@dataclass(frozen=True)
class Rung:
    """A bucket of the ladder on this machine.

    Attributes:
        attention: the backend that it runs on, or why there is none.
        stored: whether the store has its executable.
        memory: bytes of weights, inputs, temporaries, outputs and code; None while the store has no executable.
        seconds: that compiling took.
        bytes: of the entry.
    """

    bucket: Bucket
    attention: str
    stored: bool = False
    memory: Mapping[str, int] | None = None
    seconds: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Inspection:
    """Everything; see :func:`inspect`.

    Attributes:
        files: name -> bytes, of the checkpoint's folder.
        fault: why the config files cannot be used, "" when they can; then the rest of the checkpoint is unknown.
        store: folder, fault, entries, bytes.
        machine: see :mod:`jaxvit.machine`.
    """

    model: str | None
    folder: str | None
    files: Mapping[str, int]
    fault: str
    family: Family | None
    overrides: Mapping[str, Any]
    dtype: str
    weights: Weights | None
    ladder: ladders.Ladder | None
    rungs: tuple[Rung, ...]
    store: Mapping[str, Any]
    machine: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Nothing is wrong with the checkpoint, though its weights may be absent."""
        return not self.fault and not (self.weights and self.weights.fault and not self.weights.absent)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON has it, the user's home folder shortened."""
        family = self.family
        found: dict[str, Any] = {}
        if self.model is not None:
            found = {
                "model": self.model,
                "folder": self.folder,
                "files": self.files,
                "fault": self.fault,
                "family": family.name if family else None,
                "dtype": self.dtype,
                "config": family.config if family else None,
                "processing": family.settings if family else None,
                "overrides": self.overrides,
                "weights": self.weights,
                "ladder": {"source": self.ladder.source, "buckets": self.rungs} if self.ladder else None,
            }
        return _plain(found | {"store": self.store, "machine": self.machine})


def inspect(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    budgets: Sequence[int] | str | None = None,
    processor: Mapping[str, Any] | None = None,
    store: str | os.PathLike[str] | None = None,
) -> Inspection:
    """Looks at a checkpoint and at this machine; changes neither, and fetches no weights.

    Args:
        model, dtype, budgets, processor, store: as for ``jaxvit.load``; without a model, the machine alone.
    Raises:
        CheckpointError: there is no such folder or repository. LadderError: the budgets cannot be used.
    """
    store_folder = default_folder() if store is None else Path(store)
    about, entries = _store(store_folder)
    if model is None:
        nothing = (None, None, {}, "", None, {}, dtype or "bfloat16", None, None, ())
        return Inspection(*nothing, about, machine.report(dtype or "bfloat16"))
    folder = hub.snapshot(os.fspath(model))
    family, fault = None, ""
    try:
        files = read_config_files(folder)
        family = family_of(files, processor)
    except CheckpointError as error:
        files, fault = {}, str(error)
    weights = _weights(folder, family, files.get("config.json", {})) if family else None
    stored = weights.dtype if weights else ""
    compute = dtype or ("float32" if stored == "float32" else "bfloat16")
    devices, _ = machine.devices()
    ladder = ladders.resolve(family, budgets, devices[0]) if family and devices else None
    rungs = tuple(_rung(family, bucket, compute, devices[0], entries) for bucket in ladder) if family and ladder else ()
    return Inspection(
        os.fspath(model),
        str(folder),
        _files(folder),
        fault,
        family,
        dict(processor or {}),
        compute,
        weights,
        ladder,
        rungs,
        about,
        machine.report(compute),
    )


def _files(folder: Path) -> dict[str, int]:
    """The files that matter here: config files, index, weights of any kind."""
    suffixes = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"}
    names = {*CONFIGS, INDEX, "adapter_config.json"}
    paths = sorted(path for path in folder.iterdir() if path.name in names or path.suffix in suffixes)
    return {path.name: path.stat().st_size for path in paths if path.exists()}


def _weights(folder: Path, family: Family, config: Mapping[str, Any]) -> Weights:
    try:
        found = vision_tensors(folder, family.keys.prefix)
    except CheckpointError as error:
        absent = not any(path.suffix in (".safetensors", ".bin", ".pt") for path in folder.iterdir())
        return Weights(fault=str(error), absent=absent and not (folder / INDEX).exists())
    fault = ""
    try:
        load.plan(found, family.keys, parameter_shapes(nnx.eval_shape(family.module)), config)
    except CheckpointError as error:
        fault = str(error)
    return Weights(
        tensors=len(found),
        parameters=sum(prod(one.shape) for one in found.values()),
        bytes=sum(prod(one.shape) * BITS.get(one.dtype, 0) // 8 for one in found.values()),
        dtypes=Counter(one.dtype for one in found.values()),
        dtype=load.dtype_of(folder, family.keys),
        random=is_random(folder),
        fault=fault,
        likeness=likeness({name: one.shape for name, one in found.items()}, family),
    )


def _store(folder: Path) -> tuple[dict[str, Any], Store | None]:
    """What is said of the store, and the store itself where it can be used. A missing one is not made."""
    about: dict[str, Any] = {"folder": str(folder), "fault": "", "entries": 0, "bytes": 0}
    if not folder.exists():
        return about | {"fault": "not there yet: the first bucket that is compiled makes it"}, None
    try:
        store = Store(folder)
    except StoreError as error:
        return about | {"fault": str(error)}, None
    entries = store.entries()
    sizes = [one.get("bytes", 0) for one in entries if isinstance(one, dict)]
    return about | {"entries": len(entries), "bytes": sum(size for size in sizes if isinstance(size, int))}, store


def _rung(family: Family, bucket: Bucket, dtype: str, device: Any, store: Store | None) -> Rung:
    program = Program(family, bucket, dtype, "uint8", device.platform)
    try:
        name = program.backend.name
    except LadderError as error:
        return Rung(bucket, str(error))
    if store is None:
        return Rung(bucket, name)
    try:
        with store.path(program, device).open("rb") as file:
            header = json.loads(file.readline(MAX_HEADER))
        return Rung(bucket, name, True, header["memory"], header["seconds"], header["bytes"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Rung(bucket, name)


def _plain(value: Any) -> Any:
    """As JSON has it; the user's home folder becomes ``~``, wherever it stands."""
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return short(str(value))


def short(text: str) -> str:
    """A text without the name of the user's home folder: reports are pasted where others read them."""
    home = str(Path.home())
    return text.replace(home + os.sep, "~" + os.sep) if len(home) > 1 else text
