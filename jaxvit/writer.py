"""Embeddings of many files on disk, in runs that can be killed and continued.

The folder holds ``shard-00000.safetensors`` and on, ``index.jsonl`` (a line a file: path, grids, tokens, layout, shard,
key) and ``errors.jsonl`` (a line a file that could not be encoded: path, error). A shard carries its part of both lists
in its header and appears under its name only when it is whole, so the shards alone say what is done. What is packed
together never crosses a shard: a run that was killed and run again leaves the same bits as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxvit.encoder import Encoder
from jaxvit.errors import OutputError
from jaxvit.stream import Entry, Stream
from jaxvit.weights.files import read_config_files, vision_tensors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SHARD_BYTES = 2**30
"""A shard is closed once its arrays reach this size."""
WRITING = ".writing-"
"""Prefix of files that are not yet whole."""


@dataclass
class Summary:
    """What a run did, so far.

    Attributes:
        files: how many it was given, without duplicates.
        skipped: of these, embedded by earlier runs.
        encoded, failed: of the others.
        tokens: rows of embeddings of those encoded.
        shards: written by this run.
        fill: share of the patches run that were real.
        seconds: since encoding began.
    """

    files: int = 0
    skipped: int = 0
    encoded: int = 0
    failed: int = 0
    tokens: int = 0
    shards: int = 0
    fill: float = 0.0
    seconds: float = 0.0


def write(
    encoder: Encoder,
    paths: Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    out_dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Embeds files into a folder, skipping those that are there. Files that failed before are tried again, last.

    Args:
        encoder: from ``jaxvit.load``.
        paths: of pictures; each is embedded once, under the path as given.
        folder: made if it is missing; one run at a time.
        out_dtype: "float32" or "bfloat16".
        shard_bytes: bytes of arrays at which a shard is closed.
        progress: called after each file.
    Raises:
        OutputError: the folder is in use, damaged, or holds embeddings made in another way.
    """
    given = list(dict.fromkeys(os.fspath(path) for path in paths))
    folder = Path(folder)
    with _alone(folder):
        made = _made(encoder, out_dtype)
        shards = _Shards(folder, made)
        fresh = [path for path in given if path not in shards.done and path not in shards.bad]
        again = [path for path in given if path in shards.bad and path not in shards.done]
        todo = fresh + again
        summary = Summary(len(given), len(given) - len(todo))
        ends: set[int] = set()
        width, size = encoder.family.width * np.dtype(jnp.dtype(out_dtype)).itemsize, 0

        def cut(entry: Entry) -> bool:
            nonlocal size
            size += entry.item.tokens * width if entry.item else 0
            if size >= shard_bytes or entry.index in (len(fresh) - 1, len(todo) - 1):
                ends.add(entry.index)
                size = 0
            return entry.index in ends

        stream = Stream(encoder.dispatcher, todo, dtype=out_dtype, cut=cut)
        start = time.perf_counter()
        group: list[Entry] = []
        for entry in stream:
            group.append(entry)
            if entry.array is None:
                summary.failed += 1
            else:
                summary.encoded += 1
                summary.tokens += len(entry.array)
            if entry.index in ends:
                summary.shards += shards.add([todo[one.index] for one in group], group)
                group = []
            summary.fill, summary.seconds = stream.fill, time.perf_counter() - start
            progress(summary)
        return summary


class _Shards:
    """The shards of a folder and what they hold; reading it brings the two lists up to date."""

    def __init__(self, folder: Path, made: Mapping[str, Any]):
        self.folder, self.made = folder, made
        self.done: dict[str, dict[str, Any]] = {}
        self.bad: dict[str, str] = {}
        self.count = 0
        for leftover in folder.glob(f"{WRITING}*"):
            try:
                leftover.unlink()
            except OSError as error:
                raise OutputError(
                    f"{leftover} cannot be removed ({error.strerror}): remove it and run again"
                ) from error
        for path in sorted(folder.glob("shard-*.safetensors")):
            if not re.fullmatch(r"shard-[0-9]{5,9}", path.stem):
                raise OutputError(f"{path} is no shard of jaxvit, whose names are numbers: remove it and run again")
            header = _header(path)
            if header["made"] != made:
                raise OutputError(
                    f"{folder} holds embeddings made {_difference(header['made'], made)}: use another folder"
                )
            self.done |= {entry["path"]: entry for entry in header["index"]}
            self.bad |= {entry["path"]: entry["error"] for entry in header["errors"]}
            self.count = int(path.stem.removeprefix("shard-")) + 1
        self.bad = {path: error for path, error in self.bad.items() if path not in self.done}
        errors = ({"path": path, "error": error} for path, error in self.bad.items())
        for name, entries in (("index.jsonl", self.done.values()), ("errors.jsonl", errors)):
            with _whole(folder / name) as temporary:
                temporary.write_bytes(b"".join(map(_line, entries)))

    def add(self, paths: Sequence[str], entries: Sequence[Entry]) -> int:
        """Writes a shard, unless there is nothing new to write; returns how many were written."""
        name = f"shard-{self.count:05d}.safetensors"
        arrays: dict[str, np.ndarray] = {}
        index, errors = [], []
        for path, entry in zip(paths, entries, strict=True):
            if entry.array is None or entry.item is None:
                # The item's number is of this run alone.
                error = str(entry.error).removeprefix(f"item {entry.index}: ")
                errors += [{"path": path, "error": error}] if path not in self.bad else []
            else:
                item, key = entry.item, str(len(arrays))
                arrays[key] = entry.array
                index.append(
                    {"path": path, "grids": item.grids, "tokens": item.tokens, "layout": plain(item.layout)}
                    | {"shard": name, "key": key}
                )
        if not index and not errors:
            return 0
        header = {"made": self.made, "index": index, "errors": errors}
        # Under one key, since safetensors writes several in any order.
        save(self.folder / name, arrays, {"jaxvit": json.dumps(header)})
        for listed, added in (("index.jsonl", index), ("errors.jsonl", errors)):
            try:
                with (self.folder / listed).open("ab") as file:
                    file.writelines(map(_line, added))
            except OSError as error:
                raise _unwritable(self.folder / listed, error) from error
        self.bad |= {entry["path"]: entry["error"] for entry in errors}
        self.count += 1
        return 1


def save(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """A safetensors file that appears under its name only when it is whole."""
    with _whole(path) as temporary:
        mode = temporary.stat().st_mode
        save_file(dict(arrays), temporary, metadata=dict(metadata))
        temporary.chmod(mode)  # safetensors makes files for the user alone


def save_text(path: Path, text: str) -> None:
    """The same for a text in ASCII."""
    with _whole(path) as temporary:
        temporary.write_text(text, encoding="ascii")


def plain(value: Any) -> Any:
    """Arrays and tuples of an item's layout, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _line(entry: Mapping[str, Any]) -> bytes:
    """A line of JSON in UTF-8; bytes of a path that are no text are escaped, and ``json.loads`` gives them back."""
    return json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """An empty file beside ``path`` that takes its name once it is written and on the disk."""
    temporary = path.with_name(f"{WRITING}{path.name}")
    try:
        temporary.open("wb").close()
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise _unwritable(path, error) from error
        raise


def _unwritable(path: Path, error: Exception) -> OutputError:
    reason = getattr(error, "strerror", None) or error
    return OutputError(f"{path} cannot be written ({reason}): make room or choose another place, and run again")


def _at_once(path: Path) -> int:
    """Opens a file to write, makes it where it is missing, and does not wait where it is a pipe that nobody reads."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Makes the folder; two runs in one folder would write the same shards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(_at_once(folder / ".lock"), "wb")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror}): choose another folder") from error
    with lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops it with the process
            except BlockingIOError as error:
                raise OutputError(f"another run is writing to {folder}: wait for it, or use another folder") from error
        yield


def _header(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise OSError("it is no file")
        with safe_open(path, "np") as file:
            header = json.loads(file.metadata()["jaxvit"])
            known = set(file.keys())
        if not isinstance(header["made"], dict):
            raise TypeError("it does not say how it was made")
        texts = [one["path"] for one in header["index"]] + [
            one[key] for one in header["errors"] for key in ("path", "error")
        ]
        if not all(isinstance(one, str) for one in texts) or {one["key"] for one in header["index"]} != known:
            raise ValueError("its lists and its tensors disagree")
        return {name: header[name] for name in ("made", "index", "errors")}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise OutputError(f"{path} is damaged or no shard of jaxvit ({error}): remove it and run again") from error


def _made(encoder: Encoder, out_dtype: str) -> dict[str, Any]:
    """What all embeddings of a folder have in common."""
    return {
        "checkpoint": _digest(encoder),
        "dtype": encoder.dtype,
        "out_dtype": out_dtype,
        "processor": plain(encoder.overrides or {}),
    }


def _digest(encoder: Encoder) -> str:
    """Tells checkpoints apart: their configuration, and the first bytes of every tensor."""
    assert encoder.folder is not None
    digest = hashlib.sha256(json.dumps(read_config_files(encoder.folder), sort_keys=True).encode())
    for name, stored in sorted(vision_tensors(encoder.folder, encoder.family.keys.prefix).items()):
        with stored.file.open("rb") as file:
            file.seek(stored.start)
            digest.update(name.encode() + file.read(min(stored.size, 4096)))
    return digest.hexdigest()


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if old.get("checkpoint") != new["checkpoint"]:
        return "from another checkpoint"
    return ", ".join(f"with {key} {old.get(key)}, not {new[key]}" for key in new if old.get(key) != new[key])
