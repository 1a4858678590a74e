"""What can be read off a bucket's program and executable without an accelerator."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvit.bench.loads import split
from jaxvit.buckets import executable as executables
from jaxvit.buckets.dispatcher import Dispatcher
from jaxvit.buckets.executable import Executable, Program, compile_program, pad
from jaxvit.buckets.ladder import complete
from jaxvit.buffer import Buffer
from jaxvit.errors import CapacityError, OptionError
from jaxvit.layers.attention import segments
from jaxvit.layers.attention.segments import key_ranges
from jaxvit.layers.fuse import Weights, parameter_shapes
from jaxvit.models import family_of
from jaxvit.models.family import Bucket
from jaxvit.weights import manifests
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


def constants_in(text: str) -> list[tuple[int, ...]]:
    """Shapes of a lowered program's constants whose values are written out: what is one value throughout is not."""
    found = re.findall(r"stablehlo\.constant dense<(?:\"0x|\[).*?> : tensor<((?:\d+x)+[a-z]\w*)>", text)
    return [tuple(map(int, shape.split("x")[:-1])) for shape in found]


def weights_in(program: Program) -> list[tuple[int, ...]]:
    """Constants of the lowered program that have the shape of a parameter, or more values than the table of pixels."""
    shapes = set(parameter_shapes(program.module).values())
    found = constants_in(program.lower(jax.devices()[0]).as_text())
    assert (768,) in found, "the table of pixels is one"
    return [shape for shape in found if shape in shapes or prod(shape) > 768]


def test_no_weight_is_a_constant_of_the_program(program: Program):
    assert not weights_in(program)


@pytest.mark.parametrize("kind", ["kernel", "bias", "scale"])
def test_a_weight_that_is_a_constant_is_found(program: Program, kind: str, monkeypatch: pytest.MonkeyPatch):
    name, shape = next(one for one in parameter_shapes(program.module).items() if one[0].endswith(kind))
    values, unpack = np.random.default_rng(0).standard_normal(shape).astype(np.float32), Weights.unpack
    monkeypatch.setattr(
        Weights, "unpack", lambda *given, **options: unpack(*given, **options) | {name: jnp.asarray(values)}
    )
    assert weights_in(program) == [shape]


def test_the_number_of_arguments_is_bounded(program: Program):
    text = program.lower(jax.devices()[0]).as_text()
    [signature] = re.findall(r"func\.func public @main\((.*?)\) ->", text, re.DOTALL)
    count = len(re.findall(r"%arg\d+:", signature))
    layers = getattr(program.family.config, "depth", None) or program.family.config.num_hidden_layers
    assert count <= 12 * layers + 24


@pytest.mark.parametrize(
    ("name", "weights", "inputs"),
    [
        ("Qwen--Qwen2.5-VL-7B-Instruct", 133 + 2 + 128, 9),
        ("moonshotai--Kimi-K2.5", 114 + 2 + 109, 9),
        ("LiquidAI--LFM2.5-VL-450M", 54 + 2 + 49, 5),
    ],
)
@pytest.mark.parametrize(("tokens", "in_place"), [(64, True), (512, True), (544, False), (1024, False)])
def test_the_number_of_arguments_on_an_accelerator_is_known(
    name: str, weights: int, inputs: int, tokens: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
):
    """Issuing a call costs host time for each: 284, 245 and 121 of up to 2,048 patches, 12, 11 and 11 fewer above.

    Weights are matrices, an array of vectors and one of biases, and the biases that XLA's products read, each by
    itself; inputs are the family's buffers and two a segment set of the attention kernel. Memory that stays in place is
    a workspace, four or five widths of intermediates (Qwen2.5-VL's gated MLP has one more), and six tables.
    """
    monkeypatch.setattr(executables.hopper, "why_not", lambda platform, dtype: None)
    family = family_of(manifests.load(name).files)
    program = Program(family, complete(family, {"tokens": tokens}), "bfloat16", "uint8", "cuda")
    assert program.backend.name == "mosaic"
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    memory = (1 + (5 if family.pairings() else 4) + 6) if in_place else 0
    found = len(program.weights.avals(np.dtype(jnp.bfloat16), place)), len(program.scratch), len(program.buffers)
    assert found == (weights, memory, inputs)
    total = {"qwen2_5_vl": 284, "kimi_k25": 245, "lfm2_vl": 121}[family.name]
    assert sum(found) == (total if in_place else total - 1 - 6 - (5 if family.pairings() else 4))


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


PARTS = {"dense": 4, "xla": 8}
"""Pieces that fill a bucket; dense attention takes so much longer."""


def slowest(name: str, attention: str, bound: float, turns: int = 60) -> float:
    """Of one piece, a quarter, a half, three quarters of a bucket: the time of the slowest over that of the full one.
    It is the processor time of this process, which others on the machine hardly change.

    It is filled by as many pieces as every family may have, so that its attention takes as little time as it can, and
    nothing that padding costs is hidden behind it.

    Args:
        bound: measured until the quotient is below it, up to so many turns.
    """
    dispatcher = encoder(name).dispatcher
    parts = PARTS[attention]
    bucket = Bucket(64 * parts, 256 * parts, 32, 400, attention)
    executable = dispatcher.executable(bucket)
    pieces = split(dispatcher.family, bucket, parts)
    assert pieces is not None
    assert [piece.rows for piece in pieces] == [256] * parts, "LFM2-VL has no smaller ones"
    fills = sorted({1, parts // 4, parts // 2, 3 * parts // 4})
    loads = {count: executable.program.fill(pieces[:count]) for count in (*fills, parts)}
    best = dict.fromkeys(loads, float("inf"))
    found = float("inf")
    for turn in range(turns):  # in turn, and the quickest of each: other work on the machine only ever adds
        for count, arrays in loads.items():
            start = time.process_time()
            jax.block_until_ready(executable(dispatcher.weights[0], arrays))
            best[count] = min(best[count], time.process_time() - start)
        found = max(best[count] for count in fills) / best[parts]
        if turn >= 4 and found <= bound:
            break
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["dense", "xla"])
def test_the_emptier_a_bucket_the_call_is_not_slower(name: str, attention: str):
    assert slowest(name, attention, 1.3) <= 1.3


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_that_attends_to_all_padding_is_found_by_its_time(name: str, monkeypatch: pytest.MonkeyPatch):
    """The control of the test before. In a nearly empty bucket such padding takes 50 blocks of scores, where the full
    bucket has 8."""

    def one_segment(lengths: np.ndarray, patches: int) -> tuple[np.ndarray, np.ndarray]:
        return key_ranges(np.append(lengths, patches - lengths.sum()).astype(np.int32), patches)

    monkeypatch.setattr(segments, "key_ranges", one_segment)
    assert slowest(name, "xla", 0.0, turns=6) > 1.6


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
