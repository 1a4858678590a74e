"""Checkpoint -> canonical parameters: everything is checked from the headers, then a few at a time are read."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxvit.errors import CheckpointError
from jaxvit.threads import submitted
from jaxvit.weights import quantised
from jaxvit.weights.files import Stored, read_json, vision_tensors
from jaxvit.weights.keys import Key, KeyTable

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
CHUNK = 2**20
"""Elements converted at a time, so that a cast needs no second copy of a tensor."""
READERS = 4
"""Threads that read and move parameters."""
SHARE = 16
"""What they hold is at most one part in so many of what is loaded, or one parameter."""
FileOf = Callable[[Path], FileIO]
"""A path -> the file, open for the thread that asks."""


@dataclass(frozen=True)
class Source:
    """A stored tensor on its way to a parameter."""

    name: str
    key: Key
    stored: Stored
    scale: Stored | None


@dataclass(frozen=True)
class Parameter:
    """A parameter and the stored tensors it is made of: one, or one a part."""

    path: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]


def load_parameters(
    folder: Path,
    table: KeyTable,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: Any,
    finish: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Streams a checkpoint's vision parameters, read by a few threads ahead of whoever takes them.

    Args:
        folder: of a Hugging Face snapshot.
        table: the family's keys.
        shapes: parameter path -> shape, of every parameter that the configuration asks for.
        dtype: of the arrays that come out.
        finish: path and array -> what comes out in its place; done by the threads.
    Returns:
        (path, C-contiguous array) of every parameter once, in the order of the files.
    Raises:
        CheckpointError: at once, before anything is read, naming every tensor that is unmatched, missing, duplicate, of
            a wrong shape or quantised; or later, if a file shrinks meanwhile.
    """
    folder = Path(folder)
    config = _config(folder)
    parameters = plan(vision_tensors(folder, table.prefix), table, shapes, config)
    return _stream(parameters, np.dtype(dtype), quantised.block_of(config), finish)


def dtype_of(folder: Path, table: KeyTable) -> str:
    """The dtype of most of a checkpoint's vision weights: "bfloat16", "float16" or "float32"."""
    elements: Counter[str] = Counter()
    for stored in vision_tensors(Path(folder), table.prefix).values():
        if stored.dtype in DTYPES:
            wide = "BF16" if stored.dtype in quantised.FLOAT8 else stored.dtype
            elements[wide] += stored.size // DTYPES[stored.dtype].itemsize
    return DTYPES[elements.most_common(1)[0][0]].name if elements else "bfloat16"


def plan(
    tensors: Mapping[str, Stored],
    table: KeyTable,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any] | None = None,
) -> list[Parameter]:
    """Which stored tensors make up which parameter, in the order of the files.

    Raises:
        CheckpointError: listing everything that does not fit.
    """
    config = config or {}
    spelling = _spelling(tensors, table)
    block = quantised.block_of(config)
    scales = {name: scale for name in tensors if (scale := quantised.scale_of(name, tensors))}
    unused = set(scales.values()) | {
        f"{name.rpartition('.')[0]}.{activation}" for name in scales for activation in quantised.ACTIVATIONS
    }
    faults: dict[str, str] = {}
    sources: defaultdict[str, list[Source]] = defaultdict(list)
    for name, stored in tensors.items():
        if name in unused:
            continue
        key, path = _target(name, spelling, table)
        scale = tensors[scales[name]] if name in scales else None
        fault = quantised.scale_fault(stored, scale, block) if scale else quantised.scheme(name, stored)
        if fault:
            faults[name] = f"quantised ({fault})"
        elif key is None:
            faults[name] = "unknown to this model"
        elif key.target is not None and path not in shapes:
            faults[name] = f"there is no parameter {path} in this configuration (another depth than config.json says?)"
        elif path is not None and (fault := _shape_fault(key, stored, shapes[path])):
            faults[name] = fault
        if key is not None and path is not None and path in shapes:
            sources[path].append(Source(name, key, stored, scale))
    for path in shapes:
        faults |= _gaps(path, sources[path], spelling, table, faults)
    if faults:
        raise _error(faults, tensors, config)
    parameters = [Parameter(path, tuple(shapes[path]), tuple(sources[path])) for path in shapes]
    return sorted(parameters, key=lambda parameter: parameter.sources[0].stored[:1] + parameter.sources[0].stored[3:4])


def _spelling(tensors: Mapping[str, Stored], table: KeyTable) -> Mapping[str, str]:
    """The one spelling whose prefixes cover every tensor."""
    if not tensors:
        raise CheckpointError(
            f"the checkpoint has no vision tensors: no name begins with {' or '.join(sorted(table.prefixes))}. "
            "A model for text alone, or one with its vision part stripped, cannot be loaded"
        )
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in tensors:
        groups[table.prefix(name) or ""].append(name)
    best = max(
        table.spellings, key=lambda spelling: sum(len(groups[prefix]) for prefix in spelling if prefix in groups)
    )
    strange = {prefix: names for prefix, names in groups.items() if prefix not in best}
    if strange:
        lines = "".join(f"\n  {prefix}: {len(names)} tensors, such as {names[0]}" for prefix, names in groups.items())
        raise CheckpointError(
            f"the checkpoint mixes spellings of its vision tensors, of which one must do (two checkpoints in one "
            f"folder?):{lines}",
            [name for names in strange.values() for name in names],
        )
    return best


def _target(name: str, spelling: Mapping[str, str], table: KeyTable) -> tuple[Key | None, str | None]:
    prefix = table.prefix(name) or ""
    canonical = spelling[prefix] + name[len(prefix) :]
    key = table.find(canonical)
    return key, key.parameter(canonical) if key else None


def _shape_fault(key: Key, stored: Stored, shape: tuple[int, ...]) -> str | None:
    """Why a stored tensor does not become (its part of) a parameter of this shape."""
    if key.part:
        shape = (*shape[:-1], shape[-1] // key.part[1])
    try:
        # an array without memory of its own goes through the transform in the tensor's stead
        found = key.transform(np.broadcast_to(np.zeros((), np.int8), stored.shape)).shape
    except (ValueError, IndexError, OverflowError) as error:
        return f"wrong shape {list(stored.shape)}: {error}"
    if found == tuple(shape):
        return None
    return f"wrong shape {list(stored.shape)}: it becomes {list(found)}, the configuration asks for {list(shape)}"


def _gaps(
    path: str, sources: list[Source], spelling: Mapping[str, str], table: KeyTable, faults: Mapping[str, str]
) -> dict[str, str]:
    """Tensors that a parameter lacks or has twice."""
    parts = Counter(source.key.part for source in sources)
    if (None in parts and len(sources) > 1) or any(count > 1 for count in parts.values()):
        names = [source.name for source in sources]
        return {name: f"duplicate: {' and '.join(names)} all hold {path}" for name in names if name not in faults}
    if None in parts:
        return {}
    named = [(key.part, _written(name, spelling)) for key in table.keys if (name := key.name(path))]
    makers = [(part, name) for part, name in named if name]
    if sources:
        names = [name for part, name in makers if part and part not in parts]
    elif makers:  # the first way of the table to fill it
        first = makers[0][0]
        names = [name for part, name in makers if part] if first else [makers[0][1]]
    else:
        return {path: "missing, a parameter that no tensor of the key table fills"}
    stems = {fault.rpartition(".")[0] for fault, why in faults.items() if why.startswith("quantised")}
    return {name: "missing" for name in names if name.rpartition(".")[0] not in stems}


def _written(canonical: str, spelling: Mapping[str, str]) -> str | None:
    """A canonical name as this checkpoint would spell it; None when it belongs to another spelling."""
    fits = [(written, prefix) for written, prefix in spelling.items() if canonical.startswith(prefix)]
    if not fits:
        return None
    written, prefix = max(fits, key=lambda pair: len(pair[1]))
    return written + canonical[len(prefix) :]


def _error(faults: Mapping[str, str], tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> CheckpointError:
    lines = "".join(f"\n  {name}: {fault}" for name, fault in sorted(faults.items()))
    method = config.get("quantization_config")
    method = method.get("quant_method") if isinstance(method, Mapping) else None
    advice = "is this another model, or another size, than config.json says?"
    if any(fault.startswith("quantised") for fault in faults.values()):
        said = f" (config.json says quant_method {method!r})" if method else ""
        advice = f"take the original checkpoint, or one whose vision part was left unquantised{said}."
    files = ", ".join(sorted({stored.file.name for stored in tensors.values()}))
    return CheckpointError(f"{len(faults)} tensors of {files} do not fit; {advice}{lines}", sorted(faults))


def _config(folder: Path) -> Mapping[str, Any]:
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else {}


def _stream(
    parameters: list[Parameter],
    dtype: np.dtype,
    block: tuple[int, int],
    finish: Callable[[str, np.ndarray], np.ndarray] | None,
) -> Iterator[tuple[str, np.ndarray]]:
    own = threading.local()
    costs = [_cost(parameter, dtype.itemsize, finished=finish is not None) for parameter in parameters]
    room, held = max(max(costs, default=0), sum(costs) // SHARE), 0
    ahead: deque[tuple[int, Future[tuple[str, np.ndarray]]]] = deque()
    with ExitStack() as files_of_threads:

        def file_of(path: Path) -> FileIO:
            files = vars(own).setdefault("files", {})  # a file has one position, so each thread opens its own
            if path not in files:
                try:
                    files[path] = files_of_threads.enter_context(path.open("rb", buffering=0))
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read any more: {error}; fetch it again") from error
            return files[path]

        def made(parameter: Parameter) -> tuple[str, np.ndarray]:
            array = _assemble(parameter, file_of, dtype, block)
            return parameter.path, array if finish is None else finish(parameter.path, array)

        pool = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "jaxvit-read")
        try:
            for parameter, cost in zip(parameters, costs, strict=True):
                while ahead and held + cost > room:
                    held -= ahead[0][0]
                    yield ahead.popleft()[1].result()
                ahead.append((cost, submitted(pool, made, parameter)))
                held += cost
            while ahead:
                yield ahead.popleft()[1].result()
        finally:
            pool.shutdown(cancel_futures=True)


def _cost(parameter: Parameter, itemsize: int, finished: bool) -> int:
    """Bytes held while a parameter is made: itself, what it is finished into, and a tensor as it was read."""
    read = max(prod(source.stored.shape) * (itemsize + 8 * bool(source.scale)) for source in parameter.sources)
    return prod(parameter.shape) * itemsize * (2 if finished else 1) + read


def _assemble(parameter: Parameter, file_of: FileOf, dtype: np.dtype, block: tuple[int, int]) -> np.ndarray:
    whole = _aligned(parameter.shape, dtype)
    for source in parameter.sources:
        index, count = source.key.part or (0, 1)
        width = parameter.shape[-1] // count if parameter.shape else 0
        part = whole[..., index * width : (index + 1) * width] if count > 1 else whole
        raw(part)[...] = source.key.transform(raw(_read(source, file_of, dtype, block)))
    return whole


def raw(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers, which NumPy moves without holding Python's lock; bfloat16 it does not."""
    return array.view(f"u{array.dtype.itemsize}")


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array at a multiple of 64 bytes, which ``jax.device_put`` to a CPU takes over instead of copying it."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _read(source: Source, file_of: FileOf, dtype: np.dtype, block: tuple[int, int]) -> np.ndarray:
    """A tensor in its stored shape, its scale applied."""
    stored, scale = source.stored, source.scale
    result = np.empty(prod(stored.shape), dtype)
    if scale is None:
        _cast(file_of(stored.file), stored, result)
    else:
        weight, factor = (np.empty(part.shape, np.float32) for part in (stored, scale))
        _cast(file_of(stored.file), stored, weight.reshape(-1))
        _cast(file_of(scale.file), scale, factor.reshape(-1))
        quantised.apply_scale(weight, factor, block)
        result[...] = weight.reshape(-1)
    return result.reshape(stored.shape)


def _cast(file: FileIO, stored: Stored, result: np.ndarray) -> None:
    """Reads a tensor into a flat array: in place when it is stored in that dtype, else a chunk at a time."""
    source = DTYPES[stored.dtype]
    file.seek(stored.start)
    if source == result.dtype:
        _fill(file, stored, result)
        return
    chunk = np.empty(min(CHUNK, result.size), source)
    for start in range(0, result.size, CHUNK):
        part = chunk[: min(CHUNK, result.size - start)]
        _fill(file, stored, part)
        with np.errstate(over="ignore", invalid="ignore"):  # what a checkpoint holds beyond the dtype becomes infinite
            result[start : start + part.size] = part


def _fill(file: FileIO, stored: Stored, array: np.ndarray) -> None:
    view = array.view(np.uint8).data
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(f"{stored.file} became shorter while it was read; fetch the file again")
        view = view[count:]
