"""Plans, calls, overflow, warm-up and statistics of the dispatcher, for every family."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

import jaxvit
from jaxvit.buckets import dispatcher as dispatchers
from jaxvit.buckets.dispatcher import check_fits, exact_bucket
from jaxvit.buckets.executable import Executable, Program
from jaxvit.buckets.ladder import BLOCK
from jaxvit.errors import CapacityError, LadderError, MediaError
from jaxvit.models.family import Bucket, Demand, Item, Piece
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
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "jaxvit"):
            small.encode(item)
        assert len([one for one in caplog.messages if one.startswith("overflow: ")]) == 1, "a line at each call"
    assert small.stats()["compilations"] == before
    assert sum(small.stats()["overflows"].values()) == 3 * too_large


def test_a_call_without_overflow_logs_nothing(name: str, caplog):
    shared = encoder(name)
    shared.encode(media(name))
    with caplog.at_level(logging.INFO, "jaxvit"):
        shared.encode(media(name))
    assert not caplog.messages


class Stub(Executable):
    """A bucket that is not compiled. It needs a MiB for each token, and says that it is an accelerator's."""

    ran: ClassVar[list[int]] = []

    def __init__(self, program: Program, device: jax.Device):
        self.program = replace(program, platform="cuda")
        self.device, self.seconds, self.source = device, 0.0, "compiled"

    def memory(self) -> dict[str, int]:
        return {"temporaries": self.program.bucket.tokens * 2**20}

    def __call__(self, weights, arrays) -> tuple[jax.Array, jax.Array]:
        tokens = self.program.bucket.tokens
        self.ran.append(tokens)
        return jnp.zeros((tokens, self.program.family.width)), jnp.ones(tokens, bool)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    monkeypatch.setattr(Stub, "ran", [])
    return Stub


def ladder_file(path: Path, *buckets: dict[str, int]) -> Path:
    """A ladder file of buckets that have only these fields."""
    tables = ("\n".join(["[[bucket]]", *(f"{key} = {value}" for key, value in one.items())]) for one in buckets)
    path.write_text("\n".join(tables))
    return path


@dataclass(frozen=True, eq=False)
class Demanding(Piece):
    """A piece that says what it needs."""

    needs: Demand = field(kw_only=True)

    @property
    def demand(self) -> Demand:
        return self.needs


@pytest.mark.parametrize("axis", Demand._fields)
def test_an_overflow_is_refused_logged_and_counted_by_the_axis_that_does_not_fit(
    axis: str, tmp_path: Path, stub: type[Stub], caplog
):
    budgets = ladder_file(tmp_path / "ladder.toml", {"tokens": 64, "patches": 256, "segments": 2, "windows": 3})
    loaded = load("qwen2_5_vl", budgets=budgets)
    loaded.dispatcher.build = stub
    room = loaded.ladder.buckets[0].capacity
    needs = room._replace(**{axis: getattr(room, axis) + 1})
    [item] = loaded.prepare(picture(56, 56))
    piece = item.pieces[0]
    large = replace(item, pieces=(Demanding(piece.grid, piece.patches, piece.tokens, piece.windows, needs=needs),))
    with caplog.at_level(logging.INFO, "jaxvit"):
        loaded.dispatcher.run([item, large, large], loaded.plan([item, large, large]))
    others = [other for other in Demand._fields if other != axis]
    [(reason, count)] = loaded.stats()["overflows"].items()
    assert count == 2
    assert reason.endswith(f": past {getattr(room, axis)} {axis}")
    [line] = [one for one in caplog.messages if one.startswith("overflow: ")]
    assert f"{getattr(needs, axis)} {axis}" in line
    assert reason in line

    loaded.dispatcher.on_overflow = "error"
    with pytest.raises(CapacityError, match="item 1: piece 0 of") as caught:
        loaded.plan([item, large])
    message = str(caught.value)
    assert f"it needs {getattr(needs, axis)} {axis}, and the nearest bucket" in message
    assert f"holds {getattr(room, axis)} {axis}; load with" in message
    assert not any(f"{getattr(room, other)} {other}" in message.split(") holds")[1] for other in others)
    assert str(loaded.dispatcher.refusal(1, large)) == message


# A ladder that is exactly full, and one less than that on each axis

ROOMY = {"tokens": 96, "patches": 384, "segments": 4, "windows": 24}
BOUNDARY = [(name, axis) for name in ("qwen2_5_vl", "kimi_k25") for axis in Demand._fields]
BOUNDARY.remove(("kimi_k25", "windows"))


def roomy(name: str, path: Path, **axes: int) -> Path:
    """A ladder of one bucket with room to spare but on these axes."""
    fields = ROOMY | axes
    if name != "qwen2_5_vl":
        del fields["windows"]
    return ladder_file(path, fields)


def less(axis: str, need: int) -> int:
    """The next smaller capacity: patches come in blocks."""
    return need - (BLOCK if axis == "patches" else 1)


@pytest.mark.parametrize(("name", "axis"), BOUNDARY)
def test_a_bucket_that_is_exactly_full_on_an_axis_gives_the_exact_path_s_result(name: str, axis: str, tmp_path: Path):
    shared = encoder(name)
    items = shared.prepare([picture(224, 224, 1), picture(112, 112, 2)])
    needs = Demand(*map(sum, zip(*(item.pieces[0].demand for item in items), strict=True)))
    need = getattr(needs, axis)
    full = load(name, budgets=roomy(name, tmp_path / "full.toml", **{axis: need}))
    found = full.encode(items)
    assert len(found.plan.calls) == 1
    assert not found.plan.overflows
    for ours, exact in zip(found, shared.encode(items, bucketed=False), strict=True):
        assert relative(ours, exact) <= 1e-5
    short = load(name, budgets=roomy(name, tmp_path / "short.toml", **{axis: less(axis, need)}))
    assert len(short.plan(items).calls) == 2
    assert not short.plan(items).overflows


@pytest.mark.parametrize("name", ["qwen2_5_vl", "kimi_k25"])
def test_a_bucket_that_one_piece_fills_on_every_axis_gives_the_exact_path_s_result(name: str, tmp_path: Path):
    shared = encoder(name)
    [item] = shared.prepare(picture(224, 224, 1))
    full = load(name, budgets=roomy(name, tmp_path / "full.toml", **item.pieces[0].demand._asdict()))
    assert full.ladder.buckets[0].capacity == item.pieces[0].demand
    found = full.encode(item)
    assert not found.plan.overflows
    assert relative(found[0], shared.encode(item, bucketed=False)[0]) <= 1e-5


@pytest.mark.parametrize(("name", "axis"), [case for case in BOUNDARY if case[1] != "segments"])
def test_one_less_than_a_piece_needs_on_an_axis_is_an_overflow_that_names_it(name: str, axis: str, tmp_path: Path):
    shared = encoder(name)
    [item] = shared.prepare(picture(224, 224, 1))
    need = getattr(item.pieces[0].demand, axis)
    room = less(axis, need)
    budgets = roomy(name, tmp_path / "short.toml", **{axis: room})
    short = load(name, budgets=budgets)
    found = short.encode(item)
    assert found.plan.overflows == ((0, 0),)
    assert relative(found[0], shared.encode(item, bucketed=False)[0]) <= 1e-5
    [(reason, count)] = short.stats()["overflows"].items()
    assert (reason.split(": ")[1], count) == (f"past {room} {axis}", 1)
    message = rf"it needs {need} {axis}, and the nearest bucket \(\d+ tokens\) holds {room} {axis};"
    refusing = load(name, budgets=budgets, on_overflow="error")
    with pytest.raises(CapacityError, match=message):
        refusing.encode(item)
    assert refusing.stats()["compilations"] == 0


@pytest.mark.parametrize("most", [None, 8])
def test_a_clip_of_150_frame_pairs_equals_the_exact_path(most: int | None):
    """On the default ladder, as it is and with fewer segments than the clip has pairs."""
    default = load("qwen2_5_vl", budgets=None, max_pieces=most, processor={"video_min_pixels": 56 * 56})
    [item] = default.prepare(clip(299, 56, 56))
    assert len(item.pieces) == 150
    found = default.encode(item)
    assert not found.plan.overflows
    assert all(len(call.slots) <= call.bucket.segments <= (most or 256) for call in found.plan.calls)
    assert relative(found[0], default.encode(item, bucketed=False)[0]) <= 1e-5


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


def floats(item: Item) -> Item:
    """The item with pixels of float32, normalised by no table."""
    pieces = (Piece(one.grid, one.patches.astype(np.float32) / 127 - 1, one.tokens, one.windows) for one in item.pieces)
    return replace(item, pieces=tuple(pieces))


FORMS: dict[str, Callable[[jaxvit.Encoder, np.ndarray, Path], Any]] = {
    "array": lambda warm, array, folder: array,
    "PIL": lambda warm, array, folder: PIL.Image.fromarray(array),
    "JPEG": lambda warm, array, folder: encoded(array, "JPEG"),
    "PNG": lambda warm, array, folder: encoded(array, "PNG"),
    "path": lambda warm, array, folder: saved(array, folder / "picture.png"),
    "item": lambda warm, array, folder: warm.prepare(array)[0],
}


def encoded(array: np.ndarray, kind: str) -> bytes:
    out = io.BytesIO()
    PIL.Image.fromarray(array).save(out, kind)
    return out.getvalue()


def saved(array: np.ndarray, path: Path) -> Path:
    path.write_bytes(encoded(array, "PNG"))
    return path


def test_after_warm_up_nothing_compiles_over_200_mixed_calls(name: str, compilations, tmp_path: Path):
    """Sizes, counts, forms of a picture, clips, dtypes of pixels and output, packed views and pruning, in bfloat16."""
    warm = load(name, budgets=[64, 320], dtype="bfloat16")
    warm.encode(floats(warm.prepare(picture(64, 64))[0]))  # warmup() is for uint8 pixels
    warm.warmup(strict=True)
    assert compilations.count >= 3
    compilations.reset()
    generator = np.random.default_rng(0)
    forms, seen = list(FORMS), Counter()
    for number in range(200):
        count = int(generator.integers(1, 5))
        call: list = []
        for place in range(count):
            array = picture(*(int(side) for side in generator.integers(20, 330, 2)), number)
            folder = tmp_path / str(place)
            folder.mkdir(exist_ok=True)
            call.append(FORMS[forms[(number + place) % len(forms)]](warm, array, folder))
        if name in VIDEO and number % 4 == 0:
            prune = 0.5 if name == "qwen2_5_vl" and number % 8 == 0 else 0.0
            frames = [picture(56, 84, number + frame) for frame in range(int(generator.integers(1, 6)))]
            call.append(jaxvit.Video(frames, prune=prune))
        if number % 8 == 7:
            call[0] = floats(warm.prepare(picture(64, 64, number))[0])
        out_dtype = ("float32", "bfloat16", None)[number % 3]
        found = warm.encode(call, out_dtype=out_dtype)
        assert all(np.isfinite(rows.astype(np.float32)).all() for rows in found)
        assert {str(rows.dtype) for rows in found} == {out_dtype or "bfloat16"}
        assert len(found.packed) >= count
        seen.update((one.pixels, str(out_dtype)) for one in found.plan.calls)
    assert compilations.count == 0
    assert warm.stats()["compilations"] == 3
    assert len(seen) == 2 * 3, "either dtype of pixels, with every dtype of the output"


def test_strict_refuses_what_was_not_warmed_up(name: str):
    warm = load(name, budgets=[64, 320])
    warm.warmup(up_to=64, strict=True)
    assert len(warm.encode(picture(64, 64))[0])
    with pytest.raises(CapacityError, match="strict: the bucket of 320 tokens"):
        warm.encode(large(name))
    [item] = warm.prepare(picture(64, 64))
    with pytest.raises(
        CapacityError, match=r"strict: the bucket of 64 tokens \(float32 pixels\) .* encode one such item"
    ):
        warm.encode(floats(item))
    warm.dispatcher.strict = False
    expected = warm.encode(floats(item), bucketed=False)[0]
    assert relative(warm.encode(floats(item))[0], expected) <= 1e-5
    warm.dispatcher.strict = True
    warm.encode(floats(item))


def test_statistics_add_up(name: str):
    counted = load(name, budgets=[64, 320])
    items = counted.prepare(media(name))
    plans = [counted.encode(items).plan.calls, counted.encode(items[0]).plan.calls]
    stats = counted.stats()
    pieces = sum(len(item.pieces) for item in items) + len(items[0].pieces)
    assert sum(bucket["pieces"] for bucket in stats["buckets"].values()) == pieces
    assert all(0 < bucket["fill"] <= 1 for bucket in stats["buckets"].values())
    assert stats["compilations"] == len(stats["buckets"])
    assert sum(bucket["calls"] for bucket in stats["buckets"].values()) == sum(map(len, plans))
    assert all(bucket["milliseconds"] > 0 for bucket in stats["buckets"].values())
    assert stats["overflows"] == {}
    stats["buckets"].clear()
    assert counted.stats()["buckets"]


def test_buckets_of_equal_tokens_are_counted_apart(tmp_path: Path, stub: type[Stub]):
    alike = [{"tokens": 64, "segments": 1}, {"tokens": 64, "segments": 8}]
    counted = load("qwen2_5_vl", budgets=ladder_file(tmp_path / "ladder.toml", *alike))
    counted.dispatcher.build = stub
    small = counted.prepare([picture(56, 56, seed) for seed in range(3)])
    plans = [counted.plan(items) for items in (small, small[:1], small[:2], small[:1])]
    for plan in plans:
        counted.dispatcher.run(small, plan)
    calls = [call for plan in plans for call in plan.calls]
    assert {call.bucket for call in calls} == set(counted.ladder)
    found = counted.stats()["buckets"]
    assert list(found) == ["64 tokens, 1 segments, 17 windows", "64 tokens, 8 segments, 24 windows"]
    for bucket, counts in zip(counted.ladder, found.values(), strict=True):
        own = [call for call in calls if call.bucket == bucket]
        assert counts["calls"] == len(own)
        assert counts["pieces"] == sum(len(call.slots) for call in own)
        assert counts["fill"] == pytest.approx(sum(call.fill for call in own) / len(own))


def test_a_bucket_that_cannot_fit_the_device_is_refused_at_load_before_anything_compiles(monkeypatch, compilations):
    """By weights, inputs and outputs: temporaries are known when it is compiled."""
    loaded = load("qwen2_5_vl", budgets=[64, 320])
    held = sum(array.nbytes for array in loaded.dispatcher.weights[0])
    inputs = sum(buffer.nbytes for buffer in loaded.family.buffers(loaded.ladder.buckets[1], "uint8"))
    needed = held + inputs + 320 * (loaded.family.width * 4 + 1)
    monkeypatch.setattr(dispatchers, "memory_limit", lambda device: needed)
    load("qwen2_5_vl", budgets=[64, 320])
    monkeypatch.setattr(dispatchers, "memory_limit", lambda device: needed - 1)
    compilations.reset()
    with pytest.raises(CapacityError, match=r"the bucket of 320 tokens needs \d+ MiB .*load with smaller budgets"):
        load("qwen2_5_vl", budgets=[64, 320])
    assert compilations.count == 0
    load("qwen2_5_vl", budgets=[64])


def test_a_bucket_whose_temporaries_do_not_fit_is_refused_before_any_bucket_runs(monkeypatch, stub: type[Stub]):
    loaded = load("qwen2_5_vl", budgets=[64, 320])
    loaded.dispatcher.build = stub
    monkeypatch.setattr(dispatchers, "memory_limit", lambda device: 100 * 2**20)
    with pytest.raises(CapacityError, match=r"the bucket of 320 tokens needs 320 MiB \(temporaries 320\)"):
        loaded.warmup()
    items = loaded.prepare([picture(56, 56), picture(448, 560)])
    plan = loaded.plan(items)
    assert {call.bucket.tokens for call in plan.calls} == {64, 320}
    with pytest.raises(CapacityError, match="the bucket of 320 tokens"):
        loaded.dispatcher.run(items, plan)
    assert stub.ran == []
    monkeypatch.setattr(dispatchers, "memory_limit", lambda device: None)
    loaded.warmup()
    assert stub.ran == [64] * dispatchers.WARM_CALLS + [320] * dispatchers.WARM_CALLS


def test_a_compiled_bucket_is_checked_before_it_runs(monkeypatch):
    loaded = load("qwen2_5_vl")
    monkeypatch.setattr(dispatchers, "memory_limit", lambda device: 2**20)
    with pytest.raises(CapacityError, match=r"the bucket of 64 tokens needs \d+ MiB .*load with smaller budgets"):
        loaded.encode(picture(64, 64))
    assert loaded.stats()["buckets"] == {}


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


def test_a_ladder_s_attention_that_cannot_run_is_replaced_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "ladder.toml"
    path.write_text('[[bucket]]\ntokens = 64\nattention = "xla"\n\n[[bucket]]\ntokens = 128\nattention = "cudnn"\n')
    dispatcher = load("lfm2_5_vl", budgets=path).dispatcher
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"{path}: attention 'cudnn', which 1 buckets name, cannot run here (needs an NVIDIA GPU)")
    names = [dispatcher.program(bucket, "uint8").backend.name for bucket in dispatcher.ladder]
    assert names == ["xla", "dense"]


def test_of_several_pieces_that_are_too_large_the_first_is_named():
    shared = load("qwen2_5_vl", budgets=[64], on_overflow="error")
    small, large = shared.prepare([picture(56, 56), picture(336, 336)])
    with pytest.raises(CapacityError, match=r"^item 1: "):
        shared.plan([small, large, large])


def test_an_attention_of_ones_own_that_cannot_run_is_refused_at_load():
    with pytest.raises(LadderError, match="attention 'cudnn' cannot run here: needs an NVIDIA GPU"):
        load("lfm2_5_vl", attention="cudnn")


def test_a_ladder_that_was_tuned_for_another_family_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "ladder.toml"
    for family, said in (("lfm2_vl", 0), ("kimi_k25", 1)):
        path.write_text(f'[match]\nfamily = "{family}"\n\n[[bucket]]\ntokens = 64\n')
        load("lfm2_5_vl", budgets=path)
        assert (
            len([one for one in caplog.records if "measured for kimi_k25, not for lfm2_vl" in one.getMessage()]) == said
        )
