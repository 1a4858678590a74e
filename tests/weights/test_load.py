import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvit.errors import CheckpointError
from jaxvit.weights import load as loading
from jaxvit.weights.files import vision_tensors
from jaxvit.weights.load import dtype_of, load_parameters

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SPELLINGS = [
    ("visual.", "projector."),
    ("model.visual.", "model.projector."),
    ("model.visual.inner.", "model.projector."),
]


def load(folder: Path, toy, dtype="float32") -> dict[str, np.ndarray]:
    return dict(load_parameters(folder, toy.table, toy.shapes, DTYPES[dtype]))


def same(found, toy) -> None:
    expected = toy.parameters()
    assert found.keys() == expected.keys()
    for path, array in found.items():
        np.testing.assert_array_equal(array.astype(np.float32), expected[path], err_msg=path)


def refused(folder: Path, toy) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_parameters(folder, toy.table, toy.shapes, np.float32)  # before the first array is asked for
    return caught.value


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_every_float_dtype_is_accepted_and_cast(tmp_path, toy, text, stored, wanted):
    save_file({**toy.tensors(dtype=DTYPES[stored]), **text}, tmp_path / "model.safetensors")
    found = load(tmp_path, toy, wanted)
    same(found, toy)
    assert all(array.dtype == DTYPES[wanted] and array.flags.c_contiguous for array in found.values())
    assert dtype_of(tmp_path, toy.table) == stored


@pytest.mark.parametrize(("vision", "projector"), SPELLINGS)
@pytest.mark.parametrize("split", [False, True])
def test_every_spelling_and_layout_loads_to_equal_arrays(tmp_path, toy, text, write, vision, projector, split):
    write(tmp_path / "model.safetensors", {**toy.tensors(vision, projector, split=split), **text})
    same(load(tmp_path, toy), toy)


def test_casting_rounds_to_nearest_even_across_chunks(tmp_path, toy, write, monkeypatch):
    monkeypatch.setattr("jaxvit.weights.load.CHUNK", 7)
    tensors = toy.tensors(dtype=np.float32)
    exact = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
    write(tmp_path / "model.safetensors", {**tensors, "projector.fc.weight": exact})
    found = load(tmp_path, toy, "bfloat16")["p.fc.kernel"]
    np.testing.assert_array_equal(found.view(np.uint16), exact.T.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_a_known_tensor_without_a_parameter_is_stepped_over(tmp_path, toy, write):
    write(tmp_path / "model.safetensors", {**toy.tensors(), "visual.rotary.inv_freq": np.ones(3, np.float32)})
    same(load(tmp_path, toy), toy)


@pytest.mark.parametrize(("vision", "projector"), SPELLINGS)
@pytest.mark.parametrize("split", [False, True])
def test_a_missing_tensor_is_named_as_the_file_would_spell_it(tmp_path, toy, write, vision, projector, split):
    tensors = toy.tensors(vision, projector, split=split)
    name = f"{vision}blocks.1.attn.{'k_proj' if split else 'qkv'}.weight"
    del tensors[name]
    write(tmp_path / "model.safetensors", tensors)
    error = refused(tmp_path, toy)
    assert error.tensors == (name,)
    assert f"{name}: missing" in str(error)


def test_a_misspelt_tensor_is_unknown_and_the_right_one_missing(tmp_path, toy, write):
    tensors = toy.tensors()
    tensors["visual.blocks.0.attn.qvk.weight"] = tensors.pop("visual.blocks.0.attn.qkv.weight")
    write(tmp_path / "model.safetensors", tensors)
    error = refused(tmp_path, toy)
    assert error.tensors == ("visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qvk.weight")
    assert "qvk.weight: unknown to this model" in str(error)
    assert "qkv.weight: missing" in str(error)


def test_everything_that_is_wrong_is_listed_at_once(tmp_path, toy, write):
    tensors = toy.tensors()
    del tensors["visual.blocks.0.norm.weight"]
    tensors["visual.blocks.0.gamma"] = np.ones(8, np.float32)
    tensors["visual.blocks.2.norm.weight"] = np.ones(8, np.float32)
    tensors["projector.fc.weight"] = np.ones((6, 9), np.float32)
    tensors["visual.blocks.1.attn.k_proj.bias"] = np.ones(8, np.float32)
    tensors["visual.blocks.1.norm.weight"] = np.ones(8, np.int8)
    write(tmp_path / "model.safetensors", tensors)
    error = refused(tmp_path, toy)
    lines = dict(line.strip().split(": ", 1) for line in str(error).splitlines()[1:])
    assert tuple(lines) == error.tensors
    assert lines["visual.blocks.0.norm.weight"] == "missing"
    assert lines["visual.blocks.0.gamma"] == "unknown to this model"
    assert "no parameter blocks.2.norm.scale" in lines["visual.blocks.2.norm.weight"]
    assert "[6, 9]" in lines["projector.fc.weight"]
    assert "[8, 6]" in lines["projector.fc.weight"]
    assert "duplicate" in lines["visual.blocks.1.attn.k_proj.bias"]
    assert "duplicate" in lines["visual.blocks.1.attn.qkv.bias"]
    assert lines["visual.blocks.1.norm.weight"].startswith("quantised (I8")
    assert len(lines) == 7


def test_a_shape_that_a_transform_cannot_take_is_a_wrong_shape(tmp_path, toy, write):
    write(tmp_path / "model.safetensors", {**toy.tensors(), "projector.fc.weight": np.ones((), np.float32)})
    error = refused(tmp_path, toy)
    assert error.tensors == ("projector.fc.weight",)
    assert "wrong shape []" in str(error)


def test_a_part_of_the_wrong_size_is_a_wrong_shape(tmp_path, toy, write):
    tensors = toy.tensors(split=True)
    tensors["visual.blocks.0.attn.k_proj.bias"] = np.ones(4, np.float32)
    write(tmp_path / "model.safetensors", tensors)
    assert refused(tmp_path, toy).tensors == ("visual.blocks.0.attn.k_proj.bias",)


@pytest.mark.parametrize("second", SPELLINGS[1:])
def test_two_spellings_at_once_are_refused(tmp_path, toy, write, second):
    write(tmp_path / "model.safetensors", {**toy.tensors(), **toy.tensors(*second)})
    error = refused(tmp_path, toy)
    assert "mixes spellings" in str(error)
    assert "visual.: " in str(error)
    assert f"{second[0]}: " in str(error)
    assert set(error.tensors) == set(toy.tensors(*second))


def test_a_single_stray_prefix_is_refused_by_name(tmp_path, toy, write):
    stray = {"model.visual.blocks.0.norm.weight": np.ones(8, np.float32)}
    write(tmp_path / "model.safetensors", {**toy.tensors(), **stray})
    assert refused(tmp_path, toy).tensors == tuple(stray)


def test_a_text_model_is_told_that_it_has_no_vision_tensors(tmp_path, toy, write, text):
    write(tmp_path / "model.safetensors", text)
    assert "no vision tensors" in str(refused(tmp_path, toy))


def test_only_the_shards_with_vision_tensors_are_needed(tmp_path, toy, text, write_shards):
    tensors = toy.tensors()
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    last = {**halves[1], "model.norm.weight": np.ones(3, np.float32)}
    shards = {names[0]: text, names[1]: halves[0], names[2]: last}
    write_shards(tmp_path, shards)
    (tmp_path / names[0]).write_bytes(b"never read")
    same(load(tmp_path, toy), toy)
    (tmp_path / names[0]).unlink()
    same(load(tmp_path, toy), toy)
    (tmp_path / names[2]).unlink()
    error = refused(tmp_path, toy)
    assert names[2] in str(error)
    assert names[1] not in str(error)
    assert set(error.tensors) == set(halves[1])


def test_parts_may_lie_in_different_shards(tmp_path, toy, write_shards):
    tensors = toy.tensors(split=True)
    keys = {name: array for name, array in tensors.items() if ".k_proj." in name}
    rest = {name: array for name, array in tensors.items() if ".k_proj." not in name}
    write_shards(tmp_path, {"a.safetensors": keys, "b.safetensors": rest})
    same(load(tmp_path, toy), toy)


def test_a_lying_index_is_named_per_tensor(tmp_path, toy, write_shards):
    tensors = toy.tensors()
    names = sorted(tensors)
    shards = {"a.safetensors": dict(list(tensors.items())[:3]), "b.safetensors": dict(list(tensors.items())[3:])}
    places = {name: shard for shard, held in shards.items() for name in held}
    moved, gone, hidden = next(iter(shards["a.safetensors"])), "visual.blocks.7.norm.weight", names[-1]
    index = {**places, moved: "b.safetensors", gone: "a.safetensors"}
    del index[hidden]
    write_shards(tmp_path, shards, index)
    error = refused(tmp_path, toy)
    assert set(error.tensors) == {moved, gone, hidden}
    assert f"{moved} lies in a.safetensors, the index says b.safetensors" in str(error)
    assert f"{gone} is not in a.safetensors" in str(error)


def test_a_tensor_in_two_shards_is_refused(tmp_path, toy, write_shards):
    tensors = toy.tensors()
    name = "visual.blocks.0.norm.weight"
    rest = dict(list(tensors.items())[3:])
    shards = {"a.safetensors": dict(list(tensors.items())[:3]), "b.safetensors": {**rest, name: tensors[name]}}
    index = {tensor: shard for shard, held in shards.items() for tensor in held} | {name: "a.safetensors"}
    assert name in shards["a.safetensors"]
    write_shards(tmp_path, shards, index)
    assert refused(tmp_path, toy).tensors == (name,)


@pytest.mark.parametrize("shard", ["../a.safetensors", "/a.safetensors", "a.bin", "", 3])
def test_an_index_may_only_name_shards_beside_it(tmp_path, toy, write_shards, shard):
    write_shards(tmp_path, {}, {"visual.blocks.0.norm.weight": shard})
    error = refused(tmp_path, toy)
    assert error.tensors == ("visual.blocks.0.norm.weight",)
    assert "model.safetensors.index.json" in str(error)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, toy, write):
    path = tmp_path / "model.safetensors"
    write(path, toy.tensors())
    stream = load_parameters(tmp_path, toy.table, toy.shapes, np.float32)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors became shorter"):
        dict(stream)


def test_a_file_that_vanishes_while_it_is_read_is_an_error(tmp_path, toy, write):
    write(tmp_path / "model.safetensors", toy.tensors())
    stream = load_parameters(tmp_path, toy.table, toy.shapes, np.float32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read any more"):
        dict(stream)


def test_a_stream_that_is_closed_reads_no_further_and_leaves_nothing_open(tmp_path, toy, write, monkeypatch):
    write(tmp_path / "model.safetensors", toy.tensors())
    monkeypatch.setattr(loading, "SHARE", 1)
    go, begun, files = threading.Event(), [], []
    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **more: files.append(opened(path, *rest, **more)) or files[-1]
    )

    def finish(path: str, array: np.ndarray) -> np.ndarray:
        begun.append(path)
        assert len(begun) == 1 or go.wait(10)
        return array

    monkeypatch.setattr(loading, "READERS", 1)
    stream = load_parameters(tmp_path, toy.table, toy.shapes, np.float32, finish)
    next(stream)
    threading.Timer(0.2, go.set).start()
    stream.close()
    assert len(toy.shapes) > 3
    assert len(begun) <= 2, "what was queued is not begun"
    assert files
    assert all(file.closed for file in files)
    assert not [one for one in threading.enumerate() if one.name.startswith("jaxvit-read")]


def test_what_is_held_at_a_time_is_a_share_of_all_whatever_the_threads(tmp_path, toy, write, monkeypatch):
    write(tmp_path / "model.safetensors", toy.tensors())
    monkeypatch.setattr(loading, "READERS", 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    held, most, lock = 0, [], threading.Lock()
    assemble = loading._assemble

    def counted(parameter, *rest):
        nonlocal held
        with lock:
            held += (cost := loading._cost(parameter, 4, finished=False))
            most.append(held)
        time.sleep(0.01)
        array = assemble(parameter, *rest)
        with lock:
            held -= cost
        return array

    monkeypatch.setattr(loading, "_assemble", counted)
    dict(load_parameters(tmp_path, toy.table, toy.shapes, np.float32))
    plan = loading.plan(vision_tensors(tmp_path, toy.table.prefix), toy.table, toy.shapes)
    costs = [loading._cost(one, 4, finished=False) for one in plan]
    assert max(most) <= max(max(costs), sum(costs) // loading.SHARE)
    most.clear()
    monkeypatch.setattr(loading, "SHARE", 1)
    dict(load_parameters(tmp_path, toy.table, toy.shapes, np.float32))
    assert max(most) > max(costs), "several at a time"


def test_each_array_is_its_own(tmp_path, toy, write):
    write(tmp_path / "model.safetensors", toy.tensors())
    arrays = list(load(tmp_path, toy, "bfloat16").values())
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_the_dtype_is_that_of_most_weights(tmp_path, toy, write, weights):
    other = next(dtype for dtype in DTYPES if dtype not in (weights, "float16"))
    tensors = toy.tensors(dtype=DTYPES[weights])
    tensors["visual.blocks.0.norm.weight"] = tensors["visual.blocks.0.norm.weight"].astype(DTYPES[other])
    write(tmp_path / "model.safetensors", tensors)
    assert dtype_of(tmp_path, toy.table) == weights


MEASURE = """
import json, os, sys
from pathlib import Path
import jax, numpy as np
from jaxvit.weights.keys import Key, KeyTable, transpose
from jaxvit.weights.load import DTYPES, load_parameters

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

folder, dtype, shapes = Path(sys.argv[1]), DTYPES[sys.argv[2]], json.loads(sys.argv[3])
os.cpu_count = lambda: int(sys.argv[4])
keys = Key(r"(.+)\\.weight", r"\\1.kernel", transpose), Key(r"(.+)\\.bias", r"\\1.bias")
table = KeyTable(({"visual.": ""},), keys)
jax.block_until_ready(jax.device_put(np.zeros(4, dtype)))
before, held = status("VmRSS"), {}
open("/proc/self/clear_refs", "w").write("5")
for path, array in load_parameters(folder, table, {k: tuple(v) for k, v in shapes.items()}, dtype):
    held[path] = jax.device_put(array)
del array
jax.block_until_ready(held)
print(json.dumps({"peak": status("VmHWM") - before, "parameters": sum(a.nbytes for a in held.values()),
                  "largest": max(a.nbytes for a in held.values()), "count": len(held)}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures through /proc")
@pytest.mark.parametrize("cores", [1, 16])
@pytest.mark.parametrize(("stored", "wanted"), [("BF16", "BF16"), ("BF16", "F32"), ("F32", "BF16")])
def test_loading_needs_little_more_memory_than_the_parameters(tmp_path, root, stored, wanted, cores):
    from jaxvit.tiny import write_checkpoint

    width, count = 2048, {"BF16": 30, "F32": 15}[wanted]  # 240 MiB in the dtype that is wanted
    tensors, shapes = {}, {}
    for block in range(count):
        tensors |= {f"visual.blocks.{block}.weight": (width, width), f"visual.blocks.{block}.bias": (width,)}
        shapes |= {f"blocks.{block}.kernel": (width, width), f"blocks.{block}.bias": (width,)}
    write_checkpoint(tmp_path, {}, {**tensors, "lm_head.weight": (width, width)}, shards=2, dtype=stored)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), wanted, json.dumps(shapes), str(cores)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    bound = 1.2 * found["parameters"] + found["largest"]
    print(f"{stored} to {wanted}: peak {found['peak'] / 2**20:.0f} MiB, bound {bound / 2**20:.0f} MiB")
    assert found["count"] == len(shapes)
    assert found["parameters"] > 200 * 2**20
    assert found["parameters"] <= found["peak"] <= bound
