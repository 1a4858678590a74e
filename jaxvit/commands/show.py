"""``jaxvit show``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxvit.commands.console import Quiet, Verbose, progress, say
from jaxvit.commands.options import Budgets, ComputeDtype, Model, Settings, load, picture_or_clip, writable


def show(
    model: Model,
    image: Annotated[
        Path,
        typer.Argument(
            help="A picture; or a clip: a video file (extra `video`), a folder or a pattern in quotes of its frames.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png, .svg or .pdf file.")] = Path("map.png"),
    fps: Annotated[
        float | None,
        typer.Option("--fps", help="Frames a second to take of a video (default: the model's).", show_default=False),
    ] = None,
    dtype: ComputeDtype = None,
    budgets: Budgets = None,
    settings: Settings = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """The embeddings of a picture or clip as colours, beside what the tower sees (extra `plots`)."""
    from jaxvit import plots
    from jaxvit.weights.writing import is_random

    writable(output, *plots.SUFFIXES)
    plots.need()
    medium = picture_or_clip(image, fps)
    encoder = load(model, dtype, budgets, settings)
    (item,) = encoder.prepare(medium)
    with progress("encoding"):
        (embeddings,) = encoder.encode(item)
    plots.show(encoder.family, item, embeddings, output, title=image.name, random=is_random(encoder.folder))
    say(f"{item.tokens} tokens, {embeddings.shape[1]} values each: {output}")
