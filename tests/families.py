"""Tiny encoders of every family, one each for the whole test run, and media of every kind they take."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import jaxvit
from jaxvit import tiny
from jaxvit.models.family import Item, Piece

FAMILIES = ("qwen2_5_vl", "kimi_k25", "lfm2_vl", "lfm2_5_vl")
VIDEO = ("qwen2_5_vl", "kimi_k25")
BUDGETS = [64, 320]


@cache
def checkpoint(name: str) -> Path:
    return tiny.tiny_checkpoint(name)


@cache
def encoder(name: str, dtype: str = "float32") -> jaxvit.Encoder:
    """One encoder a family and dtype: its executables are compiled once for all tests."""
    return jaxvit.load(checkpoint(name), dtype=dtype, budgets=BUDGETS, store=False)


def copied(name: str, folder: Path) -> Path:
    """A copy of a family's tiny checkpoint. Another process of the test run may be writing the original just now; what
    it writes to begins with a dot and takes the file's name when it is whole."""
    return Path(shutil.copytree(checkpoint(name), folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True))


def reweighted(name: str, folder: Path, pattern: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """A copy of a family's tiny checkpoint in which the tensors of that name are changed."""
    copied(name, folder)
    found = 0
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for key in [key for key in tensors if re.search(pattern, key)]:
            tensors[key] = change(tensors[key].astype(np.float32)).astype(np.float32)
            found += 1
        save_file(tensors, file)
    assert found
    return folder


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Random blocks of colour with noise on top: uint8 [height, width, 3]."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (-(-height // 16), -(-width // 16), 3))
    image = np.kron(coarse, np.ones((16, 16, 1)))[:height, :width] + generator.integers(-20, 21, (height, width, 3))
    return np.clip(image, 0, 255).astype(np.uint8)


def clip(frames: int, height: int, width: int, seed: int = 0) -> jaxvit.Video:
    return jaxvit.Video([picture(height, width, seed * 1000 + number) for number in range(frames)])


def media(name: str) -> list:
    """A mixed call of the family: several sizes, and clips where it takes them."""
    found: list = [picture(140, 140, 1), picture(84, 300, 2), picture(300, 417, 3)]
    if name in VIDEO:
        found += [clip(1, 112, 84, 4), clip(3, 84, 112, 5)]
    return found


def repainted(item: Item, seed: int) -> Item:
    """The same item with other pixels."""
    generator = np.random.default_rng(seed)
    pieces = tuple(
        Piece(p.grid, generator.integers(0, 256, p.patches.shape, dtype=np.uint8), p.tokens, p.windows)
        for p in item.pieces
    )
    return Item(pieces, item.grids, item.tokens, item.layout)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative RMS error, in float64."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
