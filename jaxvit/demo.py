"""The demo: real photographs through a tiny checkpoint of every family, beside the PyTorch reference.

The tiny checkpoints are written on the spot (``jaxvit.tiny``). Where torch is installed the reference runs live, with
its own processor; elsewhere its outputs are read from ``weights/demo/reference/``, which ``python -m jaxvit.demo
--record`` writes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxvit
from jaxvit import media, models, tiny
from jaxvit.errors import CheckpointError, DependencyError
from jaxvit.metrics import Metrics, metrics
from jaxvit.models.family import Family
from jaxvit.paths import data
from jaxvit.reference import load_reference
from jaxvit.weights import manifests

BOUND = 1e-5
"""Largest relative RMS in float32 that passes."""
Progress = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Medium:
    """One thing that the demo encodes.

    Attributes:
        name: key in the recorded outputs.
        says: what it is, for the table.
        frames: uint8 [h, w, 3] each; one for a picture.
    """

    name: str
    says: str
    frames: tuple[np.ndarray, ...]

    @property
    def clip(self) -> bool:
        return len(self.frames) > 1

    def digest(self) -> str:
        """Tells whether another decoder made other pixels of the same file."""
        return hashlib.sha256(np.stack(self.frames).tobytes()).hexdigest()


def photographs() -> list[Medium]:
    """Two photographs, the second cut to Qwen2.5-VL's windows of 112 pixels, and a pan over a third of five frames."""
    folder = data("weights") / "demo" / "photos"
    cat, cup, rocket = (media.picture(folder / name) for name in ("chelsea.png", "coffee.png", "rocket.jpg"))
    pan = tuple(np.ascontiguousarray(rocket[150 + 16 * i :, 200 + 12 * i :][:112, :168]) for i in range(5))
    return [
        Medium("chelsea", f"chelsea.png, {_size(cat)}", (cat,)),
        Medium("coffee", "coffee.png, cut to 448x336", (np.ascontiguousarray(cup[32:368, 76:524]),)),
        Medium("rocket", f"rocket.jpg, a clip of {len(pan)} frames, {_size(pan[0])}", pan),
    ]


def _size(picture: np.ndarray) -> str:
    return f"{picture.shape[1]}x{picture.shape[0]}"


def checkpoints() -> list[str]:
    """Names of the tiny checkpoints whose family is built."""
    types = {name: manifests.load(one.manifest).files["config.json"]["model_type"] for name, one in tiny.TINY.items()}
    return [name for name, model_type in types.items() if model_type in models.REGISTRY]


def accepted(family: Family, everything: Sequence[Medium]) -> list[Medium]:
    """What the family can encode: a clip only where it has video."""
    video = type(family).prepare_video is not Family.prepare_video
    return [medium for medium in everything if video or not medium.clip]


@dataclass(frozen=True)
class Row:
    """One item of one checkpoint beside its reference; without metrics when the shapes differ."""

    checkpoint: str
    item: str
    tokens: int
    metrics: Metrics | None

    @property
    def ok(self) -> bool:
        return self.metrics is not None and self.metrics.relative_rms <= BOUND


@dataclass(frozen=True)
class Result:
    """Rows, and what they were compared with."""

    rows: tuple[Row, ...]
    live: bool
    reference: str

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def table(self) -> Table:
        table = Table(title="jaxvit beside PyTorch, float32")
        for name in ("checkpoint", "item", "tokens", "relative RMS", "max abs", "cosine", "verdict"):
            table.add_column(name, justify="left" if name in ("checkpoint", "item", "verdict") else "right")
        for row in self.rows:
            known = row.metrics
            gaps = (f"{known.relative_rms:.1e}", f"{known.max_abs:.1e}", f"{known.cosine:.6f}") if known else ("-",) * 3
            verdict = "[green]equal[/]" if row.ok else "[bold red]differs[/]"
            table.add_row(row.checkpoint, row.item, str(row.tokens), *gaps, verdict)
        return table

    def summary(self) -> str:
        passed = sum(row.ok for row in self.rows)
        how = "run live" if self.live else "recorded; with the extra 'compare' installed it runs live"
        return (
            f"{passed} of {len(self.rows)} items within a relative RMS of {BOUND:g}, in compiled buckets on "
            f"{jax.devices()[0].device_kind} (jax {jax.__version__}).\n"
            f"Reference: {self.reference}, {how}.\n"
            f"The checkpoints are tiny and their weights random: {tiny.tiny_folder()}"
        )


def run(progress: Progress = lambda _: nullcontext()) -> Result:
    """Encodes everything with every family that is built, and compares."""
    rows: list[Row] = []
    live, described = True, ""
    everything = photographs()
    for name in checkpoints():
        folder = tiny.tiny_checkpoint(name)
        with progress(f"{name}: loading, compiling, encoding"):
            encoder = jaxvit.load(folder, dtype="float32")
            taken = accepted(encoder.family, everything)
            ours = encoder.encode([jaxvit.Video(one.frames) if one.clip else one.frames[0] for one in taken])
            ours = list(ours)
        with progress(f"{name}: the reference"):
            try:
                wanted, described = run_reference(folder, taken), _versions()
            except DependencyError:
                wanted, described = recorded(name, folder, taken)
                live = False
        for medium, array in zip(taken, ours, strict=True):
            rows.append(measure(name, medium.says, array, wanted[medium.name]))
    return Result(tuple(rows), live, described)


def measure(checkpoint: str, item: str, ours: np.ndarray, reference: np.ndarray) -> Row:
    alike = ours.shape == reference.shape
    return Row(checkpoint, item, len(ours), metrics(ours, reference) if alike else None)


def run_reference(folder: Path, taken: Sequence[Medium]) -> dict[str, np.ndarray]:
    reference = load_reference(folder, dtype="float32")
    return {
        one.name: reference.encode_inputs(reference.process(list(one.frames) if one.clip else one.frames[0]))
        for one in taken
    }


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch"))


def recorded(name: str, folder: Path, taken: Sequence[Medium]) -> tuple[dict[str, np.ndarray], str]:
    """The recorded outputs of a tiny checkpoint, by medium, and what they were recorded with.

    Raises:
        CheckpointError: they are missing, or belong to another checkpoint or other pixels.
    """
    path = recording(name)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: install the extra 'compare', then python -m jaxvit.demo --record")
    with safe_open(path, "numpy") as file:
        noted = file.metadata()
        for what, found in _digests(folder, taken):
            if noted.get(what) != found:
                raise CheckpointError(
                    f"{path} was recorded with another {what}: install the extra 'compare' to run the reference live, "
                    "or record again with python -m jaxvit.demo --record"
                )
        return {one.name: file.get_tensor(one.name) for one in taken}, noted["reference"]


def record(name: str) -> Path:
    """Runs the reference on what the family accepts, and writes its outputs."""
    folder = tiny.tiny_checkpoint(name)
    taken = accepted(jaxvit.load(folder, dtype="float32").family, photographs())
    path = recording(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in run_reference(folder, taken).items()}
    save_file(arrays, path, metadata={"reference": _versions(), **dict(_digests(folder, taken))})
    path.chmod(0o644)
    return path


def recording(name: str) -> Path:
    return data("weights") / "demo" / "reference" / f"{name}.safetensors"


def _digests(folder: Path, taken: Sequence[Medium]) -> Iterator[tuple[str, str]]:
    yield "checkpoint", tiny.digest(folder)
    for one in taken:
        yield f"decoding of {one.name}", one.digest()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxvit.demo", description=__doc__)
    parser.add_argument("--record", action="store_true", required=True, help="write weights/demo/reference/")
    parser.parse_args(arguments)
    for name in checkpoints():
        print(record(name))


if __name__ == "__main__":
    main()
