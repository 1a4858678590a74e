import json
import os
import struct

import numpy as np
import pytest
from safetensors import safe_open

from jaxvit.errors import CheckpointError
from jaxvit.weights.files import MAX_HEADER, read_config_files, read_header, read_json, vision_tensors

POINTER = b"""version https://git-lfs.github.com/spec/v1
oid sha256:163cab2c6c394a8532c405d63603e7b25f9220a344df950288411d1fba0b0567
size 901692416
"""
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def refused(call, *arguments) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    return caught.value


def test_a_header_equals_what_the_library_reads(tmp_path, toy, write):
    path = tmp_path / "x.safetensors"
    write(path, toy.tensors())
    header = read_header(path)
    with safe_open(path, "np") as file:
        assert set(header) == set(file.keys())
        data = path.read_bytes()
        for name, stored in header.items():
            assert stored.dtype == file.get_slice(name).get_dtype()
            assert list(stored.shape) == file.get_slice(name).get_shape()
            assert data[stored.start : stored.start + stored.size] == file.get_tensor(name).tobytes()


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (POINTER, "Git LFS pointer"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00", "pickle"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P", "pickle"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"", "0 bytes"),
        (b"\x10\x00\x00", "3"),
        (struct.pack("<Q", 2**63) + b"{}", str(2**63)),
        (struct.pack("<Q", MAX_HEADER + 1) + b"{}", str(MAX_HEADER)),
        (struct.pack("<Q", 3) + b"{}", "cut off"),
        (struct.pack("<Q", 0), "does not begin with"),
        (struct.pack("<Q", 4) + b"null", "does not begin with"),
        (struct.pack("<Q", 2) + b"{x", "corrupt"),
        (struct.pack("<Q", 3) + b"{\xff}", "corrupt"),
        (struct.pack("<Q", 200_000) + b'{"a":' + b"[" * 199_995, "corrupt"),
    ],
)
def test_a_file_that_is_something_else_is_named_with_its_likely_cause(tmp_path, content, cause):
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(content)
    error = refused(read_header, path)
    assert str(path) in str(error)
    assert cause in str(error)


def test_an_absurd_header_length_allocates_nothing(tmp_path):
    import tracemalloc

    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000))
        file.truncate(50_000_000)
    tracemalloc.start()
    try:
        refused(read_header, path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cut", [1, 7, 8, 100])
def test_a_truncated_file_says_how_many_bytes_are_missing(tmp_path, toy, write, cut):
    path = tmp_path / "x.safetensors"
    write(path, toy.tensors())
    path.write_bytes(path.read_bytes()[:-cut])
    error = refused(read_header, path)
    assert f"{cut} bytes are missing" in str(error)
    assert list(toy.tensors())[-1] in error.tensors


def test_a_file_with_trailing_bytes_is_refused(tmp_path, toy, write):
    path = tmp_path / "x.safetensors"
    write(path, toy.tensors())
    path.write_bytes(path.read_bytes() + b"x")
    assert "1 bytes too many" in str(refused(read_header, path))


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ({"a": {**ENTRY, "data_offsets": [0, 4]}}, "which is not F32"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "before its start"),
        ({"a": {**ENTRY, "data_offsets": [-8, 0]}}, "no valid"),
        ({"a": {**ENTRY, "data_offsets": [0, 8, 8]}}, "no valid"),
        ({"a": {**ENTRY, "data_offsets": [0.0, 8.0]}}, "no valid"),
        ({"a": {**ENTRY, "data_offsets": [0, 2**64]}}, "no valid"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "no valid"),
        ({"a": {**ENTRY, "shape": [-2]}}, "no valid"),
        ({"a": {**ENTRY, "shape": [2**40, 2**40]}}, "which is not F32"),
        ({"a": {**ENTRY, "shape": [1] * 33}}, "no valid"),
        ({"a": {**ENTRY, "shape": 2}}, "no valid"),
        ({"a": {**ENTRY, "dtype": 5}}, "no valid"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "not just"),
        ({"a": {**ENTRY, "more": 1}}, "not just"),
        ({"a": [ENTRY]}, "not just"),
        ({"__metadata__": {"format": 1}, "a": ENTRY}, "__metadata__"),
        ({"a": ENTRY, "b": ENTRY}, "overlaps"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, "overlaps"),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, "gap"),
        ({"a": {**ENTRY, "data_offsets": [1000, 1008]}}, "gap"),
        (b'{"a":' + json.dumps(ENTRY).encode() + b',"a":' + json.dumps(ENTRY).encode() + b"}", "occurs twice"),
        (b'{"\\ud800":' + json.dumps(ENTRY).encode() + b"}", "surrogates not allowed"),
        (b'{"a":' + json.dumps(ENTRY).encode().replace(b"8", b"9" * 5000) + b"}", "corrupt"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, write_raw, header, fault):
    path = tmp_path / "x.safetensors"
    write_raw(path, header, b"\0" * 8)
    error = refused(read_header, path)
    assert str(path) in str(error)
    assert fault in str(error)
    assert str(error).isprintable()


def test_a_dtype_of_the_future_matters_only_where_it_is_used(tmp_path, toy, write_raw):
    header = {"lm_head.weight": {**ENTRY, "dtype": "F3_E1M1"}, "visual.a": {**ENTRY, "data_offsets": [8, 16]}}
    write_raw(tmp_path / "model.safetensors", header, b"\0" * 16)
    assert set(vision_tensors(tmp_path, toy.table.prefix)) == {"visual.a"}


def test_an_unreadable_file_is_a_checkpoint_error(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    assert "cannot be read" in str(refused(read_header, tmp_path / "model.safetensors"))
    assert "cannot be read" in str(refused(read_json, tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((), "has no weights"),
        (("pytorch_model.bin",), "only pickled weights"),
        (("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"), "only pickled weights"),
        (("adapter_model.safetensors", "adapter_config.json"), "holds only an adapter"),
        (("adapter_model.bin", "adapter_config.json"), "holds only an adapter"),
        (("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), "fetch the index"),
    ],
)
def test_a_folder_without_usable_weights_is_refused_with_the_reason(tmp_path, toy, files, reason):
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x02cos\nsystem\n(S'false'\ntR.")
    error = refused(vision_tensors, tmp_path, toy.table.prefix)
    assert reason in str(error)
    assert str(tmp_path) in str(error)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": null}'])
def test_an_index_without_a_map_is_refused(tmp_path, toy, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in str(refused(vision_tensors, tmp_path, toy.table.prefix))


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path, toy):
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"visual.a": "a.safetensors", "visual.a": "b.safetensors"}}'
    )
    assert "'visual.a' occurs twice" in str(refused(vision_tensors, tmp_path, toy.table.prefix))


def test_config_files_are_read_where_they_exist(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "x", "unknown": NaN}')
    (tmp_path / "processor_config.json").write_text('{"image_processor": {}}')
    (tmp_path / "tokenizer.json").write_text("not read")
    files = read_config_files(tmp_path)
    assert list(files) == ["config.json", "processor_config.json"]
    assert files["config.json"]["model_type"] == "x"


def test_a_folder_without_config_says_what_is_missing_and_what_there_is(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    error = refused(read_config_files, tmp_path)
    assert "has no config.json" in str(error)
    assert "model.safetensors" in str(error)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds only an adapter" in str(refused(read_config_files, tmp_path))


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "video_preprocessor_config.json"])
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{\n "a": 1,\n "b": \n', "line 4"),
        (b'{"a": 1}}', "line 1"),
        (b"", "line 1"),
        (POINTER, "Git LFS pointer"),
        (b"\xff\xfe\xff", "not valid JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b"[" * 200_000, "not valid JSON"),
    ],
)
def test_corrupt_json_names_the_file_and_the_line(tmp_path, name, content, fault):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    error = refused(read_config_files, tmp_path)
    assert str(tmp_path / name) in str(error)
    assert fault in str(error)


def test_a_json_file_of_absurd_size_is_refused_unread(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**30)
    assert "256 MiB" in str(refused(read_config_files, tmp_path))


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    assert "is not a folder" in str(refused(read_config_files, tmp_path / "absent"))


def test_no_tensor_is_read_to_check_a_checkpoint(tmp_path, toy, write_raw):
    """A file of a terabyte, nearly all of it a hole, is checked at once."""
    path = tmp_path / "model.safetensors"
    header = {"visual.a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}
    write_raw(path, header)
    try:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + 2**40)
    except OSError:
        pytest.skip("the file system has no sparse files")
    assert vision_tensors(tmp_path, toy.table.prefix)["visual.a"].size == 2**40
    assert np.prod(vision_tensors(tmp_path, toy.table.prefix)["visual.a"].shape) == 2**38


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "video_preprocessor_config.json"])
@pytest.mark.parametrize("kind", ["gone", "loop", "folder", "pipe"])
def test_what_only_looks_like_a_config_file_is_not_taken_for_none(tmp_path, name, kind):
    (tmp_path / "config.json").write_text("{}")
    strange(tmp_path / name, kind)
    error = refused(read_config_files, tmp_path)
    assert f"{tmp_path / name} is there and no file" in str(error)
    assert "remove it, or fetch the file again" in str(error)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["gone", "loop", "folder", "pipe"])
def test_what_only_looks_like_weights_is_named(tmp_path, name, kind):
    strange(tmp_path / name, kind)
    assert f"{tmp_path / name} is there and no file" in str(refused(vision_tensors, tmp_path, bool))


def strange(path, kind):
    """A path that no file stands at, though it is listed."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "loop" else "blobs/0123")
