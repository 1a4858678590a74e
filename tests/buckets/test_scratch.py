"""Memory that stays in place: who shares it, and that results do not depend on it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvit.buckets import executable, scratch
from jaxvit.buckets.executable import Executable, Program, compile_program, weights_of
from jaxvit.buckets.ladder import complete
from jaxvit.buckets.scratch import Scratch
from jaxvit.layers import fuse
from jaxvit.layers.fuse import Weights, parameter_shapes
from jaxvit.layers.hopper import kernels_for, packed
from jaxvit.models import family_of
from jaxvit.weights import manifests
from jaxvit.weights.load import load_parameters
from tests.families import FAMILIES, checkpoint, encoder, picture

LENGTHS = (4096, 1024, 1024, 64)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every bucket has such memory, as on the accelerator with the package's kernels."""
    monkeypatch.setattr(Program, "scratch", LENGTHS)
    yield
    scratch._shared.clear()


def made(name: str, tokens: int) -> Executable:
    known = encoder(name)
    bucket = complete(known.family, {"tokens": tokens})
    return compile_program(known.dispatcher.program(bucket, "uint8"), jax.devices()[0])


def call(one: Executable, name: str, seed: int) -> np.ndarray:
    known = encoder(name)
    pieces = known.prepare(picture(70 + seed % 3 * 30, 100, seed))[0].pieces
    rows, finite = one(known.dispatcher.weights[0], one.program.fill(pieces))
    tokens = sum(piece.tokens for piece in pieces)
    assert np.asarray(finite)[:tokens].all()
    return np.asarray(rows)[:tokens].copy()


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_the_same_with_memory_that_stays_in_place(family: str, request: pytest.FixtureRequest):
    plain = made(family, 96)
    expected = [call(plain, family, seed) for seed in range(4)]
    request.getfixturevalue("held")
    one = made(family, 96)
    assert plain._scratch is None
    assert one._scratch is not None
    kept = [call(one, family, seed) for seed in range(4)]
    for rows, before in zip(kept, expected, strict=True):
        np.testing.assert_array_equal(rows, before)


def test_the_arrays_are_given_back_in_the_same_memory(held: None):
    one = made("lfm2_5_vl", 96)
    room = one._scratch
    assert room is not None
    call(one, "lfm2_5_vl", 0)
    arrays = room._arrays
    assert arrays is not None
    assert tuple(array.size for array in arrays) == LENGTHS
    before = [array.unsafe_buffer_pointer() for array in arrays]
    call(one, "lfm2_5_vl", 1)
    assert all(array.is_deleted() for array in arrays), "they were handed over"
    assert room._arrays is not None
    assert [array.unsafe_buffer_pointer() for array in room._arrays] == before


def test_buckets_of_one_device_share_it_and_the_last_one_frees_it(held: None):
    small, large = made("lfm2_5_vl", 96), made("lfm2_5_vl", 128)
    assert small._scratch is large._scratch is Scratch.of(jax.devices()[0], LENGTHS)
    assert len(scratch._shared) == 1
    del small, large
    gc.collect()
    assert not scratch._shared


def test_threads_share_it(held: None):
    one, two = made("kimi_k25", 96), made("kimi_k25", 128)
    expected = {(which, seed): call((one, two)[which], "kimi_k25", seed) for which in range(2) for seed in range(6)}
    jobs = list(expected) * 3
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: call((one, two)[job[0]], "kimi_k25", job[1]), jobs))
    for job, rows in zip(jobs, found, strict=True):
        np.testing.assert_array_equal(rows, expected[job])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_call_that_failed_the_next_one_has_new_memory(held: None, error: type[BaseException]):
    one = made("lfm2_5_vl", 96)
    expected, room, launch = call(one, "lfm2_5_vl", 0), one._scratch, one._launch
    assert room is not None
    assert launch is not None

    def failing(arguments: list[jax.Array]) -> list[jax.Array]:
        launch(arguments)  # what was handed over is gone
        raise error

    one._launch = failing
    with pytest.raises(error):
        call(one, "lfm2_5_vl", 0)
    assert room._arrays is None
    one._launch = launch
    np.testing.assert_array_equal(call(one, "lfm2_5_vl", 0), expected)


def test_jax_s_own_call_takes_it_too(held: None):
    one = made("lfm2_5_vl", 96)
    expected = call(one, "lfm2_5_vl", 3)
    one._launch = None
    np.testing.assert_array_equal(call(one, "lfm2_5_vl", 3), expected)
    np.testing.assert_array_equal(call(one, "lfm2_5_vl", 3), expected)


def test_it_counts_as_temporaries(held: None, monkeypatch: pytest.MonkeyPatch):
    with_it = made("lfm2_5_vl", 96).memory()
    monkeypatch.setattr(Program, "scratch", ())
    without = made("lfm2_5_vl", 96).memory()
    assert with_it["temporaries"] - without["temporaries"] >= 0
    assert with_it["temporaries"] >= 4 * sum(LENGTHS)
    assert {key: with_it[key] for key in ("weights", "inputs")} == {key: without[key] for key in ("weights", "inputs")}
    assert abs(with_it["outputs"] - without["outputs"]) <= 64, "but for the table of results"


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("moonshotai--Kimi-K2.5", [4352, 1280, 1280, 1280]),
        ("LiquidAI--LFM2.5-VL-450M", [3072, 768, 768, 768]),
        ("Qwen--Qwen2.5-VL-7B-Instruct", [6912, 3456, 1280, 1280, 1280]),
    ],
)
def test_there_is_room_for_the_widest_intermediates_of_a_block(
    name: str, widths: list[int], monkeypatch: pytest.MonkeyPatch
):
    family = family_of(dict(manifests.load(name).files))
    monkeypatch.setattr(executable.hopper, "why_not", lambda platform, dtype: None)
    layout = weights_of(family, "cuda", "bfloat16")
    for patches, rows in ((64, 1024), (1024, 1024), (1088, 2048), (2048, 2048)):
        found = scratch.words(layout.matrices, patches, 2)
        assert found[0] * 4 == scratch.WORKSPACE
        assert [length * 2 // rows for length in found[1 : 1 + len(widths)]] == widths
        assert set(found[1 + len(widths) :]) == {rows * scratch.TABLE_WIDTH}
    assert scratch.words(layout.matrices, 2112, 2) == ()
    program = Program(family, complete(family, {"tokens": 64}), "bfloat16", "uint8", "cuda")
    assert program.scratch == scratch.words(layout.matrices, 256, 2)


def test_off_the_package_s_kernels_there_is_none():
    known = encoder("lfm2_5_vl")
    bucket = complete(known.family, {"tokens": 64})
    for platform, dtype in (("cpu", "bfloat16"), ("cuda", "float32"), ("cpu", "float32")):
        assert Program(known.family, bucket, dtype, "uint8", platform).scratch == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_biases_apart_compute_what_packed_ones_do(name: str, monkeypatch: pytest.MonkeyPatch):
    known, device = encoder(name), jax.devices()[0]
    family, shapes = known.family, parameter_shapes(executable.module_of(known.family))
    monkeypatch.setattr(fuse, "OFTEN", 1)
    pairings = [replace(pairing, columns=32) for pairing in family.pairings()]
    layout = Weights.of(shapes, (*family.widenings(), *family.by_head()), pairings, biases=True, apart=True)
    assert bool(layout.joined) == (name == "qwen2_5_vl")
    monkeypatch.setattr(executable, "weights_of", lambda *_: layout)
    stream = load_parameters(checkpoint(name), family.keys, shapes, np.dtype(np.float32), layout.widened)
    [weights] = layout.pack(stream, lambda array: [jax.device_put(array, device)])
    bucket, rows = known.ladder.buckets[-1], {}
    pieces = [piece for item in known.prepare([picture(140, 140), picture(64, 200)]) for piece in item.pieces]
    for lengths in ((), LENGTHS):
        monkeypatch.setattr(Program, "scratch", lengths)
        one = compile_program(known.dispatcher.program(bucket, "uint8"), device)
        rows[lengths] = np.asarray(one(weights, one.program.fill(pieces))[0])
    np.testing.assert_allclose(rows[LENGTHS], rows[()], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("apart", [False, True])
def test_xla_s_products_take_biases_that_are_arguments_where_they_are_apart(apart: bool):
    shapes = {"norm.scale": (4,)}
    for layer in ("a", "b", "c", "d"):
        shapes |= {f"{layer}.kernel": (3, 4), f"{layer}.bias": (4,)}
    layout = Weights.of(shapes, [fuse.ByHead("a\\.kernel", 2)], biases=True, apart=True)
    names = [name for name, _ in layout.biases]
    assert names == ["a.bias", "b.bias", "c.bias", "d.bias"]
    count = len(layout.matrices)

    def traced(*arrays: jax.Array) -> int:
        vectors, biases, own = arrays[count], arrays[count + 1], arrays[count + 2 :]
        with kernels_for("cpu", "bfloat16"):
            found = layout.unpack(arrays, apart=apart)
            for name, array in zip(names, own, strict=True):
                if name == "a.bias":  # a kernel of the package's reads it in the packed array, in float32
                    [whole], _ = packed.places(found[name])
                    assert whole is biases
                    assert found[name].dtype == jnp.float32
                    assert (packed.own(found[name]) is array) == apart
                else:
                    assert (found[name] is array) == apart
                assert packed.own(found[name]).shape == (4,)
            [whole], _ = packed.places(found["norm.scale"])
            assert whole is vectors
        return 0

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    jax.eval_shape(traced, *layout.avals(np.dtype(jnp.bfloat16), place))


def test_a_failure_on_the_device_stays_with_its_call(held: None):
    one, two = made("lfm2_5_vl", 96), made("lfm2_5_vl", 128)
    expected, launch = call(one, "lfm2_5_vl", 0), one._launch
    assert launch is not None

    def boom(_: np.ndarray) -> np.ndarray:
        time.sleep(0.2)
        raise RuntimeError("a device that failed")

    big = jax.jit(lambda a: jax.lax.fori_loop(0, 30, lambda _, a: a @ a * 1e-4, a))

    @jax.jit
    def broken(x: jax.Array, y: jax.Array) -> jax.Array:
        zero = jax.pure_callback(boom, jax.ShapeDtypeStruct((), np.int32), y[0, 0].astype(np.int32))
        return x + zero.astype(x.dtype)

    ones = jnp.ones((1000, 1000))
    big(ones).block_until_ready()
    one._launch = lambda arguments: launch([*arguments[:-1], broken(arguments[-1], big(ones))])
    with pytest.raises(jax.errors.JaxRuntimeError, match="a device that failed"):
        call(one, "lfm2_5_vl", 0)
    assert one._scratch is not None
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(one._scratch._arrays)
    one._launch = launch
    np.testing.assert_array_equal(call(one, "lfm2_5_vl", 0), expected)
    call(two, "lfm2_5_vl", 0)
