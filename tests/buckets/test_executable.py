"""What can be read off a bucket's program and executable without an accelerator."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod

import jax
import numpy as np
import pytest

from jaxvit.buckets import executable as executables
from jaxvit.buckets.dispatcher import Dispatcher
from jaxvit.buckets.executable import Executable, Program, compile_program, pad
from jaxvit.buckets.ladder import complete
from jaxvit.errors import CapacityError, OptionError
from jaxvit.models.family import Bucket, Buffer
from tests.families import FAMILIES, encoder, relative

PATCHES = 1792


@pytest.fixture(params=FAMILIES)
def program(request: pytest.FixtureRequest) -> Program:
    dispatcher = encoder(request.param).dispatcher
    return dispatcher.program(Bucket(PATCHES // 4, PATCHES, 32, 200, "xla"), "uint8")


def shapes_in(text: str) -> set[tuple[int, ...]]:
    """Every tensor shape of a lowered program."""
    return {tuple(map(int, found.split("x")[:-1])) for found in re.findall(r"tensor<((?:\d+x)+[a-z]\w*)>", text)}


def test_no_buffer_of_patches_times_patches_but_in_dense(program: Program):
    square = lambda text: [shape for shape in shapes_in(text) if sum(extent >= PATCHES for extent in shape) > 1]  # noqa: E731
    assert not square(program.lower(jax.devices()[0]).as_text())
    dense = replace(program, bucket=replace(program.bucket, attention="dense"))
    assert square(dense.lower(jax.devices()[0]).as_text()), "the search finds such a buffer where there is one"


def test_no_weight_is_a_constant_of_the_program(program: Program):
    text = program.lower(jax.devices()[0]).as_text()
    constants = re.findall(r"stablehlo\.constant dense<(?:\"0x|\[).*?> : tensor<((?:\d+x)+[a-z]\w*)>", text)
    sizes = [prod(map(int, found.split("x")[:-1])) for found in constants]
    assert sizes, "the normalisation table is one"
    assert max(sizes) <= 768


def test_the_number_of_arguments_is_bounded(program: Program):
    text = program.lower(jax.devices()[0]).as_text()
    [signature] = re.findall(r"func\.func public @main\((.*?)\) ->", text, re.DOTALL)
    count = len(re.findall(r"%arg\d+:", signature))
    layers = getattr(program.family.config, "depth", None) or program.family.config.num_hidden_layers
    assert count <= 12 * layers + 24


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((5, 3), np.int32), r"got int32 \[5, 3\], the bucket holds float32 \[4, 3\]"),
        (np.zeros((2, 2), np.float32), r"got float32 \[2, 2\]"),
        (np.zeros((5, 3), np.float32), r"got float32 \[5, 3\]"),
    ],
)
def test_an_array_that_does_not_fit_its_buffer_is_refused_by_name(array: np.ndarray, reason: str):
    with pytest.raises(CapacityError, match=f"buffer taps: {reason}"):
        pad(Buffer("taps", (4, 3), np.dtype(np.float32)), array)


def test_padding_follows_the_buffer_s_rule():
    rows = np.arange(6, dtype=np.int32).reshape(2, 3)
    zeros = pad(Buffer("a", (4, 3), np.dtype(np.int32)), rows)
    last = pad(Buffer("b", (4, 3), np.dtype(np.int32), "repeat_last"), rows)
    assert zeros is not None
    assert last is not None
    assert zeros.tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0], [0, 0, 0]]
    assert last.tolist() == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [3, 4, 5]]
    assert pad(Buffer("c", (4,), np.dtype(np.int32), optional=True), None) is None
    with pytest.raises(CapacityError, match="buffer d is missing"):
        pad(Buffer("d", (4,), np.dtype(np.int32)), None)


def example(name: str) -> tuple[Executable, dict[str, np.ndarray | None]]:
    """The smallest bucket of a family, and arrays that fill it."""
    dispatcher = encoder(name).dispatcher
    bucket = dispatcher.ladder.buckets[0]
    executable = dispatcher.executable(bucket)
    return executable, executable.program.fill(dispatcher.family.example(bucket))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_executable_refuses_a_wrong_shape_or_dtype_of_any_buffer_as_our_error(name: str):
    executable, arrays = example(name)
    for buffer in executable.program.buffers:
        right = np.zeros(buffer.shape, buffer.dtype)
        other = np.dtype(np.float64 if buffer.dtype == np.int32 else np.int32)
        for wrong in (right[:-1], right.astype(other), right[..., None], right.view(f"V{buffer.dtype.itemsize}")):
            got = re.escape(f"buffer {buffer.name}: got {wrong.dtype} {list(wrong.shape)}, the executable takes")
            with pytest.raises(CapacityError, match=got):
                executable.place(arrays | {buffer.name: wrong})


@pytest.mark.parametrize("name", FAMILIES)
def test_an_executable_refuses_a_missing_and_an_unknown_buffer_by_name(name: str):
    executable, arrays = example(name)
    for buffer in executable.program.buffers:
        without = {other: array for other, array in arrays.items() if other != buffer.name}
        for lacking in (arrays | {buffer.name: None}, without):
            if buffer.optional:
                placed = executable.place(lacking)
                assert len(placed) == len(executable.program.buffers)
                assert not placed[executable.program.buffers.index(buffer)].any()
            else:
                with pytest.raises(CapacityError, match=f"buffer {re.escape(buffer.name)} is missing"):
                    executable.place(lacking)
    with pytest.raises(CapacityError, match=r"no buffer 'pixel', 'other'; it takes .*pixels"):
        executable.place(arrays | {"pixel": arrays["pixels"], "other": None})


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_the_programs_do_not_take_are_refused_where_they_are_handed_over(name: str):
    known = encoder(name)
    dispatcher, weights = known.dispatcher, known.dispatcher.weights[0]

    def handed(weights: list[jax.Array]) -> Dispatcher:
        return Dispatcher(known.family, known.ladder, known.dtype, dispatcher.devices, [weights])

    handed(weights)
    names = dispatcher.program(dispatcher.ladder.buckets[0], "uint8").weights.names
    assert len(names) == len(weights)
    matrix = next(place for place, array in enumerate(weights) if array.ndim == 2 and len(set(array.shape)) == 2)
    for place in (matrix, len(weights) - 1):
        array = weights[place]
        wrong = [array.view(np.int32), array.reshape(-1, 1), array.T if array.ndim > 1 else array[None]]
        assert {each.nbytes for each in wrong} == {array.nbytes}, "a launch sees no difference"
        for each in (*wrong, array[:-1]):
            said = re.escape(f"array {place} ({names[place]}) is {each.dtype} {list(each.shape)}")
            with pytest.raises(OptionError, match=f"{said}, .* take {array.dtype} .*jaxvit.load"):
                handed([*weights[:place], each, *weights[place + 1 :]])
    with pytest.raises(
        OptionError, match=rf"got {len(weights) - 1} arrays, {known.family.name}'s .* take {len(weights)}"
    ):
        handed(weights[:-1])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["dense", "xla"])
def test_a_nearly_empty_bucket_is_not_slower_than_a_full_one(name: str, attention: str):
    dispatcher = encoder(name).dispatcher
    bucket = Bucket(448, 1792, 32, 200, attention)
    executable = dispatcher.executable(bucket)
    full = dispatcher.family.example(bucket)
    small = dispatcher.family.example(replace(bucket, tokens=64, patches=256, segments=1))
    assert sum(piece.rows for piece in small) <= 256 < 1700 <= sum(piece.rows for piece in full)

    filled = [executable.program.fill(pieces) for pieces in (small, full)]
    best = [float("inf")] * 2
    for turn in range(60):  # in turn, and the quickest of each: other work on the machine only ever adds
        if turn >= 12 and best[0] <= 1.3 * best[1]:
            break
        for which, arrays in enumerate(filled):
            start = time.perf_counter()
            jax.block_until_ready(executable(dispatcher.weights[0], arrays))
            best[which] = min(best[which], time.perf_counter() - start)
    assert best[0] <= 1.3 * best[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_that_holds_its_result_computes_the_same_and_keeps_nan(name: str):
    dispatcher, device = encoder(name).dispatcher, jax.devices()[0]
    bucket = dispatcher.ladder.buckets[0]
    plain, holding = (dispatcher.program(bucket, "float32") for _ in range(2))
    assert not plain.holds_result, "on a CPU none does"
    vars(holding)["holds_result"] = True
    arrays = dispatcher.program(bucket, "uint8").fill(dispatcher.family.example(bucket))
    assert arrays["pixels"] is not None
    pixels = arrays["pixels"].astype(np.float32) / 255
    pixels[5] = np.inf
    arrays |= {"pixels": pixels}
    if "pixels_second" in arrays:
        arrays["pixels_second"] = np.zeros_like(pixels)
    runs = (compile_program(program, device)(dispatcher.weights[0], arrays) for program in (plain, holding))
    (expected, finite), (found, also_finite) = ((np.asarray(rows), np.asarray(flags)) for rows, flags in runs)
    assert 0 < np.isnan(expected).any(1).sum() < len(expected)
    assert np.array_equal(np.isnan(expected), np.isnan(found))
    assert relative(np.nan_to_num(found), np.nan_to_num(expected)) <= 1e-6
    assert np.array_equal(finite, also_finite)


def test_buckets_hold_their_result_on_a_gpu(program: Program):
    assert replace(program, platform="cuda").holds_result


def test_what_buckets_have_in_common_is_made_once(monkeypatch: pytest.MonkeyPatch):
    family, made = encoder("kimi_k25").family, []
    original = type(family).module
    monkeypatch.setattr(type(family), "module", lambda self: made.append(1) or original(self))
    executables._module.cache_clear()
    executables._weights.cache_clear()
    programs = [Program(family, complete(family, {"tokens": 16 * n}), "float32", "uint8", "cpu") for n in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        layouts = list(pool.map(lambda program: (program.module, program.weights), programs))
    assert len(made) == 1
    assert {(id(module), id(weights)) for module, weights in layouts} == {(id(layouts[0][0]), id(layouts[0][1]))}
    other = replace(family, config=replace(family.config, num_hidden_layers=1))
    assert executables.module_of(other) is not layouts[0][0]
    monkeypatch.setattr(executables.hopper, "why_not", lambda platform, dtype: None)
    assert executables.weights_of(family, "cuda", "bfloat16") is not executables.weights_of(family, "cpu", "float32")
