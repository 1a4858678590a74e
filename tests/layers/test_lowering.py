"""Every kernel of the package is lowered for NVIDIA Hopper, and each tower uses those meant for it.

This needs no accelerator: Pallas makes the kernels' programs wherever jax is new enough. What they compute is tested on
the accelerator.
"""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxvit.buckets import scratch
from jaxvit.buckets.executable import Program
from jaxvit.buckets.ladder import complete
from jaxvit.layers import hopper
from jaxvit.layers.attention import mosaic, windows
from jaxvit.models import family_of
from jaxvit.tiny import cut

pytestmark = pytest.mark.skipif(
    tuple(map(int, jax.__version__.split(".")[:2])) < hopper.OLDEST_JAX, reason="the kernels need a newer jax"
)

SMALL, LARGE = 64, 1024
"""Tokens. Of fewer rows than a thousand, XLA computes norms and projections."""
TOWERS = {
    # (checkpoint, blocks, tokens of the bucket): how often each kernel is called
    ("moonshotai/Kimi-K2.5", 2, SMALL): {"windows": 2},
    ("moonshotai/Kimi-K2.5", 2, LARGE): {"layer_norm": 6, "qkv": 2, "attention": 2},
    ("moonshotai/Kimi-K2.5", 2, 4096): {"layer_norm": 6, "qkv": 2, "attention": 2},
    ("Qwen/Qwen2.5-VL-7B-Instruct", 8, SMALL): {"windows": 8},
    ("Qwen/Qwen2.5-VL-7B-Instruct", 8, LARGE): {"rms_norm": 17, "swiglu": 8, "windows": 7, "attention": 1},
    ("LiquidAI/LFM2.5-VL-450M", 2, SMALL): {"attention": 2},
    ("LiquidAI/LFM2.5-VL-450M", 2, LARGE): {"layer_norm": 5, "attention": 2},
    ("LiquidAI/LFM2.5-VL-1.6B", 2, LARGE): {"layer_norm": 5, "attention": 2},
}
KERNEL = "stablehlo.custom_call @mosaic_gpu"
FUNCTIONS = {
    "_layer_norm": "layer_norm",
    "_rms_norm": "rms_norm",
    "turned": "qkv",
    "joined": "swiglu",
    "flash": "attention",
    "attend": "windows",
}
"""The jitted functions that call a kernel, each lowered once for all the places it is called from."""


@pytest.mark.parametrize(("name", "blocks", "tokens"), TOWERS)
def test_a_tower_is_lowered_with_its_kernels(name: str, blocks: int, tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hopper, "why_not", lambda platform, dtype: None)
    family = family_of(cut(name, blocks)[0])
    program = Program(family, complete(family, {"tokens": tokens}), "bfloat16", "uint8", "cuda")
    assert program.backend.name == "mosaic"
    place = SingleDeviceSharding(jax.devices()[0])
    weights = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.weights.avals(np.dtype(jnp.bfloat16), place)]
    arrays = [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in program.buffers]
    rooms = [jax.ShapeDtypeStruct((length,), scratch.WORD) for length in program.scratch]
    text = jax.jit(program.entry()).trace(weights, rooms, *arrays).lower(lowering_platforms=("cuda",)).as_text()
    calls = Counter(re.sub(r"_\d+$", "", called) for called in re.findall(r" call @(\w+)\(", text))
    assert {FUNCTIONS[one]: count for one, count in calls.items() if one in FUNCTIONS} == TOWERS[name, blocks, tokens]
    bodies = re.split(r"\n  func\.func ", text)
    kernels = [body for body in bodies if re.sub(r"_\d+$", "", body.split("@")[1].split("(")[0]) in FUNCTIONS]
    assert kernels
    assert all(KERNEL in body for body in kernels)
    [main] = [body for body in bodies if body.startswith("public @main")]
    assert bool(rooms) == (tokens < LARGE)
    assert main.count(KERNEL) == bool(rooms), "that memory is held by a kernel of its own"


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("tiling", [mosaic.SMALL, mosaic.LARGE, mosaic.LONG])
def test_attention_is_lowered_in_each_tiling(tiling: mosaic.Tiling, dim: int):
    q, rows = jax.ShapeDtypeStruct((256, 12, dim), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.int32)
    traced = mosaic.flash.trace(q, q, q, rows, rows, 4, (0, 4, 8), 0.1, tiling)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(KERNEL) == 1


@pytest.mark.parametrize("dim", [64, 80, 96])
@pytest.mark.parametrize("beside", [False, True])
def test_attention_of_windows_is_lowered_with_either_rotation(beside: bool, dim: int):
    qkv, rows = jax.ShapeDtypeStruct((256, 12, dim), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.int32)
    half = jax.ShapeDtypeStruct((256, dim // 2), jnp.float32)
    tables = (jax.ShapeDtypeStruct((256, dim), jnp.float32),) if beside else (half, half)
    text = windows.attend.trace(qkv, tables, rows, rows, 0.1).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(KERNEL) == 1
