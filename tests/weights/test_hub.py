"""The hub is played by a fake that copies the files asked for from a folder, and keeps count of them."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors

from jaxvit.errors import CheckpointError
from jaxvit.weights import hub
from jaxvit.weights.files import read_config_files
from jaxvit.weights.load import load_parameters

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A repository with what lies in ``source``; its snapshot grows under ``cache``."""

    def __init__(self, source: Path, cache: Path):
        self.source, self.folder = source, cache / "snapshots" / COMMIT
        self.fetched: list[list[str]] = []
        self.revisions: list[str | None] = []

    def snapshot_download(self, repo_id: str, *, revision: str | None = None, allow_patterns: list[str]) -> str:
        assert repo_id == "owner/model"
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = [path for path in sorted(self.source.iterdir())
                  if any(fnmatch(path.name, pattern) for pattern in allow_patterns)]  # fmt: skip
        new = [path for path in wanted if not (self.folder / path.name).exists()]
        for path in new:
            shutil.copy(path, self.folder)
        self.fetched.append([path.name for path in new])
        self.revisions.append(revision)
        return str(self.folder)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "generation_config.json"):
        (source / name).write_text("{}")
    fake = Hub(source, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_a_hub_id_fetches_configs_then_the_index_then_only_the_vision_shards(repository, toy, text, write_shards):
    tensors = toy.tensors()
    shards = {f"model-{number:05d}-of-000004.safetensors": {f"model.layers.{number}.w": np.ones(2, np.float32)} | text
              for number in (1, 2)}  # fmt: skip
    shards["model-00003-of-000004.safetensors"] = {n: a for n, a in tensors.items() if n.startswith("projector.")}
    shards["model-00004-of-000004.safetensors"] = {n: a for n, a in tensors.items() if n.startswith("visual.")}
    write_shards(repository.source, shards)
    folder = hub.snapshot("owner/model")
    assert repository.fetched == [["config.json", "preprocessor_config.json"]]
    assert set(read_config_files(folder)) == {"config.json", "preprocessor_config.json"}
    folder = hub.fetch_weights("owner/model", folder, toy.table)
    assert repository.fetched[1:] == [
        ["model.safetensors.index.json"],
        ["model-00003-of-000004.safetensors", "model-00004-of-000004.safetensors"],
    ]
    assert repository.revisions == [None, COMMIT, COMMIT]  # all of one commit
    assert len(dict(load_parameters(folder, toy.table, toy.shapes, np.float32))) == len(toy.shapes)


def test_a_hub_id_with_a_single_file_fetches_that(repository, toy, write):
    write(repository.source / "model.safetensors", toy.tensors())
    (repository.source / "pytorch_model.bin").write_bytes(b"")
    folder = hub.fetch_weights("owner/model", hub.snapshot("owner/model"), toy.table)
    assert repository.fetched[1:] == [[], ["model.safetensors"]]
    assert len(dict(load_parameters(folder, toy.table, toy.shapes, np.float32))) == len(toy.shapes)


def test_an_index_without_vision_tensors_fetches_no_shard(repository, toy, text, write_shards):
    write_shards(repository.source, {"model-00001-of-00001.safetensors": text})
    folder = hub.fetch_weights("owner/model", hub.snapshot("owner/model"), toy.table)
    assert repository.fetched[1:] == [["model.safetensors.index.json"]]
    with pytest.raises(CheckpointError, match="no vision tensors"):
        load_parameters(folder, toy.table, toy.shapes, np.float32)


def test_an_adapter_on_the_hub_is_refused_by_name(repository, toy):
    for path in repository.source.iterdir():
        path.unlink()
    (repository.source / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (repository.source / "adapter_model.safetensors").write_bytes(b"")
    folder = hub.snapshot("owner/model")
    assert repository.fetched == [["adapter_config.json"]]
    with pytest.raises(CheckpointError, match="holds only an adapter"):
        read_config_files(folder)


def test_a_folder_is_taken_as_it_is(repository, tmp_path, toy, monkeypatch):
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for model in (folder, str(folder), "owner/model"):  # what exists here is never looked up
        found = hub.snapshot(model)
        assert found.samefile(folder)
        assert hub.fetch_weights(model, found, toy.table).samefile(folder)
    assert repository.fetched == []


@pytest.mark.parametrize("model", ["./owner/model", "../model", "/no/such/folder", "~/no/such/folder", "model", "a/b/c",
                                   "owner/", "owner/mo del", Path("owner/model")])  # fmt: skip
def test_a_path_that_does_not_exist_is_not_looked_up(repository, model):
    with pytest.raises(CheckpointError, match="there is no folder"):
        hub.snapshot(model)
    assert repository.fetched == []


def test_a_file_is_told_from_a_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        hub.snapshot(tmp_path / "model.safetensors")


def _http(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    error = kind.__new__(kind)
    Exception.__init__(error, f"{status}")
    return error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (_http(errors.RepositoryNotFoundError, 404), "neither a folder on this machine nor a repository"),
        (_http(errors.GatedRepoError, 403), "is gated: accept its terms"),
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "unset HF_HUB_OFFLINE"),
        (errors.HFValidationError("bad"), "could not be fetched"),
        (_http(errors.HfHubHTTPError, 500), "could not be fetched"),
        (ConnectionResetError("reset"), "could not be fetched"),
    ],
)
@pytest.mark.parametrize("step", [1, 2])
def test_what_goes_wrong_with_the_hub_says_what_to_do(repository, monkeypatch, toy, error, advice, step):
    folder = hub.snapshot("owner/model") if step == 2 else None

    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=advice) as caught:
        hub.snapshot("owner/model") if step == 1 else hub.fetch_weights("owner/model", folder, toy.table)
    assert "owner/model" in str(caught.value)
    assert caught.value.__cause__ is error


def test_an_unknown_id_without_a_network_is_a_checkpoint_error(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="no folder on this machine"):
        hub.snapshot("owner/model")
