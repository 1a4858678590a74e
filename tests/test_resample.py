"""The resize, against torchvision and against the sum written out."""

from __future__ import annotations

import sys
import threading
import tracemalloc

import numpy as np
import pytest

from jaxvit import resample
from jaxvit.resample import Kernel, axis_table, integer_weights, resize

KERNELS: tuple[Kernel, ...] = ("bilinear", "bicubic")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def checkerboard(height: int, width: int) -> np.ndarray:
    board = (np.add.outer(np.arange(height), np.arange(width)) % 2 * 255).astype(np.uint8)
    return np.repeat(board[:, :, None], 3, axis=2)


def edges(height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width, 3), np.uint8)
    picture[height // 3 : 2 * height // 3, width // 4 : 3 * width // 4] = 255
    return picture


def torchvision(picture: np.ndarray, height: int, width: int, kernel: Kernel) -> np.ndarray:
    import torch
    from torchvision.transforms.v2 import InterpolationMode, functional

    tensor = torch.from_numpy(picture.transpose(2, 0, 1).copy())
    mode = InterpolationMode[kernel.upper()]
    return functional.resize(tensor, [height, width], interpolation=mode, antialias=True).numpy()


def written_out(picture: np.ndarray, height: int, width: int, kernel: Kernel) -> np.ndarray:
    """The definition, one integer sum an output."""
    planes = picture.transpose(2, 0, 1).astype(np.int64)
    for axis, length in ((2, width), (1, height)):
        planes = np.moveaxis(planes, axis, -1)
        if length != planes.shape[-1]:
            low, weights, precision = integer_weights(planes.shape[-1], length, kernel)
            out = np.zeros((*planes.shape[:-1], length), np.int64)
            for place, (first, taps) in enumerate(zip(low, weights, strict=True)):
                count = min(len(taps), planes.shape[-1] - first)
                sums = (planes[..., first : first + count] * taps[:count]).sum(axis=-1)
                out[..., place] = np.clip((sums + (1 << (precision - 1))) >> precision, 0, 255)
            planes = out
        planes = np.moveaxis(planes, -1, axis)
    return planes.astype(np.uint8)


def sizes(count: int, largest: int, seed: int) -> list[tuple[int, int, int, int]]:
    """Sizes before and after, from one pixel up, evenly spread over scales."""
    generator = np.random.default_rng(seed)
    drawn = np.exp(generator.uniform(0, np.log(largest), (count, 4))).astype(int)
    return [tuple(int(n) for n in row) for row in drawn if row[2:].max() > 1]  # 1 x 1 fails in torch 2.14 itself


@pytest.mark.reference
@pytest.mark.parametrize("kernel", KERNELS)
def test_random_sizes_are_bit_equal_to_torchvision(kernel: Kernel):
    for height, width, new_height, new_width in sizes(60, 400, 1):
        picture = noise(height, width, height)
        found = resize(picture, new_height, new_width, kernel)
        np.testing.assert_array_equal(found, torchvision(picture, new_height, new_width, kernel))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.reference
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sweep_of_2000_sizes_is_bit_equal_to_torchvision(kernel: Kernel):
    for height, width, new_height, new_width in sizes(2000, 1500, 2):
        picture = noise(height, width, height)
        found = resize(picture, new_height, new_width, kernel)
        np.testing.assert_array_equal(found, torchvision(picture, new_height, new_width, kernel))


@pytest.mark.reference
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("make", [checkerboard, edges, noise])
@pytest.mark.parametrize(
    "change",
    [
        (1000, 1000, 280, 280),
        (280, 280, 560, 560),
        (500, 1000, 500, 333),
        (333, 500, 100, 500),
        (3000, 40, 28, 41),
        (60, 4000, 61, 30),
        (1, 1, 28, 56),
        (2, 700, 56, 28),
    ],
    ids=str,
)
def test_hard_patterns_are_bit_equal_to_torchvision(make, change: tuple[int, int, int, int], kernel: Kernel):
    picture = make(*change[:2])
    np.testing.assert_array_equal(resize(picture, *change[2:], kernel), torchvision(picture, *change[2:], kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("change", [(37, 53, 91, 20), (90, 200, 7, 3), (40, 700, 40, 5), (300, 9, 2, 9)], ids=str)
def test_the_products_are_the_integer_sums_written_out(change: tuple[int, int, int, int], kernel: Kernel):
    picture = noise(*change[:2])
    np.testing.assert_array_equal(resize(picture, *change[2:], kernel), written_out(picture, *change[2:], kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lengths", [(100, 101), (100, 25), (100, 12), (1000, 20), (5000, 11), (3, 500)], ids=str)
def test_no_sum_can_leave_the_integers_of_its_float_type(lengths: tuple[int, int], kernel: Kernel):
    axis = axis_table(*lengths, kernel)
    precision = integer_weights(*lengths, kernel)[2]
    digits = 24 if axis.dtype is np.float32 else 53
    assert precision + 8 <= digits
    for band in axis.bands:
        whole = band.weights.astype(np.float64) * 2**precision
        assert np.array_equal(whole, np.rint(whole))
        assert 128 * np.abs(whole).sum(axis=1).max() <= 2.0**digits


def test_strong_shrinking_needs_float64_and_the_common_cases_do_not():
    assert axis_table(1920, 1932, "bicubic").dtype is np.float32
    assert axis_table(1080, 300, "bicubic").dtype is np.float32
    assert axis_table(4000, 280, "bicubic").dtype is np.float64


def test_an_unchanged_size_returns_the_same_pixels_in_new_memory():
    picture = noise(50, 70)
    found = resize(picture, 50, 70, "bicubic")
    np.testing.assert_array_equal(found, picture.transpose(2, 0, 1))
    assert not np.shares_memory(found, picture)


def test_any_memory_order_gives_the_same_pixels_and_is_only_read():
    picture = noise(90, 110)
    expected = resize(picture, 56, 84, "bicubic")
    for view in (np.asfortranarray(picture), picture[::-1, ::-1].copy()[::-1, ::-1], noise(90, 220)[:, ::2]):
        view = view.copy(order="K")
        view[...] = picture
        view.flags.writeable = False
        np.testing.assert_array_equal(resize(view, 56, 84, "bicubic"), expected)
        np.testing.assert_array_equal(view, picture)


def test_threads_get_the_bits_of_a_serial_run():
    changes = sizes(24, 200, 3)
    pictures = [noise(*change[:2]) for change in changes]
    expected = [resize(p, *c[2:], "bicubic") for p, c in zip(pictures, changes, strict=True)]
    axis_table.cache_clear()
    wrong: list[int] = []

    def work() -> None:
        for place, change in enumerate(changes):
            if not np.array_equal(resize(pictures[place], *change[2:], "bicubic"), expected[place]):
                wrong.append(place)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_cache_of_tables_is_bounded():
    for length in range(1, 200):
        axis_table(length, 28, "bilinear")
    info = axis_table.cache_info()
    assert info.maxsize is not None
    assert info.currsize <= info.maxsize <= 64


@pytest.mark.parametrize("length", [1, 7, 120, 1932, 7168, 15596])
@pytest.mark.parametrize("size", [40, 1000, 1184, 2500, 30_000, 80_000, 2**20])
def test_parts_cover_a_length_with_less_than_a_part_to_spare_and_stay_below_the_limit(length: int, size: int):
    parts, step = resample.split(length, size)
    assert 0 <= parts * step - length < step
    assert step * size <= max(resample.PRODUCT, resample.NARROW * size)


CHANGES = [(2000, 2500, 1400, 1400), (128, 100_000, 28, 2800), (400, 40_000, 56, 4032), (20_000, 500, 1400, 28)]


@pytest.mark.skipif(sys.platform == "win32", reason="tracemalloc and BLAS buffers")
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_memory_beside_the_result_stays_below_the_picture(change: tuple[int, int, int, int]):
    picture = noise(*change[:2])
    resize(picture, *change[2:], "bicubic")
    tracemalloc.start()
    found = resize(picture, *change[2:], "bicubic")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - found.nbytes < picture.nbytes
