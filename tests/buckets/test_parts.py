"""A program cut in two computes what the whole one does, each part from no more than it needs."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxvit
from jaxvit.buckets import parts
from jaxvit.buckets.dispatcher import check_fits
from jaxvit.buckets.executable import Program, compile_program
from jaxvit.buckets.store import Store, key_of
from tests.families import FAMILIES, checkpoint, encoder, media, picture, relative

CUT = "blocks.0"


@pytest.fixture
def cutting(monkeypatch) -> None:
    """Programs made from here on are cut, which on a CPU none is; the shared encoders' are whole."""
    for name in FAMILIES:
        for pixels in ("uint8", "float32"):
            encoder(name).dispatcher.executable(encoder(name).ladder.buckets[0], pixels)
    monkeypatch.setattr(parts, "place", lambda *_: CUT)


def program(name: str) -> Program:
    dispatcher = encoder(name).dispatcher
    return dispatcher.program(dispatcher.ladder.buckets[0], "uint8")


def arguments(lowered: jax.stages.Lowered) -> list[str]:
    """Types of the arguments of a lowered program, in their order."""
    [signature] = re.findall(r"func\.func public @main\((.*?)\) ->", lowered.as_text(), re.DOTALL)
    return re.findall(r"%arg\d+: (tensor<[^>]*>)", signature)


@pytest.mark.parametrize("blocks", [1, 2, 12, 27, 32])
def test_a_small_bucket_on_a_gpu_is_cut_behind_an_eighth_of_its_blocks(blocks: int):
    place = parts.place("cuda", 256, blocks)
    if blocks == 1:
        assert place is None
    else:
        first = int(place.removeprefix("blocks.")) + 1
        assert blocks / 8 <= first < blocks / 8 + 1
    assert parts.place("cpu", 256, blocks) is None
    assert parts.place("cuda", 2048, blocks) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_give_what_the_whole_program_gives(name: str, cutting):
    dispatcher = encoder(name).dispatcher
    whole = dispatcher.executable(dispatcher.ladder.buckets[0])
    executable = compile_program(program(name), jax.devices()[0])
    assert (len(whole.parts), len(executable.parts)) == (1, 2)
    arrays = whole.program.fill(dispatcher.family.example(whole.program.bucket))
    expected, finite = whole(dispatcher.weights[0], arrays)
    found, also_finite = executable(dispatcher.weights[0], arrays)
    assert all(part._launched for part in executable.parts)
    assert np.array_equal(finite, also_finite)
    assert relative(np.asarray(found), np.asarray(expected)) <= 1e-6
    for part in executable.parts:
        part._launch = None  # as with a JAX that has no short way
    again, _ = executable(dispatcher.weights[0], arrays)
    assert np.array_equal(again, found)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_part_takes_what_it_needs_and_one_array_goes_between(name: str, cutting):
    this, device = program(name), jax.devices()[0]
    every = len(arguments(this.lower(device)))
    first, second = this.lower_parts(device)
    [carried] = first.out_info
    assert carried.shape[0] == this.bucket.patches
    of_first, of_second = arguments(first), arguments(second)
    assert len(of_first) < every / 2 + len(this.buffers)
    shared = len(of_first) + len(of_second) - 1 - every
    assert shared <= len(this.buffers) + 1, "metadata, and the packed vectors"
    pixels = next(buffer for buffer in this.buffers if buffer.name == "pixels")
    of_pixels = f"tensor<{'x'.join(map(str, pixels.shape))}xui8>"
    assert of_pixels in of_first
    assert of_pixels not in of_second


@pytest.mark.parametrize("name", FAMILIES)
def test_the_memory_of_the_parts_is_that_of_the_whole_and_what_goes_between(name: str, cutting):
    dispatcher = encoder(name).dispatcher
    whole = dispatcher.executable(dispatcher.ladder.buckets[0]).memory()
    executable = compile_program(program(name), jax.devices()[0])
    memory = executable.memory()
    between = executable.parts[0].compiled.memory_analysis().output_size_in_bytes
    assert between >= executable.program.bucket.patches * 4
    assert memory["temporaries"] >= between
    for same in ("weights", "inputs", "outputs"):
        assert memory[same] == whole[same]
    check_fits(executable, sum(memory.values()))


def test_both_parts_are_one_entry_of_the_store_with_a_key_of_its_own(tmp_path: Path, monkeypatch):
    device, store = jax.devices()[0], Store(tmp_path)
    whole = key_of(program("kimi_k25"), device)
    monkeypatch.setattr(parts, "place", lambda *_: CUT)
    assert key_of(program("kimi_k25"), device) == whole | {"cut": CUT}
    built = store.build(program("kimi_k25"), device)
    loaded = store.build(program("kimi_k25"), device)
    assert [one.source for one in (built, loaded)] == ["compiled", "store"]
    assert len(loaded.parts) == 2
    [entry] = store.entries()
    assert entry["memory"] == loaded.memory()
    dispatcher = encoder("kimi_k25").dispatcher
    arrays = built.program.fill(dispatcher.family.example(built.program.bucket))
    found = [np.asarray(one(dispatcher.weights[0], arrays)[0]) for one in (built, loaded)]
    assert np.array_equal(*found)


def test_a_bucket_in_parts_counts_as_one_compilation_and_encodes_the_same(cutting):
    options = {"dtype": "float32", "budgets": [64], "store": False}
    cut = jaxvit.load(checkpoint("qwen2_5_vl"), **options)
    cut.warmup()
    assert cut.stats()["compilations"] == 1
    ours, theirs = (np.asarray(one.encode(picture(140, 140))[0]) for one in (cut, encoder("qwen2_5_vl")))
    assert relative(ours, theirs) <= 1e-6
    taps = cut.intermediates(cut.prepare([media("qwen2_5_vl")[0]])[0])
    assert {CUT, "output"} <= set(taps[0]), "the probe of the whole program still sees everything"


@pytest.mark.parametrize("name", ["kimi_k25", "lfm2_vl"])
def test_rows_that_are_not_finite_come_out_of_the_parts_as_they_are(name: str, cutting):
    dispatcher = encoder(name).dispatcher
    whole = dispatcher.executable(dispatcher.ladder.buckets[0], "float32")
    executable = compile_program(dispatcher.program(dispatcher.ladder.buckets[0], "float32"), jax.devices()[0])
    arrays = dispatcher.executable(whole.program.bucket).program.fill(dispatcher.family.example(whole.program.bucket))
    assert arrays["pixels"] is not None
    pixels = arrays["pixels"].astype(np.float32) / 255
    pixels[5] = np.inf
    arrays |= {"pixels": pixels}
    (expected, finite), (found, also_finite) = (one(dispatcher.weights[0], arrays) for one in (whole, executable))
    assert 0 < np.isnan(expected).any(1).sum() < len(expected)
    assert np.array_equal(np.isnan(expected), np.isnan(found))
    assert np.array_equal(finite, also_finite)
