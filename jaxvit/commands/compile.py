"""``jaxvit compile``"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from jaxvit.commands.console import Quiet, Talk, Verbose, progress, size, stdout
from jaxvit.commands.options import Budgets, ComputeDtype, Model, Settings, StoreFolder, given_by, load


def compile(
    model: Model,
    up_to: Annotated[
        int | None, typer.Option("--up-to", help="The largest budget, in tokens.", show_default=False)
    ] = None,
    every_device: Annotated[
        bool, typer.Option("--all-devices", help="For every local device, not the first alone.")
    ] = False,
    store: StoreFolder = None,
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    settings: Settings = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fills the executable store: every bucket of the ladder is compiled, so that later starts only load them.

    What the store has already is loaded. Buckets are compiled in parallel, so their seconds overlap.
    """
    from rich.table import Table

    from jaxvit.buckets.store import Store

    encoder = load(model, dtype, budgets, settings, store=store, devices="all" if every_device else None)
    devices = encoder.dispatcher.devices
    with given_by("--up-to"):
        chosen = encoder.ladder.of_budgets(up_to)
    folder = Store(store)
    table = Table(title=f"{encoder.family.name}, {encoder.dtype}, {devices[0].device_kind}", title_justify="left")
    columns = ["device"] * (len(devices) > 1) + ["tokens", "patches"]
    for name in columns:
        table.add_column(name, justify="right")
    for name in ("attention", "executable"):
        table.add_column(name)
    for name in ("seconds", "stored", "inputs", "temporaries", "outputs"):
        table.add_column(name, justify="right")
    counted = {"compiled": 0, "store": 0}
    start = time.perf_counter()
    with progress("compiling", len(chosen) * len(devices)) as advance:

        def ready(bucket: Any, executable: Any) -> None:
            program, memory = executable.program, executable.memory()
            path = folder.path(program, executable.device)
            stored = size(path.stat().st_size) if path.is_file() else "not kept"
            how = "from the store" if executable.source == "store" else executable.source
            counted[executable.source] += 1
            table.add_row(
                *([str(executable.device.id)] if len(devices) > 1 else []),
                str(bucket.tokens),
                str(bucket.patches),
                program.backend.name,
                how,
                f"{executable.seconds:.1f}",
                stored,
                *(size(memory[name]) for name in ("inputs", "temporaries", "outputs")),
            )
            table.caption = f"weights, once for all buckets: {size(memory['weights'])}"
            advance(1, f"bucket of {bucket.tokens} tokens: {how}, {executable.seconds:.1f} s, {stored}")

        encoder.dispatcher.warmup(up_to, ready)
    if not Talk.quiet:
        stdout().print(table)
        seconds = time.perf_counter() - start
        stdout().print(
            f"{counted['compiled']} compiled, {counted['store']} from the store, in {seconds:.1f} s: {folder.folder}",
            markup=False,
        )
