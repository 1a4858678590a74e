"""A gated MLP computes the same from two layers and from one joined array, by XLA and by the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvit.layers import swiglu
from jaxvit.layers.fuse import Pairing
from jaxvit.layers.linear import Linear


def layers(inputs: int, outputs: int, dtype: str = "float32") -> tuple[Linear, Linear]:
    """Gate and up with values that give outputs of about 1."""
    generator = np.random.default_rng(1)
    made = Linear(inputs, outputs), Linear(inputs, outputs)
    for layer in made:
        kernel = generator.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        layer.kernel.set_value(jnp.asarray(kernel.astype(jnp.dtype(dtype))))
        layer.bias.set_value(jnp.asarray(generator.standard_normal(outputs).astype(jnp.dtype(dtype))))
    return made


def joined(gate: Linear, up: Linear, columns: int) -> tuple[jax.Array, jax.Array]:
    pairing = Pairing("", "gate", "up", columns)
    kernel = pairing.join(np.asarray(gate.kernel[...]), np.asarray(up.kernel[...]))
    bias = pairing.join(np.asarray(gate.bias[...]), np.asarray(up.bias[...]))
    assert (kernel.shape, bias.shape) == (pairing.shape(gate.kernel.shape), pairing.shape(gate.bias.shape))
    return jnp.asarray(kernel), jnp.asarray(bias)


def truth(x: np.ndarray, gate: Linear, up: Linear) -> np.ndarray:
    """In float64."""
    wide = lambda array: np.asarray(array).astype(np.float64)  # noqa: E731
    a, b = (wide(x) @ wide(layer.kernel[...]) + wide(layer.bias[...]) for layer in (gate, up))
    return a / (1 + np.exp(-a)) * b


def inputs(rows: int, width: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, width)).astype(jnp.dtype(dtype))


def error(found: jax.Array, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found).astype(np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("columns", [16, 32, 96])
def test_the_joined_array_computes_what_two_layers_do(columns: int):
    gate, up = layers(48, 96)
    x = inputs(37, 48, "float32")
    expected = swiglu.swiglu(jnp.asarray(x), gate, up)
    kernel, bias = joined(gate, up, columns)
    for layer in (gate, up):
        layer.kernel.set_value(kernel)
        layer.bias.set_value(bias)
    found = swiglu.swiglu(jnp.asarray(x), gate, up)
    assert found.shape == expected.shape
    assert error(found, np.asarray(expected)) <= 1e-6
    gate.bias = up.bias = None
    without = swiglu.joined_plain(jnp.asarray(x), kernel, None)
    assert error(swiglu.swiglu(jnp.asarray(x), gate, up), np.asarray(without)) == 0


def test_a_tile_holds_gate_and_then_up():
    pairing = Pairing("mlp", "gate", "up", 2)
    gate, up = np.arange(4).reshape(1, 4), np.arange(10, 14).reshape(1, 4)
    assert pairing.join(gate, up)[..., 0].tolist() == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    assert pairing.join(gate[0], up[0]).tolist() == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    assert pairing.shape((1, 3)) is None, "no whole tiles"
    assert pairing.of("mlp.up.bias") == ("mlp.gate.bias", "mlp.up.bias")
    assert (
        pairing.of("mlp.down.bias") is pairing.of("other.up.bias") is pairing.of("up.bias") is pairing.of("up") is None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [512, 1024, 1280, 2176, 4096, 16384])
@pytest.mark.parametrize(("width", "outputs"), [(1280, 3456), (64, 128), (192, 256), (256, 384)])
def test_the_kernel_equals_float64(rows: int, width: int, outputs: int):
    gate, up = layers(width, outputs, "bfloat16")
    x = inputs(rows, width, "bfloat16")
    x_kernel_bias = jax.device_put((x, *joined(gate, up, swiglu.COLUMNS)))
    packed = jnp.pad(x_kernel_bias[2].reshape(-1), (start := 256, 128), constant_values=100)
    arrays = (*x_kernel_bias[:2], packed, jnp.array([start], jnp.int32))
    expected = truth(x, gate, up)
    found = np.asarray(swiglu.joined(*arrays))
    assert found.shape == expected.shape
    # Half a unit in the last place of bfloat16, 2^-9, is the most that rounding the exact result once may cost.
    assert error(found, expected) <= 2**-9
    assert error(jax.jit(swiglu.joined_plain)(*x_kernel_bias), expected) <= 8e-3
    assert all(np.array_equal(swiglu.joined(*arrays), found) for _ in range(20)), "no run differs: no race"


@pytest.mark.gpu
def test_a_row_that_is_not_finite_stays_alone_in_the_kernel():
    gate, up = layers(1280, 3456, "bfloat16")
    x = inputs(2048, 1280, "bfloat16")
    kernel, bias = joined(gate, up, swiglu.COLUMNS)
    rest = kernel, bias.reshape(-1), jnp.zeros(1, jnp.int32)
    clean = np.asarray(swiglu.joined(jnp.asarray(x), *rest)).astype(np.float32)
    x[100, 7], x[1900, 3] = np.nan, np.inf
    found = np.asarray(swiglu.joined(jnp.asarray(x), *rest)).astype(np.float32)
    others = np.delete(np.arange(2048), [100, 1900])
    assert np.array_equal(found[others], clean[others])
    assert np.isnan(found[100]).all()
    assert not np.isfinite(found[1900]).all()
