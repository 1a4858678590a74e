"""Long runs: memory stays flat over calls of random sizes, caches and counters are bounded, a canary keeps its bits."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest

import jaxvit
from jaxvit.buckets import dispatcher
from jaxvit.buckets.executable import Program
from jaxvit.buckets.ladder import overflow_bucket
from jaxvit.models.family import Demand, Item
from tests.families import BUDGETS, FAMILIES, VIDEO, checkpoint, encoder, picture

ONE_OF_EACH = ("qwen2_5_vl", "kimi_k25", "lfm2_5_vl")


def resident() -> float:
    """MiB of this process in memory."""
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def random_call(name: str, generator: np.random.Generator, longest: int) -> list[Any]:
    """One to four pictures of 1 to ``longest`` pixels a side, now and then a clip or a bad item."""
    call: list[Any] = []
    for _ in range(int(generator.integers(1, 5))):
        height, width = (int(side) for side in generator.integers(1, longest + 1, 2))
        width = min(max(width, height // 50), 50 * height)
        call.append(picture(height, width, int(generator.integers(1 << 30))))
    if name in VIDEO and generator.random() < 0.2:
        frames = int(generator.integers(1, 6))
        call.append(jaxvit.Video([picture(56, 84, seed) for seed in range(frames)]))
    if generator.random() < 0.1:
        call.insert(0, b"not a picture")
    return call


def soak(name: str, calls: int, longest: int, every: int) -> list[float]:
    """Memory after each ``every`` calls, once a tenth of them has warmed allocators and caches; checks on the way."""
    loaded = jaxvit.load(checkpoint(name), dtype="float32", budgets=BUDGETS, store=False)
    loaded.warmup()
    generator, canary = np.random.default_rng(11), picture(56, 56)
    before = loaded.encode(canary)[0]
    samples = []
    for number in range(calls):
        for rows in loaded.encode(random_call(name, generator, longest), on_error="return"):
            assert isinstance(rows, jaxvit.errors.MediaError) or np.isfinite(rows).all()
        if number % 5 == 0:
            np.testing.assert_array_equal(loaded.encode(canary)[0], before)
        if number >= calls // 10 and number % every == 0:
            samples.append(resident())
    assert_bounded(loaded)
    return samples


def assert_bounded(loaded: jaxvit.Encoder) -> None:
    dispatcher = loaded.dispatcher
    largest = Demand(2**24, 2**22, 1, 2**20)
    overflows = {overflow_bucket(dispatcher.ladder, Demand(*(max(1, n // 2**i) for n in largest))) for i in range(24)}
    most = len(dispatcher.ladder) + len(overflows)
    assert len(dispatcher._ready) <= most
    assert len(dispatcher._building) <= most
    assert len(dispatcher.statistics.buckets) <= most
    reasons = 2 ** len(Demand._fields) - 1
    assert len(dispatcher.statistics.overflows) <= reasons * len(overflows)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_memory_is_flat_over_200_calls_of_random_sizes(name: str):
    samples = soak(name, 200, 250, 20)
    growth = samples[-1] - samples[0]
    print(f"{name}: 200 calls, {samples[0]:.0f} to {samples[-1]:.0f} MiB, {growth:+.1f} MiB")
    assert growth < 64


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_memory_is_flat_over_2000_calls_of_random_sizes(name: str):
    samples = soak(name, 2000, 400, 100)
    whole, later = samples[-1] - samples[0], samples[-1] - samples[len(samples) // 2]
    print(f"{name}: 2,000 calls, at {samples[-1]:.0f} MiB, {whole:+.1f} since call 200, {later:+.1f} since call 1,100")
    print("  ", " ".join(f"{sample:.0f}" for sample in samples))
    assert whole < 64
    assert later < 24  # allocators take memory in steps of about 13 MiB


def shapes(shared: jaxvit.Encoder, count: int) -> list[Item]:
    """Items of one piece, no two of one size, in an order that is not that of their sizes."""
    found: dict[int, Item] = {}
    for height in range(64, 1025, 32):
        for width in range(64, height + 1, 32):
            (item,) = shared.prepare(picture(height, width))
            if len(item.pieces) == 1:
                found.setdefault(item.num_patches, item)
            if len(found) == count:
                items = list(found.values())
                return [items[place] for place in np.random.default_rng(3).permutation(count)]
    raise AssertionError(f"only {len(found)} sizes")


def test_of_exact_shapes_the_last_programs_are_kept_and_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatcher, "EXACT_CACHE", 3)
    loaded = jaxvit.load(checkpoint("lfm2_5_vl"), dtype="float32", budgets=BUDGETS, store=False)
    items = shapes(loaded, 8)
    first = loaded.encode(items[-1], bucketed=False)[0]
    for item in items:
        loaded.encode(item, bucketed=False)
    gc.collect()
    kept = loaded.dispatcher._exact.values()
    assert [executable.program.bucket.patches for executable in kept] == [item.num_patches for item in items[-3:]]
    alive = [one for one in gc.get_objects() if type(one) is Program and one.family is loaded.family]
    assert {id(one) for one in alive} == {id(executable.program) for executable in kept}
    jax.clear_caches()  # what jax itself keeps of every shape; executables do not need it
    np.testing.assert_array_equal(loaded.encode(items[-1], bucketed=False)[0], first)


EXACT = """
import gc, sys
import jax
import jaxvit
from tests.test_soak import resident, shapes

encoder = jaxvit.load(sys.argv[1], dtype="float32", budgets=[64], store=False)
for number, item in enumerate(shapes(encoder, int(sys.argv[2])), 1):
    encoder.encode(item, bucketed=False)
    if number % 10 == 0:
        if sys.argv[3] == "clear":
            jax.clear_caches()
        print(resident(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_hardly_grows_over_90_exact_shapes(root: Path):
    """jax keeps, for every shape, what it traced of functions of its own that live on. That is all.

    Over 60 shapes 37 and 10 MiB; 39 with cleared caches at the worst seen.
    """
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "XLA_FLAGS": "", "PYTHONPATH": str(root)}
    grown = {}
    for mode in ("keep", "clear"):
        command = [sys.executable, "-c", EXACT, str(checkpoint("lfm2_5_vl")), "90", mode]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        samples = [float(line) for line in done.stdout.split()]
        grown[mode] = samples[-1] - samples[2]
        print(f"{mode}: {' '.join(f'{sample:.0f}' for sample in samples)} MiB")
    assert grown["clear"] < 60
    assert grown["keep"] < 90


def caches() -> Iterator[tuple[str, Any]]:
    """Every ``functools`` cache of a module of the package."""
    for module in pkgutil.walk_packages(jaxvit.__path__, "jaxvit."):
        if module.name.split(".")[1] in ("reference", "__main__", "ray"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if hasattr(value, "cache_info") and getattr(value, "__module__", None) == module.name:
                yield f"{module.name}.{name}", value


def test_every_cache_of_the_package_is_bounded_or_has_no_arguments():
    found = dict(caches())
    assert len(found) >= 8
    for name, cached in found.items():
        info = cached.cache_info()
        if info.maxsize is None:
            assert cached.__wrapped__.__code__.co_argcount == 0, f"{name} grows with its arguments"
        else:
            assert 0 < info.maxsize <= 2048, name


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_of_every_size_need_few_overflow_buckets(name: str):
    """So a service that meets any size compiles a bounded number of programs, and counts in as many counters."""
    shared = encoder(name)
    family, ladder = shared.family, shared.ladder
    largest = max(family.largest().tokens, 13_775)
    found = set()
    for tokens in range(1, largest + 1, 7):
        demand = Demand(tokens * family.merge**2, tokens, 1, tokens if "window" in family.segment_sets else 0)
        if not ladder.holds(demand):
            found.add(overflow_bucket(ladder, demand))
    assert len(found) <= 1 + np.log(largest / max(BUDGETS)) / np.log(1.25) + 8


@pytest.mark.parametrize("name", FAMILIES)
def test_preparing_many_pages_takes_at_most_twice_their_pixels(name: str):
    """One call of 40 pages. What is kept are the items; beside them each thread holds one page in the making."""
    pages = [np.random.default_rng(seed).integers(0, 256, (420, 560, 3), np.uint8) for seed in range(40)]
    shared = encoder(name)
    shared.prepare(pages[:2])
    tracemalloc.start()
    try:
        items = shared.prepare(pages)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    patches = sum(item.num_patches * item.patches.shape[1] for item in items)
    print(f"{name}: {patches / 2**20:.0f} MiB of patches, {kept / 2**20:.0f} MiB kept, peak {peak / 2**20:.0f} MiB")
    assert peak <= 2 * patches
