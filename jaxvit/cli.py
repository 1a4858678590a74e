"""The command ``jaxvit``: thin wrappers around the library's calls, a module each in ``jaxvit/commands/``.

Exit codes: 0 all well, 1 a verdict failed or some files could not be encoded, 2 the input or the command line cannot be
used, 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from rich.markup import escape

from jaxvit import __version__
from jaxvit.commands.bench import bench
from jaxvit.commands.compare import compare
from jaxvit.commands.compile import compile
from jaxvit.commands.console import Talk, stderr
from jaxvit.commands.demo import demo
from jaxvit.commands.encode import encode
from jaxvit.commands.inspect import inspect
from jaxvit.commands.show import show
from jaxvit.commands.tune import tune
from jaxvit.machine import issue_beside

app = typer.Typer(
    name="jaxvit",
    help="Vision encoders of Kimi-K2.5, LFM2-VL and Qwen2.5-VL in JAX.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"jaxvit {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """What the command takes before the name of one of its commands."""


for command in (demo, encode, show, compare, compile, inspect, bench, tune):
    app.command()(command)


def main() -> None:
    """Entry point: an error of ours is one clear line, not a traceback."""
    issue_beside()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be text
    try:
        app()
    except Exception as error:
        from jaxvit.errors import JaxvitError

        if Talk.verbose or not isinstance(error, (JaxvitError, OSError)):
            raise
        # An OSError comes of a file that a command reads or writes beside the library's own.
        remedy = "" if isinstance(error, JaxvitError) else ": check the path, its permissions and the room on its disk"
        stderr().print(f"[bold red]error:[/] {escape(f'{error}{remedy}')}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
