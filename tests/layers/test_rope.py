"""Rotary angles: exact enough at the longest sides, and in float32 whatever the model's dtype."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvit.layers.rope import angles_by_axis, angles_interleaved, frequencies
from tests.families import encoder


def test_frequencies_keep_the_digits_that_bfloat16_would_round():
    assert frequencies(18, 10000.0)[1] == np.float32(0.5994842)
    assert float(jnp.bfloat16(0.5994842)) == 0.59765625


@pytest.mark.parametrize("count", [18, 20])
def test_angles_of_a_page_of_1102_rows_are_within_rounding_of_float64(count: int):
    places = np.stack(np.divmod(np.arange(1102 * 50, dtype=np.int32), 50), axis=1)
    exact = places[:, :, None] * 10000.0 ** (-np.arange(count) / count)
    for ours, theirs in (
        (angles_by_axis(jnp.asarray(places), count, 10000.0), exact.reshape(len(places), -1)),
        (
            angles_interleaved(jnp.asarray(places), count, 10000.0),
            exact[:, ::-1].swapaxes(1, 2).reshape(len(places), -1),
        ),
    ):
        assert ours.dtype == jnp.float32
        assert np.abs(np.asarray(ours, np.float64) - theirs).max() <= 1102 * 3 * 2**-24


@pytest.mark.parametrize("name", ["qwen2_5_vl", "kimi_k25"])
def test_a_bfloat16_program_turns_in_float32(name: str):
    dispatcher = encoder(name, "bfloat16").dispatcher
    text = dispatcher.program(dispatcher.ladder.buckets[0], "uint8").lower(dispatcher.devices[0]).as_text()
    turns = re.findall(r"stablehlo\.(?:cosine|sine) .*tensor<[\dx]*x(\w+)>", text)
    assert turns
    assert set(turns) == {"f32"}
