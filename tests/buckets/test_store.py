"""The executable store: what it loads, what it refuses, and that it never changes a result."""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import io
import json
import logging
import os
import pickle
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import jaxvit
from jaxvit import tiny
from jaxvit.buckets import store as stores
from jaxvit.buckets.executable import Program
from jaxvit.buckets.store import Store, key_of, read_entry, write_entry
from jaxvit.errors import StoreError
from jaxvit.machine import ISSUING
from tests.families import checkpoint, encoder, picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def load(folder: Path, **options) -> jaxvit.Encoder:
    options = {"dtype": "float32", "budgets": [64], "store": folder, **options}
    return jaxvit.load(checkpoint("lfm2_5_vl"), **options)


@pytest.fixture
def filled(folder: Path) -> Path:
    """A store with one good entry."""
    load(folder).encode(picture(64, 64))
    assert len(list(folder.glob("*.executable"))) == 1
    return folder


def entry(folder: Path) -> Path:
    [path] = folder.glob("*.executable")
    return path


def test_a_second_start_compiles_nothing_and_gives_the_same_bits(folder: Path, compilations):
    first = load(folder).encode(picture(64, 64))[0]
    compilations.reset()
    again = load(folder)
    assert np.array_equal(again.encode(picture(64, 64))[0], first)
    assert compilations.count == 0
    assert again.stats()["store_hits"] == 1
    assert again.stats()["compilations"] == 0


def test_an_overflow_s_executable_is_stored_too(folder: Path, compilations):
    [item] = load(folder).prepare(picture(300, 300))
    first = load(folder)
    expected = first.encode(item)[0]
    assert first.stats()["overflows"]
    compiled = first.stats()["compilations"]
    assert compiled >= 1
    compilations.reset()
    again = load(folder)
    assert np.array_equal(again.encode(item)[0], expected)
    assert compilations.count == 0
    stats = again.stats()
    assert (stats["store_hits"], stats["compilations"]) == (compiled, 0)
    assert stats["overflows"] == first.stats()["overflows"]


def test_the_folder_and_its_entries_are_the_user_s_alone(filled: Path):
    assert filled.stat().st_mode & 0o777 == 0o700
    assert entry(filled).stat().st_mode & 0o777 == 0o600
    assert not list(filled.glob(".writing-*"))


DAMAGE = {
    "one byte short": (lambda data: data[:-1], "digest"),
    "half": (lambda data: data[: len(data) // 2], "digest"),
    "one bit": (lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:], "digest"),
    "empty": (lambda data: b"", "header"),
    "foreign": (lambda data: b"not an entry", "header"),
    "shifted": (lambda data: b"\x80\x04" + data, "header"),
    "another format": (lambda data: data.replace(b'"format":1', b'"format":9'), "something else"),
    "another key": (lambda data: data.replace(b'"dtype":"float32"', b'"dtype":"float16"'), "something else"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_reported_and_compiled_again(filled: Path, caplog, kind: str):
    damage, reason = DAMAGE[kind]
    path = entry(filled)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "jaxvit"):
        again = load(filled)
        again.encode(picture(64, 64))
    assert reason in caplog.text
    assert str(path) in caplog.text
    assert again.stats()["compilations"] == 1
    caplog.clear()
    third = load(filled)
    third.encode(picture(64, 64))
    assert third.stats()["store_hits"] == 1, "the good entry took the bad one's place"
    assert not caplog.text


def test_nothing_of_an_entry_is_deserialised_before_its_digest_is_checked(filled: Path, monkeypatch):
    path = entry(filled)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(stores.pickle, "loads", lambda *_: pytest.fail("deserialised"))
    load(filled).encode(picture(64, 64))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(StoreError, match=r"group or others may write it.*chmod go-w"):
        load(folder)


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch):
    folder.mkdir(mode=0o700)
    owner = folder.stat().st_uid
    if owner == 0:
        os.chown(folder, 1234, 1234)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        Store(folder)


def test_an_entry_that_others_can_write_is_refused_and_replaced(filled: Path, caplog):
    entry(filled).chmod(0o666)
    with caplog.at_level(logging.WARNING, "jaxvit"):
        load(filled).encode(picture(64, 64))
    assert "group or others may write it" in caplog.text
    assert entry(filled).stat().st_mode & 0o777 == 0o600


def test_an_entry_of_another_user_is_refused_and_replaced(filled: Path, caplog, monkeypatch: pytest.MonkeyPatch):
    status = os.fstat

    def foreign(handle: int) -> os.stat_result:
        found = list(status(handle))
        found[stat.ST_UID] = 4321
        return os.stat_result(found)

    with caplog.at_level(logging.WARNING, "jaxvit"), monkeypatch.context() as patch:
        patch.setattr(stores.os, "fstat", foreign)
        patch.setattr(stores.pickle, "loads", lambda *_: pytest.fail("deserialised"))
        again = load(filled)
        again.encode(picture(64, 64))
    assert f"{entry(filled)} is not used" in caplog.text
    assert "it belongs to user 4321, neither you nor root" in caplog.text
    assert again.stats()["compilations"] == 1
    assert_kept(filled, caplog)


def assert_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next start loads the one bucket, and nothing is said."""
    caplog.clear()
    following = load(folder)
    following.encode(picture(64, 64))
    assert following.stats()["store_hits"] == 1
    assert not caplog.text
    assert not list(folder.glob(".writing-*"))


@pytest.mark.parametrize("kind", ["no pickle", "another pickle", "no executable"])
def test_a_whole_entry_that_cannot_be_deserialised_is_reported_and_compiled_again(filled: Path, caplog, kind: str):
    path = entry(filled)
    key = json.loads(path.read_bytes().split(b"\n", 1)[0])["key"]
    _, *trees = pickle.loads(path.read_bytes().split(b"\n", 1)[1])
    junk = {"no pickle": b"junk", "another pickle": pickle.dumps(7), "no executable": pickle.dumps((b"junk", *trees))}
    write_entry(path, key, junk[kind], {})
    assert read_entry(path, key) == junk[kind], "its digest is right"
    with caplog.at_level(logging.WARNING, "jaxvit"):
        again = load(filled)
        again.encode(picture(64, 64))
    assert f"{path} is not used and will be compiled again" in caplog.text
    assert again.stats()["compilations"] == 1
    assert_kept(filled, caplog)


def in_place(kind: str, path: Path) -> None:
    """Puts something that is no file in an entry's place."""
    path.unlink()
    if "folder" in kind:
        path.mkdir()
    if kind == "a folder with a file":
        (path / "file").touch()
    if kind == "a pipe":
        os.mkfifo(path)
    if kind == "a loop":
        path.symlink_to(path)


@pytest.mark.parametrize("kind", ["a folder", "a folder with a file", "a pipe", "a loop"])
def test_what_is_no_file_in_an_entrys_place_is_that_entrys_fault_alone(filled: Path, caplog, kind: str):
    path = entry(filled)
    in_place(kind, path)
    with caplog.at_level(logging.WARNING, "jaxvit"):
        again = load(filled, budgets=[64, 128])
        again.warmup()
    assert f"{path} is not used and will be compiled again" in caplog.text
    assert "cannot be written" not in caplog.text
    assert again.stats()["compilations"] == 2
    kept = [each for each in filled.iterdir() if each.is_file()]
    if "folder" in kind:
        assert f"{path} is a folder, so its executable is not kept: remove it" in caplog.text
        assert len(kept) == len(list(filled.iterdir())) - 1 == 1, "the other bucket's entry is there, and no temporary"
        for inside in path.iterdir():
            inside.unlink()
        path.rmdir()
        load(filled).warmup()
    else:
        assert len(kept) == len(list(filled.iterdir())) == 2
    assert_kept(filled, caplog)


def test_a_full_disk_is_a_warning_and_leaves_nothing_behind(folder: Path, caplog, monkeypatch: pytest.MonkeyPatch):
    class Full(io.FileIO):
        """A disk that is full after the first thousand bytes."""

        def write(self, data: Any) -> int:
            if self.tell() >= 1000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(memoryview(data)[:1000])

    with caplog.at_level(logging.WARNING, "jaxvit"), monkeypatch.context() as patch:
        patch.setattr(stores.os, "fdopen", lambda handle, mode: io.BufferedWriter(Full(handle, mode)))
        full = load(folder, budgets=[64, 128])
        full.warmup()
        rows = full.encode(picture(64, 64))[0]
    assert re.search("cannot be written, executables are not kept: .*No space left", caplog.text)
    assert list(folder.iterdir()) == []
    assert full.stats()["compilations"] == 2
    assert np.array_equal(rows, load(folder).encode(picture(64, 64))[0])
    assert_kept(folder, caplog)


def test_what_a_killed_process_left_half_written_goes_and_what_is_being_written_stays(folder: Path):
    folder.mkdir(mode=0o700)
    abandoned, current, other = folder / ".writing-old", folder / ".writing-new", folder / "notes"
    for path in (abandoned, current, other):
        path.write_bytes(b"x")
    stuck, link = folder / ".writing-folder", folder / ".writing-link"
    stuck.mkdir()
    link.symlink_to("nowhere")
    hours_ago = time.time() - 2 * 3600
    for path in (abandoned, other, stuck, link):
        os.utime(path, (hours_ago, hours_ago), follow_symlinks=False)
    load(folder).encode(picture(64, 64))
    left = {path.name for path in folder.iterdir() if path.suffix != ".executable"}
    assert left == {".writing-new", "notes", ".writing-folder"}
    assert len(list(folder.glob("*.executable"))) == 1


def test_the_machine_s_clock_does_not_make_a_file_an_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch):
    folder.mkdir(mode=0o700)
    (folder / ".writing-other").write_bytes(b"x")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    load(folder).encode(picture(64, 64))
    assert (folder / ".writing-other").exists()


def test_an_entry_that_is_removed_while_it_is_written_is_its_own_fault_alone(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    shared, real = load(folder, budgets=[64, 128]), os.replace

    def removed(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "replace", real)
        Path(source).unlink()
        real(source, target)

    monkeypatch.setattr(os, "replace", removed)
    shared.encode(picture(64, 64))
    assert "was removed while it was written" in caplog.text
    shared.warmup()
    assert len(list(folder.glob("*.executable"))) == 1, "the other bucket's"


def test_a_store_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, "jaxvit"):
        rows = load(blocked / "store").encode(picture(64, 64))[0]
    assert "cannot be written" in caplog.text
    assert np.isfinite(rows).all()


def test_a_store_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not a folder"):
        Store(tmp_path / "file")


@pytest.mark.parametrize("folder", ["", "zero\0byte"])
def test_a_store_whose_path_is_none_is_refused(folder: str):
    with pytest.raises(StoreError, match="is no folder's path; pass another, or store=False"):
        Store(folder)


def test_a_store_whose_name_is_too_long_is_a_warning(tmp_path: Path, caplog):
    assert not Store(tmp_path / ("a" * 5000)).writable
    assert "cannot be written" in caplog.text


def device_of(platform: str = "cpu", version: str = "1", **facts: object) -> jax.Device:
    """A device that says what it is told to."""
    client = SimpleNamespace(platform_version=version)
    given = {"device_kind": "kind", "compute_capability": "9.0", "id": 0, **facts}
    return mock.Mock(spec=jax.Device, platform=platform, client=client, **given)


def at(program: Program, **facts: object) -> Program:
    """The same program with another backend of attention behind it."""
    changed = replace(program)
    vars(changed)["backend"] = SimpleNamespace(**{"name": "xla", "version": "1", **facts})
    return changed


PROGRAMS: dict[str, tuple[str, Callable[[Program], Program]]] = {
    "dtype": ("dtype", lambda one: replace(one, dtype="bfloat16")),
    "pixels": ("pixels", lambda one: replace(one, pixels="float32")),
    "tokens": ("bucket", lambda one: replace(one, bucket=replace(one.bucket, tokens=one.bucket.tokens + 1))),
    "patches": ("bucket", lambda one: replace(one, bucket=replace(one.bucket, patches=one.bucket.patches + 64))),
    "segments": ("bucket", lambda one: replace(one, bucket=replace(one.bucket, segments=one.bucket.segments + 1))),
    "windows": ("bucket", lambda one: replace(one, bucket=replace(one.bucket, windows=one.bucket.windows + 1))),
    "theta": ("config", lambda one: configured(one, rope_theta=1000.0)),
    "blocks": ("config", lambda one: configured(one, fullatt_block_indexes=(0, 2))),
    "mean": ("table", lambda one: normalised(one, image_mean=(0.5, 0.5, 0.5))),
    "attention": ("attention", lambda one: at(one, name="dense")),
    "attention's version": ("attention", lambda one: at(one, version="2")),
}
"""What differs -> the field of the key that has to, and how a program becomes such."""

DEVICES: dict[str, tuple[str, dict[str, object]]] = {
    "runtime": ("platform_version", {"version": "2"}),
    "kind": ("device", {"device_kind": "another"}),
    "capability": ("device", {"compute_capability": "10.0"}),
    "ordinal": ("ordinal", {"id": 1}),
}


def configured(program: Program, **changes: object) -> Program:
    family = program.family
    return replace(program, family=replace(family, config=replace(family.config, **changes)))


def normalised(program: Program, **changes: object) -> Program:
    family = program.family
    return replace(program, family=replace(family, settings=replace(family.settings, **changes)))


@pytest.fixture
def program() -> Program:
    dispatcher = encoder("qwen2_5_vl").dispatcher
    return dispatcher.program(replace(dispatcher.ladder.buckets[0], attention="xla"), "uint8")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_key_changes_with_each_thing_that_can_change_the_result(
    platform: str, program: Program, monkeypatch: pytest.MonkeyPatch
):
    program, device = at(program), device_of(platform)
    original, seen, fields = key_of(program, device), set[str](), set[str]()

    def compare(what: str, field: str, key: dict[str, Any]) -> None:
        """Of everything in the key that field alone is another, and it was never the same before."""
        assert {name for name in original if key[name] != original[name]} == {field}, what
        text = json.dumps(key, sort_keys=True)
        assert text not in seen, what
        seen.add(text)
        fields.add(field)

    for what, (field, change) in PROGRAMS.items():
        changed = change(program)
        compare(what, field, key_of(changed if field == "attention" else at(changed), device))
    for what, (field, facts) in DEVICES.items():
        compare(what, field, key_of(program, device_of(platform, **facts)))
    if platform != "cpu":  # whose host is described by other facts
        compare("platform", "device", key_of(program, device_of("rocm")))
    hosts = ["_host"] if platform == "cpu" else ["_driver", "_cudnn"]
    for name, field in {"_sources": "sources", "_versions": "versions", **dict.fromkeys(hosts, "host")}.items():
        with monkeypatch.context() as patch:
            patch.setattr(stores, name, lambda: "changed")
            compare(name, field, key_of(program, device))
    with monkeypatch.context() as patch:
        patch.setattr(stores, "compiler_options", lambda program: {"an_option": program.platform})
        compare("options", "options", key_of(program, device))
    with monkeypatch.context() as patch:
        patch.setattr(type(program.family), "name", "another")
        compare("family", "family", key_of(program, device))
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", ISSUING):
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            compare(name, "flags", key_of(program, device))
    with monkeypatch.context() as patch:
        patch.setattr(stores, "_setting", lambda name: "changed" if name == "jax_optimization_level" else "")
        compare("setting", "settings", key_of(program, device))
    assert fields == set(original), "every field of the key was another once"
    other = json.dumps(key_of(program, device_of("cuda" if platform == "cpu" else "cpu")), sort_keys=True)
    assert other not in {*seen, json.dumps(original, sort_keys=True)}


SETTINGS = {
    "jax_optimization_level": "O1",
    "jax_memory_fitting_level": "O1",
    "jax_exec_time_optimization_effort": 0.5,
    "jax_memory_fitting_effort": 0.5,
    "jax_disable_most_optimizations": True,
    "jax_compiler_enable_remat_pass": False,
    "jax_use_shardy_partitioner": False,
    "jax_xla_profile_version": 7,
}


def test_the_key_changes_with_each_setting_of_jax_that_reaches_the_compiler(program: Program):
    assert set(SETTINGS) == set(stores.SETTINGS)
    device, keys = jax.devices()[0], list[str]()
    before = {name: holder.value for name, holder in jax.config._value_holders.items() if name in SETTINGS}
    assert len(before) > 4, "this JAX knows most of them"
    for name, value in before.items():
        keys.append(json.dumps(key_of(program, device)))
        jax.config.update(name, SETTINGS[name])
        try:
            keys.append(json.dumps(key_of(program, device)))
        finally:
            jax.config.update(name, value)
    assert len(set(keys[::2])) == 1, "with everything as it was"
    assert len(set(keys[1::2])) == len(before)
    assert keys[0] not in keys[1::2]
    assert stores._setting("jax_no_such_setting") == ""


def test_what_jaxs_compile_options_are_made_of_is_in_the_key_or_known():
    """Of the settings that JAX reads when it makes compile options, none is forgotten."""
    compiler = pytest.importorskip("jax._src.compiler")
    source = inspect.getsource(compiler.get_compile_options)
    held = {holder: name for name, holder in jax.config._value_holders.items()}
    read = {held[getattr(compiler.config, name)] for name in re.findall(r"\bconfig\.(\w+)\.value", source)}
    read |= {held[getattr(compiler, name)] for name in re.findall(r"\b(_[A-Z_]+)\.value", source)}
    # Where JAX's own cache lies and what it keeps there: files, and no other code.
    assert read - {"jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches"} <= set(stores.SETTINGS)
    assert "jax_optimization_level" in read


OTHER_SETTINGS = {
    "jax_default_matmul_precision": "highest",
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "raise",
    "jax_enable_x64": True,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_softmax_custom_jvp": False,
    "jax_default_device": None,
}
"""Settings that are not in the key."""


def test_settings_that_are_not_in_the_key_do_not_change_the_program():
    dispatcher, device = encoder("lfm2_5_vl").dispatcher, jax.devices()[0]
    program = dispatcher.program(dispatcher.ladder.buckets[0], "uint8")
    key, text = key_of(program, device), program.lower(device).as_text()
    different = []
    for name, value in OTHER_SETTINGS.items():
        before = getattr(jax.config, name)
        jax.config.update(name, jax.devices()[-1] if name == "jax_default_device" else value)
        try:
            assert key_of(program, device) == key
            if program.lower(device).as_text() != text:
                different.append(name)
        finally:
            jax.config.update(name, before)
    assert not different


def test_the_cudnn_that_is_loaded_is_in_the_key_of_a_gpu(program: Program, monkeypatch: pytest.MonkeyPatch):
    def key(**plugin: object) -> str:
        with monkeypatch.context() as patch:
            for name in ("jax_cuda13_plugin._versions", "jax_cuda12_plugin._versions"):
                found = plugin.get(name.split("_")[1])
                patch.setitem(sys.modules, name.split(".")[0], None if found is None else SimpleNamespace())
                patch.setitem(sys.modules, name, found)
            stores._cudnn.cache_clear()
            return json.dumps(key_of(program, device_of("cuda")))

    def says(number: int) -> SimpleNamespace:
        return SimpleNamespace(cudnn_get_version=lambda: number)

    keys = [key(), key(cuda13=says(91300)), key(cuda13=says(92400)), key(cuda12=says(90100))]
    assert len(set(keys)) == 4
    assert "92400" in keys[2]
    assert key(cuda13=SimpleNamespace()) == keys[0], "a plugin that does not say"
    stores._cudnn.cache_clear()


def test_versions_are_those_of_the_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed = {
        name.lower().replace("_", "-"): one.version
        for one in importlib.metadata.distributions()
        if (name := one.name or "").lower().startswith(("nvidia-", "nvidia_")) or name in ("jax", "jaxlib", "flax")
    }
    stores._versions.cache_clear()
    found = stores._versions()
    assert {name: found.get(name) for name in installed} == installed
    (tmp_path / "nvidia_cudnn_cu13-9.99.1.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    stores._versions.cache_clear()
    assert stores._versions()["nvidia-cudnn-cu13"] == "9.99.1", "the first on the path is the one that is imported"
    stores._versions.cache_clear()


def test_many_threads_find_the_versions_once(monkeypatch: pytest.MonkeyPatch):
    device, dispatcher = jax.devices()[0], encoder("qwen2_5_vl").dispatcher
    program, asked = dispatcher.program(dispatcher.ladder.buckets[0], "uint8"), list[str]()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: asked.append(name) or time.sleep(0.001) or "1")
    stores._versions.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: json.dumps(key_of(program, device)), range(16)))
    stores._versions.cache_clear()
    assert len(set(keys)) == 1
    assert len(asked) == len(set(asked)) > 4


def test_a_changed_configuration_of_equal_shapes_is_not_served_an_old_executable(folder: Path, tmp_path: Path):
    plain = tiny.tiny_checkpoint("qwen2_5_vl", tmp_path / "plain")
    other = tiny.tiny_checkpoint("qwen2_5_vl", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["vision_config"]["fullatt_block_indexes"] = [0, 2]
    (other / "config.json").write_text(json.dumps(config))
    rows = [
        jaxvit.load(path, dtype="float32", budgets=[64], store=folder).encode(picture(224, 170))[0]
        for path in (plain, other)
    ]
    assert not np.allclose(*rows, atol=1e-6)
    assert len(list(folder.glob("*.executable"))) == 2


def test_an_entry_of_another_key_is_not_read(filled: Path):
    with pytest.raises(StoreError, match="something else"):
        read_entry(entry(filled), {"another": "key"})
    assert read_entry(filled / "absent.executable", {}) is None


FILLS = """
import json, sys, time
from pathlib import Path
import jaxvit
from jaxvit.buckets import store as stores
from tests.families import picture

checkpoint, folder, met, name, other = sys.argv[1:]
encoder = jaxvit.load(checkpoint, dtype="float32", budgets=[64, 128], store=folder)
compile_program = stores.compile_program


def both(program, device):
    (Path(met) / f"{name} {program.bucket.tokens}").touch()
    deadline = time.monotonic() + 200
    while not (Path(met) / f"{other} {program.bucket.tokens}").exists():
        assert time.monotonic() < deadline, f"{other} compiles no bucket of {program.bucket.tokens} tokens"
        time.sleep(0.01)
    return compile_program(program, device)


stores.compile_program = both
encoder.warmup()
stats = encoder.stats()
print(json.dumps([stats["compilations"], stats["store_hits"], encoder.encode(picture(64, 64))[0].tolist()]))
"""
"""A process that compiles a bucket only once another has missed it, too."""


def test_two_processes_fill_one_store_at_once(folder: Path, root: Path, tmp_path: Path, caplog):
    (tmp_path / "met").mkdir()
    command = [sys.executable, "-c", FILLS, str(checkpoint("lfm2_5_vl")), str(folder), str(tmp_path / "met")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen([*command, *names], cwd=root, **pipes) for names in (("a", "b"), ("b", "a"))]
    results = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert not any(b"executable store" in errors for _, errors in results), "neither was warned"
    one, other = (json.loads(output) for output, _ in results)
    assert one[:2] == other[:2] == [2, 0], "each compiled every bucket"
    assert one[2] == other[2]
    assert len(list(folder.glob("*.executable"))) == len(list(folder.iterdir())) == 2

    third = load(folder, budgets=[64, 128])
    with caplog.at_level(logging.WARNING, "jaxvit"):
        third.warmup()
    assert not caplog.text
    assert (third.stats()["compilations"], third.stats()["store_hits"]) == (0, 2)
    assert third.encode(picture(64, 64))[0].tolist() == one[2]


def test_threads_build_one_bucket_once(folder: Path):
    shared = load(folder)
    bucket = shared.ladder.buckets[0]
    threads = [threading.Thread(target=shared.dispatcher.executable, args=(bucket,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.stats()["compilations"] == 1
