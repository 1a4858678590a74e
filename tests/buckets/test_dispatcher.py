"""Plans, calls, overflow, warm-up and statistics of the dispatcher, for every family."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

import jaxvit
from jaxvit.buckets import dispatcher as dispatchers
from jaxvit.buckets.dispatcher import check_fits, exact_bucket
from jaxvit.errors import CapacityError, MediaError
from jaxvit.models.family import Bucket, Demand
from tests.families import FAMILIES, VIDEO, checkpoint, clip, encoder, media, picture, relative


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def load(name: str, **options) -> jaxvit.Encoder:
    options = {"dtype": "float32", "budgets": [64], "store": False, **options}
    return jaxvit.load(checkpoint(name), **options)


def large(name: str) -> np.ndarray:
    """A picture whose largest piece is over 64 tokens."""
    return picture(300, 300)


def test_every_piece_of_every_item_has_one_slot_and_slots_do_not_overlap(name: str):
    items = encoder(name).prepare(media(name) * 3)
    plan = encoder(name).plan(items)
    slots = [(slot.item, slot.piece) for call in plan.calls for slot in call.slots]
    assert sorted(slots) == [(i, p) for i, item in enumerate(items) for p in range(len(item.pieces))]
    for call in plan.calls:
        ends = [slot.offset + slot.tokens for slot in call.slots]
        assert [slot.offset for slot in call.slots] == [0, *ends[:-1]]
        demands = [items[slot.item].pieces[slot.piece].demand for slot in call.slots]
        assert all(
            need <= room for need, room in zip(map(sum, zip(*demands, strict=True)), call.bucket.capacity, strict=True)
        )


def test_tokens_are_known_before_encoding(name: str):
    items = encoder(name).prepare(media(name))
    found = encoder(name).encode(items)
    assert [len(rows) for rows in found] == [item.tokens for item in items]
    assert {rows.shape[1] for rows in found} == {encoder(name).family.width}


def test_an_item_split_over_buckets_equals_the_same_item_in_one(name: str):
    medium = clip(6, 140, 140) if name in VIDEO else picture(900, 700)
    split = load(name, budgets=[256], max_pieces=2) if name not in VIDEO else load(name, budgets=[36], max_pieces=1)
    found = split.encode(medium)
    assert len(found.plan.calls) > 1
    whole = encoder(name).encode(medium)
    assert relative(found[0], whole[0]) <= 1e-5


def test_an_empty_call_returns_nothing_and_touches_no_device(name: str, compilations):
    fresh = load(name)
    compilations.reset()
    found = fresh.encode([])
    assert len(found) == 0
    assert list(found) == []
    assert found.packed == []
    assert found.plan.calls == ()
    assert compilations.count == 0
    assert fresh.stats()["buckets"] == {}


def test_overflow_compiles_a_larger_bucket_counts_it_and_logs_it(name: str, caplog):
    small = load(name)
    [item] = small.prepare(large(name))
    with caplog.at_level(logging.INFO, "jaxvit"):
        found = small.encode(item)
    too_large = sum(piece.tokens > 64 for piece in item.pieces)
    assert too_large
    assert len(found.plan.overflows) == too_large
    assert sum(small.stats()["overflows"].values()) == too_large
    assert f"{item.pieces[0].rows} patches" in caplog.text
    assert relative(found[0], encoder(name).encode(item)[0]) <= 1e-5
    before = small.stats()["compilations"]
    small.encode(item)
    assert small.stats()["compilations"] == before


def test_overflow_as_an_error_names_item_and_sizes_and_runs_nothing(name: str):
    strict = load(name, on_overflow="error")
    items = strict.prepare([picture(64, 64), large(name)])
    number = next(i for i, piece in enumerate(items[1].pieces) if piece.tokens > 64)
    with pytest.raises(CapacityError, match=f"item 1: piece {number} of {items[1].pieces[number].rows} patches"):
        strict.encode(items)
    assert strict.stats()["buckets"] == {}
    assert len(strict.encode(items[0])[0]) == items[0].tokens


@pytest.mark.parametrize("axis", Demand._fields)
def test_a_bucket_holds_its_capacity_and_not_one_more(axis: str):
    bucket = Bucket(tokens=64, patches=256, segments=4, windows=20)
    full = bucket.capacity
    assert bucket.holds(full)
    assert not bucket.holds(full._replace(**{axis: getattr(full, axis) + 1}))


def test_a_bad_item_stops_the_call_or_takes_only_its_own_place(name: str):
    good, bad = picture(84, 112), b"not a picture"
    shared = encoder(name)
    before = shared.encode(good)[0]
    with pytest.raises(MediaError, match="item 1") as caught:
        shared.encode([good, bad, good, None])
    assert caught.value.index == 1
    assert sorted(caught.value.errors) == [1, 3]
    assert "item 3" in str(caught.value)
    found = shared.encode([good, bad, good, None], on_error="return")
    assert [isinstance(each, MediaError) for each in found] == [False, True, False, True]
    assert found[3].index == 3
    assert relative(found[0], before) <= 1e-5
    assert relative(found[2], before) <= 1e-5
    assert {item for _, item, _, _ in found.packed} == {0, 2}
    assert np.array_equal(shared.encode(good)[0], before)


def test_after_warm_up_nothing_compiles_over_200_mixed_calls(name: str, compilations):
    """Sizes, counts, media, output dtypes, packed views and pruning."""
    warm = load(name, budgets=[64, 320])
    warm.warmup(strict=True)
    compilations.reset()
    generator = np.random.default_rng(0)
    for number in range(200):
        count = int(generator.integers(1, 5))
        call: list = [picture(*(int(side) for side in generator.integers(20, 330, 2)), number) for _ in range(count)]
        if name in VIDEO and number % 4 == 0:
            prune = 0.5 if name == "qwen2_5_vl" and number % 8 == 0 else 0.0
            frames = [picture(56, 84, number + frame) for frame in range(int(generator.integers(1, 6)))]
            call.append(jaxvit.Video(frames, prune=prune))
        found = warm.encode(call, out_dtype=("float32", None)[number % 2])
        assert all(np.isfinite(rows).all() for rows in found)
        assert len(found.packed) >= count
    assert compilations.count == 0
    assert warm.stats()["compilations"] == 2


def test_strict_refuses_what_was_not_warmed_up(name: str):
    warm = load(name, budgets=[64, 320])
    warm.warmup(up_to=64, strict=True)
    assert len(warm.encode(picture(64, 64))[0])
    with pytest.raises(CapacityError, match="strict: the bucket of 320 tokens"):
        warm.encode(large(name))


def test_statistics_add_up(name: str):
    counted = load(name, budgets=[64, 320])
    items = counted.prepare(media(name))
    counted.encode(items)
    counted.encode(items[0])
    stats = counted.stats()
    pieces = sum(len(item.pieces) for item in items) + len(items[0].pieces)
    assert sum(bucket["pieces"] for bucket in stats["buckets"].values()) == pieces
    assert all(0 < bucket["fill"] <= 1 for bucket in stats["buckets"].values())
    assert stats["compilations"] == len(stats["buckets"])
    assert stats["overflows"] == {}
    stats["buckets"].clear()
    assert counted.stats()["buckets"]


def test_a_bucket_that_cannot_fit_the_device_is_refused_before_it_runs(monkeypatch):
    monkeypatch.setattr(dispatchers, "memory_limit", lambda device: 2**20)
    with pytest.raises(CapacityError, match=r"the bucket of 64 tokens needs \d+ MiB .*load with smaller budgets"):
        load("qwen2_5_vl").encode(picture(64, 64))


def test_memory_counts_the_weights_once_and_every_part():
    dispatcher = encoder("qwen2_5_vl").dispatcher
    executable = dispatcher.executable(dispatcher.ladder.buckets[0])
    memory = executable.memory()
    assert memory["weights"] == sum(array.nbytes for array in dispatcher.weights[0])
    assert memory["inputs"] > dispatcher.ladder.buckets[0].patches * 588 * 2
    assert memory["temporaries"] > 0
    check_fits(executable, sum(memory.values()))
    with pytest.raises(CapacityError):
        check_fits(executable, sum(memory.values()) - 1)


def test_the_exact_path_has_no_spare_row_and_a_bounded_cache(monkeypatch):
    assert exact_bucket(Demand(24, 6, 1, 2)).capacity == (24, 6, 1, 2)
    monkeypatch.setattr(dispatchers, "EXACT_CACHE", 2)
    exact = load("kimi_k25")
    for width in (2, 4, 6, 8):
        exact.encode(picture(28, 14 * width), bucketed=False)
        assert len(exact.dispatcher._exact) <= 2


def test_results_of_earlier_calls_stay_valid_and_the_caller_s_arrays_untouched(name: str):
    shared = encoder(name)
    array = picture(112, 112, 7)
    copy = array.copy()
    first = shared.encode([array, array])
    assert np.array_equal(array, copy)
    array[...] = 0
    second = shared.encode(array)
    expected = shared.encode(copy)[0]
    assert relative(first[0], expected) <= 1e-5
    assert relative(first[1], expected) <= 1e-5
    kept = first[0].copy()
    assert not np.allclose(second[0], kept, atol=1e-4)
    assert np.array_equal(first[0], kept)


def test_out_dtype_none_keeps_the_compute_dtype():
    half = encoder("lfm2_5_vl", "bfloat16")
    rows = half.encode(picture(64, 64), out_dtype=None)[0]
    assert str(rows.dtype) == "bfloat16"
    assert half.encode(picture(64, 64))[0].dtype == np.float32


def test_a_ladder_s_attention_is_what_runs():
    dispatcher = encoder("qwen2_5_vl").dispatcher
    bucket = replace(dispatcher.ladder.buckets[0], attention="xla")
    assert dispatcher.program(bucket, "uint8").backend.name == "xla"
    elsewhere = replace(bucket, attention="mosaic")
    assert dispatcher.program(elsewhere, "uint8").backend.name in ("dense", "xla"), "tuned for what cannot run here"
    assert load("qwen2_5_vl", attention="dense").dispatcher.program(bucket, "uint8").backend.name == "dense"
