"""``jaxvit encode``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxvit.commands.console import Quiet, Verbose, progress, say
from jaxvit.commands.options import Budgets, ComputeDtype, Dtype, Images, Model, Settings, load, pictures, writable

BATCH = 64
"""Pictures a call of ``Encoder.encode``: enough to fill buckets, few enough that the bar moves."""


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

    writable(output, ".safetensors")
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
        {"name": name, "path": str(path), "grids": item.grids, "tokens": item.tokens, "layout": plain(item.layout)}
        for name, path, item in zip(arrays, paths, items, strict=True)
    ]
    save_file(arrays, output, metadata={"format": "np"})
    output.with_suffix(".json").write_text(json.dumps(index, indent=1) + "\n")
    tokens = sum(item.tokens for item in items)
    say(f"{len(items)} pictures, {tokens} tokens of {encoder.family.width}: {output}, {output.with_suffix('.json')}")


def plain(value: Any) -> Any:
    """Arrays and tuples of an item's layout, as JSON has them."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value
