"""The command ``jaxvit``: thin wrappers around the library's calls.

Exit codes: 0 all well, 1 a verdict failed, 2 the input or the command line cannot be used, 130 interrupted.
Tables go to stdout; progress and messages to stderr, progress in a terminal only.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

app = typer.Typer(
    name="jaxvit",
    help="Vision encoders of Kimi-K2.5, LFM2-VL and Qwen2.5-VL in JAX.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


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
Model = Annotated[str, typer.Argument(help="Folder with a Hugging Face snapshot, or a hub id.", show_default=False)]
Images = Annotated[
    list[Path], typer.Argument(help="Pictures; a folder stands for the pictures in it.", show_default=False)
]
ComputeDtype = Annotated[Dtype | None, typer.Option("--dtype", help="Compute dtype (default: the checkpoint's).")]
Budgets = Annotated[
    str | None,
    typer.Option(
        "--budgets", help="Output tokens of each bucket, such as 256,1024,4096, or a ladder file.", show_default=False
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A processing setting that beats the checkpoint's, such as max_pixels=1003520."),
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
    """Yields ``advance(steps)``; draws a bar in a terminal, or a spinner where the total is unknown."""
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
        yield lambda steps=1: bar.advance(task, steps)


def load(model: str, dtype: Dtype | None, budgets: str | None, settings: list[str] | None) -> Any:
    """An encoder from the options that the commands share."""
    import jaxvit

    with progress(f"loading {model}"):
        return jaxvit.load(
            model,
            dtype=dtype.value if dtype else None,
            budgets=_budgets(budgets),
            processor=_settings(settings or []),
        )


def _budgets(text: str | None) -> list[int] | str | None:
    if text is None or not all(part.strip().lstrip("-").isdigit() for part in text.split(",")):
        return text
    return [int(part) for part in text.split(",")]


def _settings(pairs: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is not of the form name=value", param_hint="--set")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


def pictures(paths: list[Path]) -> list[Path]:
    """Folders replaced by the pictures in them, sorted by name."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(one for one in path.iterdir() if one.suffix.lower() in SUFFIXES)
        if not inside:
            raise typer.BadParameter(f"no pictures in {path} (looked for {', '.join(sorted(SUFFIXES))})")
        found += inside
    return found


@app.command()
def demo(quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Tiny checkpoints of all families, real photos: encode, compare with PyTorch, print the table."""
    from jaxvit import demo as demonstration

    result = demonstration.run(progress)
    stdout().print(result.table())
    stdout().print(result.summary())
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def encode(
    model: Model,
    images: Images,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .safetensors file.")] = Path(
        "embeddings.safetensors"
    ),
    dtype: ComputeDtype = None,
    out_dtype: Annotated[Dtype, typer.Option("--out-dtype", help="Dtype of the stored embeddings.")] = Dtype.float32,
    budgets: Budgets = None,
    settings: Settings = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Embeddings of pictures to a .safetensors file, and what a language model needs beside them to a .json file.

    Tensor "0" is [tokens, hidden] of the first picture, "1" of the second, and so on. The .json file lists for each its
    path, its grids (t, h, w) in patches, its tokens, and its layout.
    """
    from safetensors.numpy import save_file

    if output.suffix != ".safetensors":
        raise typer.BadParameter(f"{output} must end in .safetensors", param_hint="--output")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"the folder {output.parent} does not exist", param_hint="--output")
    paths = pictures(images)
    encoder = load(model, dtype, budgets, settings)
    items = encoder.prepare(paths)
    arrays: dict[str, Any] = {}
    with progress("encoding", len(items)) as advance:
        for start in range(0, len(items), BATCH):
            for array in encoder.encode(items[start : start + BATCH], out_dtype=out_dtype.value):
                arrays[str(len(arrays))] = array
                advance()
    index = [
        {"name": name, "path": str(path), "grids": item.grids, "tokens": item.tokens, "layout": _plain(item.layout)}
        for name, path, item in zip(arrays, paths, items, strict=True)
    ]
    save_file(arrays, output, metadata={"format": "np"})
    output.with_suffix(".json").write_text(json.dumps(index, indent=1) + "\n")
    tokens = sum(item.tokens for item in items)
    say(f"{len(items)} pictures, {tokens} tokens of {encoder.family.width}: {output}, {output.with_suffix('.json')}")


BATCH = 64
"""Pictures a call of ``encode``: enough to fill buckets, few enough that the bar moves."""


def _plain(value: Any) -> Any:
    """Arrays and tuples of an item's layout, as JSON has them."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


@app.command()
def compare(
    model: Model,
    images: Images,
    layers: Annotated[bool, typer.Option("--layers", help="Every named intermediate as well.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Without the buckets: exact shapes alone.")] = False,
    output: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file.", show_default=False)
    ] = None,
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    settings: Settings = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Parity with the PyTorch reference, picture by picture (extra `compare`). The exit code says the verdict."""
    from jaxvit.compare import compare as run

    paths = pictures(images)
    encoder = load(model, dtype, budgets, settings)
    with progress("comparing with PyTorch"):
        report = run(encoder, paths, per_layer=layers, bucketed=not exact)
    for part in (report.table(), report.layers(), report.summary()):
        if part is not None:
            stdout().print(part)
    if output:
        output.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    raise typer.Exit(0 if report.ok else 1)


def main() -> None:
    """Entry point: an error of ours is one clear line, not a traceback."""
    try:
        app()
    except Exception as error:
        from jaxvit.errors import JaxvitError

        if Talk.verbose or not isinstance(error, JaxvitError):
            raise
        stderr().print(f"[bold red]error:[/] {escape(str(error))}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
