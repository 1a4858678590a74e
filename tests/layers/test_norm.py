"""Norms: their formula, and that an overflow shows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvit.layers.norm import LayerNorm, RMSNorm


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
