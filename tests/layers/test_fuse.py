"""The executable's layout of the weights is exact: padded and packed parameters compute what the canonical ones do."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvit.buckets import executable as executables
from jaxvit.buckets.executable import compile_program, weights_of
from jaxvit.layers import fuse
from jaxvit.layers.fuse import Pairing, Weights, Widening, head_halves, mlp_width, parameter_shapes
from jaxvit.weights.load import load_parameters
from tests.families import FAMILIES, checkpoint, encoder, picture, relative

LINEAR = ("kernel", "bias")


def test_a_widened_axis_keeps_its_values_in_their_groups():
    widening = Widening(3, 4, ((r"a\.kernel", 1, (2,)), (r"b\.kernel", 0, ())))
    kernel = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert widening.apply("a.kernel", kernel).tolist() == [[0, 1, 2, 0, 3, 4, 5, 0], [6, 7, 8, 0, 9, 10, 11, 0]]
    assert widening.apply("b.kernel", np.ones((3, 2), np.float32)).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    assert widening.apply("c.kernel", kernel) is kernel
    assert widening.shape("a.kernel", (2, 6)) == (2, 8)


def test_only_what_is_needed_grows():
    assert mlp_width(3420, "up", "down").padded == 3456
    assert mlp_width(4352, "up", "down").padded == 4352
    assert head_halves(72, 16, "qkv", "out").padded == 40
    assert head_halves(80, 16, "qkv", "out").padded == 40
    assert head_halves(64, 12, "qkv", "out").padded == 32


@pytest.mark.parametrize("name", FAMILIES)
def test_widened_and_packed_weights_compute_what_canonical_ones_do(name: str, monkeypatch):
    shared = encoder(name)
    family, device = shared.family, jax.devices()[0]
    module = nnx.eval_shape(family.module)
    shapes = parameter_shapes(module)
    assert any(widening.padded > widening.size for widening in family.widenings()), "the tiny tower has odd sizes"

    pairings = [replace(pairing, columns=32) for pairing in family.pairings()]
    wide = Weights.of(shapes, (*family.widenings(), *family.by_head()), pairings, biases=True)
    assert bool(wide.joined) == (name == "qwen2_5_vl")
    assert wide.biases
    monkeypatch.setattr(executables, "weights_of", lambda *_: wide)
    stream = load_parameters(checkpoint(name), family.keys, shapes, np.dtype(np.float32), wide.widened)
    [weights] = wide.pack(stream, lambda array: [jax.device_put(array, device)])
    dispatcher = shared.dispatcher
    bucket = dispatcher.ladder.buckets[-1]
    program = dispatcher.program(bucket, "uint8")
    widened = compile_program(program, device)
    pieces = [piece for item in shared.prepare([picture(140, 140), picture(64, 200)]) for piece in item.pieces]
    rows = np.asarray(widened(weights, program.fill(pieces))[0])
    monkeypatch.undo()
    canonical = dispatcher.executable(bucket)
    expected = np.asarray(canonical(dispatcher.weights[0], canonical.program.fill(pieces))[0])
    tokens = sum(piece.tokens for piece in pieces)
    assert sum(array.nbytes for array in weights) > sum(array.nbytes for array in dispatcher.weights[0])
    assert relative(rows[:tokens], expected[:tokens]) <= 1e-6


def test_two_layers_are_joined_where_the_kernel_runs_and_only_in_whole_tiles(monkeypatch):
    family = encoder("qwen2_5_vl").family
    for platform, dtype in (("cpu", "bfloat16"), ("cuda", "float32")):
        assert not weights_of(family, platform, dtype).joined
    monkeypatch.setattr(executables.hopper, "why_not", lambda platform, dtype: None)
    joined = weights_of(family, "cuda", "bfloat16").joined
    assert len(joined) == 2 * family.config.depth
    assert joined[0][:2] == ("blocks.0.mlp.gate_proj.bias", "blocks.0.mlp.up_proj.bias")
    assert not weights_of(family, "cpu", "bfloat16").joined, "108 columns are no whole tile unless they are padded"


def test_biases_of_a_length_that_is_rare_stay_arguments():
    shapes = {f"blocks.{index}.fc.{leaf}": (5,) if leaf == "bias" else (3, 5) for index in range(4) for leaf in LINEAR}
    shapes |= {f"projector.{leaf}": (7,) if leaf == "bias" else (3, 7) for leaf in LINEAR}
    packed = Weights.of(shapes, biases=True)
    assert packed.biases == tuple((f"blocks.{index}.fc.bias", (5,)) for index in range(4))
    assert [name for name, _ in packed.matrices] == [
        *(f"blocks.{index}.fc.kernel" for index in range(4)),
        "projector.bias",
        "projector.kernel",
    ]
    assert not Weights.of(shapes).biases
    apart = Weights.of(shapes | {"norm.scale": (6,)}, biases=True, apart=True)
    biases = [name for name, _ in apart.biases]
    assert apart.names == [*(name for name, _ in apart.matrices), "packed vectors", "packed biases", *biases]
    for layout in (apart, packed, Weights.of(shapes)):
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        assert len(layout.names) == len(layout.avals(np.dtype(np.float32), place))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_packed_vectors_come_back_bit_by_bit(dtype: type, monkeypatch):
    monkeypatch.setattr(fuse, "OFTEN", 2)
    generator, device = np.random.default_rng(0), jax.devices()[0]
    pairing = Pairing("blocks\\.\\d", "gate", "up", 2)
    shapes: dict[str, tuple[int, ...]] = {"norm.scale": (6,)}
    for layer in ("blocks.0.gate", "blocks.0.up", "blocks.1.gate", "blocks.1.up", "a", "b"):
        shapes |= {f"{layer}.kernel": (3, 4), f"{layer}.bias": (4,)}
    canonical = {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    layout = Weights.of(shapes, pairings=[pairing], biases=True)
    assert [name for name, _ in layout.biases] == ["a.bias", "b.bias", "blocks.0.gate.bias", "blocks.1.gate.bias"]
    [arrays] = layout.pack(canonical.items(), lambda array: [jax.device_put(array, device)])
    avals = layout.avals(np.dtype(dtype), jax.sharding.SingleDeviceSharding(device))
    assert [(array.shape, array.dtype) for array in arrays] == [(aval.shape, aval.dtype) for aval in avals]
    found = jax.jit(layout.unpack)(arrays)
    for index in range(2):
        pair = (f"blocks.{index}.gate.bias", f"blocks.{index}.up.bias")
        joined = pairing.join(*(canonical.pop(name) for name in pair))
        for name in pair:
            assert found[name].dtype == np.float32, "a kernel reads it as it lies"
            assert np.array_equal(found[name], joined)
    for name in ("norm.scale", "a.bias", "b.bias", "a.kernel"):
        assert found[name].dtype == dtype
        assert np.array_equal(found[name], canonical[name])


def test_biases_are_packed_on_an_accelerator_in_half_precision(monkeypatch):
    monkeypatch.setattr(executables.hopper, "why_not", lambda platform, dtype: "not here")
    family = encoder("kimi_k25").family
    assert weights_of(family, "cuda", "bfloat16").biases
    assert not weights_of(family, "cuda", "float32").biases
    assert not weights_of(family, "cpu", "bfloat16").biases


@pytest.mark.parametrize("name", FAMILIES)
def test_an_executable_takes_few_arguments(name: str):
    family = encoder(name).family
    module = nnx.eval_shape(family.module)
    weights = weights_of(family, "cpu", "float32")
    assert all(len(shape) > 1 or name.endswith(".bias") for name, shape in weights.matrices)
    assert not any("norm" in name or "ln_q" in name for name, _ in weights.matrices)
    assert len(weights.matrices) + 1 < len(parameter_shapes(module))
