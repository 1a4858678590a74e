"""What ``jaxvit inspect`` finds, on good checkpoints and on bad ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import jaxvit
from jaxvit import inspection, machine, tiny
from jaxvit.commands.inspect import tables
from jaxvit.errors import CheckpointError, LadderError
from jaxvit.likeness import likeness
from jaxvit.models import family_of
from jaxvit.weights import manifests
from tests.families import FAMILIES, checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of one file that a test may spoil."""
    return tiny.tiny_checkpoint("lfm2_vl", tmp_path / "model")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def text(found: inspection.Inspection) -> str:
    """What people read, without its frames."""
    from rich.console import Console

    console = Console(width=400, color_system=None)
    with console.capture() as captured:
        for table in tables(found.to_dict()):
            console.print(table)
    return captured.get()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_every_family_is_described(name: str, store: Path) -> None:
    found = inspection.inspect(checkpoint(name), budgets=[64], store=store)
    assert found.ok
    assert found.weights is not None
    assert found.family is not None
    assert (found.weights.fault, found.weights.absent, found.weights.random) == ("", False, True)
    assert found.weights.likeness is not None
    assert family_of(manifests.load(found.weights.likeness.repo_id).files).name == found.family.name
    assert found.rungs[0].attention in ("dense", "xla")
    said = text(found)
    for part in (found.family.name, f"{found.weights.tensors} tensors", "random: drawn by jaxvit", "jaxlib"):
        assert part in said
    assert json.loads(json.dumps(found.to_dict()))["family"] == found.family.name


def test_memory_is_unknown_until_the_store_has_the_executable(model: Path, store: Path) -> None:
    (rung,) = inspection.inspect(model, budgets=[64], store=store).rungs
    assert (rung.stored, rung.memory, rung.seconds) == (False, None, None)
    assert not store.exists(), "looking changes nothing"
    encoder = jaxvit.load(model, budgets=[64], store=store)
    encoder.warmup()
    found = inspection.inspect(model, budgets=[64], store=store)
    (rung,) = found.rungs
    assert rung.stored
    assert rung.memory == encoder.dispatcher.executable(encoder.ladder.buckets[0]).memory()
    assert found.store["entries"] == 1
    assert "1 of 1 buckets" in text(found)
    (other,) = inspection.inspect(model, budgets=[64], store=store, dtype="float32").rungs
    assert not other.stored, "an executable of another dtype is another executable"


def test_a_folder_of_config_files_alone_is_described_and_said_to_have_no_weights(model: Path, store: Path) -> None:
    (model / "model.safetensors").unlink()
    found = inspection.inspect(model, budgets=[64], store=store)
    assert found.ok
    assert found.weights is not None
    assert found.weights.absent
    assert len(found.rungs) == 1
    assert "not here" in text(found)
    json.dumps(found.to_dict())


def test_what_the_loader_would_refuse_is_part_of_the_answer(model: Path, store: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    lost = "model.vision_tower.vision_model.encoder.layers.1.mlp.fc1.bias"
    changed = "model.multi_modal_projector.linear_1.bias"
    del tensors[lost]
    tensors[changed] = tensors[changed][:5]
    save_file(tensors, model / "model.safetensors")
    found = inspection.inspect(model, budgets=[64], store=store)
    assert not found.ok
    assert found.weights is not None
    assert lost in found.weights.fault
    assert changed in found.weights.fault
    with pytest.raises(CheckpointError) as error:
        jaxvit.load(model, store=False)
    assert str(error.value) == found.weights.fault
    assert lost in text(found)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3_vl"}'), "qwen3_vl"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs"), "Git LFS"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickled"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"), "fetch the index"),
    ],
)
def test_a_spoilt_checkpoint_still_gets_a_report(model: Path, store: Path, spoil, says: str) -> None:
    spoil(model)
    found = inspection.inspect(model, budgets=[64], store=store)
    assert not found.ok
    said = text(found)
    assert says in said
    assert "jaxlib" in said
    json.dumps(found.to_dict())


def test_no_folder_and_impossible_budgets_are_errors_of_the_caller(model: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        inspection.inspect(tmp_path / "nothing", store=store)
    with pytest.raises(LadderError, match="0"):
        inspection.inspect(model, budgets=[0], store=store)


def test_a_store_that_others_may_write_is_named_with_the_reason(model: Path, store: Path) -> None:
    store.mkdir()
    store.chmod(0o777)
    found = inspection.inspect(model, budgets=[64], store=store)
    assert "chmod go-w" in text(found)
    assert found.ok


def test_without_a_model_the_machine_is_described(store: Path) -> None:
    found = inspection.inspect(store=store)
    assert set(found.to_dict()) == {"store", "machine"}
    assert found.ok
    assert "extra compare" in text(found)


def test_home_folders_do_not_appear(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path}/dump")
    (model / "model.safetensors").write_bytes(b"nothing")
    found = inspection.inspect(model, budgets=[64], store=tmp_path / "store")
    for said in (json.dumps(found.to_dict()), text(found)):
        assert str(tmp_path) not in said
        assert "~/model" in said
        assert "~/dump" in said


@pytest.mark.parametrize("name", manifests.names())
def test_every_manifest_is_closest_to_itself(name: str) -> None:
    manifest = manifests.load(name)
    shapes = {tensor: shape for tensor, (shape, _) in manifest.tensors.items()}
    found = likeness(shapes, family_of(manifest.files))
    assert found.distance == 0
    same = {tensor: shape for tensor, (shape, _) in manifests.load(found.repo_id).tensors.items()}
    assert same == shapes, "of two checkpoints alike in every name and shape the first is named"


def test_another_spelling_of_a_checkpoint_is_recognised() -> None:
    manifest = manifests.load("Qwen--Qwen2.5-VL-7B-Instruct")
    shapes = {f"model.{tensor}": shape for tensor, (shape, _) in manifest.tensors.items()}
    assert likeness(shapes, family_of(manifest.files)) == inspection.Likeness(manifest.repo_id)


def test_missing_unexpected_and_misshapen_tensors_are_told_apart() -> None:
    manifest = manifests.load("LiquidAI--LFM2-VL-3B")
    shapes = {tensor: shape for tensor, (shape, _) in manifest.tensors.items()}
    lost, changed, *_ = (name for name in sorted(shapes) if ".layers.3." in name and name.endswith(".bias"))
    del shapes[lost]
    right, shapes[changed] = shapes[changed], (7,)
    extra = "model.vision_tower.vision_model.extra"
    shapes[extra] = (3,)
    found = likeness(shapes, family_of(manifest.files))
    assert found.repo_id == manifest.repo_id
    assert (found.missing, found.unexpected) == ((lost,), (extra,))
    assert list(found.shapes) == [changed]
    assert found.shapes[changed][1] == right


def test_every_attention_backend_says_whether_it_can_run_here() -> None:
    backends = machine.report("float32")["attention"]
    assert backends["dense"] is backends["xla"] is None
    assert backends["cudnn"] == "needs an NVIDIA GPU"


def test_a_platform_that_does_not_start_is_part_of_the_answer(model: Path, store: Path, root: Path) -> None:
    shutil.rmtree(store, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "jaxvit.cli", "inspect", str(model), "--store", str(store), "--json"],
        cwd=root, env={"PATH": "", "JAX_PLATFORMS": "cuda", "HOME": str(model)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "JAX has no device" in found["machine"]["devices_fault"]
    assert found["ladder"] is None
    assert found["weights"]["fault"] == ""


def test_what_is_not_installed_is_said_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise machine.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.importlib.metadata, "version", nothing)
    found = machine.report()
    assert set(found["versions"].values()) == set(found["extras"].values()) == {None}
