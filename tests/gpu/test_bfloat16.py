"""bfloat16 on an accelerator, by every attention backend: no farther from float32 than the reference's own bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxvit
from jaxvit.bench.subject import random_checkpoint
from jaxvit.layers.attention import BACKENDS
from jaxvit.models.family import Item
from tests.families import picture, relative

pytestmark = [pytest.mark.gpu, pytest.mark.reference]
TOWERS = ("moonshotai/Kimi-K2.5", "Qwen/Qwen2.5-VL-7B-Instruct", "LiquidAI/LFM2.5-VL-450M")
LAYERS = 8
"""Of full width; Qwen's eighth attends to everything, the others within windows."""
SIZES = ((224, 224), (140, 420), (448, 336), (80, 600), (336, 336), (504, 252), (392, 448), (252, 504))


@pytest.fixture(scope="module", params=TOWERS, ids=lambda name: name.split("/")[1])
def known(request: pytest.FixtureRequest) -> Iterator[tuple[Path, list[Item], np.ndarray, float]]:
    """A random checkpoint, items, their embeddings by the reference in float32, and its own error in bfloat16."""
    from jaxvit.reference import load_reference

    with random_checkpoint(request.param, LAYERS) as folder:
        given = [picture(*size, seed) for seed, size in enumerate(SIZES)]
        items = jaxvit.load(folder, dtype="float32", budgets=[1024], store=False).prepare(given)
        exact = joined(load_reference(folder), items)
        kinds = [load_reference(folder, dtype="bfloat16", attention=kind) for kind in ("sdpa", "eager")]
        errors = [relative(joined(kind, items), exact) for kind in kinds]
        yield folder, items, exact, float(np.sqrt(np.mean(np.square(errors))))


def joined(reference: object, items: list[Item]) -> np.ndarray:
    return np.concatenate([reference.encode(item) for item in items])  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_no_farther_from_float32_than_the_reference_s_own(
    known: tuple[Path, list[Item], np.ndarray, float], backend: str
):
    folder, items, exact, theirs = known
    platform = jax.devices()[0].platform
    if reason := BACKENDS[backend].why_not(platform, "bfloat16"):
        pytest.skip(reason)
    for budgets in ([256], [1024]):  # of few patches, where a piece may need a bucket of its own size, and of many
        encoder = jaxvit.load(folder, dtype="bfloat16", attention=backend, budgets=budgets, store=False)
        ours = relative(np.concatenate([np.asarray(rows, np.float32) for rows in encoder.encode(items)]), exact)
        print(f"{encoder.family.name} {backend} {budgets}: {ours:.2e}, the reference {theirs:.2e}")
        assert ours <= 1.1 * theirs
