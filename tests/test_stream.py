"""Streams: order, packing, bounds, errors by position, and nothing left behind."""

from __future__ import annotations

import gc
import io
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import psutil
import pytest

import jaxvit
from jaxvit import stream as streams
from jaxvit.buckets.dispatcher import Call, Output
from jaxvit.errors import CapacityError, DeviceError, JaxvitError, MediaError, NumericsError
from jaxvit.models.family import Item, Piece
from jaxvit.stream import Stream
from tests.families import FAMILIES, VIDEO, checkpoint, clip, encoder, media, picture, relative

BROKEN = b"\xff\xd8\xff\xe0 no picture"


def load(name: str, **options) -> jaxvit.Encoder:
    return jaxvit.load(checkpoint(name), **{"dtype": "float32", "budgets": [64], "store": False, **options})


@cache
def four() -> jaxvit.Encoder:
    return load("qwen2_5_vl", devices="all")


def mixed(name: str, number: int) -> object:
    """The medium of that number in an endless mix of sizes; every seventh a clip, every twentieth broken."""
    generator = np.random.default_rng(number)
    height, width = (int(side) for side in generator.integers(20, 330, 2))
    if number % 20 == 13:
        return BROKEN
    if number % 7 == 3 and name in VIDEO:
        return clip(1 + number % 5, 56 + 28 * (number % 3), 84, number)
    return picture(height, width, number)


def small(count: int) -> list[np.ndarray]:
    return [picture(56, 28 * (1 + number % 4), number) for number in range(count)]


def left_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("jaxvit-stream")]


class Counted:
    """An iterator that knows how much of it was read, by which threads, and whether anything is out of order."""

    def __init__(self, source: Iterator[object]):
        self.source, self.taken, self.threads = source, 0, set()

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> object:
        found = next(self.source)
        self.taken += 1
        self.threads.add(threading.current_thread())
        return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stream_gives_what_encode_gives_in_order(name: str):
    given = media(name) * 4
    found = list(encoder(name).encode_iter(iter(given)))
    expected = encoder(name).encode(given)
    assert len(found) == len(given)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == np.float32
        assert relative(ours, theirs) <= 1e-5
    half = next(encoder(name).encode_iter(given[0], out_dtype="bfloat16"))
    assert str(half.dtype) == "bfloat16"


def test_one_medium_is_a_stream_of_one_and_nothing_a_stream_of_nothing():
    shared = encoder("qwen2_5_vl")
    assert len(list(shared.encode_iter(picture(84, 84)))) == 1
    assert list(shared.encode_iter([])) == []
    assert list(shared.encode_iter(iter(()))) == []
    assert left_threads() == []


def test_a_stream_without_end_is_read_only_as_far_as_it_must_be_and_by_the_caller_alone():
    shared = encoder("qwen2_5_vl")
    source = Counted(picture(56, 56, number % 9) for number in itertools.count())
    found = shared.encode_iter(source, lookahead=8)
    assert source.taken == 0
    for number in range(40):
        assert len(next(found)) == 4
        assert source.taken <= number + 8
    found.close()
    assert source.threads == {threading.current_thread()}
    assert left_threads() == []


def test_threads_put_arrays_together_a_few_ahead(monkeypatch):
    joined: list[str] = []
    finished = streams.finished

    def watched(*args: object) -> object:
        joined.append(threading.current_thread().name)
        return finished(*args)

    monkeypatch.setattr(streams, "finished", watched)
    shared, most = encoder("qwen2_5_vl"), 0
    found = shared.encode_iter(small(40))
    for number, array in enumerate(found):
        assert array.flags.owndata
        most = max(most, len(joined) - number)
    assert len(joined) == 40
    assert all(name.startswith("jaxvit-join") for name in joined)
    assert 1 < most <= 1 + streams.AHEAD


def test_with_a_lookahead_of_one_each_array_comes_before_the_next_item_is_read():
    source = Counted(iter(small(5)))
    for number, _ in enumerate(encoder("qwen2_5_vl").encode_iter(source, lookahead=1)):
        assert source.taken == number + 1


def test_memory_bounds_what_is_read_whatever_the_lookahead(monkeypatch):
    """Items that fill a bucket each: four are held, one more may come in, and the threads have some in hand."""
    monkeypatch.setattr(streams, "THREADS", 2)
    source = Counted(picture(224, 224, number % 5) for number in itertools.count())
    found = load("qwen2_5_vl").encode_iter(source, lookahead=10_000)
    for number in range(12):
        next(found)
        assert source.taken <= number + 1 + 4 + 4
    found.close()


def test_the_first_calls_are_small_and_grow_so_that_the_device_begins_early(monkeypatch):
    known = load("lfm2_5_vl", budgets=[64, 4096])
    stream, batch = Stream(known.dispatcher, [], dtype="float32"), 2 * 4 * 4096
    assert (stream.batch, stream.first) == (batch, batch / 16)
    [item] = known.prepare(picture(256, 256))
    issued: list[int] = []

    def run(items: list[Item], plan: object) -> list[object]:
        issued.append(stream.waiting)
        return []

    monkeypatch.setattr(known.dispatcher, "run", run)
    monkeypatch.setattr(stream, "_late", lambda plan, pieces: [])
    for index in range(260):
        stream._take(streams.Entry(index, item=item))
        stream.pending.append((stream.entries[-1], 0))
    assert issued == [batch // 16, batch // 8, batch // 4, batch // 2, batch]
    only = Stream(load("lfm2_5_vl", budgets=[64]).dispatcher, [], dtype="float32")
    assert only.first == only.batch == 512, "few pieces pack badly"
    large = Stream(load("lfm2_5_vl", budgets=[64, 16384]).dispatcher, [], dtype="float32")
    assert large.batch == 2 * 16384, "not 2 x 65,536"


def test_many_small_pieces_share_no_larger_bucket_than_that_and_a_large_piece_takes_one(monkeypatch):
    monkeypatch.setattr(streams, "LARGE", 512)
    known = load("qwen2_5_vl", budgets=[64, 128, 1024])
    buckets: list[tuple[int, int]] = []
    run = known.dispatcher._run

    def watched(call: Call, pieces: list[Piece]) -> Output:
        buckets.append((call.bucket.patches, len(pieces)))
        return run(call, pieces)

    monkeypatch.setattr(known.dispatcher, "_run", watched)
    given = [picture(112, 112, number) for number in range(60)]
    given[30] = picture(560, 560)
    found = list(Stream(known.dispatcher, given, dtype="float32"))
    assert {patches for patches, _ in buckets} <= {256, 512, 4096}
    assert [count for patches, count in buckets if patches == 4096] == [1]
    assert sum(count for _, count in buckets) == 60
    for one, expected in zip(found, known.encode(given), strict=True):
        np.testing.assert_allclose(one.array, expected, atol=1e-5)


def test_a_cut_begins_with_small_calls_again(monkeypatch):
    known = load("lfm2_5_vl", budgets=[64, 1024])
    given = [picture(140 + index % 7 * 16, 140, index) for index in range(90)]
    packed: list[list[tuple[int, ...]]] = []
    run = known.dispatcher.run

    def recorded(items, plan):
        packed.append([tuple(slot.item for slot in call.slots) for call in plan.calls])
        return run(items, plan)

    monkeypatch.setattr(known.dispatcher, "run", recorded)
    whole = Stream(known.dispatcher, given, dtype="float32", cut=lambda entry: entry.index == 44)
    assert sum(entry.patches for entry in whole) / 2 > 2 * whole.first, "calls have grown before the cut"
    both = packed[:]
    packed.clear()
    list(Stream(known.dispatcher, given[45:], dtype="float32"))
    assert len(both) > len(packed) > 1
    assert both[-len(packed) :] == packed


def test_a_slow_consumer_finds_the_next_item_ready():
    """The next ones are prepared, and their calls issued, while the consumer is busy."""
    shared = encoder("qwen2_5_vl")
    stream = Stream(shared.dispatcher, small(40), dtype="float32", lookahead=4)
    entries = iter(stream)
    next(entries)
    deadline = time.monotonic() + 30
    while not all(entry.prepared is None or entry.prepared.done() for entry in stream.unprepared):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(stream.unprepared) + len(stream.entries) >= 3
    entries.close()


def test_the_same_stream_gives_the_same_bits_however_long_each_item_takes(monkeypatch):
    shared = encoder("qwen2_5_vl")
    given = [mixed("qwen2_5_vl", number) for number in range(60)]
    expected = list(shared.encode_iter(given, on_error="return", lookahead=20))
    prepare = streams.prepared

    def slow(family, index, medium):
        time.sleep(random.uniform(0, 0.02))
        return prepare(family, index, medium)

    monkeypatch.setattr(streams, "prepared", slow)
    for threads in (1, 5):
        monkeypatch.setattr(streams, "THREADS", threads)
        found = shared.encode_iter(iter(given), on_error="return", lookahead=20)
        for ours, theirs in zip(found, expected, strict=True):
            if isinstance(theirs, MediaError):
                assert str(ours) == str(theirs)
            else:
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("lookahead", "size"), [(1024, 25), (12, 25), (1024, 3)])
def test_what_is_packed_between_two_cuts_does_not_depend_on_what_lies_outside(lookahead: int, size: int):
    shared = load("qwen2_5_vl")
    items = shared.prepare([mixed("qwen2_5_vl", number) for number in range(75)], on_error="return")
    given = [BROKEN if isinstance(item, MediaError) else item for item in items]
    source = Counted(iter(given))
    whole = Stream(
        shared.dispatcher,
        source,
        dtype="float32",
        lookahead=lookahead,
        cut=lambda entry: entry.index % size == size - 1,
    )
    arrays = []
    for entry in whole:
        arrays.append(entry.array)
        assert source.taken <= entry.index + lookahead
    for start in range(0, 75, size):
        alone = Stream(shared.dispatcher, given[start : start + size], dtype="float32", lookahead=lookahead)
        for entry, array in zip(alone, arrays[start : start + size], strict=True):
            assert (entry.array is None) == (array is None)
            if array is not None:
                np.testing.assert_array_equal(array, entry.array)


def test_errors_are_handed_out_in_their_places():
    given = [*small(3), BROKEN, *small(3), None]
    found = list(encoder("qwen2_5_vl").encode_iter(given, on_error="return"))
    assert [index for index, one in enumerate(found) if isinstance(one, MediaError)] == [3, 7]
    assert found[3].index == 3
    assert "item 3" in str(found[3])
    assert found[7].index == 7


def test_an_error_is_raised_in_its_place_after_every_earlier_array():
    items = encoder("qwen2_5_vl").prepare(small(5))
    found = encoder("qwen2_5_vl").encode_iter([*items, BROKEN, *items])
    assert [len(array) for array in itertools.islice(found, 5)] == [item.tokens for item in items]
    with pytest.raises(MediaError, match="item 5") as caught:
        next(found)
    assert caught.value.index == 5
    assert left_threads() == []
    assert list(found) == []


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_what_the_iterable_raises_is_raised_after_every_earlier_array(on_error: str):
    def source() -> Iterator[object]:
        yield from small(3)
        raise OSError("the disk is gone")

    found = encoder("qwen2_5_vl").encode_iter(source(), on_error=on_error)
    assert len(list(itertools.islice(found, 3))) == 3
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    assert left_threads() == []


def test_an_item_too_large_or_not_finite_is_an_error_in_its_place():
    strict = load("qwen2_5_vl", on_overflow="error")
    given = [picture(56, 56), picture(300, 300), picture(56, 84)]
    found = list(strict.encode_iter(given, on_error="return"))
    assert [len(found[0]), len(found[2])] == [4, 6]
    assert isinstance(found[1], CapacityError)
    assert "item 1: piece 0" in str(found[1])
    [item] = strict.prepare(picture(56, 84))
    pieces = tuple(replace(one, patches=np.full(one.patches.shape, np.nan, np.float32)) for one in item.pieces)
    poisoned = Item(pieces, item.grids, item.tokens)
    found = list(strict.encode_iter([given[0], poisoned, given[2]], on_error="return"))
    assert [len(found[0]), len(found[2])] == [4, 6]
    assert isinstance(found[1], NumericsError)
    assert found[1].index == 1


@pytest.mark.parametrize("end", ["close", "forget", "raise"])
def test_a_stream_that_ends_early_leaves_no_thread_behind(end: str):
    found = encoder("qwen2_5_vl").encode_iter(itertools.cycle(small(7)))
    next(found)
    assert left_threads()
    if end == "close":
        found.close()
    elif end == "raise":
        with pytest.raises(KeyError):
            found.throw(KeyError("the consumer's"))
    del found
    gc.collect()
    assert left_threads() == []


def test_two_streams_of_one_encoder_do_not_mix():
    shared = encoder("qwen2_5_vl")
    given = small(24)
    there, back = shared.encode_iter(given, lookahead=6), shared.encode_iter(given[::-1], lookahead=3)
    first, second = zip(*zip(there, back, strict=True), strict=True)
    for ours, theirs in zip(first, second[::-1], strict=True):
        assert relative(ours, theirs) <= 1e-5


def test_after_warm_up_a_stream_compiles_nothing(compilations):
    warm = load("qwen2_5_vl", budgets=[64, 320])
    warm.warmup(strict=True)
    compilations.reset()
    assert len(list(warm.encode_iter((mixed("qwen2_5_vl", number) for number in range(40)), on_error="return"))) == 40
    assert compilations.count == 0


@pytest.mark.skipif(jax.local_device_count() < 4, reason="needs four devices")
def test_four_devices_share_a_stream_and_a_failing_one_ends_it(monkeypatch):
    given = small(90)
    found = Stream(four().dispatcher, given, dtype="float32")
    for entry, theirs in zip(found, encoder("qwen2_5_vl").encode(given), strict=True):
        assert relative(entry.array, theirs) <= 1e-5
    assert found.fill >= 0.7
    bucket = four().ladder.buckets[0]
    assert {(bucket, "uint8", device) for device in range(4)} <= set(four().dispatcher._ready)

    def fail(*arguments):
        raise RuntimeError("fell off the bus")

    executable = four().dispatcher._ready[bucket, "uint8", 1]
    monkeypatch.setattr(executable, "run", fail)
    with pytest.raises(DeviceError, match="fell off the bus"):
        list(four().encode_iter(given, on_error="return"))
    assert left_threads() == []
    monkeypatch.undo()
    assert len(list(four().encode_iter(given[:4]))) == 4


@pytest.mark.parametrize(("budgets", "least"), [([64, 320], 0.93), ([320], 0.87)])
def test_buckets_run_full_over_200_mixed_items(budgets: list[int], least: float):
    """One bucket alone too: what does not fill it waits for others."""
    check_stream("qwen2_5_vl", load("qwen2_5_vl", budgets=budgets), 200, least)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budgets"), [("qwen2_5_vl", [64, 320]), ("kimi_k25", [64, 320]), ("lfm2_5_vl", [64, 128, 256, 512])]
)
def test_buckets_run_full_and_memory_is_flat_over_2000_mixed_items(name: str, budgets: list[int]):
    shared = load(name, budgets=budgets)
    resident = check_stream(name, shared, 2000, 0.9)
    settled = resident[5:]
    assert max(settled) - settled[0] <= 32 * 2**20, [size >> 20 for size in resident]


def check_stream(name: str, shared: jaxvit.Encoder, count: int, least: float) -> list[int]:
    """Runs a mixed stream, 5% of it broken; returns the resident bytes at each hundred items."""
    process, resident, bad = psutil.Process(), [], []
    stream = Stream(shared.dispatcher, (mixed(name, number) for number in range(count)), dtype="float32")
    for number, entry in enumerate(stream):
        assert entry.index == number
        if entry.error:
            assert isinstance(entry.error, MediaError)
            bad.append(entry.error.index)
        else:
            assert entry.array.shape == (entry.item.tokens, shared.family.width)
        if number % 50 == 0 and not entry.error:
            assert relative(entry.array, shared.encode(mixed(name, number))[0]) <= 1e-5
        if number % 100 == 99:
            gc.collect()
            resident.append(process.memory_info().rss)
    assert number == count - 1
    assert bad == list(range(13, count, 20))
    assert stream.fill >= least
    return resident


@pytest.mark.parametrize("wrong", [{"on_error": "ignore"}, {"lookahead": 0}, {"lookahead": 2.5}, {"lookahead": True}])
def test_wrong_options_are_refused_at_the_call(wrong: dict):
    with pytest.raises((ValueError, TypeError, JaxvitError), match=r"on_error|lookahead"):
        encoder("qwen2_5_vl").encode_iter([], **wrong)


def test_a_file_object_is_one_medium(photos):
    data = io.BytesIO(photos["chelsea"].read_bytes())
    assert len(list(encoder("qwen2_5_vl").encode_iter(data))) == 1
