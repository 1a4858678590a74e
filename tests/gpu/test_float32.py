"""float32 means float32 on an accelerator: its embeddings are the CPU's, and no process-wide precision changes them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxvit
from tests.families import FAMILIES, checkpoint, picture, relative

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_accelerators_embeddings_in_float32_are_the_cpus(name: str, precision: str | None):
    pictures = [picture(140, 140), picture(64, 200), picture(90, 30)]
    options = {"dtype": "float32", "budgets": [64, 256], "store": False}
    there = jaxvit.load(checkpoint(name), devices=jax.devices("cuda")[:1], **options)
    here = jaxvit.load(checkpoint(name), devices=jax.devices("cpu")[:1], **options)
    expected = here.encode(pictures)
    with jax.default_matmul_precision(precision):
        found = there.encode(pictures)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(np.asarray(ours), np.asarray(theirs)) <= 1e-5
