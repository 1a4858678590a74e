"""``jaxvit compare``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxvit.commands.console import Quiet, Verbose, progress, stdout
from jaxvit.commands.options import Budgets, ComputeDtype, Images, Model, Settings, load, no_clips, pictures, writable


def compare(
    model: Model,
    images: Images,
    layers: Annotated[bool, typer.Option("--layers", help="Every named intermediate as well.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Without the buckets: exact shapes alone.")] = False,
    output: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file.", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            help="Also draw, to this .png, .svg or .pdf file, where on each picture the two differ (extra `plots`).",
            show_default=False,
        ),
    ] = None,
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    settings: Settings = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Parity with the PyTorch reference, picture by picture (extra `compare`). The exit code says the verdict."""
    from jaxvit import plots
    from jaxvit.compare import compare as run

    if picture:
        writable(picture, *plots.SUFFIXES, option="--picture")
        plots.need()
    paths = pictures(images)
    no_clips(paths, "compare")
    encoder = load(model, dtype, budgets, settings)
    with progress("comparing with PyTorch"):
        report = run(encoder, paths, per_layer=layers, bucketed=not exact)
    for part in (report.table(), report.layers(), report.summary()):
        if part is not None:
            stdout().print(part)
    if output:
        output.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    if picture:
        plots.differences(encoder.family, encoder.prepare(paths), report, picture)
    raise typer.Exit(0 if report.ok else 1)
