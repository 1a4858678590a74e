"""The comparison with PyTorch says "equal" of equal encoders and names what differs of others."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

import jaxvit
from jaxvit.compare import Comparison, Report, compare
from jaxvit.encoder import Encoder
from jaxvit.errors import CheckpointError, DependencyError, MediaError
from jaxvit.metrics import Metrics, cosines, metrics, relative_rms, token_errors
from jaxvit.tiny import tiny_checkpoint

CHECKPOINTS = ("qwen2_5_vl", "kimi_k25", "lfm2_vl", "lfm2_5_vl")


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def clip(frames: int, height: int, width: int) -> jaxvit.Video:
    return jaxvit.Video([picture(height, width, seed) for seed in range(frames)])


def load(folder: Path, **options: object) -> Encoder:
    return jaxvit.load(folder, **{"dtype": "float32", "budgets": [64, 256], "store": False, **options})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_checkpoint(name, tmp_path_factory.mktemp(name)) for name in CHECKPOINTS}


@pytest.fixture(scope="module")
def qwen(folders: dict[str, Path]) -> Encoder:
    return load(folders["qwen2_5_vl"])


MEDIA = {
    "qwen2_5_vl": [picture(56, 140), clip(3, 56, 84)],
    "kimi_k25": [picture(100, 60), clip(11, 84, 56)],
    "lfm2_vl": [picture(256, 256), picture(1100, 300)],
    "lfm2_5_vl": [picture(100, 500)],
}


class TestMetrics:
    def test_values_of_a_known_difference(self) -> None:
        theirs = np.array([[3.0, 4.0], [0.0, 5.0]], np.float32)
        ours = theirs + np.array([[0.3, 0.4], [0.0, 0.0]], np.float32)
        assert metrics(ours, theirs) == pytest.approx((0.5 / np.sqrt(50), 0.4, 1.0), rel=1e-6)
        assert token_errors(ours, theirs) == pytest.approx([np.sqrt(0.125) / np.sqrt(12.5), 0.0], rel=1e-6)

    def test_the_cosine_is_that_of_the_worst_row(self) -> None:
        theirs = np.eye(3, dtype=np.float32)
        ours = theirs.copy()
        ours[1] = [1, 1, 0]
        assert metrics(ours, theirs).cosine == pytest.approx(np.sqrt(0.5))
        np.testing.assert_allclose(cosines(ours, theirs), [1, np.sqrt(0.5), 1])

    def test_rows_in_blocks_give_what_all_rows_at_once_give(self) -> None:
        rng = np.random.default_rng(0)
        theirs = rng.normal(size=(2500, 3)).astype(np.float32)
        ours = theirs + rng.normal(size=theirs.shape).astype(np.float32) * np.float32(1e-3)
        gap = ours.astype(np.float64) - theirs
        expected = np.sqrt((gap**2).sum() / (theirs.astype(np.float64) ** 2).sum())
        assert metrics(ours, theirs)[:2] == pytest.approx((expected, np.abs(gap).max()), rel=1e-12)

    def test_a_difference_that_is_not_finite_is_no_equality(self) -> None:
        theirs = np.ones((2, 2), np.float32)
        ours = theirs.copy()
        ours[0, 1] = np.nan
        assert not relative_rms(ours, theirs) <= 1e30
        assert np.isnan(metrics(ours, theirs).max_abs)

    def test_zeros_equal_zeros_and_nothing_else(self) -> None:
        zeros = np.zeros((2, 2), np.float32)
        assert metrics(zeros, zeros) == (0.0, 0.0, 1.0)
        assert relative_rms(zeros + 1, zeros) == np.inf

    def test_another_number_of_tokens_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 3\)"):
            metrics(np.zeros((2, 3)), np.zeros((3, 3)))


@pytest.mark.reference
class TestReport:
    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_every_family_equals_the_reference(self, folders: dict[str, Path], name: str) -> None:
        report = compare(load(folders[name]), MEDIA[name])
        assert report.ok, report
        for item in report.items:
            assert item.pixels == (0, 0, "")
            assert item.bound == 1e-5
            assert 0 < item.exact.relative_rms < 1e-5
            assert item.bucketed is not None
            assert item.between is not None
            assert item.tokens_off.shape == (item.tokens,)
        assert report.pooled is None

    def test_every_layer_is_compared_on_request(self, qwen: Encoder) -> None:
        report = compare(qwen, MEDIA["qwen2_5_vl"][1], per_layer=True, bucketed=False)
        (item,) = report.items
        names = [name for name, _ in item.layers]
        assert names == ["patch_embed", *(f"blocks.{i}" for i in range(4)), "merger"]
        assert all(measured.relative_rms < 1e-5 for _, measured in item.layers)
        assert item.bucketed is None
        assert "blocks.3" in str(report)

    def test_a_changed_weight_fails_and_the_layers_say_where(self, tmp_path: Path) -> None:
        encoder = load(tiny_checkpoint("qwen2_5_vl", tmp_path))
        perturb(tmp_path, "visual.blocks.2.mlp.down_proj.weight")
        report = compare(encoder, picture(56, 56), per_layer=True)
        assert not report.ok
        (item,) = report.items
        off = {name: measured.relative_rms > 1e-5 for name, measured in item.layers}
        before, after = ("patch_embed", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "merger")
        assert off == {**dict.fromkeys(before, False), **dict.fromkeys(after, True)}
        assert item.pixels is not None
        assert item.pixels.ok
        assert "differs" in str(report)
        assert "0 of 1 items" in report.summary()

    def test_pixels_that_differ_fail_apart_from_the_encoder(self, folders: dict[str, Path]) -> None:
        encoder = load(folders["qwen2_5_vl"], processor={"max_pixels": 28 * 28 * 9})
        assert compare(encoder, picture(112, 112), bucketed=False).ok
        encoder.overrides = None
        report = compare(encoder, picture(112, 112), bucketed=False)
        (item,) = report.items
        assert not report.ok
        assert item.encoder_ok
        assert item.pixels is not None
        assert "(1, 6, 6)" in item.pixels.fault
        assert "(1, 8, 8)" in item.pixels.fault

    def test_one_pixel_value_off_is_counted(self, qwen: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
        prepare = qwen.prepare

        def smudged(media: list, **options: str) -> list:
            (item,) = prepare(media, **options)
            if media[0] is item:
                return [item]
            patches = item.pieces[0].patches.copy()
            patches[3, 7] ^= 4
            return [dataclasses.replace(item, pieces=(dataclasses.replace(item.pieces[0], patches=patches),))]

        monkeypatch.setattr(qwen, "prepare", smudged)
        report = compare(qwen, picture(56, 56), bucketed=False)
        # the still's one frame stands twice in the reference's patches
        assert report.items[0].pixels == (2, 4, "")
        assert report.items[0].encoder_ok
        assert not report.ok

    def test_prepared_items_are_compared_without_a_look_at_their_pixels(self, qwen: Encoder) -> None:
        (item,) = qwen.prepare([picture(56, 56)])
        (found,) = compare(qwen, [item], bucketed=False).items
        assert found.pixels is None
        assert found.ok

    def test_the_bound_follows_the_references_own_error(self, qwen: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.import_module("jaxvit.compare"), "FLOOR", 1e-12)
        (found,) = compare(qwen, picture(56, 56), bucketed=False).items
        assert found.own is not None
        assert 1e-8 < found.own < 1e-5
        assert found.bound == 2 * found.own

    def test_bfloat16_is_measured_by_the_references_own_bfloat16_error(self, folders: dict[str, Path]) -> None:
        encoder = load(folders["qwen2_5_vl"], dtype="bfloat16")
        report = compare(encoder, [picture(56, 56, seed) for seed in range(8)])
        assert report.ok, report
        assert report.pooled is not None
        assert 0.5 < report.pooled <= 1.1
        for item in report.items:
            assert item.own is not None
            assert 1e-4 < item.own < 3e-2
            assert item.bound == 1.5 * item.own

    def test_a_pool_of_eight_items_decides_in_bfloat16(self) -> None:
        good = Metrics(0.01, 0.0, 1.0)
        item = Comparison("a", 1, None, good, None, None, 0.01, 0.015, (), np.zeros(1, np.float32))
        few = Report((item,) * 7, "family", "bfloat16", 1.2, {})
        assert few.ok
        assert not dataclasses.replace(few, items=(item,) * 8).ok

    def test_json_holds_what_the_table_shows(self, qwen: Encoder, photos: dict[str, Path]) -> None:
        report = compare(qwen, [photos["chelsea"]], bucketed=False)
        found = json.loads(json.dumps(report.to_dict()))
        assert found["ok"] is True
        assert found["family"] == "qwen2_5_vl"
        assert found["items"][0]["name"] == "chelsea.png"
        assert found["items"][0]["exact"]["relative_rms"] == report.items[0].exact.relative_rms
        assert found["items"][0]["pixels"] == {"values": 0, "largest": 0, "fault": ""}
        for shown in ("chelsea.png", f"{report.items[0].exact.relative_rms:.1e}", "equal", "1 of 1 items"):
            assert shown in str(report)

    def test_a_bad_item_is_named_by_its_place(self, qwen: Encoder, tmp_path: Path) -> None:
        with pytest.raises(MediaError) as caught:
            compare(qwen, [picture(56, 56), tmp_path / "none.png"])
        assert caught.value.index == 1

    def test_an_encoder_without_a_folder_is_refused(self, qwen: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(qwen, "folder", None)
        with pytest.raises(CheckpointError, match=r"jaxvit\.load"):
            compare(qwen, picture(56, 56))


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DependencyError, match=r"jaxvit\[compare\]"):
        compare(Encoder.__new__(Encoder), [])


def perturb(folder: Path, name: str) -> None:
    """Adds 1 to one value of a tensor in the folder's files."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][0, 0] += torch.tensor(1.0, dtype=tensors[name].dtype)
            save_file(tensors, path, metadata={"format": "pt"})
