"""Arguments and options that several commands take, and what is made of them."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxvit.commands.console import progress


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


Model = Annotated[str, typer.Argument(help="Folder with a Hugging Face snapshot, or a hub id.", show_default=False)]
Images = Annotated[
    list[str],  # a Path would lose the separator at the end of a folder's name
    typer.Argument(help="Pictures, folders of them, patterns in quotes, or .txt lists of paths.", show_default=False),
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
StoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="Folder of compiled executables (default: JAXVIT_STORE, else the user's cache).",
        show_default=False,
    ),
]


def load(
    model: str,
    dtype: Dtype | None = None,
    budgets: str | None = None,
    settings: list[str] | None = None,
    **options: Any,
) -> Any:
    """An encoder from the options that the commands share, and others of ``jaxvit.load``."""
    import jaxvit

    with progress(f"loading {model}"):
        return jaxvit.load(
            model,
            dtype=dtype.value if dtype else None,
            budgets=budgets_of(budgets),
            processor=settings_of(settings),
            **options,
        )


@contextmanager
def given_by(option: str) -> Iterator[None]:
    """What the library says of an argument is said of the option that gave it."""
    from jaxvit.errors import OptionError

    try:
        yield
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def budgets_of(text: str | None) -> list[int] | str | None:
    """The value of ``--budgets`` as ``jaxvit.load`` takes it."""
    if text is None or not re.fullmatch(r"[-\s\d,]*\d[\s,]*", text):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text:.80} is no list of output tokens such as 256,1024,4096", param_hint="--budgets"
        ) from error


def settings_of(pairs: list[str] | None) -> dict[str, Any]:
    """The values of ``--set`` as ``jaxvit.load`` takes them."""
    settings: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"{pair!r} is not of the form name=value", param_hint="--set")
        try:
            settings[name] = json.loads(value)
        except (ValueError, RecursionError):
            settings[name] = value
    return settings


VIDEOS = {".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".ogv"}
"""Of files that go in as ``jaxvit.Video.open(path)``."""
ON_CLIPS = "`jaxvit show` draws clips, and in Python encoder.encode(jaxvit.Video.open(path)) encodes them"
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


def pictures(given: Sequence[str | Path], some: bool = False) -> list[Path]:
    """Folders replaced by the pictures in and below them, patterns and lists (.txt, a path a line) by their paths.

    Args:
        some: the caller goes on without what cannot be encoded: files of a list may be missing, though not all.
    """
    found: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if _is_picture(one, path))
            empty = f"no pictures in {path} (looked for {', '.join(sorted(SUFFIXES))})"
        elif path.suffix.lower() == ".txt" and path.is_file():
            inside = _listed(path, some)
            empty = f"no pictures in {path}: give it a path a line"
        elif glob.has_magic(str(path)) and not path.exists():
            inside = [Path(one) for one in sorted(glob.glob(str(path), recursive=True)) if Path(one).is_file()]
            empty = f"no pictures match {path}"
        elif str(name).endswith(("/", "\\")) and not path.exists():
            inside, empty = [], f"there is no folder {name}: check the path"
        else:
            inside, empty = [path], ""
        if not inside:
            raise typer.BadParameter(empty)
        found += inside
    return found


def _listed(path: Path, some: bool) -> list[Path]:
    """The paths of a list, a line each, without blanks at its end; a name need not be text."""
    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read ({error.strerror}): check the list") from error
    if "\0" in text:
        raise typer.BadParameter(f"{path} is no list of paths in UTF-8: save it as one")
    lines = [line.rstrip(" \t\r") for line in text.split("\n")]
    listed = {number: line for number, line in enumerate(lines, 1) if line.strip()}
    if some and any(map(os.path.isfile, listed.values())):
        return list(map(Path, listed.values()))
    missing = [number for number, line in listed.items() if not os.path.isfile(line)]
    if missing:
        first = f"line {missing[0]}: there is no file {listed[missing[0]]!r:.200}"
        if len(missing) == len(listed):
            raise typer.BadParameter(
                f"{path} names no file that there is ({first}): a .txt file is read as a list of paths, one a line, "
                "relative to the current directory"
            )
        more = f" (one of {len(missing)} such lines)" if len(missing) > 1 else ""
        raise typer.BadParameter(f"{path}, {first}{more}: check the path, or take the line out")
    return list(map(Path, listed.values()))


def no_clips(paths: Sequence[Path], command: str) -> None:
    """Refuses video files among the pictures of a command, in its words."""
    for path in paths:
        if path.suffix.lower() in VIDEOS and os.path.isfile(path):
            raise typer.BadParameter(f"{path} is a video, and `jaxvit {command}` takes pictures: {ON_CLIPS}")


def picture_or_clip(path: Path, fps: float | None = None) -> Any:
    """A picture as its path; a clip of a video file, or of the pictures of a folder, pattern or list, in their order.

    Args:
        fps: of a video file, frames a second to take; of pictures, what they were taken at.
    """
    from jaxvit import Video

    if path.suffix.lower() in VIDEOS and not path.is_dir():
        return Video.open(path, fps=fps)
    found = pictures([path])
    if found == [path] and fps is not None:
        raise typer.BadParameter(f"{path} is a picture, which has no rate: leave it out", param_hint="--fps")
    return path if found == [path] else Video(found, fps=fps)


def _is_picture(path: Path, folder: Path) -> bool:
    """Whether it is named as a picture and nothing on the way from the folder is hidden; it may be broken."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in SUFFIXES and not hidden and not path.is_dir()


def writable(path: Path, *suffixes: str, option: str = "--output") -> Path:
    """An output file whose name and folder will do, known before any work is done."""
    if path.suffix.lower() not in suffixes:
        raise typer.BadParameter(f"{path} must end in {' or '.join(suffixes)}", param_hint=option)
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist", param_hint=option)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder", param_hint=option)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} may not be written: choose another place", param_hint=option)
    return path
