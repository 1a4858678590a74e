import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxvit import tiny
from jaxvit.errors import CheckpointError
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


def test_the_first_elements_are_what_the_hash_says():
    """SplitMix64 by its definition, in Python integers."""
    import hashlib

    mask = 2**64 - 1
    state = int.from_bytes(hashlib.sha256(b"3 visual.x.weight").digest()[:8], "little")
    expected = []
    for _ in range(6):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        expected.append((sum((z >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131070) * (0.02 / 37837.22))
    found = tiny.draw("visual.x.weight", (2, 3), seed=3).ravel()
    np.testing.assert_array_equal(found, np.float32(expected).astype(ml_dtypes.bfloat16))


def test_elements_do_not_depend_on_chunks(monkeypatch):
    whole = tiny.draw("x", (40, 5))
    monkeypatch.setattr(tiny, "CHUNK", 7)
    np.testing.assert_array_equal(tiny.draw("x", (40, 5)), whole)


def test_weights_are_about_normal_and_norms_are_around_one():
    weight = tiny.draw("a.weight", (500, 400)).astype(np.float64)
    assert abs(weight.mean()) < 3 * 0.02 / weight.size**0.5
    assert weight.std() == pytest.approx(0.02, rel=0.01)
    assert 0.06 < abs(weight).max() <= 0.0693  # four uniform numbers end at 2 x sqrt(3) deviations
    norm = tiny.draw("a.weight", (100_000,)).astype(np.float64)
    assert norm.mean() == pytest.approx(1, abs=3e-4)
    assert norm.std() == pytest.approx(0.02, rel=0.02)
    assert abs(tiny.draw("a.bias", (1000,)).astype(np.float64)).max() < 0.07
    assert not np.array_equal(tiny.draw("a", (9,)), tiny.draw("b", (9,)))


def test_outliers_are_two_channels_of_each_norm():
    plain, outlying = (tiny.draw("a.weight", (64,), outliers=on).astype(np.float64) for on in (False, True))
    ratio = outlying / plain
    assert np.flatnonzero(ratio > 1.5).tolist() == [20, 44]
    np.testing.assert_allclose(ratio[[20, 44]], 50, rtol=0.01)
    np.testing.assert_array_equal(tiny.draw("a.weight", (8, 8), outliers=True), tiny.draw("a.weight", (8, 8)))


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


@pytest.mark.parametrize(("stored", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_other_dtypes_hold_the_same_values(tmp_path, stored, dtype):
    shapes = {"a.weight": (30, 20), "b.weight": (30,)}
    load = {}
    for kind in ("BF16", stored):
        folder = tiny.write_checkpoint(tmp_path / kind, {}, shapes, dtype=kind)
        load[kind] = load_file(folder / "model.safetensors")
    for name in shapes:
        assert load[stored][name].dtype == dtype
        np.testing.assert_array_equal(load[stored][name], load["BF16"][name].astype(dtype))


def test_sharding_changes_nothing_but_the_files(tmp_path):
    shapes = {f"a.{index}.weight": (10 + index, 8) for index in range(9)}
    folders = [tiny.write_checkpoint(tmp_path / str(count), {}, shapes, shards=count) for count in (1, 2, 4)]
    assert len({tiny.digest(folder) for folder in folders}) == 1
    assert [path.name for path in sorted(folders[0].iterdir())] == ["model.safetensors"]
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert [path.name for path in sorted(folders[2].glob("*.safetensors"))] == names
    index = json.loads((folders[2] / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * a * b for a, b in shapes.values())
    for tensor, shard in index["weight_map"].items():
        assert tensor in load_file(folders[2] / shard)
    sizes = [(folders[2] / name).stat().st_size for name in names]
    assert max(sizes) < sum(sizes) / 2


def test_real_shapes_are_written_with_the_layers_asked_for(tmp_path):
    folder = tiny.random_full_size("LiquidAI/LFM2.5-VL-450M", tmp_path, layers=1)
    config = read_config_files(folder)["config.json"]
    assert config["vision_config"]["num_hidden_layers"] == 1
    assert len(list(folder.glob("*.safetensors"))) == 2
    family = family_of(read_config_files(folder))
    shapes = parameter_shapes(nnx.eval_shape(family.module))
    assert len(dict(load_parameters(folder, family.keys, shapes, ml_dtypes.bfloat16))) == len(shapes)


def test_kimi_comes_as_two_of_64_shards(tmp_path, monkeypatch):
    cut = tiny._cut
    monkeypatch.setattr(tiny, "_cut", lambda name, layers: _narrow(*cut(name, layers)))
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
    files, _ = tiny._cut("Qwen/Qwen2.5-VL-3B-Instruct", 16)
    assert files["config.json"]["vision_config"]["depth"] == 16
    assert files["config.json"]["vision_config"]["fullatt_block_indexes"] == [7, 15]


def test_tiny_checkpoints_go_to_the_cache_where_weights_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "data", lambda name: tmp_path / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "weights").mkdir()
    assert tiny.tiny_folder() == tmp_path / "weights" / "tiny"
    monkeypatch.setattr(tiny.os, "access", lambda path, mode: False)
    assert tiny.tiny_folder() == tmp_path / "cache" / "jaxvit" / "tiny"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tiny.tiny_folder() == Path.home() / ".cache" / "jaxvit" / "tiny"
