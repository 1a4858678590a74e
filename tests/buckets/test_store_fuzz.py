"""Mutated entries through the store's checks: a StoreError, or exactly the payload that was written."""

from __future__ import annotations

import io
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxvit.buckets.store import SUFFIX, Store, read_entry, write_entry
from jaxvit.errors import StoreError

try:
    import resource
except ImportError:  # not on Windows
    resource = None

KEY = {
    "sources": "5f" * 32,
    "versions": {"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"},
    "device": ["cpu", "cpu", ""],
    "ordinal": 0,
    "flags": ["", "", ""],
    "options": {},
    "config": "Config(hidden_size=64, rope_theta=10000.0)",
    "dtype": "float32",
    "bucket": [256, 64, 16, 0],
}
PAYLOAD = random.Random(7).randbytes(3000)
FRAGMENTS = (
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"-", b"0", b"1e999", b"9" * 5000, b"null", b"true", b"NaN", b"\n"),
    *(b"\\ud800", b"\xff", b"\0", b'"sha256":', b'"key":', b'"format":1', b"float32", b"[" * 3000, b'{"a":' * 3000),
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four changes, mostly in the header, where the structure is."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = changed.find(b"\n") if rng.random() < 0.7 else len(changed)
        start = rng.randrange(max(end, 1))
        stop = min(len(changed), start + rng.choice([1, 1, 2, 8, 64]))
        match rng.randrange(8):
            case 0:
                changed[start:stop] = rng.randbytes(stop - start)
            case 1 if changed:
                changed[start % len(changed)] ^= 1 << rng.randrange(8)
            case 2:
                del changed[start:stop]
            case 3:
                changed[start:start] = changed[start:stop]
            case 4:
                changed[start:stop] = rng.choice(FRAGMENTS)
            case 5:
                del changed[rng.randrange(len(changed) + 1) :]
            case 6:  # another digit in a fact, a key or the digest
                digits = [place for place, byte in enumerate(changed[:2000]) if chr(byte).isdigit()]
                if digits:
                    changed[rng.choice(digits)] = rng.choice(b"0123456789")
            case 7:  # parts of the file change places
                changed[:] = changed[start:] + changed[:start]
    return bytes(changed)


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """Valid JSON that says something else, in front of the same payload."""
    line, payload = data.split(b"\n", 1)
    header = json.loads(line)
    name = rng.choice(list(header))
    junk = [None, True, 0, -1, 1.5, "", "0" * 64, [], {}, [[]], dict(header["key"]), "\ud800", 10**400]
    match rng.randrange(4):
        case 0:
            header[name] = rng.choice(junk)
        case 1:
            del header[name]
        case 2:
            header["key"][rng.choice(list(KEY))] = rng.choice(junk)
        case 3:
            header = rng.choice([list(header.items()), name, header["key"], {"entry": header}])
    return json.dumps(header).encode() + b"\n" + payload


def run(folder: Path, count: int) -> None:
    path = folder / ("entry" + SUFFIX)
    write_entry(path, KEY, PAYLOAD, {"seconds": 1.234, "bytes": len(PAYLOAD), "memory": {"weights": 10}})
    original = path.read_bytes()
    assert read_entry(path, KEY) == PAYLOAD
    store, rng = Store(folder), random.Random(20242)
    refused = loaded = 0
    slowest = 0.0
    for _ in range(count):
        path.write_bytes((mutate if rng.random() < 0.7 else mutate_header)(original, rng))
        start = time.perf_counter()
        try:
            found = read_entry(path, KEY)
        except StoreError:
            refused += 1
        else:
            assert found == PAYLOAD
            loaded += 1
        store.entries()
        slowest = max(slowest, time.perf_counter() - start)
    print(f"{count} mutated entries: {refused} refused, {loaded} with the payload whole, slowest {slowest:.3f} s")
    assert refused + loaded == count
    assert loaded > 0
    assert slowest < 5


def test_500_mutated_entries_are_refused_or_whole(tmp_path: Path):
    run(tmp_path, 500)


@pytest.mark.slow
def test_10000_mutated_entries_are_refused_or_whole(tmp_path: Path):
    run(tmp_path, 10_000)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path):
    folder, pipe = tmp_path / ("folder" + SUFFIX), tmp_path / ("pipe" + SUFFIX)
    folder.mkdir()
    os.mkfifo(pipe)
    for path in (folder, pipe):
        with pytest.raises(StoreError, match="no file"):
            read_entry(path, KEY)
    loop = tmp_path / ("loop" + SUFFIX)
    loop.symlink_to(loop)
    with pytest.raises(StoreError, match="cannot be read"):
        read_entry(loop, KEY)
    assert Store(tmp_path).entries() == []


class Stop(BaseException):
    """What ends a write."""


STOPS = (Stop, KeyboardInterrupt, MemoryError, OSError)
OTHER = random.Random(8).randbytes(2**20)


class Half(io.FileIO):
    """A file whose second write is stopped; the first takes half of what it is given."""

    def __init__(self, handle: int, mode: str, stop: type[BaseException]):
        super().__init__(handle, mode)
        self.stop = stop

    def write(self, data: Any) -> int:
        if self.tell():
            raise self.stop
        return super().write(memoryview(data)[: len(data) // 2])


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
@pytest.mark.parametrize("before", [PAYLOAD, None])
def test_a_write_that_is_stopped_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException], where: str, before: bytes | None
):
    path = tmp_path / ("entry" + SUFFIX)
    if before is not None:
        write_entry(path, KEY, before, {})

    def stopped(*_: object) -> None:
        raise stop

    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(os, "fdopen", lambda handle, mode: io.BufferedWriter(Half(handle, mode, stop)))
        else:
            patch.setattr(os, where, stopped)
        with pytest.raises(stop):
            write_entry(path, KEY, OTHER, {})
    assert read_entry(path, KEY) == before
    assert list(tmp_path.iterdir()) == ([] if before is None else [path]), "no temporary is left"
    write_entry(path, KEY, OTHER, {})
    assert read_entry(path, KEY) == OTHER


@pytest.mark.skipif(resource is None, reason="limits the size of files")
def test_a_write_that_the_system_stops_leaves_what_was_there(tmp_path: Path):
    path = tmp_path / ("entry" + SUFFIX)
    write_entry(path, KEY, PAYLOAD, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(OTHER) // 2, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            write_entry(path, KEY, OTHER, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_entry(path, KEY) == PAYLOAD
    assert list(tmp_path.iterdir()) == [path]


def test_readers_beside_a_writer_see_whole_entries(tmp_path: Path):
    path = tmp_path / ("entry" + SUFFIX)
    write_entry(path, KEY, PAYLOAD, {})
    done, seen = threading.Event(), set[bytes | None]()

    def read() -> None:
        while not done.is_set():
            seen.add(read_entry(path, KEY))  # a StoreError if it is damaged

    with ThreadPoolExecutor(2) as pool:
        readers, number = [pool.submit(read) for _ in range(2)], 0
        try:
            while number < 100 or (len(seen) < 2 and not any(reader.done() for reader in readers)):
                write_entry(path, KEY, (OTHER, PAYLOAD)[number % 2], {})
                number += 1
        finally:
            done.set()
        for reader in readers:
            reader.result()
    assert seen == {PAYLOAD, OTHER}
    assert list(tmp_path.iterdir()) == [path]
