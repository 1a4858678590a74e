"""The record of a benchmark: on what it ran, tables, JSON, the ladder's picture."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxvit.machine import ISSUING

PACKAGES = ("jaxvit", "jax", "jaxlib", "flax", "numpy", "torch", "transformers", "tokamax", "triton")
VARIANTS = ("eager", "graph", "compile + graph")


def environment(device: jax.Device) -> dict[str, Any]:
    """Versions of everything that a time depends on, and the chip."""
    found = {}
    names = [name for one in importlib.metadata.distributions() if (name := one.name or "")]
    cudnn = [name for name in names if re.fullmatch(r"nvidia-(cudnn|cublas)(-cu\d+)?", name)]
    for name in (*PACKAGES, *sorted(cudnn)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "chip": device.device_kind,
        "platform": device.platform,
        "driver": _driver() if device.platform != "cpu" else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": found,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "issues_beside": os.environ.get(ISSUING, "") if device.platform != "cpu" else "",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


@dataclass
class Report:
    """What was measured, ready for JSON; what failed is in ``failures``, step by step.

    Attributes:
        rows: one a load, as ``jaxvit.bench.calls`` makes them.
    """

    model: str
    family: str
    dtype: str
    environment: dict[str, Any]
    rates: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    host: dict[str, Any] | None = None
    pictures: list[dict[str, Any]] = field(default_factory=list)
    start: dict[str, Any] | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.failures

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")

    def plot(self, path: Path) -> None:
        """The ladder as a staircase. Raises DependencyError where matplotlib is missing."""
        from jaxvit.plots import ladder_plot

        steps = [
            {
                "patches": row["patches"],
                "milliseconds": row["ours"]["back_to_back"],
                "floor": row["floor_ms"],
                "peer": _best(row, "back_to_back"),
            }
            for row in self.rows
        ]
        title = f"{self.model}, {self.dtype}, {self.environment['chip']}"
        ladder_plot(steps, path, title=title, subtitle="calls back to back; peer: the best of packed PyTorch")

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """(title, column names, rows) of everything that was measured."""
        found = []
        if self.rows:
            found.append(self._calls())
        if self.host:
            names = ("plan", "fill", "transfer", "dispatch")
            cells = [self.host["load"], *(f"{self.host[name]:.3f}" for name in names)]
            cells.append(f"{self.host['bytes'] / 2**20:.1f}")
            found.append(("the host's part of a call, ms", ["load", *names, "MiB sent"], [cells]))
        if self.pictures:
            names = ("stream", "call", "preparation", "device", "reference")
            columns = ["pictures", *names, "stream / device", "stream / reference"]
            found.append(("from JPEG bytes, images a second", columns, [self._picture(one) for one in self.pictures]))
            spent = list(self.pictures[0]["stream_share"])
            rows = [
                [f"{one['height']}x{one['width']}", *(f"{one['stream_share'][name]:.0%}" for name in spent)]
                for one in self.pictures
            ]
            found.append(("what the stream's own thread waits for and does", ["pictures", *spent], rows))
        if self.start:
            names = ("imported", "loaded", "warmed", "first_embedding", "build_seconds", "compilations", "store_hits")
            rows = [[kind, *(_short(self.start[kind][name]) for name in names)] for kind in ("empty", "filled")]
            title = f"seconds from the start of a process, {len(self.start['budgets'])} buckets"
            found.append((title, ["store", *(name.replace("_", " ") for name in names)], rows))
        if self.failures:
            found.append(("failed", ["step", "why"], [[step, why] for step, why in self.failures.items()]))
        return found

    def _calls(self) -> tuple[str, list[str], list[list[str]]]:
        variants = [name for name in VARIANTS if any(name in row.get("torch", {}) for row in self.rows)]
        reference = any("reference" in row for row in self.rows)
        columns = ["load", "tokens", "attention", "compile s", "temp MiB", "one call", "renewed", "back to back"]
        columns.append("of floor")
        columns += [f"torch {name}" for name in variants] + (["transformers"] if reference else [])
        columns += ["/ torch, one", "/ torch, b2b", "error"] if variants else ["error"] if reference else []
        rows = []
        for row in self.rows:
            stored = " (store)" if row["source"] == "store" else ""
            cells = [row["load"], str(row["tokens"]), row["attention"], f"{row['compile_seconds']:.1f}{stored}"]
            one, behind = _pair(row["ours"])
            cells += [f"{row['memory']['temporaries'] / 2**20:.0f}", one, _short(row["renewed_call"]), behind]
            cells.append(_ratio(row["share_of_floor"]))
            cells += [" ".join(_pair(row.get("torch", {}).get(name))) for name in variants]
            cells += [" ".join(_pair(row.get("reference")))] if reference else []
            if variants:
                cells += [_ratio(row.get(name)) for name in ("one_call_over_torch", "back_to_back_over_torch")]
            peers = [*row.get("torch", {}).values(), *filter(None, [row.get("reference")])]
            if variants or reference:
                cells.append(f"{max(peer['relative_rms'] for peer in peers):.1e}" if peers else "-")
            rows.append(cells)
        rate = max(self.rates.values(), default=0) / 1e12
        title = (
            f"{self.model}, {self.dtype}, {self.environment['chip']}; ms (peers: one call, back to back); "
            f"floor at {rate:.3g} TFLOP/s"
        )
        return title, columns, rows

    def _picture(self, one: Mapping[str, Any]) -> list[str]:
        names = ("stream", "call", "preparation", "device", "reference")
        cells = [f"{one['count']} of {one['height']}x{one['width']}", *(_short(one.get(name)) for name in names)]
        return [*cells, _ratio(one["stream_over_device"]), _short(one.get("stream_over_reference"))]

    def markdown(self) -> str:
        """The tables for a README."""
        parts = []
        for title, columns, rows in self.tables():
            lines = [columns, ["---"] * len(columns), *rows]
            parts.append(f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
        return "\n\n".join(parts) + "\n"

    def print(self) -> None:
        """Tables by rich, in plain text where it is missing."""
        for title, columns, rows in self.tables():
            show(title, columns, rows)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table on stdout."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[at]) for line in (columns, *rows)) for at in range(len(columns))]
        print(title)
        for line in (columns, *rows):
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = Table(title=escape(title), title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if at == 0 else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(width=200 if piped else None, highlight=False).print(table)


def _best(row: Mapping[str, Any], name: str) -> float | None:
    return min((one[name] for one in row.get("torch", {}).values()), default=None)


def _pair(times: Mapping[str, Any] | None) -> list[str]:
    return ["-"] if times is None else [_short(times["one_call"]), _short(times["back_to_back"])]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
