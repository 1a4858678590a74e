"""What the families' processing shares: normalisation and its inverse, cutting, sampling, reading of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from jaxvit.errors import CheckpointError, MediaError
from jaxvit.resample import Kernel

HUGE = 1e30
"""Numbers of a file stay below it: float32 holds them, and no whole number is too long for a float."""

KERNELS: dict[int, Kernel] = {2: "bilinear", 3: "bicubic"}
"""PIL's numbers, as the checkpoints' ``resample`` has them."""


def normalisation_table(
    mean: Sequence[float], std: Sequence[float], rescale_factor: float = 1 / 255
) -> Float32[np.ndarray, "256 3"]:
    """(value - mean) / std of each uint8 value of each channel, float32, in the reference's order of operations."""
    scale = np.float32(1.0 / rescale_factor)
    shift = np.asarray(mean, np.float32) * scale
    width = np.asarray(std, np.float32) * scale
    table = (np.arange(256, dtype=np.float32)[:, None] - shift) / width
    table.flags.writeable = False
    return table


def recover(
    values: Float32[np.ndarray, "rows values"],
    table: Float32[np.ndarray, "256 3"],
    channels: Int32[np.ndarray, " values"],
) -> UInt8[np.ndarray, "rows values"] | None:
    """The uint8 pixels whose normalised values these are, or None unless every value is the table's, bit for bit.

    Args:
        channels: the colour channel of each value of a row.
    """
    span = (table[255] - table[0])[channels]
    with np.errstate(invalid="ignore"):
        guess = (values - table[0, channels]) * (255 / span).astype(np.float32)
        pixels = np.clip(np.rint(np.nan_to_num(guess)), 0, 255).astype(np.uint8)
    return pixels if np.array_equal(table[pixels, channels], values) else None


def host(value: Any, dtype: type[np.generic]) -> np.ndarray:
    """A numpy array from a processor's output: numpy's, a list, or a tensor, also in bfloat16 or on another device."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    try:
        return np.asarray(value).astype(dtype, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise MediaError(f"inputs hold {value!r:.80}, which are no numbers: hand in a processor's output") from error


def grids_of(inputs: Mapping[str, Any], name: str, rows: int, merge: int) -> list[tuple[int, int, int]]:
    """The (t, h, w) of a processor's output, checked against its rows of pixel values."""
    if name not in inputs:
        raise MediaError(f"inputs have pixel values but no {name}: hand in the processor's whole output")
    array = host(inputs[name], np.int64)
    if array.ndim != 2 or array.shape[1] != 3 or (array < 1).any() or (array[:, 1:] % merge).any():
        raise MediaError(f"{name} must hold rows (t, h, w), h and w multiples of {merge}; got {array.tolist()}")
    grids = [(int(t), int(h), int(w)) for t, h, w in array]
    if (expected := sum(t * h * w for t, h, w in grids)) != rows:
        raise MediaError(f"{name} asks for {expected} patches, and there are {rows}: they belong to different calls")
    return grids


def whole_pieces(name: str, counts: Any, pieces: int) -> list[int]:
    """How many pieces each item has, checked against those that there are."""
    found = [int(one) for one in host(counts, np.int64).reshape(-1)]
    if sum(found) != pieces or min(found, default=1) < 1:
        raise MediaError(f"{name} is {found}, and there are {pieces} pieces: give each item's number, at least 1")
    return found


def cells(
    planes: UInt8[np.ndarray, "3 height width"], merge: int, side: int
) -> UInt8[np.ndarray, "cells patches values"]:
    """Patches of side x side pixels, merge x merge of them a merged cell, cells row-major; values (channel, y, x)."""
    rows, columns = planes.shape[1] // (merge * side), planes.shape[2] // (merge * side)
    split = planes.reshape(3, rows, merge, side, columns, merge, side).transpose(1, 4, 2, 5, 0, 3, 6)
    return split.reshape(rows * columns, merge**2, 3 * side**2)


def uniform(total: int, native: float, fps: float | None) -> list[int]:
    """Frames spread evenly over the file, ``fps`` (2 if None) a second: at least one, at most all of them."""
    count = min(max(1, int(total / native * (2.0 if fps is None else fps))), total)
    return [place * total // count for place in range(count)]


# Settings ------------------------------------------------------------------------------------------------------------


def check_overrides(overrides: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(str(name) for name in set(overrides) - set(known)):
        raise CheckpointError(
            f"processor settings {', '.join(unknown)} are not known here; there are {', '.join(known)}"
        )


def kernel_of(raw: Mapping[str, Any], default: int) -> Kernel:
    resample = raw.get("resample")
    resample = default if resample is None else resample
    if not isinstance(resample, int) or resample not in KERNELS:
        raise CheckpointError(f"resample is {resample!r}, and only 2 (bilinear) and 3 (bicubic) are implemented")
    return KERNELS[resample]


def colours_of(raw: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> tuple[tuple, tuple, float]:
    """image_mean, image_std and rescale_factor of a settings file, checked."""
    for name in ("do_rescale", "do_normalize"):
        if raw.get(name) is False:
            raise CheckpointError(f"{name} is false, and only normalised pixels are implemented")
    found = []
    for name, default in (("image_mean", mean), ("image_std", std)):
        value = raw.get(name)
        value = default if value is None else (value,) * 3 if _number(value) else value
        if not isinstance(value, Sequence) or len(value) != 3 or not all(map(_number, value)):
            raise CheckpointError(f"{name} must be three finite numbers, got {value!r}")
        found.append(tuple(map(float, value)))
    if 0 in found[1]:
        raise CheckpointError(f"image_std has a zero: {found[1]!r}")
    factor = raw.get("rescale_factor") or 1 / 255
    if not _number(factor) or factor < 0:
        raise CheckpointError(f"rescale_factor must be a finite number above 0, got {factor!r}")
    return found[0], found[1], float(factor)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -HUGE < value < HUGE


def positive(name: str, value: Any, most: int = 2**31) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise CheckpointError(f"{name} must be a positive integer, got {value!r}")
    if value > most:
        raise CheckpointError(f"{name} is {value}, and at most {most} is implemented")
    return int(value)


def rate(keyword: Any, stored: Any) -> float:
    """Frames a second of a clip: the keyword's, else the file's, else 2."""
    fps = (stored or 2.0) if keyword is None else keyword
    if not _number(fps) or fps <= 0:
        raise CheckpointError(f"fps is {fps!r}: give frames a second, more than 0")
    return float(fps)


def field(raw: Mapping[str, Any], name: str, default: int) -> int:
    """A positive integer of a settings file; null counts as absent."""
    value = raw.get(name)
    return default if value is None else positive(name, value)
