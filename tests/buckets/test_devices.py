"""Data parallel encoding: spreading over devices, equality with one device, failing devices."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import PIL.Image
import pytest

import jaxvit
from jaxvit import tiny
from jaxvit.buckets.devices import interleave, spread
from jaxvit.buckets.dispatcher import Plan
from jaxvit.buckets.executable import Executable
from jaxvit.errors import CapacityError, DeviceError
from jaxvit.models.family import Demand
from tests.buckets.photos import sizes
from tests.families import VIDEO, checkpoint, clip, encoder, picture, relative

NAMES = ("qwen2_5_vl", "lfm2_vl")
SIZES = ((140, 140), (84, 300), (56, 56), (224, 112), (196, 168), (30, 200), (112, 112), (168, 224), (100, 90))

needs_four = pytest.mark.skipif(jax.local_device_count() < 4, reason="needs four devices")


@cache
def four(name: str) -> jaxvit.Encoder:
    return load(name, devices="all")


@cache
def one(name: str) -> jaxvit.Encoder:
    return load(name)


def load(name: str, **options) -> jaxvit.Encoder:
    options = {"dtype": "float32", "budgets": [64], "store": False, **options}
    return jaxvit.load(checkpoint(name), **options)


def mixed(name: str, count: int) -> list:
    """Pictures of several sizes; every third medium a clip where the family takes them."""
    found: list = [picture(height, width, seed) for seed, (height, width) in enumerate(SIZES[:count])]
    if name in VIDEO:
        found[2::3] = [clip(2 + number, 84, 112, number) for number in range(len(found[2::3]))]
    return found


def test_costs_are_spread_so_that_no_device_has_more_than_its_share_and_one_piece():
    ladder = encoder("qwen2_5_vl").ladder
    generator = np.random.default_rng(0)
    for count in (0, 1, 3, 4, 5, 40):
        demands = [Demand(4 * int(tokens), int(tokens), 1, 1) for tokens in generator.integers(1, 64, count)]
        shares = spread(demands, ladder, 4)
        assert sorted(index for share in shares for index in share) == list(range(count))
        assert all(share == sorted(share) for share in shares)
        assert sum(bool(share) for share in shares) == min(count, 4)
        loads = [sum(demands[index].patches for index in share) for share in shares]
        largest = max((demand.patches for demand in demands), default=0)
        assert max(loads) <= sum(loads) / 4 + largest


def test_queues_are_issued_one_of_each_device_in_turn():
    assert interleave([[1, 2, 3], [], [4], [5, 6]]) == [1, 4, 5, 2, 6, 3]
    assert interleave([]) == []


@needs_four
@pytest.mark.parametrize("count", range(10))
@pytest.mark.parametrize("name", NAMES)
def test_items_over_four_devices_equal_those_of_one_device(name: str, count: int):
    items = one(name).prepare(mixed(name, count))
    found = four(name).encode(items)
    assert len(found) == count
    pieces = sum(len(item.pieces) for item in items)
    assert len({call.device for call in found.plan.calls}) == min(pieces, 4)
    for ours, theirs in zip(found, one(name).encode(items), strict=True):
        assert ours.shape == theirs.shape
        assert relative(ours, theirs) <= 1e-5


@needs_four
@pytest.mark.parametrize("name", NAMES)
def test_each_call_equals_the_same_call_on_one_device_bit_for_bit(name: str):
    items = one(name).prepare(mixed(name, 9))
    plan = four(name).plan(items)
    assert Counter(call.device for call in plan.calls[:4]) == {0: 1, 1: 1, 2: 1, 3: 1}
    outputs = four(name).dispatcher.run(items, plan)
    for call, output in zip(plan.calls, outputs, strict=True):
        assert output.embeddings.devices() == {jax.local_devices()[call.device]}
        [alone] = one(name).dispatcher.run(items, Plan((replace(call, device=0),)))
        np.testing.assert_array_equal(np.asarray(output.embeddings), np.asarray(alone.embeddings))


@needs_four
def test_a_long_clip_is_spread_over_every_device_and_put_together_in_order():
    medium = clip(12, 168, 168)
    found = four("qwen2_5_vl").encode(medium)
    assert {call.device for call in found.plan.calls} == {0, 1, 2, 3}
    assert relative(found[0], one("qwen2_5_vl").encode(medium)[0]) <= 1e-5


@needs_four
def test_an_overflow_runs_on_its_device_and_is_counted_once():
    wide = load("qwen2_5_vl", devices="all")
    media = [picture(56, 56, 1), picture(300, 300, 2), picture(56, 84, 3)]
    found = wide.encode(media)
    [overflow] = found.plan.overflows
    assert overflow == (1, 0)
    assert {call.device for call in found.plan.calls} == {0, 1, 2}
    assert sum(wide.stats()["overflows"].values()) == 1
    for ours, theirs in zip(found, encoder("qwen2_5_vl").encode(media), strict=True):
        assert relative(ours, theirs) <= 1e-5
    with pytest.raises(CapacityError, match="item 1: piece 0"):
        load("qwen2_5_vl", devices="all", on_overflow="error").encode(media)


class Broken(Executable):
    """An executable whose device fails: at the call, or later, when its results are read."""

    def __init__(self, executable: Executable, later: bool):
        vars(self).update(vars(executable))
        self.later = later

    def __call__(self, weights, arrays):
        if not self.later:
            raise RuntimeError("uncorrectable ECC error")
        found = super().__call__(weights, arrays)
        for array in found:
            array.delete()
        return found


@needs_four
@pytest.mark.parametrize("later", [False, True])
def test_a_failing_device_ends_the_call_with_its_name_and_the_encoder_stays_usable(monkeypatch, later: bool):
    shared = four("qwen2_5_vl")
    items = shared.prepare([picture(140, 140, seed) for seed in range(16)])
    before = list(shared.encode(items))
    bucket = shared.ladder.buckets[0]
    calls = shared.stats()["buckets"]["64 tokens"]["calls"]
    key = (bucket, "uint8", 2)
    with monkeypatch.context() as patch:
        patch.setitem(shared.dispatcher._ready, key, Broken(shared.dispatcher._ready[key], later))
        with pytest.raises(DeviceError, match=f"device {shared.dispatcher.devices[2].id} ") as caught:
            list(shared.encode(items))
        assert caught.value.device == shared.dispatcher.devices[2].id
        assert isinstance(caught.value.__cause__, RuntimeError)
    if not later:  # the calls issued before it, and none after
        assert shared.stats()["buckets"]["64 tokens"]["calls"] == calls + 2
    for ours, theirs in zip(shared.encode(items), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@needs_four
def test_a_device_that_cannot_build_is_named_and_the_next_call_builds(monkeypatch):
    fresh = load("qwen2_5_vl", devices="all")
    build, failing = fresh.dispatcher.build, fresh.dispatcher.devices[3]

    def refuse(program, device):
        if device == failing:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return build(program, device)

    items = fresh.prepare([picture(140, 140, seed) for seed in range(4)])
    monkeypatch.setattr(fresh.dispatcher, "build", refuse)
    with pytest.raises(DeviceError, match=f"device {failing.id} .*RESOURCE_EXHAUSTED"):
        fresh.encode(items)
    monkeypatch.setattr(fresh.dispatcher, "build", build)
    assert len(fresh.encode(items)) == 4
    assert fresh.stats()["compilations"] == 4


@needs_four
def test_threads_share_an_encoder_of_several_devices():
    shared = four("qwen2_5_vl")
    items = shared.prepare(mixed("qwen2_5_vl", 6))
    expected = list(shared.encode(items))
    found: dict[int, list[np.ndarray]] = {}

    def encode(number: int) -> None:
        found[number] = [array for _ in range(3) for array in shared.encode(items)]

    threads = [threading.Thread(target=encode, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2, 3]
    for arrays in found.values():
        for ours, theirs in zip(arrays, expected * 3, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@needs_four
def test_the_store_serves_every_device(tmp_path: Path, compilations):
    media = [picture(140, 140, seed) for seed in range(4)]
    first = load("qwen2_5_vl", devices="all", store=tmp_path / "store")
    expected = list(first.encode(media))
    assert first.stats()["compilations"] == 4
    compilations.reset()
    second = load("qwen2_5_vl", devices="all", store=tmp_path / "store")
    second.warmup(strict=True)
    assert second.stats()["compilations"] == 0
    assert second.stats()["store_hits"] == 4
    assert compilations.count == 0
    for ours, theirs in zip(second.encode(media), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("devices", ["some", [], [0, 0]])
def test_devices_that_cannot_be_meant_are_refused(devices):
    chosen = [jax.local_devices()[index] for index in devices] if isinstance(devices, list) else devices
    with pytest.raises(ValueError, match="devices"):
        load("qwen2_5_vl", devices=chosen)


@pytest.mark.gpu
@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
def test_two_accelerators_encode_256_photographs_at_1_9_times_the_rate_of_one(photos: dict[str, Path], tmp_path: Path):
    """Prepared beforehand; until every embedding is on a device. Printed beside it: until all are on the host."""
    folder = tiny.random_full_size("Qwen/Qwen2.5-VL-7B-Instruct", tmp_path / "checkpoint")
    originals = [PIL.Image.open(path).convert("RGB") for path in photos.values()]
    pictures = [originals[n % len(originals)].resize(size[::-1]) for n, size in enumerate(sizes(256, 0))]
    rates, items = {}, []
    for count in (2, 1):
        loaded = jaxvit.load(
            folder,
            dtype="bfloat16",
            budgets=[256, 1024, 4096],
            processor={"max_pixels": 4096 * 28**2},
            devices=jax.local_devices()[:count],
            store=tmp_path / "store",
        )
        loaded.warmup()
        items = items or loaded.prepare(pictures)
        on_device = min(seconds(lambda: loaded.encode(items, out_dtype=None).packed) for _ in range(3))  # noqa: B023
        on_host = min(seconds(lambda: list(loaded.encode(items, out_dtype=None))) for _ in range(2))  # noqa: B023
        rates[count] = 256 / on_device
        print(f"{count}: {256 / on_device:.1f} images/s on the device, {256 / on_host:.1f} on the host", flush=True)
    assert rates[2] >= 1.9 * rates[1], rates


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
