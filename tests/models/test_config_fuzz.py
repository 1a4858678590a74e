"""Junk in any field of any config file: refused as a CheckpointError, or taken; never another error, a hang or NaN."""

from __future__ import annotations

import copy
import json
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxvit.errors import CheckpointError
from jaxvit.models import family_of
from tests.families import FAMILIES, checkpoint

JUNK = (
    None, True, False, 0, -1, 1, 3, 1.5, math.nan, math.inf, 10**6, 2**31, 2**39, 10**30, 10**400, "", "x", [], [1],
    [2, 2, 2], {}, {"a": 1}, [None] * 3, ["x"] * 3,
)  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "size": {"shortest_edge": 3136, "longest_edge": 12845056},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "min_frames": 4,
        "max_frames": 768,
        "max_video_tokens": 128000,
        "cap_pixels_per_frame": True,
        "fps": 2,
    }
}
"""Fields of preprocessor_config.json that the tiny checkpoint does not have and the family reads."""


def files_of(name: str) -> dict[str, Any]:
    folder = checkpoint(name)
    files = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json") if "index" not in path.name}
    files["config.json"]["vision_config"].setdefault("rope_parameters", {"rope_theta": 10000.0})
    files.setdefault("preprocessor_config.json", {}).update(MORE.get(name, {}))
    return files


def fields(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field, but for those inside the language model's configuration."""
    if isinstance(node, dict) and path[-1:] != ("text_config",):
        for name, value in node.items():
            yield (*path, name)
            yield from fields(value, (*path, name))


def with_field(files: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    files = copy.deepcopy(files)
    node = files
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return files


@pytest.mark.parametrize("name", FAMILIES)
def test_junk_in_any_field_is_refused_or_harmless(name: str):
    files = files_of(name)
    refused = taken = 0
    slowest = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        family_of(files)
        for path in [path for path in fields(files) if len(path) > 1]:
            for junk in JUNK:
                start = time.perf_counter()
                try:
                    family = family_of(with_field(files, path, junk))
                    low, high = family.budget_range()
                except CheckpointError:
                    refused += 1
                else:
                    assert 1 <= low <= high <= max(family.largest()), path
                    assert np.isfinite(family.table).all(), path
                    taken += 1
                slowest = max(slowest, time.perf_counter() - start)
    print(f"{name}: {refused + taken} junk values: {refused} refused, {taken} harmless, slowest {slowest:.2f} s")
    assert refused > 100
    assert slowest < 10
