"""What ``jaxvit inspect`` finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxvit import inspection, tiny
from jaxvit.weights import manifests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_checkpoint("lfm2_vl", tmp_path_factory.mktemp("tiny"))


def test_memory_is_unknown_until_an_executable_is_built_and_then_comes_from_the_store(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXVIT_STORE", str(tmp_path / "store"))
    (rung,) = inspection.inspect(model, budgets=[64]).rungs
    assert rung.memory is None
    assert not rung.stored
    (built,) = inspection.inspect(model, budgets=[64], build=True).rungs
    assert built.stored
    (known,) = inspection.inspect(model, budgets=[64]).rungs
    assert known.memory == built.memory
    assert known.memory is not None
    assert known.memory["outputs"] >= 64 * 96 * 2


def test_absent_weights_are_part_of_the_answer(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (model / name).is_file():
            (tmp_path / name).write_text((model / name).read_text())
    found = inspection.inspect(tmp_path, budgets=[64])
    assert found.tensors.count == 0
    assert "safetensors" in found.tensors.fault
    json.dumps(found.to_dict())
    assert found.tables()


def test_a_real_checkpoint_is_recognised_by_the_names_and_shapes_of_its_tensors(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inspection.vision_tensors(model, lambda name: name.startswith("model.vision_tower"))
    assert inspection.inspect(model, budgets=[64]).tensors.manifest is None
    monkeypatch.setattr(
        inspection,
        "vision_tensors",
        lambda folder, is_vision: {
            name: next(iter(found.values()))._replace(shape=shape, dtype=dtype)
            for name, (shape, dtype) in manifests.load("LiquidAI/LFM2-VL-3B").tensors.items()
        },
    )
    tensors = inspection.inspect(model, budgets=[64]).tensors
    assert tensors.manifest == "LiquidAI/LFM2-VL-3B"
    assert round(tensors.parameters / 1e6) == 430


def test_every_attention_backend_says_whether_it_can_run_here() -> None:
    backends = inspection.machine("float32")["attention"]
    assert {"dense", "xla"} <= set(backends)
    assert backends["dense"] is None
    assert all(why is None or why for why in backends.values())
