"""``jaxvit demo``"""

from __future__ import annotations

import typer

from jaxvit.commands.console import Quiet, Verbose, progress, stdout


def demo(quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Tiny checkpoints of all families, real photos: encode, compare with PyTorch, print the table."""
    from jaxvit import demo as demonstration

    result = demonstration.run(progress)
    stdout().print(result.table())
    stdout().print(result.summary())
    raise typer.Exit(0 if result.ok else 1)
