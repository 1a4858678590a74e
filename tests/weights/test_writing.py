import hashlib
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxvit.weights import writing


def test_the_first_elements_are_what_the_hash_says():
    """SplitMix64 by its definition, in Python integers."""
    mask = 2**64 - 1
    state = int.from_bytes(hashlib.sha256(b"3 visual.x.weight").digest()[:8], "little")
    expected = []
    for _ in range(6):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        expected.append((sum((z >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131070) * (0.02 / 37837.22))
    found = writing.draw("visual.x.weight", (2, 3), seed=3).ravel()
    np.testing.assert_array_equal(found, np.float32(expected).astype(ml_dtypes.bfloat16))


def test_elements_do_not_depend_on_chunks(monkeypatch):
    whole = writing.draw("x", (40, 5))
    monkeypatch.setattr(writing, "CHUNK", 7)
    np.testing.assert_array_equal(writing.draw("x", (40, 5)), whole)


def test_weights_are_about_normal_and_norms_are_around_one():
    weight = writing.draw("a.weight", (500, 400)).astype(np.float64)
    assert abs(weight.mean()) < 3 * 0.02 / weight.size**0.5
    assert weight.std() == pytest.approx(0.02, rel=0.01)
    assert 0.06 < abs(weight).max() <= 0.0693  # four uniform numbers end at 2 x sqrt(3) deviations
    norm = writing.draw("a.weight", (100_000,)).astype(np.float64)
    assert norm.mean() == pytest.approx(1, abs=3e-4)
    assert norm.std() == pytest.approx(0.02, rel=0.02)
    assert abs(writing.draw("a.bias", (1000,)).astype(np.float64)).max() < 0.07
    assert not np.array_equal(writing.draw("a", (9,)), writing.draw("b", (9,)))


def test_outliers_are_two_channels_of_each_norm():
    plain, outlying = (writing.draw("a.weight", (64,), outliers=on).astype(np.float64) for on in (False, True))
    ratio = outlying / plain
    assert np.flatnonzero(ratio > 1.5).tolist() == [20, 44]
    np.testing.assert_allclose(ratio[[20, 44]], 50, rtol=0.01)
    np.testing.assert_array_equal(writing.draw("a.weight", (8, 8), outliers=True), writing.draw("a.weight", (8, 8)))


@pytest.mark.parametrize(("stored", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_other_dtypes_hold_the_same_values(tmp_path, stored, dtype):
    shapes = {"a.weight": (30, 20), "b.weight": (30,)}
    load = {}
    for kind in ("BF16", stored):
        folder = writing.write_checkpoint(tmp_path / kind, {}, shapes, dtype=kind)
        load[kind] = load_file(folder / "model.safetensors")
    for name in shapes:
        assert load[stored][name].dtype == dtype
        np.testing.assert_array_equal(load[stored][name], load["BF16"][name].astype(dtype))


def test_sharding_changes_nothing_but_the_files(tmp_path):
    shapes = {f"a.{index}.weight": (10 + index, 8) for index in range(9)}
    folders = [writing.write_checkpoint(tmp_path / str(count), {}, shapes, shards=count) for count in (1, 2, 4)]
    assert len({writing.digest(folder) for folder in folders}) == 1
    assert [path.name for path in sorted(folders[0].iterdir())] == ["model.safetensors"]
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    assert [path.name for path in sorted(folders[2].glob("*.safetensors"))] == names
    index = json.loads((folders[2] / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * a * b for a, b in shapes.values())
    for tensor, shard in index["weight_map"].items():
        assert tensor in load_file(folders[2] / shard)
    sizes = [(folders[2] / name).stat().st_size for name in names]
    assert max(sizes) < sum(sizes) / 2


def test_files_written_here_say_that_their_weights_are_random(tmp_path):
    assert not writing.is_random(tmp_path)
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    assert not writing.is_random(tmp_path)
    writing.write_checkpoint(tmp_path, {}, {"a": (2,)})
    assert writing.is_random(tmp_path)
