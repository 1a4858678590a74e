"""Errors in their place, numbers that are not finite, threads and interrupts: what one encoder takes in a long life."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import PIL.Image
import pytest

import jaxvit
from jaxvit import encoder as encoders
from jaxvit import encodings
from jaxvit.buckets.dispatcher import COMPILE_STACK, Output
from jaxvit.buckets.executable import Executable, Program
from jaxvit.errors import CapacityError, DependencyError, MediaError, NumericsError
from jaxvit.layers.linear import Linear
from jaxvit.models.family import Item, Piece
from jaxvit.threads import with_stack
from tests.families import BUDGETS, FAMILIES, VIDEO, checkpoint, clip, encoder, media, picture, reweighted

ONE_OF_EACH = ("qwen2_5_vl", "kimi_k25", "lfm2_5_vl")


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the results are."""
    monkeypatch.setattr(encodings, "LEAST", 0)


def load(name: str, **options: Any) -> jaxvit.Encoder:
    return jaxvit.load(checkpoint(name), **{"dtype": "float32", "budgets": BUDGETS, "store": False, **options})


def same_bits(ours: Any, theirs: Any) -> bool:
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


# Errors in their place


def test_a_missing_extra_takes_the_place_of_its_item(monkeypatch: pytest.MonkeyPatch):
    shared = encoder("qwen2_5_vl")
    expected = list(shared.encode([picture(56, 56), picture(84, 56)]))
    monkeypatch.setitem(sys.modules, "av", None)
    call = [picture(56, 56), jaxvit.Video.open("clip.mp4"), picture(84, 56)]
    found = shared.encode(call, on_error="return")
    assert isinstance(found[1], DependencyError)
    assert str(found[1]).startswith("item 1: ")
    assert same_bits([found[0], found[2]], expected)
    with pytest.raises(DependencyError, match=r"item 1: .*jaxvit\[video\]"):
        shared.encode(call)


def test_a_piece_too_large_takes_the_place_of_its_item_and_its_index_counts_bad_items(compilations):
    small = load("qwen2_5_vl", budgets=[64], on_overflow="error")
    call = [None, picture(56, 84), picture(300, 300), picture(84, 56)]
    found = small.encode(call, on_error="return")
    assert [type(each) for each in found] == [MediaError, np.ndarray, CapacityError, np.ndarray]
    assert "item 2: piece 0 of 484 patches" in str(found[2])
    assert same_bits([found[1], found[3]], small.encode([call[1], call[3]]))
    assert len(found.plan.calls) == 1
    with pytest.raises(CapacityError, match="item 1: piece 0"):
        small.encode(call[1:])


def test_an_item_without_pieces_is_refused():
    with pytest.raises(MediaError, match="item 1: an Item without pieces"):
        encoder("kimi_k25").encode([picture(28, 28), Item((), (), 0)])


@pytest.mark.parametrize("other", FAMILIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_item_of_another_family_is_refused(name: str, other: str):
    [item] = encoder(other).prepare(picture(56, 84))
    if (name.startswith("lfm2") and other.startswith("lfm2")) or name == other:
        assert len(encoder(name).encode([picture(56, 56), item])[1]) == item.tokens
    else:
        with pytest.raises(MediaError, match=f"item 1: an Item with a piece .* is none of {encoder(name).family.name}"):
            encoder(name).encode([picture(56, 56), item])


def test_a_damaged_item_is_refused():
    [item] = encoder("kimi_k25").prepare(picture(56, 84))
    [piece] = item.pieces
    for patches in (piece.patches[:-1], piece.patches.astype(np.float64), piece.patches[:, :-1], piece.patches[None]):
        bad = Item((Piece(piece.grid, patches, piece.tokens),), item.grids, item.tokens)
        with pytest.raises(MediaError, match="item 1: an Item with a piece"):
            encoder("kimi_k25").encode([item, bad])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in VIDEO])
def test_a_family_without_video_says_so(name: str):
    with pytest.raises(MediaError, match="item 1: lfm2_vl has no video input; pass the frames as images"):
        encoder(name).encode([picture(64, 64), clip(2, 64, 64)])


def test_encoders_and_encodings_say_what_they_are():
    known = encoder("lfm2_5_vl")
    found = known.encode([picture(64, 64), b"", picture(96, 64)], on_error="return")
    buckets, device = known.ladder.buckets, jax.devices()[0].device_kind
    sizes = f"{len(buckets)} buckets of {buckets[0].tokens} to {buckets[-1].tokens} tokens"
    assert repr(known) == f"<Encoder of lfm2_vl: float32 on 1 x {device}, {sizes}>"
    tokens = len(found[0]) + len(found[2])
    assert repr(found) == f"<Encodings of 3 items, 1 of them errors: {tokens} tokens, {known.family.width} values each>"
    assert repr(known.encode([])) == f"<Encodings of 0 items: 0 tokens, {known.family.width} values each>"
    with pytest.raises(IndexError, match="there is no item 3: there are 3"):
        found[3]
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxvit.__version__)


def test_choices_are_checked_before_anything_runs():
    shared = encoder("lfm2_5_vl")
    for wrong in ("float64", "int8", "f4"):
        with pytest.raises(ValueError, match=f"out_dtype is '{wrong}'; choose one of 'float32', 'bfloat16'"):
            shared.encode(picture(64, 64), out_dtype=wrong)
    for call in (shared.encode, shared.encode_iter):
        with pytest.raises(ValueError, match="out_dtype float16 is refused: embeddings may overflow its range"):
            call([picture(64, 64)], out_dtype="float16")


# Numbers that are not finite


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_the_compute_dtype_follows_the_checkpoint_and_float16_becomes_bfloat16_with_a_warning(stored: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = encoders._dtype(None, stored)
    assert found == {"float16": "bfloat16"}.get(stored, stored)
    assert [str(one.message)[:25] for one in caught] == ["the checkpoint is float16"] * (stored == "float16")


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_float16_checkpoint_loads_as_bfloat16_and_float16_is_refused(name: str, tmp_path: Path):
    folder = reweighted(name, tmp_path / "half", "never|weight", lambda array: array)
    from safetensors.numpy import load_file, save_file

    for file in folder.glob("*.safetensors"):
        save_file({k: v.astype(np.float16) if v.dtype.kind == "f" else v for k, v in load_file(file).items()}, file)
    with pytest.warns(UserWarning, match="the checkpoint is float16, whose range these towers overflow"):
        half = jaxvit.load(folder, budgets=BUDGETS, store=False)
    assert half.dtype == "bfloat16"
    with pytest.raises(ValueError, match="dtype float16 is refused: these towers overflow its range"):
        jaxvit.load(folder, dtype="float16", store=False)


def sharing(other: jaxvit.Encoder, shared: jaxvit.Encoder) -> jaxvit.Encoder:
    """Another set of weights through the executables of an encoder of the same sizes."""
    other.dispatcher._ready, other.dispatcher._exact = shared.dispatcher._ready, shared.dispatcher._exact
    return other


MEAN = {"qwen2_5_vl": (123, 117, 104)}
PATCHES = r"patch_embed.*proj\.weight|patch_embedding\.weight"
HIDDEN = r"(blocks|layers)\.1\.mlp\.(down_proj|fc1|fc2)\.weight"


def plain(name: str, white: bool) -> np.ndarray:
    """White, or the family's mean colour, which the normalisation turns into almost nothing."""
    return np.full((56, 56, 3), 255 if white else MEAN.get(name, (127,) * 3), np.uint8)


@pytest.mark.parametrize("bucketed", [True, False], ids=["bucketed", "exact"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_item_that_overflows_is_named_and_the_others_are_whole(
    name: str, dtype: str, bucketed: bool, tmp_path: Path
):
    folder = reweighted(name, tmp_path / "huge", PATCHES, lambda array: array * 1e20)
    huge = sharing(jaxvit.load(folder, dtype=dtype, budgets=BUDGETS, store=False), encoder(name, dtype))
    gray, white = plain(name, False), plain(name, True)
    expected = list(huge.encode([gray, gray, gray], bucketed=bucketed))
    assert all(np.isfinite(rows).all() for rows in expected)

    found = huge.encode([gray, white, gray], bucketed=bucketed)
    for read in (lambda: found[1], lambda: list(found), lambda: found.packed, lambda: found.kept(1)):
        with pytest.raises(NumericsError, match=r"item 1: .* embeddings are not finite") as caught:
            read()
        assert caught.value.index == 1
    assert same_bits([found[0], found[2]], expected[::2])

    found = huge.encode([None, gray, white, gray], on_error="return", bucketed=bucketed)
    assert [type(each) for each in found] == [MediaError, np.ndarray, NumericsError, np.ndarray]
    assert found[2].index == 2
    assert found.kept(2) is None
    assert {item for _, item, _, _ in found.packed} == {1, 3}
    assert same_bits(huge.encode([gray, gray, gray], bucketed=bucketed), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("weight", [np.nan, np.inf, 3e38])
def test_a_weight_that_is_no_number_or_overflows_is_never_passed_over(
    name: str, dtype: str, weight: float, tmp_path: Path
):
    def one(array: np.ndarray) -> np.ndarray:
        if weight == 3e38:
            return np.full_like(array, weight)
        array.flat[7] = weight
        return array

    folder = reweighted(name, tmp_path / "bad", HIDDEN, one)
    bad = sharing(jaxvit.load(folder, dtype=dtype, budgets=BUDGETS, store=False), encoder(name, dtype))
    for bucketed in (True, False):
        found = bad.encode([picture(56, 56), picture(56, 56, 1)], bucketed=bucketed, on_error="return")
        assert [type(each) for each in found] == [NumericsError] * 2
        assert [each.index for each in found] == [0, 1]
        assert found.packed == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_activations_beyond_the_range_of_float16_stay_finite(name: str, dtype: str, tmp_path: Path):
    """White, black and noise through one weight matrix that is scaled so far that its products pass 1e5."""
    folder = reweighted(name, tmp_path / "large", HIDDEN, lambda array: array * 1e7)
    large = sharing(jaxvit.load(folder, dtype=dtype, budgets=BUDGETS, store=False), encoder(name, dtype))
    call = [plain(name, True), np.zeros((56, 56, 3), np.uint8), picture(56, 56)]
    if dtype == "float32":
        taps = [large.intermediates(item)[0] for item in large.prepare(call)[2:]]
        assert max(np.abs(value).max() for tap in taps for value in tap.values()) > 65504
    assert all(np.isfinite(rows).all() for rows in large.encode(call))


# Threads


def calls_of(name: str) -> list[list[Any]]:
    """Calls of several kinds and lengths, some of their items bad."""
    generator = np.random.default_rng(5)
    found: list[list[Any]] = [media(name), [None], [picture(30, 200, 9)], [b"bad", picture(64, 64, 8), "no/such/file"]]
    for number in range(8):
        sides = generator.integers(1, 200, (int(generator.integers(1, 5)), 2))
        call: list[Any] = [picture(int(h), int(w), number) for h, w in sides if max(h, w) < 50 * min(h, w)]
        if number % 3 == 0:
            call.insert(1, b"not a picture")
        found.append(call)
    return found


def results_of(shared: jaxvit.Encoder, call: list[Any]) -> list[Any]:
    return [
        (type(each), str(each)) if isinstance(each, Exception) else each.copy()
        for each in shared.encode(call, on_error="return")
    ]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all(a == b if isinstance(a, tuple) else isinstance(b, np.ndarray) and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_16_threads_get_the_bits_of_a_serial_run_from_their_first_call_on(name: str):
    calls = calls_of(name)
    expected = [results_of(encoder(name), call) for call in calls]
    fresh, barrier = load(name), threading.Barrier(16)
    wrong: list[Any] = []

    def work(number: int) -> None:
        order = random.Random(number).sample(range(len(calls)), len(calls))
        barrier.wait()
        for index in order:
            try:
                if not equal(results_of(fresh, calls[index]), expected[index]):
                    wrong.append((number, index))
            except Exception as error:
                wrong.append((number, index, error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert fresh.stats()["compilations"] == len(BUDGETS)
    assert sum(one["calls"] for one in fresh.stats()["buckets"].values()) > 16 * len(calls) // 2


def test_one_result_may_be_read_by_many_threads():
    found = encoder("kimi_k25").encode(media("kimi_k25") * 3)
    expected = list(encoder("kimi_k25").encode(media("kimi_k25") * 3))
    read: dict[int, list[np.ndarray]] = {}
    threads = [threading.Thread(target=lambda n=n: read.__setitem__(n, list(found))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(read) == 16
    assert all(same_bits(arrays, expected) for arrays in read.values())


def test_threads_that_compile_leave_the_process_its_stack_size(monkeypatch: pytest.MonkeyPatch):
    default, told, stack_size = threading.stack_size(), list[int](), threading.stack_size

    def slowly(*size: int) -> int:
        before = stack_size(*size)
        told.extend(size)
        time.sleep(0.05)  # another thread that starts one would come in now
        return before

    monkeypatch.setattr(threading, "stack_size", slowly)
    fresh = load("lfm2_5_vl")
    threads = [threading.Thread(target=fresh.warmup) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fresh.stats()["compilations"] == len(BUDGETS)
    assert told == [COMPILE_STACK, default] * len(BUDGETS), "set for one start at a time, and put back"
    assert stack_size() == default


class Attributes(ctypes.Union):
    """Room for a pthread_attr_t."""

    _fields_ = (("size", ctypes.c_char * 64), ("align", ctypes.c_long))


def stack() -> int:
    """Bytes of stack that this thread really has."""
    pthread, attributes, size = ctypes.CDLL(None), Attributes(), ctypes.c_size_t()
    pthread.pthread_self.restype = ctypes.c_ulong
    assert not pthread.pthread_getattr_np(ctypes.c_ulong(pthread.pthread_self()), ctypes.byref(attributes))
    assert not pthread.pthread_attr_getstacksize(ctypes.byref(attributes), ctypes.byref(size))
    pthread.pthread_attr_destroy(ctypes.byref(attributes))
    return size.value


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's C library for a thread's stack")
def test_whatever_compiles_has_a_large_stack_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch):
    """The caller has a stack in which a deep tower may not compile."""
    fresh, media = load("lfm2_5_vl", budgets=[64, 128]), [picture(64, 64)]
    piece, sizes, own = fresh.prepare(media)[0].pieces[0], list[int](), list[int]()

    def measured(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **options: sizes.append(stack()) or function(*given, **options)

    for owner, name in ((Program, "apply"), (jax.stages.Lowered, "compile")):
        monkeypatch.setattr(owner, name, measured(getattr(owner, name)))
    for ask in (
        lambda: fresh.encode(media),  # one bucket is missing
        fresh.warmup,
        lambda: fresh.encode(media, bucketed=False),
        lambda: fresh.dispatcher.intermediates(piece),
    ):
        sizes.clear()
        previous = threading.stack_size(2**20)
        try:
            caller = threading.Thread(target=lambda ask=ask: own.append(stack()) or ask())
            caller.start()
        finally:
            threading.stack_size(previous)
        caller.join()
        assert sizes
        assert min(sizes) >= 60 * 2**20
    assert len(own) == 4
    assert max(own) <= 2 * 2**20
    assert fresh.stats()["compilations"] == 2


def test_programs_are_lowered_one_by_one_and_compiled_in_parallel(monkeypatch: pytest.MonkeyPatch):
    lower, compiled = Program.lower, jax.stages.Lowered.compile
    inside, most = list[int](), list[int]()
    together = threading.Barrier(2, timeout=60)

    def lowering(*given: Any, **options: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        try:
            time.sleep(0.3)  # the other thread would come in now
            return lower(*given, **options)
        finally:
            inside.pop()

    def compiling(*given: Any, **options: Any) -> Any:
        together.wait()  # for the other: a BrokenBarrierError if it does not come while this one compiles
        return compiled(*given, **options)

    monkeypatch.setattr(Program, "lower", lowering)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    fresh = load("lfm2_5_vl", budgets=[64, 128])
    fresh.warmup()
    assert fresh.stats()["compilations"] == 2
    assert most == [1, 1]


def test_an_error_in_a_thread_with_a_large_stack_is_the_callers():
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_stack(COMPILE_STACK, stop)
    with pytest.raises(ZeroDivisionError):
        with_stack(COMPILE_STACK, divmod, 1, 0)
    assert with_stack(COMPILE_STACK, divmod, 7, 2) == (3, 1)


# Interrupts


class Once:
    """Raises KeyboardInterrupt at the given call of a function, and never again."""

    def __init__(self, function: Callable[..., Any], at: int = 1):
        self.function, self.left = function, at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else lambda *args, **kwargs: self(instance, *args, **kwargs)


PLACES: dict[str, tuple[Any, str, int]] = {
    "decoding": (encoders._media, "decode", 2),
    "tracing": (Linear, "__call__", 3),
    "lowering": (Program, "lower", 1),
    "compiling": (jax.stages.Lowered, "compile", 1),
    "filling": (Program, "fill", 1),
    "placing": (Executable, "place", 1),
    "running": (Executable, "run", 1),
    "reading": (Output, "host", 2),
}


COMPILED = ("tracing", "lowering", "compiling")
"""Places on the way to a new executable; one family's will do there, since they cost a compilation each."""


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, place) for name in ONE_OF_EACH for place in PLACES if name == "kimi_k25" or place not in COMPILED],
)
def test_a_call_that_is_interrupted_leaves_an_encoder_with_the_same_bits(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
):
    call = [picture(56, 84, 1), picture(64, 64, 2)]
    expected = list(encoder(name).encode(call))
    touched = load(name) if place in COMPILED else encoder(name)
    owner, attribute, at = PLACES[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, Once(getattr(owner, attribute), at))
        with pytest.raises(KeyboardInterrupt):
            list(touched.encode(call))
        assert same_bits(touched.encode(call), expected)
    assert same_bits(touched.encode(call), expected)
    assert not touched.dispatcher._lock.locked()
    assert not any(lock.locked() for lock in touched.dispatcher._building.values())


def test_a_result_whose_reading_was_interrupted_can_be_read_again(monkeypatch: pytest.MonkeyPatch):
    found = encoder("kimi_k25").encode([picture(56, 56), picture(84, 84)])
    monkeypatch.setattr(Output, "host", Once(Output.host, 2))
    with pytest.raises(KeyboardInterrupt):
        list(found)
    assert same_bits(found, encoder("kimi_k25").encode([picture(56, 56), picture(84, 84)]))


def test_a_warm_up_that_is_interrupted_can_be_finished():
    fresh = load("lfm2_5_vl")
    build = fresh.dispatcher.build
    fresh.dispatcher.build = Once(build, 2)
    with pytest.raises(KeyboardInterrupt):
        fresh.warmup(strict=True)
    assert not fresh.dispatcher.strict
    fresh.dispatcher.build = build
    fresh.warmup(strict=True)
    assert fresh.stats()["compilations"] == len(BUDGETS)
    assert same_bits(fresh.encode(picture(64, 64)), encoder("lfm2_5_vl").encode(picture(64, 64)))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that starts a process in the background has it ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(rounds: int) -> None:
    """Sends this process real SIGINTs at random moments of calls; the first rounds compile, too."""
    rng = random.Random(6)
    shared = load("qwen2_5_vl")
    call = [picture(56, 84, 1), picture(64, 64, 2), b"bad", picture(200, 170, 3)]
    expected = results_of(encoder("qwen2_5_vl"), call)
    main, stopped, done = threading.get_ident(), 0, 0
    for number in range(rounds):
        delay = rng.uniform(0, 1.0 if number < 4 else 0.05)
        timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
        try:
            timer.start()
            while True:
                results_of(shared, call)
                done += 1
        except KeyboardInterrupt:
            stopped += 1
        timer.join()
        assert equal(results_of(shared, call), expected)
    print(f"{stopped} interrupts among {done} whole calls: every call after them gave the first one's bits")
    assert stopped == rounds
    assert 1 <= shared.stats()["compilations"] <= len(BUDGETS)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a thread")
def test_20_real_interrupts_change_no_bit_of_later_calls():
    interrupted(20)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a thread")
def test_500_real_interrupts_change_no_bit_of_later_calls():
    interrupted(500)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_every_array_has_memory_of_its_own(out_dtype: str):
    for array in encoder("qwen2_5_vl").encode([picture(56, 56), picture(84, 56)], out_dtype=out_dtype):
        assert array.flags.owndata
        assert array.flags.writeable


def test_reading_all_hands_out_arrays_in_order_until_one_cannot_be_read_and_may_be_given_up(
    monkeypatch: pytest.MonkeyPatch,
):
    shared, call = encoder("qwen2_5_vl"), [picture(56, 56 + 28 * (number % 3), number) for number in range(30)]
    expected = [shared.encode(one)[0] for one in call]
    assert not same_bits(expected[:3], expected[3:6])
    found = shared.encode(call)
    some = list(islice(found, 3))
    assert same_bits(some, expected[:3])
    assert all(again is one for again, one in zip(found, some, strict=False))
    assert same_bits(found, expected)
    finish = encodings.finished

    def broken(family: Any, item: Any, *rest: Any) -> Any:
        if item is items[20]:
            raise ValueError("no memory")
        return finish(family, item, *rest)

    monkeypatch.setattr(encodings, "finished", broken)
    items = shared.prepare(call)
    rows, read = iter(shared.encode(items)), []
    with pytest.raises(ValueError, match="no memory"):
        read.extend(rows)
    assert same_bits(read, expected[:20])


def test_reading_all_does_not_wait_for_threads_that_prepare():
    shared, read = encoder("lfm2_5_vl"), threading.Event()
    found = shared.encode([picture(56, 56), picture(84, 56)])
    expected = list(found)

    class Slow(io.BytesIO):
        def read(self, *size: int) -> bytes:
            assert read.wait(60)
            return super().read(*size)

    class Reading(io.BytesIO):
        def read(self, *size: int) -> bytes:
            assert same_bits(results.pop(), expected)
            return super().read(*size)

    file = io.BytesIO()
    PIL.Image.fromarray(picture(30, 30)).save(file, "png")
    found = shared.encode([picture(56, 56), picture(84, 56)])
    slow = threading.Thread(target=lambda: shared.prepare([Slow(file.getvalue()) for _ in range(64)]))
    slow.start()
    assert same_bits(found, expected)
    read.set()
    slow.join(60)
    assert not slow.is_alive()
    results = [shared.encode([picture(56, 56), picture(84, 56)]) for _ in range(200)]
    assert len(shared.prepare([Reading(file.getvalue()) for _ in range(16)])) == 16
    assert len(results) < 190


def test_results_do_not_keep_the_weights():
    alone = load("lfm2_5_vl")
    found, weights = alone.encode([picture(56, 56), picture(84, 56)]), alone.dispatcher.weights[0]
    kept = [weakref.ref(one) for one in weights]
    rows = list(found)
    del alone, weights
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    assert same_bits(found, rows)


def test_a_thread_works_on_after_the_main_thread_has_ended():
    script = """
import threading, time, jaxvit, numpy as np
from jaxvit import encodings
encodings.LEAST = 0
pictures = [np.full((56, 56, 3), value, np.uint8) for value in (1, 2, 3)] + [np.zeros((200, 200, 3), np.uint8)]
def late():
    threading.main_thread().join()
    time.sleep(0.2)
    encoder = jaxvit.load({folder!r}, budgets=[64, 128], store=False)
    encoder.warmup()
    print(len(list(encoder.encode(pictures))), len(list(encoder.encode_iter(pictures))))
threading.Thread(target=late).start()
"""
    code = script.format(folder=str(checkpoint("lfm2_5_vl")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "4 4\n"), done.stderr


def test_reading_all_begins_with_what_was_read_whatever_became_of_the_rest():
    found = encoder("qwen2_5_vl").encode([picture(56, 56), picture(84, 56)])
    first = found[0]
    for output in found._outputs:
        output.embeddings.delete()
    assert next(iter(found)) is first
