"""The fused projection and its rotation: by two steps, and by one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvit.layers import qkv
from jaxvit.layers.fuse import ByHead
from jaxvit.layers.hopper import kernels_for
from jaxvit.layers.hopper.packed import taken
from jaxvit.layers.linear import Linear
from jaxvit.layers.rope import rotate

HEADS = 16


def layer(inputs: int, dim: int, dtype: str) -> Linear:
    generator = np.random.default_rng(1)
    made = Linear(inputs, 3 * HEADS * dim)
    kernel = generator.standard_normal((inputs, 3 * HEADS * dim)) / np.sqrt(inputs)
    made.kernel.set_value(jnp.asarray(kernel.astype(jnp.dtype(dtype))))
    made.bias.set_value(jnp.asarray(generator.standard_normal(3 * HEADS * dim).astype(jnp.dtype(dtype))))
    return made


def by_head(layer: Linear) -> None:
    how = ByHead("qkv", 3 * HEADS)
    array = np.asarray(layer.kernel[...])
    found = how.apply("qkv", array)
    assert found.shape == how.shape("qkv", array.shape)
    assert how.shape("other", array.shape) == array.shape
    assert how.apply("other", array) is array
    layer.kernel.set_value(jnp.asarray(found))


def inputs(rows: int, width: int, pairs: int, dtype: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    generator = np.random.default_rng(0)
    angles = generator.random((rows, pairs), np.float32) * 6
    x = generator.standard_normal((rows, width)).astype(jnp.dtype(dtype))
    return jnp.asarray(x), (jnp.cos(angles), jnp.sin(angles))


def test_the_kernel_cut_by_heads_projects_the_same():
    plain, cut = layer(48, 16, "float32"), layer(48, 16, "float32")
    by_head(cut)
    x, turn = inputs(40, 48, 8, "float32")
    (expected, _), (found, due) = (qkv.project(x, each, HEADS, turn) for each in (plain, cut))
    assert due is turn
    assert found.shape == expected.shape == (40, 3, HEADS, 16)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    cut.bias = plain.bias = None
    (expected, _), (found, _) = (qkv.project(x, each, HEADS, turn) for each in (plain, cut))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dim", "count"), [(80, 3), (64, 4), (128, 2), (72, 0), (256, 1), (272, 0)])
def test_a_tile_holds_whole_heads(dim: int, count: int):
    assert qkv.tile_heads(48, dim) == count


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", ["all", "widened"])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("rows", [1024, 4096 + 128, 16384])
def test_the_product_rotates_q_and_k_and_leaves_v(rows: int, dim: int, pairs: str):
    made = layer(1152, dim, "bfloat16")
    x, turn = inputs(rows, 1152, dim // 2 - (0 if pairs == "all" else 4), "bfloat16")
    kernel, bias = (np.asarray(each[...]).astype(np.float64) for each in (made.kernel, made.bias))
    truth = (np.asarray(x).astype(np.float64) @ kernel + bias).reshape(rows, 3 * HEADS, dim)
    by_head(made)

    @jax.jit
    def run(x: jax.Array, turn: tuple[jax.Array, jax.Array], packed: jax.Array) -> jax.Array:
        with kernels_for("cuda", "bfloat16"):
            graph, state = nnx.split(made)
            state["bias"] = state["bias"].replace(taken(packed, 128, bias.shape))
            found, due = qkv.project(x, nnx.merge(graph, state), HEADS, turn)
        assert due is None
        return found

    packed = jnp.pad(jnp.asarray(bias, jnp.float32), (128, 64), constant_values=100)
    found = run(x, turn, packed)
    turned = np.asarray(rotate(jnp.asarray(truth[:, : 2 * HEADS].astype(np.float32)), turn))
    for index, expected in enumerate([turned[:, :HEADS], turned[:, HEADS:], truth[:, 2 * HEADS :]]):
        error = np.linalg.norm(np.asarray(found[:, index]).astype(np.float64) - expected)
        assert error / np.linalg.norm(expected) <= 3e-3
