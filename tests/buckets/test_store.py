"""The executable store: what it loads, what it refuses, and that it never changes a result."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxvit
from jaxvit import tiny
from jaxvit.buckets import store as stores
from jaxvit.buckets.store import Store, key_of, read_entry
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


def test_the_key_changes_with_everything_that_can_change_the_result(monkeypatch):
    device = jax.devices()[0]
    dispatcher = encoder("qwen2_5_vl").dispatcher
    program = dispatcher.program(dispatcher.ladder.buckets[0], "uint8")
    family, bucket = program.family, program.bucket
    variants = {
        "itself": program,
        "dtype": replace(program, dtype="bfloat16"),
        "pixels": replace(program, pixels="float32"),
        "patches": replace(program, bucket=replace(bucket, patches=bucket.patches + 64)),
        "segments": replace(program, bucket=replace(bucket, segments=bucket.segments + 1)),
        "attention": replace(program, bucket=replace(bucket, attention="xla")),
        "theta": replace(program, family=replace(family, config=replace(family.config, rope_theta=1000.0))),
        "blocks": replace(program, family=replace(family, config=replace(family.config, fullatt_block_indexes=(0, 2)))),
        "mean": replace(program, family=replace(family, settings=replace(family.settings, image_mean=(0.5, 0.5, 0.5)))),
    }
    keys = {name: json.dumps(key_of(variant, device), sort_keys=True) for name, variant in variants.items()}
    assert len(set(keys.values())) == len(keys)
    for name, value in (("XLA_FLAGS", "--xla_dump_to=/nowhere"), ("NVIDIA_TF32_OVERRIDE", "1"), (ISSUING, "another")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert json.dumps(key_of(program, device), sort_keys=True) not in keys.values()
    for name in ("_sources", "_versions", "_host"):
        with monkeypatch.context() as patch:
            patch.setattr(stores, name, lambda: "changed")
            assert json.dumps(key_of(program, device), sort_keys=True) not in keys.values()


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


def test_two_processes_fill_one_store_at_once(folder: Path, root: Path):
    script = (
        "import sys, jaxvit\n"
        "from tests.families import picture\n"
        "encoder = jaxvit.load(sys.argv[1], dtype='float32', budgets=[64, 128], store=sys.argv[2])\n"
        "encoder.warmup()\n"
        "print(float(encoder.encode(picture(64, 64))[0].sum()))\n"
    )
    command = [sys.executable, "-c", script, str(checkpoint("lfm2_5_vl")), str(folder)]
    both = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    results = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert len(list(folder.glob("*.executable"))) == 2
    assert not list(folder.glob(".writing-*"))


def test_threads_build_one_bucket_once(folder: Path):
    shared = load(folder)
    bucket = shared.ladder.buckets[0]
    threads = [threading.Thread(target=shared.dispatcher.executable, args=(bucket,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.stats()["compilations"] == 1
