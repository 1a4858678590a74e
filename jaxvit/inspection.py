"""What ``jaxvit inspect`` tells of a checkpoint and of this machine; what a user pastes into a bug report.

No weights are read: tensors are known from their headers, memory from executables.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxvit.buckets import ladder as ladders
from jaxvit.buckets.executable import Program
from jaxvit.buckets.store import Store
from jaxvit.errors import CheckpointError, StoreError
from jaxvit.layers import attention
from jaxvit.models import family_of
from jaxvit.models.family import Bucket, Family
from jaxvit.weights import hub, manifests
from jaxvit.weights.files import BITS, Stored, read_config_files, vision_tensors
from jaxvit.weights.load import dtype_of

PACKAGES = ("jaxvit", "jax", "jaxlib", "flax", "numpy", "pillow", "safetensors", "huggingface_hub")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "cuda12": ("jax-cuda12-plugin",),
    "cuda13": ("jax-cuda13-plugin",),
    "compare": ("torch", "torchvision", "transformers"),
    "tokamax": ("tokamax",),
    "video": ("av",),
    "plots": ("matplotlib",),
    "ray": ("ray",),
}
MIB = 2**20


@dataclass(frozen=True)
class Tensors:
    """The vision part's tensors as the files hold them.

    Attributes:
        manifest: the real checkpoint whose names and shapes are the same, None when there is none.
        dtypes: dtype in the file -> tensors.
        fault: why the files cannot be used, empty when they can.
    """

    count: int
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]
    manifest: str | None
    fault: str = ""


@dataclass(frozen=True)
class Rung:
    """A bucket of the ladder on this machine.

    Attributes:
        attention: the backend that it runs on.
        memory: bytes of inputs, temporaries, outputs, code; None while no executable is known.
        stored: whether the store has its executable.
    """

    bucket: Bucket
    attention: str
    memory: Mapping[str, int] | None
    stored: bool


@dataclass(frozen=True)
class Inspection:
    """Everything; see :func:`inspect`."""

    model: str
    family: Family
    dtype: str
    tensors: Tensors
    ladder: ladders.Ladder
    rungs: tuple[Rung, ...]
    store: Mapping[str, Any]
    machine: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        return {
            "model": self.model,
            "family": self.family.name,
            "dtype": self.dtype,
            "config": _plain(self.family.config),
            "processing": _plain(self.family.settings),
            "tensors": _plain(self.tensors),
            "ladder": {"source": self.ladder.source, "buckets": _plain(self.rungs)},
            "store": _plain(self.store),
            "machine": _plain(self.machine),
        }

    def tables(self) -> list[Table]:
        """The same for people."""
        found = self.tensors
        low, high = self.family.budget_range()
        sizes = (
            f"{found.count} tensors, {found.parameters / 1e6:.1f} M parameters, {_mib(found.bytes)} MiB in the files"
        )
        known = (
            f"names and shapes as in {found.manifest}" if found.manifest else "names and shapes of no known checkpoint"
        )
        checkpoint = _pairs(
            f"{self.model}",
            {
                "family": self.family.name,
                "computes in": self.dtype,
                "tensors": found.fault or f"{sizes} ({', '.join(f'{n} {d}' for d, n in found.dtypes.items())})",
                **({} if found.fault else {"manifest": known}),
                "tokens of a piece": f"{low} to {high}",
                "embeddings": f"{self.family.width} wide, from {self.family.merge}x{self.family.merge} patches each",
                "tower": _fields(self.family.config),
                "processing": _fields(self.family.settings),
            },
        )
        rungs = Table(title=f"ladder: {self.ladder.source}", title_justify="left")
        for name in (
            "tokens",
            "patches",
            "segments",
            "windows",
            "attention",
            "inputs",
            "temporaries",
            "outputs",
            "stored",
        ):
            rungs.add_column(name, justify="right" if name != "attention" else "left")
        for rung in self.rungs:
            size = rung.memory or {}
            memory = [
                f"{_mib(size[name])} MiB" if name in size else "?" for name in ("inputs", "temporaries", "outputs")
            ]
            capacity = map(str, (rung.bucket.tokens, rung.bucket.patches, rung.bucket.segments, rung.bucket.windows))
            rungs.add_row(*capacity, rung.attention, *memory, "yes" if rung.stored else "no")
        machine = dict(self.machine)
        backends, extras, devices = machine.pop("attention"), machine.pop("extras"), machine.pop("devices")
        about = _pairs(
            "this machine",
            {
                "versions": ", ".join(f"{name} {version}" for name, version in machine.pop("versions").items()),
                **machine,
                "devices": "; ".join(f"{one['id']}: {one['kind']} ({one['platform']})" for one in devices),
                "extras": "; ".join(f"{name}: {has or 'not installed'}" for name, has in extras.items()),
                "attention": "; ".join(f"{name}: {why or 'yes'}" for name, why in backends.items()),
                "store": self.store.get("fault") or "{folder}, {entries} executables, {mib} MiB".format(**self.store),
            },
        )
        return [checkpoint, rungs, about]


def inspect(
    model: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    budgets: Sequence[int] | str | None = None,
    processor: Mapping[str, Any] | None = None,
    build: bool = False,
) -> Inspection:
    """Looks at a checkpoint and at this machine.

    Args:
        model, dtype, budgets, processor: as for ``jaxvit.load``.
        build: compile what the store does not hold, to know every bucket's memory.
    Raises:
        CheckpointError: the config files cannot be used; faulty or missing weights are part of the answer.
    """
    model = os.fspath(model)
    folder = hub.snapshot(model)
    files = read_config_files(folder)
    family = family_of(files, processor)
    tensors, stored = _tensors(model, folder, family)
    compute = dtype or ("float32" if stored == "float32" else "bfloat16")
    device = jax.local_devices()[0]
    ladder = ladders.resolve(family, budgets, device)
    store, about = _store()
    programs = [Program(family, bucket, compute, "uint8", device.platform) for bucket in ladder.buckets]
    if build and store:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            built = list(pool.map(lambda program: store.build(program, device).memory(), programs))
    else:
        built = [None] * len(programs)
    rungs = tuple(_rung(program, device, store, memory) for program, memory in zip(programs, built, strict=True))
    return Inspection(model, family, compute, tensors, ladder, rungs, about, machine(compute))


def _tensors(model: str, folder: Path, family: Family) -> tuple[Tensors, str]:
    try:
        folder = hub.fetch_weights(model, folder, family.keys)
        found = vision_tensors(folder, family.keys.prefix)
        stored = dtype_of(folder, family.keys)
    except CheckpointError as error:
        return Tensors(0, 0, 0, {}, None, str(error)), "bfloat16"
    dtypes: dict[str, int] = {}
    for one in found.values():
        dtypes[one.dtype] = dtypes.get(one.dtype, 0) + 1
    parameters = sum(prod(one.shape) for one in found.values())
    size = sum(prod(one.shape) * BITS[one.dtype] // 8 for one in found.values())
    return Tensors(len(found), parameters, size, dtypes, _manifest(found)), stored


def _manifest(found: Mapping[str, Stored]) -> str | None:
    shapes = {name: one.shape for name, one in found.items()}
    for name in manifests.names():
        manifest = manifests.load(name)
        if {tensor: shape for tensor, (shape, _) in manifest.tensors.items()} == shapes:
            return manifest.repo_id
    return None


def _store() -> tuple[Store | None, dict[str, Any]]:
    try:
        store = Store()
    except StoreError as error:
        return None, {"fault": str(error)}
    entries = store.entries()
    size = sum(int(entry.get("bytes", 0)) for entry in entries)
    return store, {"folder": str(store.folder), "entries": len(entries), "mib": _mib(size)}


def _rung(program: Program, device: jax.Device, store: Store | None, memory: Mapping[str, int] | None) -> Rung:
    stored = False
    if store:
        try:
            with store.path(program, device).open("rb") as file:
                memory = memory or json.loads(file.readline())["memory"]
                stored = True
        except (OSError, ValueError, KeyError):
            pass
    return Rung(program.bucket, program.backend.name, memory, stored)


def machine(dtype: str) -> dict[str, Any]:
    """Versions, devices, extras, and for each attention backend why it cannot run here in ``dtype`` (None: it can)."""
    devices = jax.local_devices()
    kinds = [{"id": one.id, "kind": one.device_kind, "platform": one.platform} for one in devices]
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "backend": devices[0].client.platform_version.replace("\n", ", ").strip(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "devices": kinds,
        "extras": {extra: _installed(names) for extra, names in EXTRAS.items()},
        "attention": {name: one.why_not(devices[0].platform, dtype) for name, one in attention.BACKENDS.items()},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed(names: Sequence[str]) -> str | None:
    """Versions of an extra's packages, None unless all are there."""
    versions = [_version(name) for name in names]
    return None if None in versions else ", ".join(f"{n} {v}" for n, v in zip(names, versions, strict=True))


def _pairs(title: str, rows: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _fields(value: Any) -> str:
    return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in dataclasses.fields(value))


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
