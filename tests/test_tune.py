"""Tuning: the fit, what is dropped, which backend wins, and that the ladder it writes is found and planned with."""

from __future__ import annotations

import math
import sys
import time
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from flax import nnx

import jaxvit
from jaxvit import cli, guides, paths, tune
from jaxvit.bench import clock
from jaxvit.bench.alone import Alone
from jaxvit.bench.record import columns_of
from jaxvit.buckets import executable, ladder
from jaxvit.buckets.ladder import from_budgets, from_file
from jaxvit.layers import attention
from jaxvit.layers.fuse import Weights, parameter_shapes
from jaxvit.layers.rope import Neighbours
from jaxvit.models.family import Bucket
from tests.families import checkpoint, encoder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls of each measurement."""
    monkeypatch.setattr(clock, "CALLS", 3)


@pytest.mark.parametrize(
    ("points", "constant", "slope"),
    [
        ([(4e6, 5.0), (1e6, 2.0), (0.5e6, 1.5)], 1.0, 1e-6),  # a line
        ([(4e6, 5.0)], 5.0, 0.0),  # nothing to tell attention from the rest
        ([(4e6, 1.0), (1e6, 2.0)], 1.5, 0.0),  # noise: more attention is never cheaper
        ([(4e6, 8.0), (1e6, 1.0)], 0.0, 33e6 / 17e12),  # nor is a call ever below zero
    ],
)
def test_a_bucket_costs_a_constant_and_a_slope_neither_negative(
    points: list[tuple[float, float]], constant: float, slope: float
) -> None:
    bucket = tune.fitted(Bucket(64, 256, 4), points)
    assert bucket.constant == pytest.approx(constant, rel=1e-4)
    assert bucket.slope == pytest.approx(slope, rel=1e-4)


def measured(tokens: int, constant: float, slope: float, windows: int = 0) -> tune.Measured:
    bucket = Bucket(tokens, 4 * tokens, 4, windows, "dense", constant, slope)
    return tune.Measured(bucket, points=[((4.0 * tokens) ** 2, constant + slope * (4 * tokens) ** 2)])


def test_a_bucket_that_costs_as_much_as_a_larger_one_is_dropped() -> None:
    found = [measured(64, 1.0, 0.0), measured(128, 1.01, 0.0), measured(256, 2.0, 0.0), measured(512, 2.5, 0.0)]
    tune.drop_equals(found)
    assert [one.bucket.tokens for one in found if one.dropped is None] == [128, 256, 512]
    assert found[0].dropped == "costs as much as 128 tokens"


def test_a_bucket_stays_whose_attention_is_cheaper_or_whose_capacities_are_larger() -> None:
    found = [measured(64, 1.0, 1e-6), measured(128, 1.0, 2e-6)]
    tune.drop_equals(found)
    assert [one.dropped for one in found] == [None, None]
    found = [measured(64, 2.0, 0.0, windows=9), measured(128, 1.0, 0.0, windows=8)]
    tune.drop_equals(found)
    assert [one.dropped for one in found] == [None, None]


def test_a_bucket_stays_that_is_cheaper_full_of_many_small_pieces() -> None:
    found = [measured(864, 6.2, 3.4e-7), measured(1024, 6.8, 2.7e-7)]
    most = found[0].points[0][0]
    assert found[1].cost(most) <= found[0].cost(most)
    found[0].points.append((most / 16, found[0].cost(most / 16)))
    tune.drop_equals(found)
    assert [one.dropped for one in found] == [None, None]


def test_a_chain_of_nearly_equal_buckets_is_not_dropped_as_a_whole() -> None:
    found = [measured(64 * step, 1.0 * 1.015**step, 0.0) for step in range(1, 9)]
    tune.drop_equals(found)
    kept = [one.bucket for one in found if one.dropped is None]
    for one in found:
        cheapest = min(bucket.constant for bucket in kept if bucket.tokens >= one.bucket.tokens)
        assert cheapest <= (1 + tune.SAME) * one.bucket.constant


@pytest.fixture(scope="module", params=["qwen2_5_vl", "kimi_k25"])
def tuned(request: pytest.FixtureRequest) -> tuple[jaxvit.Encoder, tune.Tuned]:
    known = encoder(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "CALLS", 3)
        return known, tune.tune(known, from_budgets(known.family, [64, 128], platform="cpu"))


def test_the_fastest_backend_is_taken_for_each_bucket(tuned: tuple[jaxvit.Encoder, tune.Tuned]) -> None:
    _, found = tuned
    for one in found.measured:
        times = {name: value for name, value in one.attention.items() if isinstance(value, float)}
        assert {"dense", "xla"} <= set(times)
        assert one.bucket.attention == min(times, key=lambda name: times[name])
        assert len(one.points) >= 2
        assert [squares for squares, _ in one.points] == sorted((s for s, _ in one.points), reverse=True)
        assert "cudnn" not in times  # no such device here
    absent = found.record["left_out"]
    assert {"cudnn", "tokamax", "mosaic"} <= set(absent)
    assert absent["mosaic"] == "needs an NVIDIA GPU"
    assert not any(name in key for name in absent for key in found.record), "no version of what was not tried"


def test_the_ladder_is_written_found_again_and_planned_with(
    tuned: tuple[jaxvit.Encoder, tune.Tuned], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, found = tuned
    path = tmp_path / "buckets" / "chip" / "tower.toml"
    found.write(path)
    assert from_file(path, known.family).buckets == found.ladder.buckets
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    chosen = ladder.find(known.family, found.match["device"])
    assert chosen is not None
    assert chosen.buckets == found.ladder.buckets
    assert all(chosen.constant(bucket) == bucket.constant for bucket in chosen)
    assert ladder.find(known.family, "another chip") is None
    assert f'jax = "{found.record["jax"]}"' in path.read_text()
    loaded = jaxvit.load(known.folder, dtype="float32", store=False)  # nothing named: the device's own
    assert loaded.ladder.source == str(path)
    assert loaded.ladder.buckets == found.ladder.buckets
    named = jaxvit.load(known.folder, dtype="float32", store=False, budgets=[64])
    assert named.ladder.source == "budgets [64]"
    other = path.read_text().replace("sizes = { ", "sizes = { patch_size = 99, ", 1).replace(", patch_size = 14", "")
    path.write_text(other)
    assert "default" in jaxvit.load(known.folder, dtype="float32", store=False).ladder.source


def test_what_a_bucket_took_is_recorded_and_makes_the_guides_table(
    tuned: tuple[jaxvit.Encoder, tune.Tuned], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, found = tuned
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    assert guides.tuned_tables() == ""
    path = tmp_path / "buckets" / "chip" / "tower.toml"
    found.write(path)
    record = tomllib.loads(path.read_text())["record"]
    assert record["left_out"] == found.record["left_out"]
    kept = [one for one in found.measured if one.dropped is None]
    assert record["few_large_ms"] == [round(one.points[0][1], 4) for one in kept]
    assert record["many_small_ms"] == [round(one.points[-1][1], 4) for one in kept]
    for name in ("compile_seconds", "share_of_floor", "temporary_bytes"):
        assert len(record[name]) == len(kept)
        assert all(value > 0 for value in record[name])
    assert "stored_bytes" not in record  # there is no store
    assert set(record["attention_ms"]) == {"dense", "xla"}
    for name, times in record["attention_ms"].items():
        assert times == [round(one.attention[name], 4) for one in kept if isinstance(one.attention[name], float)]
    section = guides.tuned_tables()
    assert section.startswith("## Tuned ladders that ship\n")
    assert f"### `chip/tower.toml`\n{known.family.name} on {found.match['device']}, dtype float32" in section
    assert (
        "| tokens | patches | attention | compile, s | few large, ms | many small, ms | share of the floor |" in section
    )
    bucket = kept[0].bucket
    cells = [f"{bucket.tokens}", f"{bucket.patches}", bucket.attention, f"{record['compile_seconds'][0]:.1f}"]
    assert f"| {' | '.join(cells)} | {round(kept[0].points[0][1], 4):.3f} | " in section
    guide = tmp_path / "README.md"
    guide.write_text(f"before\n{guides.MARKS[0]}\nstale\n{guides.MARKS[1]}\nafter\n")
    guides.write_tables(guide)
    assert guide.read_text() == f"before\n{guides.MARKS[0]}\n{section}{guides.MARKS[1]}\nafter\n"
    guides.write_tables(guide)
    assert guides.marked(guide.read_text())[1] == section
    with pytest.raises(ValueError, match="lacks the lines"):
        guides.marked("no marks")


def test_attention_that_was_not_timed_is_nan_in_the_file_and_no_column_without_a_time(tmp_path: Path) -> None:
    found = [measured(64, 1.0, 0.0), measured(128, 2.0, 0.0), measured(256, 4.0, 0.0)]
    found[0].attention = {"cudnn": "needs an NVIDIA GPU", "dense": 0.12345, "xla": 0.5}
    found[1].attention = {"cudnn": "needs an NVIDIA GPU", "dense": "lost on a smaller bucket", "xla": 1.0}
    times = tune.attention_of(found)  # the third came too late for any
    path = tmp_path / "ladder.toml"
    ladder.write(ladder.Ladder(tuple(one.bucket for one in found), "made"), path, None, {"attention_ms": times})
    read = tomllib.loads(path.read_text())["record"]["attention_ms"]
    assert repr(read) == "{'dense': [0.1235, nan, nan], 'xla': [0.5, 1.0, nan]}"
    assert repr(times) == repr(read)


def test_a_bucket_between_its_neighbours_has_no_figures_in_the_guides_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    record = {
        "interpolated": [128],
        "compile_seconds": [1.0, math.nan, 3.0],
        "few_large_ms": [1.0, 2.0, 3.0],
        "many_small_ms": [0.5, 1.5, 2.5],
        "share_of_floor": [0.25, 0.5, 0.75],
    }
    buckets = tuple(measured(tokens, 1.0, 0.0).bucket for tokens in (64, 128, 256))
    ladder.write(ladder.Ladder(buckets, "made"), tmp_path / "buckets" / "chip" / "tower.toml", {"family": "x"}, record)
    section = guides.tuned_tables()
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        "| 64 | 256 | dense | 1.0 | 1.000 | 0.500 | 0.25 |",
        "| 128 | 512 | dense | - | between its neighbours | between its neighbours | - |",
        "| 256 | 1,024 | dense | 3.0 | 3.000 | 2.500 | 0.75 |",
    ]
    said = " ".join(section.split("###")[0].split())
    assert "compiled in parallel threads" in said
    assert (
        "few pieces as are legal, many small by equal shares, the most of 4, 16, 64 that bucket and pieces allow"
        in said
    )


def test_whatever_is_recorded_the_ladder_can_be_read(tuned: tuple[jaxvit.Encoder, tune.Tuned], tmp_path: Path) -> None:
    known, found = tuned
    said = 'not "here" \\ or\nthere\t\x7f \x85 \U0001f600 \udc80'
    path = tmp_path / "odd.toml"
    ladder.write(found.ladder, path, found.match, {**found.record, "left_out": {"tokamax": said}})
    assert from_file(path, known.family).buckets == found.ladder.buckets
    record = tomllib.loads(path.read_text(encoding="utf-8"))["record"]
    assert record["left_out"]["tokamax"] == said.replace("\udc80", "?")


def test_a_ladder_of_before_has_a_table_without_the_columns_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / name)
    path = tmp_path / "buckets" / "chip" / "tower.toml"
    path.parent.mkdir(parents=True)
    path.write_text('[match]\nfamily = "lfm2_vl"\ndevice = "chip"\n[[bucket]]\ntokens = 64\n')
    assert "| tokens | patches | attention |\n|---|---|---|\n| 64 | - | auto |\n" in guides.tuned_tables()


def test_the_table_has_a_row_for_every_bucket_measured(tuned: tuple[jaxvit.Encoder, tune.Tuned]) -> None:
    _, found = tuned
    _, columns, rows = found.table()
    assert [row[0] for row in rows] == ["64", "128"]
    assert {len(row) for row in rows} == {len(columns)}


def test_the_encoder_is_compiled_once_a_bucket_for_the_winner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a store, where a bucket that is met again under other costs would be compiled again."""
    known = jaxvit.load(checkpoint("lfm2_5_vl"), dtype="float32", budgets=[64], store=False)
    built: list[tuple[int, str]] = []
    build = known.dispatcher.build

    def counted(program: executable.Program, device: jax.Device) -> executable.Executable:
        built.append((program.bucket.tokens, program.bucket.attention))
        return build(program, device)

    monkeypatch.setattr(known.dispatcher, "build", counted)
    found = tune.tune(known, from_budgets(known.family, [64, 80, 96], platform="cpu"))
    timed = [name for one in found.measured for name, value in one.attention.items() if isinstance(value, float)]
    assert len(timed) == 6, "two backends a bucket were timed"
    assert sorted(built) == [(one.bucket.tokens, one.bucket.attention) for one in found.measured]
    assert known.stats()["compilations"] == 3


class Broken(type(attention.BACKENDS["dense"])):
    name = "broken"

    def __call__(self, *_: object) -> None:
        raise RuntimeError("this kernel does not compile")


def test_a_backend_that_fails_is_named_and_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"broken": Broken(), "dense": attention.BACKENDS["dense"]}
    monkeypatch.setattr(attention, "BACKENDS", backends)
    known = encoder("lfm2_5_vl")
    found = tune.tune(known, from_budgets(known.family, [64], platform="cpu"))
    assert "does not compile" in str(found.measured[0].attention["broken"])
    assert found.ladder.buckets[0].attention == "dense"


def test_a_backend_that_lost_clearly_is_not_tried_on_larger_buckets() -> None:
    known = encoder("lfm2_5_vl")
    bucket = from_budgets(known.family, [64], platform="cpu").buckets[0]
    with ThreadPoolExecutor(2) as pool:
        trial = tune._trial(known, bucket, pool, {"dense": bucket.patches - 1})
        tune._choose(trial, {})
        assert trial.measured.attention["dense"] == "lost on a smaller bucket"
        assert trial.measured.bucket.attention == "xla"
        assert "dense" in tune._trial(known, bucket, pool, {"dense": bucket.patches}).ready, "it lost on none smaller"
        trial = tune._trial(known, bucket, pool, {"dense": 1, "xla": 1})
        tune._choose(trial, {})
        assert all(isinstance(trial.measured.attention[name], float) for name in ("dense", "xla")), "no other is left"


def test_what_is_clearly_slower_is_remembered_from_1024_patches_on(monkeypatch: pytest.MonkeyPatch) -> None:
    done = {name: Future[str]() for name in ("dense", "xla", "mosaic")}
    for name, future in done.items():
        future.set_result(name)
    lost: dict[str, int] = {}
    for patches, slower in ((512, 9.0), (4096, 9.0), (1024, 2.1), (2048, 1.9)):
        costs = {"dense": slower, "xla": 1.9, "mosaic": 1.0}
        monkeypatch.setattr(Alone, "milliseconds", lambda _, name, costs=costs: costs[name])
        trial = tune._Trial(tune.Measured(Bucket(patches // 4, patches, 1, 0)), Alone.__new__(Alone), done, ())
        tune._choose(trial, lost)
        assert trial.measured.bucket.attention == "mosaic"
        assert trial.measured.attention["dense"] == (slower if patches != 2048 else "lost on a smaller bucket")
    assert lost == {"dense": 1024}


def test_buckets_spread_over_the_ladder_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    known = encoder("lfm2_5_vl")
    buckets = from_budgets(known.family, range(64, 64 * 7, 64), platform="cpu").buckets
    order, seen = [], []

    def trial(encoder: jaxvit.Encoder, bucket: Bucket, pool: ThreadPoolExecutor, lost: dict[str, int]) -> tune._Trial:
        seen.append(dict(lost))
        return tune._Trial(tune.Measured(bucket), Alone.__new__(Alone), {}, ())

    def choose(trial: tune._Trial, lost: dict[str, int]) -> None:
        order.append(trial.measured.bucket.tokens)
        lost["dense"] = 1

    monkeypatch.setattr(tune, "_trial", trial)
    monkeypatch.setattr(tune, "_choose", choose)
    found = tune._backends(known, buckets, lambda: False, lambda _: None)
    assert order == [64, 320, 384, 128, 192, 256]
    assert [one.bucket for one in found] == list(buckets)
    assert seen == [{}] * 3 + [{"dense": 1}] * 3


def test_when_it_is_late_what_is_not_compiled_yet_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    known = encoder("lfm2_5_vl")
    buckets = from_budgets(known.family, range(64, 64 * 17, 64), platform="cpu").buckets
    compiled: list[int] = []
    monkeypatch.setattr(tune, "THREADS", 1)
    monkeypatch.setattr(tune, "POLL", 0.01)

    def trial(encoder: jaxvit.Encoder, bucket: Bucket, pool: ThreadPoolExecutor, lost: dict[str, int]) -> tune._Trial:
        def prepare() -> str:
            time.sleep(0.05)
            compiled.append(bucket.tokens)
            return "dense"

        return tune._Trial(tune.Measured(bucket), Alone.__new__(Alone), {"dense": pool.submit(prepare)}, ())

    monkeypatch.setattr(tune, "_trial", trial)
    monkeypatch.setattr(Alone, "milliseconds", lambda *_: 1.0)
    found = tune._backends(known, buckets, lambda: True, lambda _: None)
    assert compiled[0] == 64, "the first bucket's are waited for"
    assert len(compiled) <= 2, "of the others, one may have begun"
    assert [one.bucket.attention for one in found] == ["dense"] * 16
    compiled.clear()
    begun = time.monotonic()
    late = lambda: time.monotonic() - begun > 0.32  # noqa: E731
    found = tune._backends(known, buckets, late, lambda _: None)
    assert 4 < len(compiled) < 12, "the first pass, and some of the second"
    assert [one.bucket.attention for one in found] == ["dense"] * 16


def test_an_untried_bucket_takes_the_backend_of_the_nearest() -> None:
    known = encoder("lfm2_5_vl")
    buckets = from_budgets(known.family, [64, 80, 112, 144, 256], platform="cpu").buckets
    tried = [tune.Measured(replace(buckets[0], attention="dense")), tune.Measured(replace(buckets[4], attention="xla"))]
    found = [tune._as_nearest(bucket, tried).attention for bucket in buckets]
    assert found == ["dense", "dense", "dense", "xla", "xla"], "128 tokens are as far from both"


def test_nothing_is_taken_from_a_bucket_where_no_backend_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    known = encoder("lfm2_5_vl")
    buckets = from_budgets(known.family, range(64, 64 * 10, 64), platform="cpu").buckets
    tried: list[int] = []

    def choose(trial: tune._Trial, lost: dict[str, int]) -> None:
        one = trial.measured
        tried.append(one.bucket.tokens)
        if one.bucket.tokens == 320:
            one.dropped = "no attention backend ran"
        else:
            one.bucket = replace(one.bucket, attention="xla" if one.bucket.tokens > 320 else "dense")

    def trial(encoder: jaxvit.Encoder, bucket: Bucket, pool: ThreadPoolExecutor, lost: dict[str, int]) -> tune._Trial:
        return tune._Trial(tune.Measured(bucket), Alone.__new__(Alone), {}, ())

    monkeypatch.setattr(tune, "_trial", trial)
    monkeypatch.setattr(tune, "_choose", choose)
    found = tune._backends(known, buckets, lambda: len(tried) >= 3, lambda _: None)
    assert tried == [64, 320, 576]
    wanted = ["dense", "dense", "dense", "xla", "auto", "xla", "xla", "xla", "xla"]
    assert [one.bucket.attention for one in found] == wanted
    assert found[4].dropped


def test_attention_alone_has_the_head_dim_of_a_projection_cut_by_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    known = encoder("kimi_k25")
    bucket = known.ladder.buckets[0]
    cut = Weights.of(
        parameter_shapes(nnx.eval_shape(known.family.module)), (*known.family.widenings(), *known.family.by_head())
    )
    plain = Alone(known, bucket, [known.family.example(bucket)])
    monkeypatch.setattr(executable, "weights_of", lambda *_: cut)
    alone = Alone(known, bucket, [known.family.example(bucket)])
    heads = known.family.config.num_attention_heads
    assert plain.inputs[0][0].shape == (bucket.patches, 3, heads, known.family.config.head_dim)
    assert alone.inputs[0][0].shape == (bucket.patches, 3, heads, 2 * known.family.widenings()[2].padded)
    assert isinstance(alone.inputs[1], Neighbours), "on a CPU the product does not rotate"
    assert isinstance(plain.inputs[1], tuple)
    assert not isinstance(plain.inputs[1], Neighbours)


def test_a_bucket_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = encoder("lfm2_5_vl")
    calls = tune._calls

    def limited(encoder: jaxvit.Encoder, bucket: Bucket) -> list[tuple[float, float]]:
        if bucket.tokens > 64:
            raise jaxvit.errors.CapacityError("the bucket of 80 tokens needs more memory")
        return calls(encoder, bucket)

    monkeypatch.setattr(tune, "_calls", limited)
    found = tune.tune(known, from_budgets(known.family, [64, 80], platform="cpu"))
    assert [bucket.tokens for bucket in found.ladder] == [64]
    assert "more memory" in str(found.measured[1].dropped)
    monkeypatch.setattr(tune, "_calls", lambda encoder, bucket: 1 / 0)
    with pytest.raises(jaxvit.errors.CapacityError, match="ZeroDivisionError"):
        tune.tune(known, from_budgets(known.family, [64], platform="cpu"))


def test_when_time_is_over_buckets_take_the_last_winner_and_costs_between_the_ends_are_interpolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def choose(trial: tune._Trial, lost: dict[str, int]) -> None:
        nonlocal now
        now += 6.0
        trial.measured.bucket = replace(trial.measured.bucket, attention="xla")

    def calls(encoder: jaxvit.Encoder, bucket: Bucket) -> list[tuple[float, float]]:
        nonlocal now
        now += 3.0
        return [(1.0, 1.0 * bucket.tokens)]

    monkeypatch.setattr(tune.time, "monotonic", lambda: now)
    monkeypatch.setattr(tune, "_choose", choose)
    monkeypatch.setattr(tune, "_calls", calls)
    monkeypatch.setattr(tune, "_build", lambda encoder, waiting, *_: waiting)
    known = encoder("lfm2_5_vl")
    found = tune.tune(known, from_budgets(known.family, [64, 128, 256], platform="cpu"), seconds=10.0)
    assert [one.bucket.attention for one in found.measured] == ["xla"] * 3
    assert [(bucket.tokens, bucket.constant, bucket.slope) for bucket in found.ladder] == [
        (64, 64.0, 0.0),
        (128, 128.0, 0.0),
        (256, 256.0, 0.0),
    ]
    assert [one.interpolated for one in found.measured] == [False, True, False]
    assert [milliseconds for _, milliseconds in found.measured[1].points] == [128.0] * len(found.measured[1].points)
    assert found.record["interpolated"] == [128]
    assert [row[-1] for row in found.table()[2]] == ["", "between its neighbours", ""]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An encoder whose buckets take three seconds each to compile, one at a time, on a clock of their own, and a
    millisecond a token to run; the largest fails where ``fails``."""
    state = SimpleNamespace(encoder=encoder("lfm2_5_vl"), now=0.0, compiled=[], timed=[], fails=False)

    def executable(bucket: Bucket) -> None:
        state.now += 3.0
        state.compiled.append(bucket.tokens)
        if state.fails and bucket.tokens == 320:
            raise jaxvit.errors.CapacityError("too large")

    def calls(encoder: jaxvit.Encoder, bucket: Bucket) -> list[tuple[float, float]]:
        state.timed.append(bucket.tokens)
        if state.fails and bucket.tokens == 320:
            raise jaxvit.errors.CapacityError("too large")
        return [(1.0, 1.0 * bucket.tokens)]

    monkeypatch.setattr(tune.time, "monotonic", lambda: state.now)
    monkeypatch.setattr(tune, "THREADS", 1)
    monkeypatch.setattr(tune, "_choose", lambda *_: None)
    monkeypatch.setattr(tune, "_calls", calls)
    monkeypatch.setattr(state.encoder.dispatcher, "executable", executable)
    monkeypatch.setattr(tune, "columns_of", lambda *_, **__: {})
    state.candidates = from_budgets(state.encoder.family, [64, 128, 192, 256, 320], platform="cpu")
    return state


def test_when_three_quarters_of_the_time_are_over_no_further_bucket_is_compiled(compiling: SimpleNamespace) -> None:
    found = tune.tune(compiling.encoder, compiling.candidates, seconds=10.0)
    assert compiling.timed == compiling.compiled == [320, 64, 256]
    assert [bucket.constant for bucket in found.ladder] == [64, 128, 192, 256, 320]
    assert found.record["interpolated"] == [128, 192]


def test_the_ends_are_compiled_and_timed_however_little_time_there_is(compiling: SimpleNamespace) -> None:
    assert len(tune.tune(compiling.encoder, compiling.candidates, seconds=1.0).ladder) == 5
    assert compiling.timed == compiling.compiled == [320, 64]


@pytest.mark.parametrize(("seconds", "compiled"), [(None, [320, 64, 256, 192, 128]), (10.0, [320, 64, 256])])
def test_a_bucket_that_cannot_be_compiled_takes_none_of_the_others_along(
    compiling: SimpleNamespace, seconds: float | None, compiled: list[int]
) -> None:
    compiling.fails = True
    found = tune.tune(compiling.encoder, compiling.candidates, seconds=seconds)
    assert compiling.timed == compiling.compiled == compiled
    assert [bucket.tokens for bucket in found.ladder] == [64, 128, 192, 256]
    assert str(found.measured[-1].dropped) == "CapacityError: too large"


def test_what_is_tried_first_is_compiled_and_timed_first() -> None:
    assert [tune._spread(range(count)) for count in (1, 2, 4, 6, 9)] == [
        [0],
        [0, 1],
        [0, 3],
        [0, 4, 5],
        [0, 4, 8],
    ]


def test_of_a_bucket_that_was_not_compiled_the_record_knows_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    known = encoder("lfm2_5_vl")
    large, small = known.ladder.buckets[-1], known.ladder.buckets[0]
    known.dispatcher.executable(small)
    built = known.dispatcher.built
    monkeypatch.setattr(known.dispatcher, "built", lambda bucket: None if bucket is large else built(bucket))
    columns = columns_of(known, [(small, [(1.0, 2.0)]), (large, [(1.0, 8.0), (0.5, 7.0)])], floor=False)
    assert columns["few_large_ms"] == [2.0, 8.0]
    assert columns["many_small_ms"] == [2.0, 7.0]
    for name in ("compile_seconds", "temporary_bytes"):
        assert columns[name][0] > 0
        assert math.isnan(columns[name][1])


@pytest.mark.parametrize(
    ("alone", "own"),
    [
        ({64, 192, 256}, True),
        ({64, 128, 192, 256}, True),  # of two of the timed ones' neighbours nothing is known: only the others count
        ({64, 256}, False),  # its own attention is not known
        ({192}, False),  # nor that of the buckets around it
        ({64, 192}, False),
    ],
)
def test_between_its_neighbours_is_what_a_call_takes_beside_its_own_attention(alone: set[int], own: bool) -> None:
    known = encoder("lfm2_5_vl")
    attention_of = {64: 1.0, 128: 1.5, 160: 1.6, 192: 7.0, 224: 1.9, 256: 2.0}

    def made(tokens: int) -> tune.Measured:
        bucket = from_budgets(known.family, [tokens], platform="cpu").buckets[0]
        loads = tune._loads_alone(known, bucket)
        squares = sum(float(sum(piece.rows**2 for piece in load)) for load in loads) / len(loads)
        bucket = replace(bucket, attention="xla", constant=0.01 * tokens, slope=attention_of[tokens] / squares)
        times = {"xla": attention_of[tokens] if tokens in alone else tune.LOST_BELOW, "dense": 99.0}
        return tune.Measured(bucket, times, [] if tokens == 192 else [(1.0, 1.0)])

    measured = [made(tokens) for tokens in attention_of]
    target = measured[3]
    tune._interpolate(known, measured)
    assert [one.interpolated for one in measured] == [one is target for one in measured]
    found = tune._mean_cost(known, target)
    if own:
        assert found == pytest.approx(1.92 + 7.0, rel=1e-4)
    else:
        assert target.bucket.constant == pytest.approx(1.92)
        assert 1.92 < found < 5
    assert target.points[0][1] == target.cost(target.points[0][0])


@pytest.mark.parametrize("costs", [(0.0, 0.0), (0.5, 0.0)])
def test_calls_that_seem_quicker_than_their_attention_say_nothing_of_the_rest(costs: tuple[float, float]) -> None:
    known = encoder("lfm2_5_vl")

    def made(tokens: int) -> tune.Measured:
        bucket = from_budgets(known.family, [tokens], platform="cpu").buckets[0]
        bucket = replace(bucket, attention="xla", constant=costs[0], slope=costs[1])
        return tune.Measured(bucket, {"xla": 2.0 if tokens == 128 else 1.0}, [] if tokens == 128 else [(1.0, 1.0)])

    measured = [made(tokens) for tokens in (64, 128, 192)]
    tune._interpolate(known, measured)
    assert (measured[1].bucket.constant, measured[1].bucket.slope) == costs


def test_what_lies_beyond_the_buckets_that_ran_is_not_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def calls(encoder: jaxvit.Encoder, bucket: Bucket) -> list[tuple[float, float]]:
        nonlocal now
        now += 20.0
        if bucket.tokens == 256:
            raise jaxvit.errors.CapacityError("too large for the device")
        return [(1.0, 1.0 * bucket.tokens)]

    monkeypatch.setattr(tune.time, "monotonic", lambda: now)
    monkeypatch.setattr(tune, "_choose", lambda *_: None)
    monkeypatch.setattr(tune, "_calls", calls)
    monkeypatch.setattr(tune, "_build", lambda encoder, waiting, *_: waiting)
    known = encoder("lfm2_5_vl")
    found = tune.tune(known, from_budgets(known.family, [64, 128, 256], platform="cpu"), seconds=10.0)
    assert [bucket.tokens for bucket in found.ladder] == [64]
    assert [one.dropped for one in found.measured] == [
        None,
        "not measured: the time was over",
        "CapacityError: too large for the device",
    ]


def test_an_encoder_with_a_fixed_backend_is_refused() -> None:
    fixed = jaxvit.load(checkpoint("lfm2_5_vl"), dtype="float32", budgets=[64], store=False, attention="dense")
    with pytest.raises(jaxvit.errors.OptionError, match='"auto"'):
        tune.tune(fixed)


def test_the_default_path_names_device_and_model() -> None:
    path = tune.default_path("LiquidAI/LFM2.5-VL-450M", "NVIDIA H200")
    assert path.relative_to(paths.data("buckets")).as_posix() == "h200/lfm2_5_vl_450m.toml"
    assert tune.default_path("a/Qwen2.5-VL-7B-Instruct", "cpu").name == "qwen2_5_vl_7b.toml"


def test_the_command_refuses_fewer_layers_of_weights_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.app(["tune", str(checkpoint("lfm2_5_vl")), "--layers", "2", "-o", str(tmp_path / "ladder.toml")])
    assert exit.value.code == 2
    assert "only random weights" in capsys.readouterr().err


def test_the_help_of_the_command_names_the_file_that_it_writes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.app(["tune", "--help"])
    assert "buckets/<device>/<model>.toml" in "".join(capsys.readouterr().out.replace("│", "").split())


def test_the_command_writes_a_ladder_that_load_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ladder.toml"
    options = ["--budgets", "64", "--dtype", "float32", "-o", str(path)]
    monkeypatch.setattr(sys, "argv", ["jaxvit", "tune", str(checkpoint("lfm2_5_vl")), *options])
    cli.app(standalone_mode=False)
    assert "dense, ms" in capsys.readouterr().out
    loaded = jaxvit.load(checkpoint("lfm2_5_vl"), dtype="float32", budgets=path, store=False)
    assert loaded.ladder.buckets[0].constant is not None
    assert tomllib.loads(path.read_text())["record"]["stored_bytes"][0] > 10_000  # the command has a store
