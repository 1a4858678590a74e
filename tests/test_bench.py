"""The benchmark: what is run, what is counted, what is written, and that one failing step stops no other."""

from __future__ import annotations

import io
import itertools
import json
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import jaxvit
from jaxvit import cli
from jaxvit.bench import Report, bench, clock, subject
from jaxvit.bench.clock import CALLS, PATIENCE, ROUNDS, renewed, timed
from jaxvit.bench.loads import jpegs, load_of, split, total_of
from jaxvit.bench.pictures import pictures
from jaxvit.bench.start import starts
from jaxvit.bench.subject import Subject, random_checkpoint
from jaxvit.buckets.ladder import from_budgets, from_file
from jaxvit.errors import CheckpointError, OptionError
from tests.families import FAMILIES, checkpoint, encoder

SMALL = "1x256"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls and small products."""
    monkeypatch.setattr(clock, "PATIENCE", 0.01)
    monkeypatch.setattr(clock, "CALLS", 4)
    monkeypatch.setattr(subject, "SHAPES", {"cpu": ((64, 64, 64),)})


class Clock:
    """A device whose calls take so many seconds; a call that is waited for takes one millisecond more."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch):
        self.now, self.seconds, self.runs = 0.0, seconds, 0
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(clock, "PATIENCE", PATIENCE)
        monkeypatch.setattr(clock, "CALLS", CALLS)

    def run(self) -> None:
        self.now += self.seconds
        self.runs += 1

    def wait(self, _: object) -> None:
        self.now += 1e-3


def test_a_quick_call_is_warmed_and_measured_thirty_times_alone_and_back_to_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Clock(0.002, monkeypatch)
    times = timed(device.run, device.wait)
    assert times.calls == CALLS == 30
    assert times.one_call == pytest.approx(3.0)
    assert times.back_to_back == pytest.approx(2.0 + 1.0 / 30)
    assert device.runs == 4 + CALLS * (1 + ROUNDS)


def test_a_slow_call_is_measured_as_often_as_patience_allows_and_never_less_than_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert timed((slow := Clock(1.0, monkeypatch)).run, slow.wait).calls == int(PATIENCE / (1 + ROUNDS) / 1.001)
    assert timed((slower := Clock(100.0, monkeypatch)).run, slower.wait).calls == 3


def test_a_renewed_call_has_new_inputs_and_keeps_some_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Result:
        pass

    device, inputs, alive = Clock(0.002, monkeypatch), itertools.count(), weakref.WeakSet[Result]()
    seen: list[tuple[int, int]] = []

    def prepare() -> int:
        device.now += 1.0  # not timed
        return next(inputs)

    def run(number: int) -> Result:
        seen.append((number, len(alive)))
        device.run()
        alive.add(result := Result())
        return result

    def wait(result: Result) -> Result:
        device.wait(result)
        return result

    assert renewed(prepare, run, wait) == pytest.approx(3.0)
    assert [number for number, _ in seen] == list(range(clock.WARM + CALLS))
    assert [kept for _, kept in seen[:3]] == [0, 1, 2]
    assert seen[-1][1] == clock.KEPT
    slow = Clock(100.0, monkeypatch)
    assert renewed(lambda: None, lambda _: slow.run(), slow.wait) == pytest.approx(100_001.0)
    assert slow.runs == 3


def test_a_load_fills_a_bucket_of_its_size_with_pixels_of_its_own() -> None:
    family = encoder("qwen2_5_vl").family
    load = load_of(family, "3x256", from_budgets(family, [64]), attention="dense")
    assert [piece.grid for piece in load.pieces] == [(1, 16, 16)] * 3
    assert (load.bucket.tokens, load.bucket.patches, load.bucket.attention) == (192, 768, "dense")
    assert not np.array_equal(load.pieces[0].patches, load.pieces[1].patches)
    assert [item.tokens for item in load.items] == [64] * 3


def test_a_load_takes_the_ladders_bucket_where_it_has_one_of_that_size(tmp_path: Path) -> None:
    family = encoder("qwen2_5_vl").family
    path = tmp_path / "ladder.toml"
    path.write_text('[[bucket]]\ntokens = 192\nsegments = 3\nattention = "xla"\n')
    ladder = from_file(path, family)
    assert load_of(family, "3x256", ladder).bucket == ladder.buckets[0]
    assert load_of(family, "12x64", ladder).bucket.attention == "auto"  # more pieces than it takes


@pytest.mark.parametrize("text", ["256", "0x256x1", "1x2", "1x258", "1x4194304", "1x1004", "0x256", "1x0"])
def test_a_load_that_cannot_be_is_refused(text: str) -> None:
    family = encoder("qwen2_5_vl").family
    with pytest.raises(OptionError, match=text):
        load_of(family, text, from_budgets(family, [64]))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bucket_is_split_into_legal_pieces_that_fit_it(name: str) -> None:
    family = encoder(name).family
    bucket = from_budgets(family, [1024]).buckets[0]
    for parts in (1, 4, 16):
        pieces = split(family, bucket, parts)
        assert pieces is not None
        assert bucket.holds(total_of(pieces))
        assert len(pieces) >= parts
        assert total_of(pieces).tokens >= 0.9 * bucket.tokens
    assert split(family, bucket, 1000) is None


def test_jpeg_files_have_their_size_and_differ() -> None:
    files = jpegs(90, 120, 4)
    assert {Image.open(io.BytesIO(file)).size for file in files} == {(120, 90)}
    assert len(set(files)) == 4


@pytest.mark.reference
def test_the_report_holds_ours_and_the_peers_of_every_load(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    saved: list[int] = []

    def changed(report: Report) -> None:
        report.save(path)
        saved.append(len(json.loads(path.read_text())["rows"]))

    report = bench(encoder("lfm2_5_vl"), [SMALL], peer=True, reference=True, changed=changed)
    assert report.ok, report.failures
    (row,) = report.rows
    assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ours"]["back_to_back"])
    assert row["floor_ms"] == pytest.approx(row["flops"] / max(report.rates.values()) * 1e3)
    assert list(row["torch"]) == ["eager"]
    for peer in (row["torch"]["eager"], row["reference"]):
        assert peer["relative_rms"] <= 1e-5
        assert peer["one_call"] > 0
    assert row["one_call_over_torch"] == pytest.approx(row["ours"]["one_call"] / row["torch"]["eager"]["one_call"])
    assert report.host is not None
    assert report.host["bytes"] > 0
    assert min(report.host[step] for step in ("plan", "fill", "transfer", "dispatch")) > 0
    assert saved[0] == 0  # saved from the first step on
    assert saved[-1] == 1
    written = json.loads(path.read_text())
    assert written["environment"]["packages"]["jax"]
    assert written["environment"]["chip"]
    assert "date" not in json.dumps(written).lower()


@pytest.mark.reference
def test_a_step_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxvit.reference.packed import Packed

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Packed, "variants", broken)
    report = bench(encoder("lfm2_5_vl"), [SMALL, "1x7"], peer=True)
    assert set(report.failures) == {"1x256: torch", "1x7"}
    assert "no such kernel" in report.failures["1x256: torch"]
    assert [row["load"] for row in report.rows] == [SMALL]
    assert report.host is not None


def test_no_step_begins_when_time_is_over() -> None:
    report = bench(encoder("lfm2_5_vl"), [SMALL], pictures=[(64, 64, 2)], seconds=1e-9)
    assert report.rows == report.pictures == []
    assert set(report.failures) == {SMALL, "host", "64x64"}


def test_without_loads_every_bucket_up_to_a_budget_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench(encoder("kimi_k25"), up_to=64, host=False)
    assert [(row["load"], row["tokens"]) for row in report.rows] == [("64 tokens", 64)]
    report.print()
    printed = capsys.readouterr().out
    assert "64 tokens" in printed
    assert "dense" in printed
    header, _, row = report.markdown().splitlines()[2:5]
    assert header.startswith("| load | tokens |")
    assert row.startswith("| 64 tokens | 64 | dense |")
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "ladder.png")
    with Image.open(tmp_path / "ladder.png") as picture:
        assert picture.width > 100


def test_from_jpeg_bytes_nothing_compiles_in_the_timed_passes() -> None:
    result = pictures(Subject(encoder("qwen2_5_vl")), 84, 112, 5)
    assert result["compilations"] == 0
    assert (result["tokens"], result["patches"]) == (12, 48)
    assert min(result[name] for name in ("stream", "call", "preparation", "device")) > 0
    assert result["stream_over_device"] == pytest.approx(result["stream"] / result["device"])
    share = result["stream_share"]
    assert list(share) == ["reading", "preparation", "issue", "device", "transfer", "finish"]
    assert all(value > 0 for value in share.values())
    assert 0.5 < sum(share.values()) <= 1, "what is left is the loop itself"
    told = Report("model", "family", "float32", {"chip": "a CPU"}, pictures=[result])
    assert [title for title, _, _ in told.tables()][1] == "what the stream's own thread waits for and does"


@pytest.mark.reference
def test_from_jpeg_bytes_beside_transformers() -> None:
    result = pictures(Subject(encoder("qwen2_5_vl")), 84, 112, 5, reference=True)
    assert result["stream_over_reference"] == pytest.approx(result["stream"] / result["reference"])


def test_a_second_start_compiles_nothing() -> None:
    result = starts(checkpoint("lfm2_5_vl"), "float32", [64, 256])
    empty, filled = result["empty"], result["filled"]
    assert (empty["compilations"], empty["store_hits"]) == (2, 0)
    assert (filled["compilations"], filled["backend_compilations"], filled["store_hits"]) == (0, 0, 2)
    marks = [filled[mark] for mark in ("imported", "loaded", "warmed", "first_embedding")]
    assert marks == sorted(marks)
    assert marks[0] > 0


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"config\.json"):
        starts(tmp_path, "float32", [64])


def test_a_random_checkpoint_is_gone_afterwards_and_an_unknown_one_is_refused() -> None:
    with random_checkpoint("LiquidAI/LFM2.5-VL-450M", layers=1) as folder:
        assert jaxvit.load(folder, store=False).config.num_hidden_layers == 1
        assert folder.name == "LFM2.5-VL-450M"
    assert not folder.exists()
    with pytest.raises(CheckpointError, match="no manifest"), random_checkpoint("no/such"):
        pass


def test_an_encoder_that_was_not_loaded_from_a_folder_has_no_weights_for_peers() -> None:
    known = encoder("lfm2_5_vl")
    bare = jaxvit.Encoder(known.family, known.ladder, known.dtype, known.dispatcher.devices, known.dispatcher.weights)
    with pytest.raises(CheckpointError, match="folder"):
        next(Subject(bare).parameters())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 0),
        (["--images", "1x70000:1"], 1),  # no JPEG file is so wide
    ],
)
def test_the_command_writes_the_record_and_its_exit_code_says_how_it_went(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    options = ["--json", str(path), "--loads", "1x256", "--dtype", "float32", *arguments]
    monkeypatch.setattr(sys, "argv", ["jaxvit", "bench", str(checkpoint("lfm2_5_vl")), *options])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == code
    written = json.loads(path.read_text())
    assert written["environment"]["command"].startswith("jaxvit bench")
    assert written["model"] == "lfm2_5_vl"
    assert [row["load"] for row in written["rows"]] == ["1x256"]
    assert bool(written["failures"]) is bool(code)


REAL = ["LiquidAI/LFM2.5-VL-450M", "--random"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{model}", "--images", "448"], "Invalid value for --images: '448' is not of the form"),
        (["{model}", "--json", "{folder}/no/report.json"], "Invalid value for --json: the folder"),
        (["{model}", "--plot", "p.jpg"], "Invalid value for --plot: p.jpg must end in .png"),
        (["{model}", "--loads", "1x256,4by256"], "Invalid value for --loads: '4by256' is no load"),
        (["{model}", "--loads", "0x256"], "Invalid value for --loads: '0x256': a load has at least one piece"),
        (["{model}", "--loads", "1x256,1x255"], "Invalid value for --loads: '1x255': a piece of lfm2_vl has"),
        (["{model}", "--up-to", "3"], "Invalid value for --up-to: the smallest bucket has 64 tokens"),
        (["{model}", "--up-to", "0"], "Invalid value for --up-to: the smallest bucket has 64 tokens"),
        (["{model}", "--layers", "2"], "Invalid value for --layers: only random weights"),
        ([*REAL, "--layers", "99"], "Invalid value for --layers: layers is 99, and the tower of {real} has 12: give"),
        ([*REAL, "--layers", "0"], "Invalid value for --layers: layers is 0, and the tower of {real} has 12: give"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_refused_before_anything_is_measured(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("jaxvit.bench.product_rates", lambda _: pytest.fail("something was measured"))
    places = {"folder": tmp_path, "model": checkpoint("lfm2_5_vl"), "real": REAL[0]}
    given = [argument.format(**places) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["jaxvit", "bench", *given, "--dtype", "float32"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    said = "".join(capsys.readouterr().err.replace("│", "").split())  # in a box, which breaks long lines
    assert "".join(says.format(**places).split()) in said


def test_on_a_cpu_the_smallest_bucket_is_measured_however_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxvit.commands.bench.ON_CPU", 32)
    path = tmp_path / "report.json"
    options = ["--budgets", "64,128", "--dtype", "float32", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["jaxvit", "bench", str(checkpoint("lfm2_5_vl")), *options])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    assert [row["load"] for row in json.loads(path.read_text())["rows"]] == ["64 tokens"]
