"""The demo: its photographs, its verdict, and the recorded outputs that stand in for PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxvit
from jaxvit import demo, tiny
from jaxvit.errors import CheckpointError
from jaxvit.metrics import relative_rms


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny.tiny_checkpoint(name, tmp_path_factory.mktemp(name)) for name in demo.checkpoints()}


def test_the_demo_holds_two_photographs_on_and_off_the_windows_and_a_clip() -> None:
    stills = [one.frames[0].shape for one in demo.photographs() if not one.clip]
    on = [shape[0] % 112 == 0 and shape[1] % 112 == 0 for shape in stills]
    assert True in on
    assert False in on
    assert [len(one.frames) for one in demo.photographs() if one.clip] == [5]


@pytest.mark.parametrize("name", demo.checkpoints())
def test_bucketed_encoding_equals_the_recorded_outputs(name: str, folders: dict[str, Path]) -> None:
    encoder = jaxvit.load(folders[name], dtype="float32")
    taken = demo.accepted(encoder.family, demo.photographs())
    wanted, _ = demo.recorded(name, folders[name], taken)
    ours = encoder.encode([jaxvit.Video(one.frames) if one.clip else one.frames[0] for one in taken])
    for one, array in zip(taken, ours, strict=True):
        row = demo.measure(name, one.says, array, wanted[one.name])
        assert row.ok, row


@pytest.mark.reference
@pytest.mark.parametrize("name", demo.checkpoints())
def test_the_recorded_outputs_are_those_that_pytorch_makes_now(name: str, folders: dict[str, Path]) -> None:
    taken = demo.photographs()
    known = load_file(demo.recording(name))
    taken = [one for one in taken if one.name in known]
    live = demo.run_reference(folders[name], taken)
    assert set(known) == set(live)
    for medium, array in live.items():
        assert relative_rms(known[medium], array) <= 1e-5


@pytest.mark.reference
def test_the_demo_runs_every_family_live_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny, "tiny_folder", lambda: tmp_path)
    result = demo.run()
    assert result.ok, result.rows
    assert result.live
    assert "run live" in result.summary()
    assert {row.checkpoint for row in result.rows} == set(demo.checkpoints())


def test_recorded_outputs_of_other_pixels_or_weights_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    name = demo.checkpoints()[0]
    first = demo.photographs()[0]
    other = replace(first, frames=(first.frames[0] ^ np.uint8(1),))
    with pytest.raises(CheckpointError, match=f"another decoding of {first.name}"):
        demo.recorded(name, folders[name], [other])
    foreign = tiny.tiny_checkpoint(name, tmp_path, seed=1)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        demo.recorded(name, foreign, [first])


@pytest.mark.parametrize(("error", "ok"), [(0.0, True), (0.9e-5, True), (1.1e-5, False), (np.nan, False)])
def test_the_verdict_is_the_relative_rms_in_float32(error: float, ok: bool) -> None:
    reference = np.ones((3, 4), np.float32)
    row = demo.measure("tiny", "one", (reference * np.float64(1 + error)), reference)
    assert row.ok is ok


def test_embeddings_of_another_shape_fail() -> None:
    assert not demo.measure("tiny", "one", np.ones((3, 4), np.float32), np.ones((4, 4), np.float32)).ok


def test_no_item_at_all_fails() -> None:
    assert not demo.Result((), True, "torch").ok
