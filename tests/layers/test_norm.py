"""Norms: their formula, and that an overflow shows."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvit.layers.hopper import kernels_for, norms
from jaxvit.layers.hopper.packed import taken
from jaxvit.layers.norm import LayerNorm, RMSNorm, inverse_root


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_row_whose_squares_overflow_becomes_nan_and_no_other_row_changes(kind: Any, dtype: str):
    rows = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    norm = kind(64, 1e-6)
    norm.scale = nnx.Param(jnp.ones(64, dtype))
    before = np.asarray(norm(jnp.asarray(rows).astype(dtype)), np.float32)
    wide = rows.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True) if kind is LayerNorm else wide
    expected = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(before, expected, rtol=1e-5 if dtype == "float32" else 2**-6, atol=2e-2)
    for factor in (1e20, 1e38):
        rows[2] = rows[0] * np.float32(factor)
        after = np.asarray(norm(jnp.asarray(rows).astype(dtype)), np.float32)
        assert np.isnan(after[2]).all()
        np.testing.assert_array_equal(np.delete(after, 2, 0), np.delete(before, 2, 0))


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_large_rows_below_the_overflow_are_normalised(kind: Any):
    rows = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    norm = kind(64, 1e-6)
    large = np.asarray(norm(jnp.asarray(rows * np.float32(1e17))))
    np.testing.assert_allclose(large, np.asarray(norm(jnp.asarray(rows))), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("square", [0.0, 1e-45, 1e-6, 3.0, 1e30, 3.4e38])
def test_the_inverse_root_of_a_finite_number_is_that_of_the_formula(square: float):
    value = jnp.float32(square).reshape(1, 1)
    assert jnp.array_equal(inverse_root(value, 1e-6), jax.lax.rsqrt(value + jnp.float32(1e-6)))


def test_the_inverse_root_of_what_is_not_finite_is_nan():
    assert jnp.isnan(inverse_root(jnp.array([[jnp.inf], [jnp.nan]], jnp.float32), 1e-6)).all()


ON_GPU = [(rows, kernel) for rows in (256, 4096, 16384) for kernel in (False, True)]
ROWS = [(8, False), *(pytest.param(*each, marks=pytest.mark.gpu) for each in ON_GPU)]


@pytest.mark.parametrize(("rows", "kernel"), ROWS)
@pytest.mark.parametrize("width", [768, 1152, 1280])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_compiled_norm_contains_rows_that_are_not_finite_and_shows_them_elsewhere(
    kind: Any, width: int, rows: int, kernel: bool
):
    generator = np.random.default_rng(2)
    x = generator.standard_normal((rows, width)).astype(jnp.bfloat16)
    packed = generator.standard_normal(3 * width).astype(jnp.bfloat16)
    scale, bias = packed[width : 2 * width].astype(np.float64), packed[2 * width :].astype(np.float64)

    @partial(jax.jit, static_argnames="contain")
    def run(x: jax.Array, packed: jax.Array, contain: bool) -> jax.Array:
        norm = kind(width, 1e-6)
        with kernels_for("cuda", "bfloat16") if kernel else nullcontext():
            norm.scale = nnx.Param(taken(packed, width, (width,)))
            if kind is LayerNorm:
                norm.bias = nnx.Param(taken(packed, 2 * width, (width,)))
            assert norms.suits(x) == (kernel and rows >= norms.LEAST_ROWS)
            return norm(x, contain=contain)

    wide = x.astype(np.float64)
    wide = wide - wide.mean(-1, keepdims=True) if kind is LayerNorm else wide
    truth = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-6) * scale
    truth = truth + bias if kind is LayerNorm else truth
    clean = np.asarray(run(x, packed, contain=False)).astype(np.float64)
    assert np.linalg.norm(clean - truth) / np.linalg.norm(truth) <= 2**-8
    bad = [1, 3, rows - 1]
    x[1, 5], x[3, 0] = np.nan, -np.inf
    x[rows - 1] = (x[0].astype(np.float32) * 1e30).astype(x.dtype)  # finite, and its squares are not
    shown, contained = (np.asarray(run(x, packed, contain=contain)).astype(np.float64) for contain in (False, True))
    others = np.delete(np.arange(rows), bad)
    assert np.isnan(shown[bad]).all()
    assert np.array_equal(shown[others], clean[others])
    assert np.array_equal(contained[others], clean[others])
    assert not contained[bad].any()
