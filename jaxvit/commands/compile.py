"""``jaxvit compile``"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxvit.commands.console import Quiet, Talk, Verbose, progress, stdout
from jaxvit.commands.options import Budgets, ComputeDtype, Model, Settings, StoreFolder, load


def compile(
    model: Model,
    up_to: Annotated[
        int | None, typer.Option("--up-to", help="The largest budget, in tokens.", show_default=False)
    ] = None,
    store: StoreFolder = None,
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    settings: Settings = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fills the executable store: every bucket of the ladder is compiled, so that later starts only load them."""
    from rich.table import Table

    encoder = load(model, dtype, budgets, settings, store=store)
    chosen = [bucket for bucket in encoder.ladder.buckets if up_to is None or bucket.tokens <= up_to]
    table = Table(title=f"{encoder.family.name}, {encoder.dtype}")
    for name in ("tokens", "patches", "executable", "seconds", "temporaries"):
        table.add_column(name, justify="left" if name == "executable" else "right")
    with progress("compiling", len(chosen) * len(encoder.dispatcher.devices)) as advance:

        def ready(bucket: Any, executable: Any) -> None:
            how = "from the store" if executable.source == "store" else executable.source
            temporaries = f"{executable.memory()['temporaries'] / 2**20:.1f} MiB"
            table.add_row(str(bucket.tokens), str(bucket.patches), how, f"{executable.seconds:.1f}", temporaries)
            advance(1, f"bucket of {bucket.tokens} tokens: {how}, {executable.seconds:.1f} s")

        encoder.dispatcher.warmup(up_to, ready)
    if not Talk.quiet:
        stdout().print(table)
