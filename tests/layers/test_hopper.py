"""Where layers may use the package's own kernels."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxvit.layers import hopper
from jaxvit.layers.hopper import allowed, kernels_for, norms


def test_the_kernels_say_why_they_cannot_run_here():
    assert hopper.why_not("cpu", "bfloat16") == "needs an NVIDIA GPU"
    assert hopper.why_not("cuda", "float32") == "the kernel takes bfloat16, not float32"


def test_layers_use_kernels_only_inside_a_program_that_allows_them(monkeypatch):
    rows = jnp.zeros((1024, 1152), jnp.bfloat16)
    with kernels_for("cpu", "bfloat16"):
        assert not allowed()
    monkeypatch.setattr(hopper, "why_not", lambda platform, dtype: None)
    assert not norms.suits(rows)
    with kernels_for("cuda", "bfloat16"):
        assert norms.suits(rows)
        assert not norms.suits(rows[:1023]), "part of a block of rows"
        assert not norms.suits(rows[:512]), "few rows"
        assert not norms.suits(rows[:, :1100]), "part of a warp's values"
        with pytest.raises(RuntimeError), kernels_for("cpu", "float32"):
            raise RuntimeError
        assert allowed()
    assert not allowed()
