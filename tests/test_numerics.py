"""Process-wide settings of JAX: they change no result, and none of them is changed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxvit
from tests.families import BUDGETS, FAMILIES, checkpoint, encoder, picture

SETTINGS = {
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "bfloat16",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "raise",
    "jax_disable_jit": True,
    "jax_check_tracer_leaks": True,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_process_wide_setting_changes_no_bit_and_is_left_as_it_was(name: str):
    """Set before loading and compiling, and again on an encoder that is loaded already."""
    before = encoder(name).encode(picture(112, 84))[0]
    previous = {setting: getattr(jax.config, setting) for setting in SETTINGS}
    try:
        for setting, value in SETTINGS.items():
            jax.config.update(setting, value)
        fresh = jaxvit.load(checkpoint(name), dtype="float32", budgets=BUDGETS, store=False)
        found = [shared.encode(picture(112, 84))[0] for shared in (fresh, encoder(name))]
        exact = fresh.encode(picture(112, 84), bucketed=False)[0]
        assert {setting: getattr(jax.config, setting) for setting in SETTINGS} == SETTINGS
    finally:
        for setting, value in previous.items():
            jax.config.update(setting, value)
    assert all(np.array_equal(rows, before) for rows in found)
    assert np.isfinite(exact).all()
