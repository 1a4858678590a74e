"""``jaxvit inspect``"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jaxvit.commands.console import Quiet, Verbose, progress, stdout
from jaxvit.commands.options import Budgets, ComputeDtype, Model, Settings, budgets_of, settings_of


def inspect(
    model: Model,
    memory: Annotated[
        bool, typer.Option("--memory", help="Compile what is needed to know every bucket's memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    settings: Settings = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Checkpoint, buckets, memory, what this machine can run. Paste it into a bug report."""
    from jaxvit import inspection

    with progress("inspecting"):
        found = inspection.inspect(
            model,
            dtype=dtype.value if dtype else None,
            budgets=budgets_of(budgets),
            processor=settings_of(settings),
            build=memory,
        )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
        return
    for table in found.tables():
        stdout().print(table)
