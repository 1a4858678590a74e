"""Reading a checkpoint's files: JSON, safetensors headers, the index of shards. Nothing here trusts a file.

Headers are checked here and not by the safetensors library, because a loader that streams (no mapped pages that pile
up in memory) needs only the offsets, and because an error has to name the file, the tensor and the likely cause.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from jaxvit.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIGS = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
MAX_HEADER = 100_000_000
"""Bytes of a safetensors header at most, the limit of the safetensors library."""
MAX_JSON = 256 * 2**20
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of one element of every dtype that the format knows."""


class Stored(NamedTuple):
    """Where a tensor lies: bytes [start, start + size) of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_json(path: Path, unique: bool = False) -> dict[str, Any]:
    """A JSON object; with ``unique`` no name may occur twice in it.

    Raises:
        CheckpointError: the message names the file and, for a syntax error, the line.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path} is larger than {MAX_JSON >> 20} MiB, which no JSON file of a checkpoint is")
        value = json.loads(path.read_bytes(), object_pairs_hook=_unique if unique else None)
    except CheckpointError:
        raise
    except json.JSONDecodeError as error:
        cause = _cause(path) or "it was cut off or edited by hand; fetch the file again"
        raise CheckpointError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}): {cause}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config_files(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> parsed JSON of the config files that a checkpoint's folder holds.

    Raises:
        CheckpointError: no config.json (the message says what the folder holds), or a file that is not valid JSON.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of a Hugging Face snapshot")
    if not present(folder / "config.json"):
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(f"{folder}: {_ADAPTER}")
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"{folder} has no config.json, which says what the model is (found: {found})")
    return {name: read_json(folder / name) for name in CONFIGS if present(folder / name)}


def present(path: Path) -> bool:
    """Whether there is such a file. What only looks like it counts neither as a file nor as none.

    Raises:
        CheckpointError: a link to what is gone, a folder, a pipe.
    """
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise CheckpointError(f"{path} is there and no file ({_strange(path)}): remove it, or fetch the file again")
    return False


def _strange(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which is not there"
    return "a folder" if path.is_dir() else "a pipe, a device or a socket"


def read_header(path: Path) -> dict[str, Stored]:
    """Tensor name -> place, of one safetensors file, every offset checked against the file's size.

    Raises:
        CheckpointError: the file is no safetensors file or not a whole one; the message names it and the likely cause.
    """
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(MAX_HEADER, total - 8):
                cut = f"it is cut off: a header of {length} bytes in a file of {total}; fetch the file again"
                absurd = f"its header would have {length} bytes (at most {MAX_HEADER})"
                cause = _cause(path) or (cut if len(first) < 8 or length <= MAX_HEADER else absurd)
                raise CheckpointError(f"{path} is not a safetensors file: {cause}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with '{'")
        return _entries(path, json.loads(text.decode(), object_pairs_hook=_unique), 8 + length, total)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is corrupt ({error}); fetch the file again") from error


def vision_tensors(folder: Path, is_vision: Callable[[str], Any]) -> dict[str, Stored]:
    """Every tensor of a checkpoint whose name ``is_vision`` accepts, opening only the shards that hold some.

    Raises:
        CheckpointError: no safetensors weights, a shard that is missing, or an index that contradicts its shards.
    """
    folder = Path(folder)
    if present(folder / SINGLE):
        return {name: stored for name, stored in read_header(folder / SINGLE).items() if is_vision(name)}
    if not present(folder / INDEX):
        raise CheckpointError(_no_weights(folder))
    expected = {name: shard for name, shard in read_index(folder / INDEX).items() if is_vision(name)}
    shards = sorted(set(expected.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        lost = [name for name, shard in expected.items() if shard in absent]
        raise CheckpointError(
            f"{folder} lacks {', '.join(absent)}, which {INDEX} names for {len(lost)} vision tensors ({_some(lost)}); "
            "fetch it (shards that hold only the language model are not needed)",
            lost,
        )
    found: dict[str, Stored] = {}
    lies: dict[str, str] = {}
    for shard in shards:
        header = read_header(folder / shard)
        for name, stored in header.items():
            if not is_vision(name):
                continue
            if expected.get(name) == shard:
                found[name] = stored
            else:
                lies[name] = f"lies in {shard}, the index says {expected.get(name, 'nothing')}"
        for name, place in expected.items():
            if place == shard and name not in header:
                lies.setdefault(name, f"is not in {shard}, where the index has it")
    if lies:
        lines = "".join(f"\n  {name} {fault}" for name, fault in sorted(lies.items()))
        raise CheckpointError(
            f"{folder / INDEX} contradicts its shards (files of two downloads mixed?):{lines}", [*lies]
        )
    return found


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> name of its shard."""
    places = read_json(path, unique=True).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{path} has no weight_map; fetch the file again")
    for name, shard in places.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} should lie in {shard!r}, which is not the name of a shard", [name])
    return places


_ADAPTER = "holds only an adapter (adapter_config.json): merge it into its base model and save that"


def _no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    shards = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if shards:
        return f"{folder} has {_some(shards)} but neither {SINGLE} nor {INDEX}; fetch the index"
    if any(name.startswith("adapter_") for name in names):
        return f"{folder} {_ADAPTER}"
    if pickles:
        return (
            f"{folder} has only pickled weights ({_some(pickles)}). Unpickling runs code from the file and is "
            "never done here: convert them to safetensors (save_pretrained of transformers does)"
        )
    return f"{folder} has no weights: neither {SINGLE} nor {INDEX}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are text and occur once."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        name.encode()  # a lone surrogate, which could not even be printed, is a UnicodeEncodeError
        if name in result:
            raise ValueError(f"{name!r} occurs twice")
        result[name] = value
    return result


def _cause(path: Path) -> str | None:
    """What a file really is, when its first bytes tell."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; run `git lfs pull` in the folder, or download the file"
    if head.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "it is a PyTorch pickle under another name; jaxvit never unpickles"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page, as a failed download leaves one; download the file again"
    return None


def _entries(path: Path, header: Mapping[str, Any], begin: int, total: int) -> dict[str, Stored]:
    """The header's entries, checked: known sizes fit their shapes, and the tensors fill the file without overlap."""
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                raise ValueError("__metadata__ does not map text to text")
            continue
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name} has not just dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"{name} has no valid dtype, shape or data_offsets")
        start, stop = offsets
        if stop < start:
            raise ValueError(f"{name} ends at byte {stop}, before its start {start}")
        if dtype in BITS and prod(shape) * BITS[dtype] != (stop - start) * 8:
            raise ValueError(f"{name} has {stop - start} bytes, which is not {dtype} {shape}")
        found[name] = Stored(path, dtype, tuple(shape), begin + start, stop - start)
    end = begin
    for name, stored in sorted(found.items(), key=lambda entry: (entry[1].start, entry[1].size)):
        if stored.start != end:
            fault = "overlaps the tensor before it" if stored.start < end else "leaves a gap before it"
            raise ValueError(f"{name} {fault}")
        end += stored.size
    if end != total:
        lost = sorted(name for name, stored in found.items() if stored.start + stored.size > total)
        fault = f"is cut off: {end - total} bytes are missing" if end > total else f"has {total - end} bytes too many"
        raise CheckpointError(f"{path} {fault} ({total} bytes, its header speaks of {end}); fetch the file again", lost)
    return found


def _sizes(values: Any) -> bool:
    """Whether this is a list of a few non-negative integers that fit 63 bits."""
    if not isinstance(values, list) or len(values) > 32:
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)
