"""Antialiased linear positions: weights from the host, applied on the device, against PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvit.layers.position import _weighed_in_halves, antialiased_linear, weigh_by_axis

GRIDS = [
    (6, 100),
    (2, 16),
    (100, 6),
    (16, 16),
    (32, 32),
    (10, 100),
    (14, 20),
    (22, 44),
    (2, 2),
    (2, 512),
    (1, 1),
    (15, 17),
]


def resampled(table: np.ndarray, height: int, width: int) -> np.ndarray:
    """A table [side, side, hidden] on a grid of height x width."""
    y, x = np.divmod(np.arange(height * width), width)
    rows, columns = antialiased_linear(len(table), height)[y], antialiased_linear(len(table), width)[x]
    flat = table.reshape(-1, table.shape[-1])
    return np.asarray(jax.jit(weigh_by_axis)(rows, columns, flat)).reshape(height, width, -1)


def random_table(side: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((side, side, 8)).astype(np.float32)


def test_a_weight_in_two_halves_is_the_weight() -> None:
    generator = np.random.default_rng(0)
    weights = generator.random((50, 256), np.float32)
    table = jnp.asarray(generator.standard_normal((256, 8)), jnp.bfloat16)
    found = np.asarray(_weighed_in_halves(jnp.asarray(weights), table)).astype(np.float64)
    exact = weights.astype(np.float64) @ np.asarray(table).astype(np.float64)
    once = exact.astype(jnp.bfloat16).astype(np.float64)
    assert np.abs(found - exact).max() <= np.abs(once - exact).max() * 1.1
    rounded = weights.astype(jnp.bfloat16).astype(np.float64) @ np.asarray(table).astype(np.float64)
    assert np.linalg.norm(found - exact) < np.linalg.norm(rounded.astype(jnp.bfloat16) - exact) * 0.9


@pytest.mark.reference
@pytest.mark.parametrize("side", [11, 16])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_positions_equal_pytorch_s_antialiased_bilinear(grid: tuple[int, int], side: int) -> None:
    import torch

    table = random_table(side)
    planes = torch.from_numpy(table).permute(2, 0, 1)[None]
    options = {"mode": "bilinear", "antialias": True, "align_corners": False}
    expected = torch.nn.functional.interpolate(planes, size=grid, **options)[0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(resampled(table, *grid), expected, atol=1e-6, rtol=0)


@pytest.mark.reference
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_positions_equal_the_reference_s_own(grid: tuple[int, int]) -> None:
    import torch
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    table = random_table(16)
    expected = Siglip2VisionEmbeddings.resize_positional_embeddings(
        torch.from_numpy(table), torch.tensor([grid]), max_length=grid[0] * grid[1]
    )
    np.testing.assert_allclose(resampled(table, *grid).reshape(-1, 8), expected[0].numpy(), atol=1e-6, rtol=0)


def test_a_grid_as_large_as_the_table_returns_the_table_unchanged() -> None:
    table = random_table(16)
    np.testing.assert_array_equal(resampled(table, 16, 16), table)


@pytest.mark.parametrize("length", [1, 2, 6, 15, 16, 17, 100, 512])
def test_each_place_s_weights_add_up_to_one_and_mirror_its_opposite_s(length: int) -> None:
    weights = antialiased_linear(16, length)
    assert weights.dtype == np.float32
    assert weights.shape == (length, 16)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    np.testing.assert_allclose(weights, weights[::-1, ::-1], atol=1e-5)


def test_shrinking_reads_every_entry_and_growing_reads_two() -> None:
    assert (antialiased_linear(16, 2) > 0).any(0).all()
    assert (antialiased_linear(16, 100) > 0).sum(-1).max() == 2


def test_a_table_in_bfloat16_is_weighed_in_float32_and_rounded_once() -> None:
    table = jax.numpy.asarray(random_table(16), jax.numpy.bfloat16)
    ours = resampled(table, 22, 30)
    wide = resampled(np.asarray(table, np.float32), 22, 30)
    assert ours.dtype == table.dtype
    np.testing.assert_array_equal(ours, wide.astype(table.dtype))
