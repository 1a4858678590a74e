"""``jaxvit encode``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxvit.commands.console import Quiet, Talk, Verbose, progress, say, stdout
from jaxvit.commands.options import (
    ON_CLIPS,
    VIDEOS,
    Budgets,
    ComputeDtype,
    Dtype,
    Images,
    Model,
    Settings,
    load,
    no_clips,
    pictures,
    writable,
)

BATCH = 64
"""Pictures a call of ``Encoder.encode``: enough to fill buckets, few enough that the bar moves."""


def encode(
    model: Model,
    images: Images,
    output: Annotated[
        str, typer.Option("--output", "-o", help="A .safetensors file, or a folder for shards.")
    ] = "embeddings.safetensors",
    dtype: ComputeDtype = None,
    out_dtype: Annotated[Dtype, typer.Option("--out-dtype", help="Dtype of the stored embeddings.")] = Dtype.float32,
    budgets: Budgets = None,
    settings: Settings = None,
    shard: Annotated[int, typer.Option("--shard", min=1, help="Megabytes of a shard, in a folder.")] = 1024,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Embeddings of pictures to a .safetensors file or a folder, and what a language model needs beside them.

    To a file: tensor "0" is [tokens, hidden] of the first picture, "1" of the second, and so on. The .json file beside
    it lists for each its path, its grids (t, h, w) in patches, its tokens, and its layout.

    To a folder, for collections of any size: shards, and index.jsonl with the same for each picture and the shard and
    tensor that hold it. Pictures that cannot be encoded go to errors.jsonl; the exit code is then 1. What the folder
    holds is not encoded again: run the command again after an interruption, or when pictures were added.
    """
    place = Path(output)
    sharded = output.endswith(("/", "\\")) or place.is_dir() or not place.suffix
    if not output:
        raise typer.BadParameter("give a .safetensors file or a folder", param_hint="--output")
    paths = pictures(images, some=sharded)
    if not sharded:
        no_clips(paths, "encode")
        writable(place, ".safetensors")
        writable(place.with_suffix(".json"), ".json")
    encoder = load(model, dtype, budgets, settings)
    if sharded:
        _to_folder(encoder, paths, place, out_dtype.value, shard)
    else:
        _to_file(encoder, paths, place, out_dtype.value)


def _to_folder(encoder: Any, paths: list[Path], folder: Path, out_dtype: str, shard: int) -> None:
    from jaxvit.writer import Summary, write

    with progress("encoding", len(set(paths))) as advance:
        passed = 0

        def show(so_far: Summary) -> None:
            nonlocal passed
            before, passed = passed, so_far.skipped + so_far.encoded + so_far.failed
            advance(passed - before, f"{_rate(so_far)}, fill {so_far.fill:.2f}")

        done = write(encoder, paths, folder, out_dtype=out_dtype, shard_bytes=shard * 10**6, progress=show)
    if not Talk.quiet:
        parts = [f"{done.encoded} of {done.files} pictures encoded, {done.skipped} already there, {done.failed} failed"]
        if done.encoded:
            parts.append(
                f"{done.tokens} tokens, {encoder.family.width} values each, {_rate(done)}, fill {done.fill:.2f}"
            )
        if done.failed:
            parts.append(f"see {folder / 'errors.jsonl'}")
            if any(path.suffix.lower() in VIDEOS for path in paths):
                parts.append(f"`jaxvit encode` takes pictures, not videos: {ON_CLIPS}")
        stdout().print("; ".join(parts), markup=False, soft_wrap=True)
    raise typer.Exit(1 if done.failed else 0)


def _rate(summary: Any) -> str:
    return f"{summary.encoded / max(summary.seconds, 1e-9):.1f} images/s"


def _to_file(encoder: Any, paths: list[Path], output: Path, out_dtype: str) -> None:
    from jaxvit.writer import plain, save, save_text

    items = encoder.prepare(paths)
    arrays: dict[str, Any] = {}
    with progress("encoding", len(items)) as advance:
        for start in range(0, len(items), BATCH):
            for array in encoder.encode(items[start : start + BATCH], out_dtype=out_dtype):
                arrays[str(len(arrays))] = array
                advance()
    index = [
        {"name": name, "path": str(path), "grids": item.grids, "tokens": item.tokens, "layout": plain(item.layout)}
        for name, path, item in zip(arrays, paths, items, strict=True)
    ]
    save(output, arrays, {"format": "np"})
    save_text(output.with_suffix(".json"), json.dumps(index, indent=1) + "\n")
    tokens = sum(item.tokens for item in items)
    written = f"{output}, {output.with_suffix('.json')}"
    say(f"{len(items)} pictures, {tokens} tokens, {encoder.family.width} values each: {written}")
