"""The fused projection and its rotation: by two steps, and by one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvit.layers import fuse, qkv
from jaxvit.layers.hopper import kernels_for
from jaxvit.layers.hopper.packed import taken
from jaxvit.layers.hopper.product import Tile
from jaxvit.layers.linear import Linear
from jaxvit.layers.rope import Neighbours, rotate

HEADS = 16


def layer(inputs: int, dim: int, dtype: str) -> Linear:
    generator = np.random.default_rng(1)
    made = Linear(inputs, 3 * HEADS * dim)
    kernel = generator.standard_normal((inputs, 3 * HEADS * dim)) / np.sqrt(inputs)
    made.kernel.set_value(jnp.asarray(kernel.astype(jnp.dtype(dtype))))
    made.bias.set_value(jnp.asarray(generator.standard_normal(3 * HEADS * dim).astype(jnp.dtype(dtype))))
    return made


def by_head(layer: Linear, dim: int) -> None:
    """The layer as Kimi-K2.5's lies where the kernel runs: heads padded, their halves in turn, cut by heads."""
    halves = fuse.head_halves(dim, HEADS, "qkv", "out")
    steps = [halves, fuse.Interleaving(halves), fuse.ByHead(r"qkv\.kernel", 3 * HEADS)]
    for leaf in ("kernel", "bias"):
        parameter, name = getattr(layer, leaf), f"qkv.{leaf}"
        if parameter is None:
            continue
        array = np.asarray(parameter[...])
        shape = array.shape
        for step in steps:
            shape, array = step.shape(name, shape), step.apply(name, array)
            assert array.shape == shape
            assert step.apply("other", array) is array
            assert step.shape("other", shape) == shape
        parameter.set_value(jnp.asarray(array))


def in_turn(x: np.ndarray) -> np.ndarray:
    """The halves of the last axis in turn: (0, d/2), (1, d/2 + 1), .."""
    first, second = np.split(x, 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(x.shape)


def inputs(rows: int, width: int, pairs: int, dtype: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    generator = np.random.default_rng(0)
    angles = generator.random((rows, pairs), np.float32) * 6
    x = generator.standard_normal((rows, width)).astype(jnp.dtype(dtype))
    return jnp.asarray(x), (jnp.cos(angles), jnp.sin(angles))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", [16, 20])
def test_the_kernel_cut_by_heads_projects_the_same_values_in_turn(dim: int, bias: bool):
    plain, cut = layer(48, dim, "float32"), layer(48, dim, "float32")
    if not bias:
        plain.bias = cut.bias = None
    by_head(cut, dim)
    x, turn = inputs(40, 48, dim // 2, "float32")
    (halves, same), (found, due) = (qkv.project(x, each, HEADS, turn) for each in (plain, cut))
    assert same is turn
    assert isinstance(due, Neighbours)
    wide = -(-dim // 16) * 16
    assert found.shape == (40, 3, HEADS, wide)
    np.testing.assert_allclose(found[..., :dim], in_turn(np.asarray(halves)), rtol=1e-5, atol=1e-5)
    assert not np.asarray(found[..., dim:]).any(), "padding is behind"
    turned, expected = rotate(found[:, 0], due), rotate(halves[:, 0], turn)
    assert not np.allclose(turned[..., :dim], found[:, 0, :, :dim], atol=0.1)
    np.testing.assert_allclose(turned[..., :dim], in_turn(np.asarray(expected)), rtol=1e-5, atol=1e-5)
    assert not np.asarray(turned[..., dim:]).any()


def test_the_output_projection_takes_the_values_in_turn():
    halves = fuse.head_halves(20, HEADS, "qkv", "out")
    generator = np.random.default_rng(0)
    values, kernel = generator.standard_normal((5, HEADS, 20)), generator.standard_normal((HEADS * 20, 7))
    moved = fuse.Interleaving(halves).apply("out.kernel", halves.apply("out.kernel", kernel))
    padded = np.pad(in_turn(values), ((0, 0), (0, 0), (0, 12)))
    np.testing.assert_allclose(padded.reshape(5, -1) @ moved, values.reshape(5, -1) @ kernel, rtol=1e-12)


@pytest.mark.parametrize(
    ("dim", "pairs", "tile"),
    [
        (80, 40, Tile(3, 80, 80)),
        (80, 36, Tile(3, 72, 80)),
        (80, 35, Tile(3, 72, 80)),
        (64, 32, Tile(4, 64, 64)),
        (128, 64, Tile(2, 128, 128)),
        (256, 128, Tile(1, 256, 256)),
        (72, 36, None),
        (272, 136, None),
    ],
)
def test_a_tile_holds_whole_heads_and_multiplies_no_padding(dim: int, pairs: int, tile: Tile | None):
    assert qkv.tile_of(48, dim, pairs) == tile
    assert tile is None or tile.columns <= tile.span <= qkv.WIDEST


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72, 80, 128])
@pytest.mark.parametrize("rows", [1024, 4096 + 128, 16384])
def test_the_product_rotates_q_and_k_and_leaves_v(rows: int, dim: int):
    made = layer(1152, dim, "bfloat16")
    x, turn = inputs(rows, 1152, dim // 2, "bfloat16")
    kernel, bias = (np.asarray(each[...]).astype(np.float64) for each in (made.kernel, made.bias))
    truth = (np.asarray(x).astype(np.float64) @ kernel + bias).reshape(rows, 3 * HEADS, dim)
    by_head(made, dim)
    bias = np.asarray(made.bias[...])

    @jax.jit
    def run(x: jax.Array, turn: tuple[jax.Array, jax.Array], packed: jax.Array) -> jax.Array:
        with kernels_for("cuda", "bfloat16"):
            graph, state = nnx.split(made)
            state["bias"] = state["bias"].replace(taken(packed, 128, bias.shape))
            found, due = qkv.project(x, nnx.merge(graph, state), HEADS, turn)
        assert due is None
        return found

    packed = jnp.pad(jnp.asarray(bias, jnp.float32), (128, 64), constant_values=100)
    found = np.asarray(run(x, turn, packed)).astype(np.float64)
    turned = np.asarray(rotate(jnp.asarray(truth[:, : 2 * HEADS].astype(np.float32)), turn))
    for index, expected in enumerate([turned[:, :HEADS], turned[:, HEADS:], truth[:, 2 * HEADS :]]):
        error = np.linalg.norm(found[:, index, :, :dim] - in_turn(expected))
        assert error / np.linalg.norm(expected) <= 3e-3
    assert not found[..., dim:].any()
