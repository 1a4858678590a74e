"""Attention kernels alone, also in forms that the package does not use: what its choices rest on.

    python3 tests/gpu/attention.py windows blocks

``windows``: windows of 64 patches, Qwen2.5-VL's heads, from the projection to the output, rotation included: the
package's kernel, cuDNN with the windows as a batch, cuDNN and tokamax packed. ``blocks``: tokamax's block sizes.
Microseconds of a call, the median of several rounds in turns. It needs no installed package: run it in the repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxvit.bench.report import show
from jaxvit.layers.attention import BACKENDS, windows
from jaxvit.layers.attention.segments import key_ranges
from jaxvit.layers.attention.tokamax import _kernel
from jaxvit.layers.rope import rotate

WINDOW, HEADS, DIM = 64, 16, 80
LOADS = ((4, 256), (1, 1024), (4, 1024), (1, 4096), (16, 1024))
"""Pieces of so many patches, for the block sizes."""
CONFIGS = [(64, 64), (64, 128), (64, 256), (128, 64), (128, 128)]
REPEATED, CALLS, ROUNDS = 8, 4, 5
Trial = tuple[list[str], Callable[..., Any], tuple[Any, ...]]


def random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def windowed(patches: int) -> list[Trial]:
    """The kernels on whole windows: one projection in, one output out."""
    lengths = np.full(patches // WINDOW, WINDOW, np.int32)
    starts, ends = (jnp.asarray(each) for each in key_ranges(lengths, patches))
    angles = jax.random.uniform(jax.random.key(1), (patches, DIM // 2)) * 6
    cos, sin, scale = jnp.cos(angles), jnp.sin(angles), DIM**-0.5
    qkv = random(2, patches, 3, HEADS, DIM)

    def turned(qkv: jax.Array) -> list[jax.Array]:
        return [rotate(qkv[:, 0], (cos, sin)), rotate(qkv[:, 1], (cos, sin)), qkv[:, 2]]

    def ours(qkv: jax.Array) -> jax.Array:
        return windows.attend(qkv.reshape(patches, 3 * HEADS, DIM), (cos, sin), starts, ends, scale=scale)

    def batch(qkv: jax.Array) -> jax.Array:
        q, k, v = (each.reshape(-1, WINDOW, HEADS, DIM) for each in turned(qkv))
        return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn").reshape(patches, HEADS, DIM)

    def packed(name: str, qkv: jax.Array) -> jax.Array:
        metadata = BACKENDS[name].metadata(lengths, patches, len(lengths))
        return BACKENDS[name](*turned(qkv), {key: jnp.asarray(array) for key, array in metadata.items()}, scale)

    ways = {"the package's": ours, "cuDNN, a batch": batch}
    ways |= {f"{name}, packed": partial(packed, name) for name in ("cudnn", "tokamax")}
    return [([f"{patches}", name], way, (qkv,)) for name, way in ways.items()]


def blocked(pieces: int, length: int) -> list[Trial]:
    """tokamax's kernel by the sizes of its blocks."""
    module, reason = _kernel()
    if module is None:
        raise SystemExit(reason)
    patches = pieces * length
    starts, ends = (jnp.asarray(each)[None] for each in key_ranges(np.full(pieces, length, np.int32), patches))
    q, k, v = (random(seed, patches, HEADS, DIM) for seed in range(3))

    def attend(config: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, *_ = module.flash_attention_kernel(
            q, k, v, None, None, starts, ends,
            is_causal=False, logits_soft_cap=None, logits_scale=DIM**-0.5, out_dtype=jnp.dtype(jnp.bfloat16),
            normalize_output=True, return_residuals=False, use_stable_softmax=True, rescale_threshold=1.0,
            config=config,
        )  # fmt: skip
        return out

    trials: list[Trial] = []
    for block_q, block_kv in CONFIGS:
        for persistent in (True, False):
            config = module.Config(block_q=block_q, block_kv=block_kv, num_stages=2, persistent=persistent)
            said = f"{block_q} x {block_kv}{', persistent' if persistent else ''}"
            trials.append(([f"{pieces} x {length}", said], partial(attend, config), (q, k, v)))
    return trials


def repeated(way: Callable[..., Any], copies: Sequence[Any], *rest: Any) -> Any:
    """A call on each copy of the first argument, one behind the other: of one array XLA would make one call, and none
    whose result is not used."""
    total, out = jnp.float32(0), copies[0]
    for each in copies:
        each, _ = lax.optimization_barrier((each, out))
        out = lax.optimization_barrier(way(each, *rest))
        total += out.ravel()[0].astype(jnp.float32)
    return total


def given(trial: Trial) -> tuple[Any, ...]:
    """What the compiled repetitions take: the first argument so often, and the others."""
    first, *rest = trial[2]
    return [first] * REPEATED, *rest


def build(trial: Trial) -> Any:
    try:
        return jax.jit(partial(repeated, trial[1])).lower(*given(trial)).compile()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=["windows", "blocks"])
    asked = parser.parse_args()
    trials: list[Trial] = []
    if "windows" in asked.what:
        trials += [trial for patches in (1024, 4096, 16384) for trial in windowed(patches)]
    if "blocks" in asked.what:
        trials += [trial for load in LOADS for trial in blocked(*load)]
    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(build, trials))
    times: list[list[float]] = [[] for _ in trials]
    for _ in range(ROUNDS):
        for trial, one, found in zip(trials, built, times, strict=True):
            if isinstance(one, str):
                continue
            arguments = given(trial)
            jax.block_until_ready(one(*arguments))
            start = perf_counter()
            jax.block_until_ready([one(*arguments) for _ in range(CALLS)])
            found.append((perf_counter() - start) / CALLS / REPEATED * 1e6)
    rows = [
        [*labels, one if isinstance(one, str) else f"{median(found):.1f}"]
        for (labels, _, _), one, found in zip(trials, built, times, strict=True)
    ]
    show(f"{jax.devices()[0].device_kind}, bfloat16, {HEADS} heads of {DIM}", ["patches", "way", "us"], rows)


if __name__ == "__main__":
    main()
