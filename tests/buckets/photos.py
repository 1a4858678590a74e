"""Real families without weights, and what photographs of a usual mix of sizes take of their buckets."""

from __future__ import annotations

from functools import cache

import numpy as np

from jaxvit.models import family_of
from jaxvit.models.family import Demand, Family
from jaxvit.models.kimi_k25 import processing as kimi
from jaxvit.models.lfm2_vl import processing as lfm2
from jaxvit.models.qwen2_5_vl import processing as qwen
from jaxvit.weights import manifests

CHECKPOINTS = {
    "qwen2_5_vl": "Qwen--Qwen2.5-VL-7B-Instruct",
    "kimi_k25": "moonshotai--Kimi-K2.5",
    "lfm2_vl": "LiquidAI--LFM2.5-VL-1.6B",
}
FAMILIES = tuple(CHECKPOINTS)


@cache
def family(name: str, **overrides: int) -> Family:
    return family_of(manifests.load(CHECKPOINTS[name]).files, overrides)


def sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """(height, width): the long side log-uniform in 300..2000 pixels, 4:3, 16:9 or square, upright or not."""
    generator = np.random.default_rng(seed)
    long = np.exp(generator.uniform(np.log(300), np.log(2000), count)).astype(int)
    short = (long * generator.choice([3 / 4, 9 / 16, 1.0], count)).astype(int)
    upright = generator.integers(0, 2, count).astype(bool)
    return [
        (int(a), int(b)) for a, b in zip(np.where(upright, long, short), np.where(upright, short, long), strict=True)
    ]


def demands(one: Family, height: int, width: int) -> list[Demand]:
    """What a picture's pieces take, from the family's own sizes."""
    if one.name == "qwen2_5_vl":
        rows, columns = (side // 28 for side in qwen.smart_resize(height, width, one.settings.image))
        return [Demand(4 * rows * columns, rows * columns, 1, -(-rows // 4) * -(-columns // 4))]
    if one.name == "kimi_k25":
        rows, columns = (side // 28 for side in kimi.navit_resize(height, width, one.settings.image)[2:])
        return [Demand(4 * rows * columns, rows * columns, 1, 0)]
    rows, columns = lfm2.tiling(height, width, one.settings)
    tall, wide = lfm2.smart_resize(height, width, one.settings)
    view = tall * wide // 32**2
    return [Demand(1024, 256, 1, 0)] * (rows * columns if rows * columns > 1 else 0) + [Demand(4 * view, view, 1, 0)]
