"""What a command says. Tables go to stdout; progress and messages to stderr, progress in a terminal only."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Talk:
    """How much the command says: set by ``--quiet`` and ``--verbose``, which every command takes."""

    quiet = False
    verbose = False


def _set_quiet(value: bool) -> bool:
    Talk.quiet = value
    return value


def _set_verbose(value: bool) -> bool:
    Talk.verbose = value
    if value:
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=stderr())])
        logging.getLogger("jaxvit").setLevel(logging.INFO)
    return value


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="Say nothing but results and errors.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_set_verbose, help="Log loading and compiling; full tracebacks."),
]


def stdout() -> Console:
    """Results. A pipe has no width of its own: nothing is cut there."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=160 if piped else None, highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """A message beside the results: nothing under ``--quiet`` or in a pipe."""
    if not Talk.quiet and sys.stderr.isatty():
        stderr().print(f"[dim]{escape(message)}[/dim]")


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Any]:
    """Yields ``advance(steps, description)``; draws a bar in a terminal, or a spinner where the total is unknown."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    shown = columns if total is not None else (columns[0], columns[1], columns[4])
    console = stderr()
    with Progress(*shown, console=console, transient=True, disable=Talk.quiet or not console.is_terminal) as bar:
        task = bar.add_task(escape(description), total=total)

        def advance(steps: int = 1, description: str | None = None) -> None:
            bar.update(task, advance=steps, description=None if description is None else escape(description))

        yield advance


def size(count: int | None) -> str:
    """Bytes for people; "?" where they are not known."""
    if count is None:
        return "?"
    if count < 100 * 2**10:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 10 * 2**30 else f"{count / 2**30:.1f} GiB"
