"""Bicubic positions: taps from the host, their weighted sum on the device, against PyTorch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxvit.layers.position import bicubic, gather_by_axis

SIDE = 64
GRIDS = [(2, 2), (2, 512), (512, 2), (64, 64), (64, 66), (130, 130)]
# Corners, edges and middle, and an entry that only an asymmetric rule would place wrongly.
IMPULSES = [(0, 0), (0, 63), (63, 31), (17, 0), (32, 32), (20, 45)]


def resampled(table: np.ndarray, height: int, width: int) -> np.ndarray:
    y, x = np.divmod(np.arange(height * width), width)
    rows, columns = bicubic(table.shape[0], height), bicubic(table.shape[1], width)
    index = np.stack([rows.index[y], columns.index[x]], axis=1)
    weight = np.stack([rows.weight[y], columns.weight[x]], axis=1)
    return np.asarray(jax.jit(gather_by_axis)(index, weight, table)).reshape(height, width, -1)


@pytest.fixture(scope="module")
def impulses() -> np.ndarray:
    table = np.zeros((SIDE, SIDE, len(IMPULSES)), np.float32)
    for channel, (y, x) in enumerate(IMPULSES):
        table[y, x, channel] = 1.0
    return table


@pytest.mark.reference
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_unit_impulse_spreads_as_in_pytorch(impulses: np.ndarray, grid: tuple[int, int]) -> None:
    import torch

    planes = torch.from_numpy(impulses).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(planes, size=grid, mode="bicubic", align_corners=False)
    difference = resampled(impulses, *grid) - expected[0].permute(1, 2, 0).numpy()
    assert np.abs(difference).max() <= 1e-5


@pytest.mark.parametrize("side", [9, 64])
def test_a_grid_as_large_as_the_table_returns_the_table_unchanged(side: int) -> None:
    table = np.random.default_rng(0).standard_normal((side, side, 4)).astype(np.float32)
    np.testing.assert_array_equal(resampled(table, side, side), table)


@pytest.mark.parametrize("length", [1, 2, 18, 64, 130, 512])
def test_weights_add_up_to_one_and_taps_stay_on_the_table(length: int) -> None:
    taps = bicubic(SIDE, length)
    np.testing.assert_allclose(taps.weight.sum(-1), 1.0, atol=1e-6)
    assert taps.index.min() >= 0
    assert taps.index.max() < SIDE
    assert taps.index.dtype == np.int32


def test_a_table_in_bfloat16_is_summed_in_float32() -> None:
    table = jax.numpy.asarray(np.random.default_rng(0).standard_normal((9, 9, 4)), jax.numpy.bfloat16)
    wide = np.asarray(table, np.float32)
    np.testing.assert_array_equal(resampled(table, 22, 30), resampled(wide, 22, 30))
