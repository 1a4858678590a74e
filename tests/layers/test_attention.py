"""Every attention backend: against float64 segment by segment, and what segments must never share.

The same tests run on the CPU in float32 and, with the marker ``gpu``, on an accelerator in bfloat16 for every backend.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvit.errors import LadderError
from jaxvit.layers import attention
from jaxvit.layers.attention import BACKENDS, TILE, choose, cudnn, key_ranges, tokamax
from jaxvit.layers.attention.mosaic import LONG_FROM
from jaxvit.layers.rope import Neighbours, rotate

HEADS = 4
CASES = {
    "many tiles, all of them cut": (8192, [576] * 13 + [333, 1, 77, 200]),
    "one segment": (512, [512]),
    "full": (1024, [512, 256, 64, 128, 64]),
    "ragged": (1024, [1, 333, 17, 64, 190, 100]),
    "nearly empty": (1024, [20]),
    "one patch each": (256, [1] * 40),
    "windows": (1024, [64] * 9 + [48, 48, 16, 12] + [64, 32]),
}
MANY = "many tiles, all of them cut"
ON_CPU = [("dense", "float32", 64), ("xla", "float32", 64), ("dense", "bfloat16", 72), ("xla", "bfloat16", 72)]
ON_GPU = [(name, "bfloat16", dim) for name in BACKENDS for dim in (64, 80)]
SETUPS = [
    *(pytest.param(*setup, id="-".join(map(str, setup))) for setup in ON_CPU),
    *(pytest.param(*setup, id="gpu-" + "-".join(map(str, setup)), marks=pytest.mark.gpu) for setup in ON_GPU),
]
BOUND = {"float32": 1e-6, "bfloat16": 5e-3}


def inputs(patches: int, dim: int, dtype: str, seed: int = 0, heads: int = HEADS) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((patches, heads, dim)).astype(jnp.dtype(dtype)) for _ in range(3)]


def attend(name: str, qkv: list[np.ndarray], lengths: list[int], segments: int = 64) -> np.ndarray:
    """The backend, compiled, on the default device: float32 [patches, heads, dim]."""
    backend, patches = BACKENDS[name], qkv[0].shape[0]
    metadata = backend.metadata(np.array(lengths, np.int32), patches, segments)
    assert {b.name: (b.shape, b.dtype) for b in backend.buffers(patches, segments)} == {
        key: (array.shape, array.dtype) for key, array in metadata.items()
    }
    out = jax.jit(partial(backend, scale=qkv[0].shape[-1] ** -0.5))(*qkv, metadata)
    return np.asarray(out).astype(np.float32)


def expected(qkv: list[np.ndarray], lengths: list[int]) -> np.ndarray:
    """Softmax attention of each segment alone, in float64."""
    q, k, v = (array.astype(np.float64) for array in qkv)
    rows, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        scores = np.einsum("qhd,khd->hqk", q[part], k[part]) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        rows.append(np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v[part]))
        start += length
    return np.concatenate(rows)


@pytest.mark.parametrize(("name", "dtype", "dim"), SETUPS)
@pytest.mark.parametrize("case", CASES)
def test_every_segment_equals_softmax_attention_in_float64(name: str, dtype: str, dim: int, case: str):
    patches, lengths = CASES[case]
    if case == MANY and name == "dense":
        patches, lengths = 1216, [576, 333, 1, 77, 200]
    qkv = inputs(patches, dim, dtype)
    found, truth = attend(name, qkv, lengths), expected(qkv, lengths)
    real = found[: sum(lengths)]
    assert np.linalg.norm(real - truth) / np.linalg.norm(truth) <= BOUND[dtype]
    assert np.isfinite(found).all(), "padding is finite"
    again = [attend(name, qkv, lengths) for _ in range(20 if jax.default_backend() != "cpu" else 1)]
    assert all(np.array_equal(one[: sum(lengths)], real) for one in again), "no run differs: no race"


@pytest.mark.parametrize(("name", "dtype", "dim"), SETUPS)
def test_nothing_of_a_segment_or_of_the_padding_reaches_another(name: str, dtype: str, dim: int):
    lengths = [100, 333, 64, 1, 200]
    qkv, others = inputs(1024, dim, dtype), inputs(1024, dim, dtype, seed=1)
    before = attend(name, qkv, lengths)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        mixed = []
        for array, other in zip(qkv, others, strict=True):
            changed = other.copy()
            changed[part] = array[part]
            mixed.append(changed)
        assert np.array_equal(attend(name, mixed, lengths)[part], before[part])
        start += length


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80])
def test_with_sums_by_halves_a_segment_gets_the_bits_that_it_has_beside_others(dim: int):
    lengths = [100, 3333, 64, 1, 2000, 576]
    qkv, others = inputs(LONG_FROM, dim, "bfloat16"), inputs(LONG_FROM, dim, "bfloat16", seed=1)
    before, truth = attend("mosaic", qkv, lengths), expected(qkv, lengths)
    assert np.linalg.norm(before[: sum(lengths)] - truth) / np.linalg.norm(truth) <= BOUND["bfloat16"]
    assert np.isfinite(before).all()
    part = slice(100, 3433)
    for array, other in zip(qkv, others, strict=True):
        array[: part.start], array[part.stop :] = other[: part.start], other[part.stop :]
    assert np.array_equal(attend("mosaic", qkv, lengths)[part], before[part])


@pytest.mark.gpu
@pytest.mark.parametrize("how", [tuple, Neighbours._make])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize(
    ("patches", "lengths"),
    [
        pytest.param(4096, [64] * 64, id="full, four heads a block"),
        pytest.param(4096, ([64] * 9 + [48] * 3 + [16, 12] + [64] * 5 + [32] * 2) * 3, id="cut"),
        pytest.param(384, [64] * 5 + [40, 24], id="a head a block"),
        pytest.param(1600, [64] * 20 + [48, 12] + [64] * 4, id="two heads a block"),
        pytest.param(256, [256], id="few patches, one segment"),
        pytest.param(256, [100, 1, 90], id="few patches, cut"),
    ],
)
def test_rotation_and_attention_are_one(dim: int, patches: int, lengths: list[int], how: Callable):
    q, k, v = inputs(patches, dim, "bfloat16", heads=16)
    angles = np.random.default_rng(1).random((patches, dim // 2), dtype=np.float32) * 6
    turn = how([jnp.cos(angles), jnp.sin(angles)])
    backend = BACKENDS["mosaic"]
    metadata = backend.metadata(np.array(lengths, np.int32), patches, 64)
    qkv = jnp.stack([q, k, v], axis=1)
    found = jax.jit(lambda *a: attention.attend(backend, *a, dim**-0.5, max(lengths)))(qkv, turn, metadata)
    turned = [np.asarray(rotate(jnp.asarray(each), turn)) for each in (q, k)]
    truth = expected([*turned, v], lengths)
    real = np.asarray(found).astype(np.float32)[: sum(lengths)]
    assert np.linalg.norm(real - truth) / np.linalg.norm(truth) <= BOUND["bfloat16"]
    assert np.isfinite(np.asarray(found).astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_a_nearly_empty_bucket_is_not_slower_than_a_full_one(name: str):
    backend, patches = BACKENDS[name], 4096
    qkv = [jax.device_put(array) for array in inputs(patches, 80, "bfloat16")]
    run = jax.jit(partial(backend, scale=0.1))

    loads = {"full": [1024] * 4, "nearly empty": [64], "empty": []}
    metadata = {
        load: jax.device_put(backend.metadata(np.array(lengths, np.int32), patches, 64))
        for load, lengths in loads.items()
    }
    best = dict.fromkeys(loads, math.inf)
    for _ in range(8):  # in turn, so that what disturbs one disturbs the others too
        for load, arrays in metadata.items():
            run(*qkv, arrays).block_until_ready()
            start = time.perf_counter()
            for _ in range(30):
                found = run(*qkv, arrays)
            found.block_until_ready()
            best[load] = min(best[load], (time.perf_counter() - start) / 30)
    print({load: f"{seconds * 1e6:.0f} us" for load, seconds in best.items()})
    assert best["nearly empty"] <= 1.1 * best["full"], best
    assert best["empty"] <= 1.1 * best["full"], best


def test_padding_attends_within_tiles_of_its_own():
    starts, ends = key_ranges(np.array([10, 60], np.int32), 300)
    assert (starts[:10].tolist(), ends[:10].tolist()) == ([0] * 10, [10] * 10)
    assert (starts[10:70].tolist(), ends[10:70].tolist()) == ([10] * 60, [70] * 60)
    rows = np.arange(70, 300)
    assert (starts[70:] <= rows).all()
    assert (rows < ends[70:]).all()
    assert (ends[70:] - starts[70:]).max() <= TILE
    assert starts[70:].min() == 70
    assert ends.max() == 300
    empty = key_ranges(np.zeros(0, np.int32), 100)
    assert (empty[1] - empty[0]).max() <= TILE
    full = key_ranges(np.array([64, 36], np.int32), 100)
    assert (full[0].tolist(), full[1].tolist()) == ([0] * 64 + [64] * 36, [64] * 64 + [100] * 36)


def test_a_backend_that_cannot_run_here_says_why():
    assert choose("auto", "cpu", "float32", 256).name == "dense"
    assert choose("auto", "cpu", "float32", 4096).name == "xla"
    with pytest.raises(LadderError, match="'cudnn' cannot run here: needs an NVIDIA GPU"):
        choose("cudnn", "cpu", "bfloat16", 256)
    with pytest.raises(LadderError, match="no attention backend 'flash'; there are dense, xla"):
        choose("flash", "cpu", "bfloat16", 256)


# Private entries


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As on such a GPU, as far as the backends ask; what they found of their private entries is forgotten."""
    forget = (cudnn._entry.cache_clear, tokamax._kernel.cache_clear)
    for module in (cudnn, tokamax):
        monkeypatch.setattr(module, "capability", lambda platform: 9.0)
    for each in forget:
        each()
    yield monkeypatch
    monkeypatch.undo()
    for each in forget:
        each()


def renamed(
    query, key, value, bias=None, *, scale=1.0, mask_type=None, q_seqlen=None, kv_seqlen=None, offsets=None
): ...
def demanding(query, key, value, pages, *, scale, mask_type, q_seqlen, kv_seqlen, q_offsets, kv_offsets): ...
def moved(key, query, value, *, scale, mask_type, q_seqlen, kv_seqlen, q_offsets, kv_offsets): ...


def test_cudnn_s_private_entry_is_as_the_adapter_calls_it(hopper: pytest.MonkeyPatch):
    assert BACKENDS["cudnn"].why_not("cuda", "bfloat16") is None
    assert choose("auto", "cuda", "bfloat16", 4096).name == "cudnn"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (renamed, "unexpected keyword argument 'q_offsets'"),
        (demanding, "missing a required argument: 'pages'"),
        (moved, "its first arguments are key, query, value, not query, key, value"),
        (None, "it takes other arguments than it is given here: None is not a callable object"),
    ],
)
def test_another_signature_of_cudnn_s_entry_is_named_and_another_backend_taken(
    hopper: pytest.MonkeyPatch, entry: Callable | None, said: str
):
    hopper.setattr(f"{cudnn.ENTRY}.dot_product_attention", entry)
    reason = BACKENDS["cudnn"].why_not("cuda", "bfloat16")
    assert reason is not None
    assert reason.startswith("jax._src.cudnn.fused_attention_stablehlo.dot_product_attention of this jax: ")
    assert said in reason
    assert choose("auto", "cuda", "bfloat16", 4096).name == "xla"
    with pytest.raises(LadderError, match=r"'cudnn' cannot run here: jax\._src\.cudnn"):
        choose("cudnn", "cuda", "bfloat16", 4096)


@pytest.mark.parametrize("gone", ["dot_product_attention", "MaskType", "MaskType.PADDING"])
def test_an_entry_of_cudnn_that_is_gone_is_named(hopper: pytest.MonkeyPatch, gone: str):
    module = importlib.import_module(cudnn.ENTRY)
    if gone == "MaskType.PADDING":
        hopper.setattr(module, "MaskType", SimpleNamespace())
    else:
        hopper.delattr(module, gone)
    reason = BACKENDS["cudnn"].why_not("cuda", "bfloat16")
    assert reason is not None
    assert f"has no attribute '{gone.split('.')[-1]}'" in reason


def kernel(
    q, k, v, bias, mask, k_start, k_end, *, is_causal, logits_soft_cap, logits_scale, out_dtype, normalize_output,
    return_residuals, use_stable_softmax, rescale_threshold, config,
): ...  # fmt: skip
def older(
    q, k, v, bias, mask, k_end, k_start, *, is_causal, logits_soft_cap, logits_scale, out_dtype, normalize_output,
    return_residuals, use_stable_softmax, rescale_threshold, config,
): ...  # fmt: skip
def newer(
    q, k, v, bias, mask, k_start, k_end, *, is_causal, logits_soft_cap, logits_scale, out_dtype, normalize_output,
    return_residuals, use_stable_softmax, config,
): ...  # fmt: skip
def config(*, block_q=64, block_kv=64, num_stages=2, persistent=False, split_k=1): ...
def plainer(*, block_q=64, block_kv=64, num_stages=2): ...


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"Config": config, "flash_attention_kernel": kernel}, None),
        ({"Config": config}, ".flash_attention_kernel of this tokamax: it is not there"),
        ({"Config": config, "flash_attention_kernel": older}, "its first arguments are q, k, v, bias, mask, k_end"),
        ({"Config": config, "flash_attention_kernel": newer}, "unexpected keyword argument 'rescale_threshold'"),
        ({"Config": plainer, "flash_attention_kernel": kernel}, ".Config of this tokamax: it takes other arguments"),
    ],
)
def test_another_signature_of_tokamax_s_kernel_is_named(
    hopper: pytest.MonkeyPatch, entries: dict[str, Callable], said: str | None
):
    fake = ModuleType(tokamax.KERNEL)
    vars(fake).update(entries)
    hopper.setitem(sys.modules, tokamax.KERNEL, fake)
    reason = BACKENDS["tokamax"].why_not("cuda", "bfloat16")
    if said is None:
        assert reason is None
    else:
        assert reason is not None
        assert said in reason
        with pytest.raises(LadderError, match=r"'tokamax' cannot run here: tokamax\._src"):
            choose("tokamax", "cuda", "bfloat16", 4096)


def test_a_tokamax_that_breaks_on_import_is_named(hopper: pytest.MonkeyPatch):
    def broken(name: str) -> ModuleType:
        raise AttributeError("module 'jax' has no attribute 'core'")

    hopper.setattr(tokamax.importlib, "import_module", broken)
    reason = BACKENDS["tokamax"].why_not("cuda", "bfloat16")
    assert reason is not None
    assert "fails to import (module 'jax' has no attribute 'core')" in reason
