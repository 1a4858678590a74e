"""``jaxvit inspect``"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from jaxvit.commands.console import Quiet, Verbose, progress, size, stdout
from jaxvit.commands.options import Budgets, ComputeDtype, Settings, StoreFolder, budgets_of, settings_of


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder with a Hugging Face snapshot, or a hub id; without it, this machine alone.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every name in full.")] = False,
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    store: StoreFolder = None,
    settings: Settings = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Checkpoint, buckets, memory, what this machine can run: what to paste into a bug report.

    Nothing is loaded, fetched or compiled; a bucket's memory is known once `jaxvit compile` has filled the store. The
    exit code is 1 when the checkpoint cannot be used.
    """
    from jaxvit import inspection, machine

    with progress("inspecting"):
        with machine.modest():
            machine.devices()
        found = inspection.inspect(
            model,
            dtype=dtype.value if dtype else None,
            budgets=budgets_of(budgets),
            processor=settings_of(settings),
            store=store,
        )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        for table in tables(found.to_dict()):
            stdout().print(table)
    raise typer.Exit(0 if found.ok else 1)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """What :meth:`Inspection.to_dict` holds, for people."""
    shown = []
    if "model" in found:
        shown.append(_pairs("checkpoint", _checkpoint(found)))
        if found["ladder"]:
            shown.append(_ladder(found["ladder"]))
    shown.append(_pairs("store", _store(found)))
    shown.append(_pairs("machine", _machine(found["machine"])))
    return shown


def _checkpoint(found: Mapping[str, Any]) -> dict[str, Any]:
    files = ", ".join(f"{name} {size(count)}" for name, count in found["files"].items())
    rows: dict[str, Any] = {"model": found["model"]}
    if Path(found["folder"]) != Path(found["model"]):
        rows["folder"] = found["folder"]
    rows["files"] = files or "none"
    if found["fault"]:
        return rows | {"fault": Text(found["fault"], "bold red")}
    weights = found["weights"]
    if weights["absent"]:
        rows["weights"] = f"not here: {found['folder']} holds config files alone"
    else:
        rows |= _weights(weights)
    rows |= {"family": found["family"], "computes in": found["dtype"], "sizes": _fields(found["config"])}
    rows["processing"] = _fields(found["processing"])
    if found["overrides"]:
        rows["overrides"] = _fields(found["overrides"])
    return rows


def _weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    if weights["tensors"]:
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in weights["dtypes"].items())
        rows["weights"] = (
            f"{weights['tensors']} tensors ({dtypes}), {weights['parameters'] / 1e6:.1f} M parameters, "
            f"{size(weights['bytes'])}" + (", random: drawn by jaxvit" if weights["random"] else "")
        )
        rows["manifest"] = _likeness(weights)
    rows["loads"] = Text(_first(weights["fault"].splitlines(), "\n"), "bold red") if weights["fault"] else "yes"
    return rows


def _likeness(weights: Mapping[str, Any]) -> str:
    found = weights["likeness"]
    if not found["repo_id"]:
        return "none of this family"
    if 2 * len(found["shapes"]) > weights["tensors"]:
        return f"like no known checkpoint; the names are closest to {found['repo_id']}"
    parts = [f"{len(found[kind])} {kind} ({_first(found[kind])})" for kind in ("missing", "unexpected") if found[kind]]
    if found["shapes"]:
        some = _first([f"{name} {here}, there {there}" for name, (here, there) in found["shapes"].items()], "; ")
        parts.append(f"{len(found['shapes'])} of another shape ({some})")
    if not parts:
        return f"{found['repo_id']}: the same names and shapes"
    return f"closest is {found['repo_id']}: {'; '.join(parts)}"


def _ladder(ladder: Mapping[str, Any]) -> Table:
    buckets = ladder["buckets"]
    capacity = ("tokens", "patches", "segments", "windows")
    capacity = capacity if any(rung["bucket"]["windows"] for rung in buckets) else capacity[:-1]
    known = [rung["memory"] for rung in buckets if rung["memory"]]
    caption = f"weights, once for all buckets: {size(known[0]['weights'])}" if known else UNKNOWN
    table = Table(title=f"ladder: {ladder['source']}", title_justify="left", title_style="bold", caption=caption)
    for name in capacity:
        table.add_column(name, justify="right")
    table.add_column("attention")
    for name in ("inputs", "temporaries", "outputs", "stored", "compiled in"):
        table.add_column(name, justify="right")
    for rung in buckets:
        memory = rung["memory"] or {}
        table.add_row(
            *(str(rung["bucket"][name]) for name in capacity),
            rung["attention"],
            *(size(memory.get(name)) for name in ("inputs", "temporaries", "outputs")),
            size(rung["bytes"]) if rung["stored"] else "no",
            "?" if rung["seconds"] is None else f"{rung['seconds']:.1f} s",
        )
    return table


UNKNOWN = "memory is known once `jaxvit compile` has filled the store"


def _store(found: Mapping[str, Any]) -> dict[str, Any]:
    store = found["store"]
    rows = {"folder": store["folder"]}
    if store["fault"]:
        return rows | {"state": store["fault"]}
    rows["entries"] = f"{store['entries']} executables, {size(store['bytes'])}"
    buckets = found["ladder"]["buckets"] if found.get("ladder") else []
    if buckets:
        rows["of this ladder"] = f"{sum(rung['stored'] for rung in buckets)} of {len(buckets)} buckets"
    return rows


def _machine(machine: Mapping[str, Any]) -> dict[str, Any]:
    rows = {"system": machine["system"], "host": machine["host"]}
    rows["python"] = machine["python"]
    rows["versions"] = ", ".join(f"{name} {version or 'missing'}" for name, version in machine["versions"].items())
    for extra, has in machine["extras"].items():
        rows[f"extra {extra}"] = has or "not installed"
    libraries = ("driver", "jax-cuda", "cudnn", "cublas", "cuda-runtime", "nccl")
    if cuda := [f"{name} {has}" for name, has in machine["cuda"].items() if any(one in name for one in libraries)]:
        rows["cuda"] = ", ".join(cuda)
    for device in machine["devices"]:
        about = dict.fromkeys((device["kind"], device["platform_version"]))
        if device["compute_capability"]:
            about[f"compute capability {device['compute_capability']}"] = None
        if device["bytes_limit"]:
            about[f"{size(device['bytes_in_use'])} of {size(device['bytes_limit'])} in use"] = None
        rows[f"device {device['id']}"] = ", ".join(about)
    if machine["devices_fault"]:
        rows["devices"] = Text(machine["devices_fault"], "bold red")
    for name, why in machine["attention"].items():
        rows[f"attention {name}"] = f"no: {why}" if why else f"yes, in {machine['dtype']}"
    return rows | machine["environment"]


def _pairs(title: str, rows: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value if isinstance(value, Text) else Text(str(value)))
    return table


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _first(lines: Sequence[str], between: str = ", ", most: int = 3) -> str:
    more = len(lines) - most
    return between.join(lines[:most]) + (f"{between}and {more} more" if more > 0 else "")
