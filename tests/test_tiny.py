import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxvit import tiny
from jaxvit.errors import CheckpointError, OptionError
from jaxvit.layers.fuse import parameter_shapes
from jaxvit.models import family_of
from jaxvit.weights import manifests
from jaxvit.weights.files import read_config_files
from jaxvit.weights.load import dtype_of, load_parameters

DIGESTS = {
    "qwen2_5_vl": "342299c80788e8e7accadad8c3e405319efdc86992f437385914210b2d247a6f",
    "kimi_k25": "6e922ad0e4d5f709414e86446237c9f861a107d8d2dc891ac037c4afb6a7f5f7",
    "lfm2_vl": "2ebb78a946a32ab7087ad16e93d32b952ea01f3a1410774f6c4e343acbf99a2d",
    "lfm2_5_vl": "535b2a2242b93ff304ca55f072ca51a29dc069c83124c168a98879f8028239d7",
}


@pytest.mark.parametrize("name", tiny.TINY)
def test_a_tiny_checkpoint_has_the_same_bytes_everywhere(tmp_path, name):
    assert tiny.digest(tiny.tiny_checkpoint(name, tmp_path / "a")) == DIGESTS[name]
    assert tiny.digest(tiny.tiny_checkpoint(name, tmp_path / "b", seed=1)) != DIGESTS[name]


@pytest.mark.parametrize("name", tiny.TINY)
def test_a_tiny_checkpoint_loads_through_the_real_loader(tmp_path, name):
    folder = tiny.tiny_checkpoint(name, tmp_path)
    family = family_of(read_config_files(folder))
    shapes = parameter_shapes(nnx.eval_shape(family.module))
    found = dict(load_parameters(folder, family.keys, shapes, np.float32))
    assert {path: array.shape for path, array in found.items()} == shapes
    assert dtype_of(folder, family.keys) == "bfloat16"


@pytest.mark.parametrize("name", tiny.TINY)
def test_a_tiny_checkpoint_is_laid_out_as_the_real_one(tmp_path, name):
    """Names, ranks and config files are those of the manifest, less the layers that were left out."""
    folder = tiny.tiny_checkpoint(name, tmp_path)
    manifest = manifests.load(tiny.TINY[name].manifest)
    assert set(read_config_files(folder)) == set(manifest.files)
    ranks = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            ranks |= {tensor: len(file.get_slice(tensor).get_shape()) for tensor in file.keys()}  # noqa: SIM118
    text = set(tiny.TINY[name].text)
    assert text <= set(ranks)
    layers = {int(match[1]) for tensor in ranks if tensor not in text and (match := tiny._LAYER.search(tensor))}
    assert layers == set(range(tiny.TINY[name].layers))
    for tensor in set(ranks) - text:
        assert ranks[tensor] == len(manifest.tensors[tensor][0])
    for tensor in set(manifest.tensors) - set(ranks):
        assert int(tiny._LAYER.search(tensor)[1]) >= tiny.TINY[name].layers


def test_position_tables_equal_no_grid(tmp_path):
    """Every grid has even sides; a table of that size would leave the interpolation untested."""
    for name, tensor, sides in (
        ("kimi_k25", "vision_tower.patch_embed.pos_emb.weight", (9, 9)),
        ("lfm2_vl", "model.vision_tower.vision_model.embeddings.position_embedding.weight", (11, 11)),
    ):
        folder = tiny.tiny_checkpoint(name, tmp_path / name)
        tensors = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
        assert tensors[tensor].size == np.prod(sides) * 64


def test_real_shapes_are_written_with_the_layers_asked_for(tmp_path):
    folder = tiny.random_full_size("LiquidAI/LFM2.5-VL-450M", tmp_path, layers=1)
    config = read_config_files(folder)["config.json"]
    assert config["vision_config"]["num_hidden_layers"] == 1
    assert len(list(folder.glob("*.safetensors"))) == 2
    family = family_of(read_config_files(folder))
    shapes = parameter_shapes(nnx.eval_shape(family.module))
    assert len(dict(load_parameters(folder, family.keys, shapes, ml_dtypes.bfloat16))) == len(shapes)


def test_kimi_comes_as_two_of_64_shards(tmp_path, monkeypatch):
    cut = tiny.cut
    monkeypatch.setattr(tiny, "cut", lambda name, layers: _narrow(*cut(name, layers)))
    folder = tiny.random_full_size("moonshotai/Kimi-K2.5", tmp_path, layers=1)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == ["model-00063-of-000064.safetensors", "model-00064-of-000064.safetensors"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {*names, "model-00001-of-000064.safetensors"}
    family = family_of(read_config_files(folder))
    assert dtype_of(folder, family.keys) == "bfloat16"
    (folder / names[0]).unlink()
    with pytest.raises(CheckpointError, match="model-00063-of-000064"):
        dtype_of(folder, family.keys)


def _narrow(files: dict, tensors: dict) -> tuple[dict, dict]:
    return files, {name: tuple(min(extent, 8) for extent in shape) for name, shape in tensors.items()}


def test_full_attention_blocks_beyond_the_last_layer_are_dropped(tmp_path):
    files, _ = tiny.cut("Qwen/Qwen2.5-VL-3B-Instruct", 16)
    assert files["config.json"]["vision_config"]["depth"] == 16
    assert files["config.json"]["vision_config"]["fullatt_block_indexes"] == [7, 15]


@pytest.mark.parametrize("layers", [-1, 0, 33])
def test_layers_that_a_tower_has_not_are_refused_before_anything_is_written(tmp_path, layers):
    with pytest.raises(OptionError, match=f"layers is {layers}, .* has 32: give 1 to 32"):
        tiny.random_full_size("Qwen/Qwen2.5-VL-7B-Instruct", tmp_path, layers)
    assert not list(tmp_path.iterdir())


def test_tiny_checkpoints_go_to_the_cache_where_weights_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "data", lambda name: tmp_path / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "weights").mkdir()
    assert tiny.tiny_folder() == tmp_path / "weights" / "tiny"
    monkeypatch.setattr(tiny.os, "access", lambda path, mode: False)
    assert tiny.tiny_folder() == tmp_path / "cache" / "jaxvit" / "tiny"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tiny.tiny_folder() == Path.home() / ".cache" / "jaxvit" / "tiny"
