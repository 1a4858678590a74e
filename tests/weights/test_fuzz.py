"""Mutated files through the loader: an error of ours, or exactly what the safetensors library reads."""

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxvit.errors import CheckpointError
from jaxvit.weights.load import dtype_of, load_parameters

FRAGMENTS = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"-",
        b"0",
        b"9" * 30,
        b"1e9",
        b"null",
        b"true",
        b"\\ud800",
        b"\0",
        b"\xff",
    ),
    *(b'"F8_E4M3"', b'"F32"', b'"I8"', b'"__metadata__":', b"visual.", b"model.visual.", b" " * 64),
]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four changes, mostly in the length and the header, where the structure is."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = min(len(data), 8 + int.from_bytes(data[:8], "little")) if rng.random() < 0.8 else len(data)
        start = rng.randrange(max(1, end))
        stop = min(end, start + rng.choice([1, 1, 2, 8, 40]))
        match rng.randrange(9):
            case 0:
                data[start:stop] = rng.randbytes(stop - start)
            case 1 if data:
                data[start % len(data)] ^= 1 << rng.randrange(8)
            case 2:
                del data[start:stop]
            case 3:
                data[start:start] = data[start:stop]
            case 4:
                data[start:stop] = rng.choice(FRAGMENTS)
            case 5:
                data[:8] = rng.choice([0, 1, len(data), len(data) - 8, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
            case 6:
                del data[rng.randrange(len(data) + 1) :]
            case 7:  # other digits in a number: offsets, shapes, names of blocks
                digits = [place for place in range(8, end) if 48 <= data[place] < 58]
                if digits:
                    data[rng.choice(digits)] = rng.randrange(48, 58)
            case 8:
                data += rng.randbytes(rng.choice([1, 8, 100]))
    return bytes(data)


def mutate_entries(data: bytes, rng: random.Random) -> bytes:
    """A header that is valid JSON with one field changed, its length set right: past the parser, to the checks."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = rng.choice(list(header))
    entry = header[name]
    number = rng.choice([-1, 0, 1, 7, 8, 24, 192, 384, 2**31, 2**62, 2**64, True, 1.5, None, "8"])
    match rng.randrange(6):
        case 0:
            entry["dtype"] = rng.choice(["F32", "F16", "BF16", "F8_E4M3", "I8", "I64", "F4", "X", "", 3, None])
        case 1:
            entry["data_offsets"][rng.randrange(2)] = number
        case 2:
            entry["shape"].insert(rng.randrange(3), number)
        case 3:
            entry["shape"] = entry["shape"][::-1]
        case 4:
            other = rng.choice(list(header))
            entry["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], entry["data_offsets"]
        case 5:
            header[rng.choice([name + "_scale", "lm_head", "model." + name, "__metadata__"])] = header.pop(name)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def run(folder: Path, toy, write, count: int) -> None:
    path = folder / "model.safetensors"
    write(path, toy.tensors())
    original = path.read_bytes()
    rng = random.Random(20240)
    refused = loaded = 0
    slowest = 0.0
    for _ in range(count):
        path.write_bytes((mutate if rng.random() < 0.6 else mutate_entries)(original, rng))
        start = time.perf_counter()
        try:
            found = dict(load_parameters(folder, toy.table, toy.shapes, np.float32))
            dtype_of(folder, toy.table)
        except CheckpointError:
            refused += 1
        else:
            for parameter, value in _expected(load_file(path), toy).items():
                np.testing.assert_array_equal(found.pop(parameter), value.astype(np.float32))
            assert not found
            loaded += 1
        slowest = max(slowest, time.perf_counter() - start)
    print(
        f"{count} mutated files: {refused} refused, {loaded} loaded as the library reads them, slowest {slowest:.3f} s"
    )
    assert refused + loaded == count
    assert loaded > 0
    assert slowest < 5


def _expected(tensors: dict[str, np.ndarray], toy) -> dict[str, np.ndarray]:
    """Parameter -> value of a checkpoint in the first spelling that stores q, k and v as one."""
    result = {}
    for name, array in tensors.items():
        canonical = name.replace("projector.", "p.", 1).removeprefix("visual.")
        parameter = canonical.replace("norm.weight", "norm.scale").replace("weight", "kernel")
        if parameter in toy.shapes:
            result[parameter] = array.T if array.ndim == 2 else array
    return result


def test_500_mutated_files_are_refused_or_loaded_right(tmp_path, toy, write):
    run(tmp_path, toy, write, 500)


@pytest.mark.slow
def test_10000_mutated_files_are_refused_or_loaded_right(tmp_path, toy, write):
    run(tmp_path, toy, write, 10_000)


def test_500_mutated_indices_are_refused_or_loaded_right(tmp_path, toy, write_shards):
    tensors = toy.tensors()
    shards = {"a.safetensors": dict(list(tensors.items())[:3]), "b.safetensors": dict(list(tensors.items())[3:])}
    write_shards(tmp_path, shards)
    path = tmp_path / "model.safetensors.index.json"
    original = path.read_bytes()
    rng = random.Random(20241)
    refused = loaded = 0
    for _ in range(500):
        path.write_bytes(mutate(b"\xff" * 8 + original, rng)[8:])
        try:
            found = dict(load_parameters(tmp_path, toy.table, toy.shapes, np.float32))
        except CheckpointError:
            refused += 1
        else:
            expected = toy.parameters()
            assert all(np.array_equal(array, expected[name]) for name, array in found.items())
            assert found.keys() == expected.keys()
            loaded += 1
    print(f"500 mutated indices: {refused} refused, {loaded} loaded")
    assert refused > 0
    assert loaded > 0
