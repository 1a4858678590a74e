"""``jaxvit bench``"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from jaxvit.commands.console import Quiet, Talk, Verbose, say, stderr
from jaxvit.commands.options import (
    Budgets,
    ComputeDtype,
    Model,
    Settings,
    StoreFolder,
    given_by,
    load,
    writable,
)

ON_CPU = 256
"""Tokens of the largest bucket that is measured on a CPU, where a larger one takes minutes, unless asked otherwise."""

Random = Annotated[
    bool,
    typer.Option("--random", help="MODEL names a manifest of weights/manifests: random weights in its shapes."),
]
Layers = Annotated[
    int | None, typer.Option("--layers", help="With --random: only the first layers.", show_default=False)
]


def bench(
    model: Model,
    loads: Annotated[
        str | None,
        typer.Option(
            "--loads",
            help="Pieces x patches of each, such as 1x256,4x1024 (default: every bucket, full).",
            show_default=False,
        ),
    ] = None,
    up_to: Annotated[
        int | None, typer.Option("--up-to", help="The largest bucket, in tokens (default on a CPU: 256).")
    ] = None,
    peer: Annotated[
        bool, typer.Option("--peer", help="Beside a packed PyTorch encoder: eager, CUDA graph, torch.compile + graph.")
    ] = False,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="With --peer: leave torch.compile out.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Beside transformers, eager.")] = False,
    images: Annotated[
        str | None,
        typer.Option(
            "--images",
            help="From JPEG bytes: height x width : count, such as 448x448:128,1080x1920:32.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Also the start of a process, with an empty and a filled store.")
    ] = False,
    random: Random = False,
    layers: Layers = None,
    output: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the ladder (.png, .svg; extra `plots`).", show_default=False)
    ] = None,
    attention: Annotated[str, typer.Option("--attention", help="The attention backend of every bucket.")] = "auto",
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    settings: Settings = None,
    store: StoreFolder = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Speed: a call of every bucket against the floor, beside PyTorch, from JPEG bytes. Exit code 1: a step failed."""
    from jaxvit.bench import bench as run
    from jaxvit.bench.loads import piece_of, size_of
    from jaxvit.bench.subject import share_memory

    if output:
        writable(output, ".json", option="--json")
    if plot:
        writable(plot, ".png", ".svg", ".pdf", option="--plot")
    asked, wanted = pictures_of(images), loads.split(",") if loads else None
    with given_by("--loads"):
        for text in wanted or []:
            size_of(text)
    if peer or reference:
        share_memory()
    with weights_of(model, random, layers) as folder:
        encoder = load(folder, dtype, budgets, settings, store=store, attention=attention)
        if up_to is None and encoder.dispatcher.devices[0].platform == "cpu":
            up_to = max(ON_CPU, encoder.ladder.buckets[0].tokens)
        if wanted is None:
            with given_by("--up-to"):
                encoder.ladder.of_budgets(up_to)
        with given_by("--loads"):
            for text in wanted or []:
                piece_of(encoder.family, text)
        report = run(
            encoder,
            wanted,
            name=Path(model).name,
            up_to=up_to,
            peer=peer,
            compiled=not no_compile,
            reference=reference,
            pictures=asked,
            start=start,
            note=note,
            changed=lambda report: report.save(output) if output else None,
        )
    report.print()
    if plot:
        report.plot(plot)
    if not report.ok:
        stderr().print(f"[bold red]failed:[/] {len(report.failures)} steps; --verbose shows why")
    raise typer.Exit(0 if report.ok else 1)


def note(text: str) -> None:
    """What is being done: in a terminal, and under ``--verbose`` in the log."""
    if Talk.verbose:
        logging.getLogger("jaxvit").info(text)
    else:
        say(text)


@contextmanager
def weights_of(model: str, random: bool, layers: int | None) -> Iterator[str]:
    """The folder or id to load: of random weights, while the context lasts, where ``--random`` asks for them."""
    from jaxvit.bench.subject import random_checkpoint

    if layers is not None and not random:
        raise typer.BadParameter("only random weights come with fewer layers: add --random", param_hint="--layers")
    with ExitStack() as stack:
        if random:
            with given_by("--layers"):
                model = str(stack.enter_context(random_checkpoint(model, layers)))
        yield model


def pictures_of(text: str | None) -> list[tuple[int, int, int]]:
    """The value of ``--images``: (height, width, count) of each."""
    found = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)x(\d+):(\d+)", part.strip())
        if not match or not all(map(int, match.groups())):
            raise typer.BadParameter(f"{part!r} is not of the form 448x448:128", param_hint="--images")
        height, width, count = map(int, match.groups())
        found.append((height, width, count))
    return found
