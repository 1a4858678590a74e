"""``jaxvit tune``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxvit.commands.bench import Layers, Random, note, weights_of
from jaxvit.commands.console import Quiet, Verbose, say
from jaxvit.commands.options import Budgets, ComputeDtype, Model, Settings, StoreFolder, budgets_of, load, writable


def tune(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The ladder file (default: `buckets/<device>/<model>.toml`).", show_default=False
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Be done in about this time, trying less.", show_default=False)
    ] = None,
    random: Random = False,
    layers: Layers = None,
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    settings: Settings = None,
    store: StoreFolder = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measures every bucket on this device and writes a ladder: backends, costs, no bucket that a larger one replaces.

    The candidates are the family's default ladder, or those of --budgets. A ladder under buckets/ is taken by every
    later load of a tower of these sizes on such a device; another file is named by --budgets.
    """
    from jaxvit import tune as tuning
    from jaxvit.bench.report import show

    if output:
        writable(output, ".toml")
    with weights_of(model, random, layers) as folder:
        encoder = load(folder, dtype, budgets, settings, store=store)
        tuned = tuning.tune(
            encoder, encoder.ladder if budgets_of(budgets) is not None else None, seconds=seconds, note=note
        )
    path = output or tuning.default_path(model, encoder.dispatcher.devices[0].device_kind)
    tuned.write(path)
    show(*tuned.table())
    dropped = len(tuned.measured) - len(tuned.ladder)
    say(f"{len(tuned.ladder)} buckets, {dropped} left out: {path}")
