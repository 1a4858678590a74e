"""Qwen2.5-VL against transformers, on identical pixels."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import jaxvit
from jaxvit import tiny
from jaxvit.models.qwen2_5_vl.layout import windows
from jaxvit.reference import Reference, load_reference
from tests.families import checkpoint, clip, encoder, picture, relative

SIZES = [(56, 56), (140, 140), (224, 224), (1092, 644), (28, 812)]
pytestmark = pytest.mark.reference


@cache
def reference(dtype: str = "float32", attention: str = "sdpa") -> Reference:
    return load_reference(checkpoint("qwen2_5_vl"), "qwen2_5_vl", dtype, attention)  # pyright: ignore


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_image_agrees_with_the_reference(size: tuple[int, int]):
    [item] = encoder("qwen2_5_vl").prepare(picture(*size))
    assert relative(encoder("qwen2_5_vl").encode(item)[0], reference().encode(item)) <= 1e-5


def test_images_packed_in_one_bucket_agree_with_the_reference():
    media = [picture(*size, seed) for seed, size in enumerate([(56, 56), (140, 140), (28, 812), (224, 224)])]
    items = encoder("qwen2_5_vl").prepare(media)
    found = encoder("qwen2_5_vl").encode(items)
    assert max(len(call.slots) for call in found.plan.calls) > 1
    for item, rows in zip(items, found, strict=True):
        assert relative(rows, reference().encode(item)) <= 1e-5


@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_a_clip_agrees_with_the_reference(frames: int):
    [item] = encoder("qwen2_5_vl").prepare(clip(frames, 112, 140))
    assert item.grids[0][0] == -(-frames // 2)
    assert relative(encoder("qwen2_5_vl").encode(item)[0], reference().encode(item)) <= 1e-5


def test_a_clip_longer_than_its_bucket_agrees_with_the_reference():
    [item] = encoder("qwen2_5_vl").prepare(clip(9, 224, 280))
    assert item.tokens > encoder("qwen2_5_vl").ladder.buckets[-1].tokens
    found = encoder("qwen2_5_vl").encode(item)
    assert len(found.plan.calls) > 1
    assert not found.plan.overflows
    assert relative(found[0], reference().encode(item)) <= 1e-5


@pytest.mark.parametrize(
    ("cells", "lengths"),
    [((5, 5), [64, 16, 16, 4]), ((4, 4), [64]), ((8, 8), [64] * 4), ((3, 3), [36]), ((1, 29), [16] * 7 + [4])],
    ids=str,
)
def test_windows_at_the_edge_keep_their_true_length_and_none_is_empty(cells: tuple[int, int], lengths: list[int]):
    assert windows(2 * cells[0], 2 * cells[1], 2, 4).lengths.tolist() == lengths


def test_the_output_of_the_reference_s_processor_gives_the_same_embeddings():
    first, second = picture(140, 140, 1), picture(90, 300, 2)
    inputs = [reference().process(one) for one in (first, second)]
    joined = {
        key: np.concatenate([np.asarray(one[key]) for one in inputs]) for key in ("pixel_values", "image_grid_thw")
    }
    items = encoder("qwen2_5_vl").items(joined)
    assert {piece.patches.dtype for item in items for piece in item.pieces} == {np.dtype(np.uint8)}
    for rows, ours in zip(
        encoder("qwen2_5_vl").encode(items), encoder("qwen2_5_vl").encode([first, second]), strict=True
    ):
        assert relative(rows, ours) <= 1e-6


def test_float_pixels_that_no_uint8_gives_run_through_a_float_executable():
    inputs = dict(reference().process(picture(140, 140, 1)))
    inputs["pixel_values"] = np.asarray(inputs["pixel_values"]) * np.float32(0.999)
    [item] = encoder("qwen2_5_vl").items(inputs)
    assert item.pieces[0].patches.dtype == np.float32
    theirs = reference().encode_inputs({key: reference_tensor(value) for key, value in inputs.items()})
    assert relative(encoder("qwen2_5_vl").encode(item)[0], theirs) <= 1e-5


def reference_tensor(value):
    import torch

    return torch.as_tensor(np.asarray(value))


def test_pruning_keeps_the_first_frame_pair_and_the_tokens_that_changed():
    still = picture(112, 112, 1)
    moved = still.copy()
    moved[:56, :56] = picture(56, 56, 2)
    frames = [still, still, still, still, moved, moved]
    whole = encoder("qwen2_5_vl").encode(jaxvit.Video(frames))
    [item] = encoder("qwen2_5_vl").prepare(jaxvit.Video(frames, prune=0.5))
    pruned = encoder("qwen2_5_vl").encode(item)
    kept = pruned.kept(0)
    assert item.tokens == len(pruned[0]) == max(16, int(48 * 0.5))
    assert np.array_equal(pruned[0], whole[0][kept])
    assert kept[:16].tolist() == list(range(16))
    assert whole.kept(0) is None
    changed = {32 + row * 4 + column for row in range(2) for column in range(2)}
    assert changed <= set(kept.tolist()), "the second frame pair repeats the first, the third has a new corner"


@pytest.mark.parametrize("prune", [0.3, 0.5, 0.9])
def test_pruning_equals_its_definition(prune: float):
    """EVS, written out: tokens of later pairs by cosine with the same place one pair before, least similar first."""
    video = clip(7, 84, 112)
    whole = encoder("qwen2_5_vl").encode(video)[0].astype(np.float64)
    pairs, tokens = 4, len(whole) // 4
    keep = max(tokens, int(len(whole) * (1 - prune)))
    scored = []
    for place in range(tokens, len(whole)):
        now, before = whole[place], whole[place - tokens]
        scored.append((now @ before / np.linalg.norm(now) / np.linalg.norm(before), place))
    expected = sorted([*range(tokens), *(place for _, place in sorted(scored)[: keep - tokens])])
    pruned = encoder("qwen2_5_vl").encode(jaxvit.Video(video.frames, prune=prune))
    assert pruned.kept(0).tolist() == expected
    assert pairs * tokens == len(whole)


@pytest.mark.slow
def test_the_full_3b_tower_agrees_with_the_reference_on_a_photograph(tmp_path, photos):
    folder = tiny.random_full_size("Qwen--Qwen2.5-VL-3B-Instruct", tmp_path, shards=2)
    full = jaxvit.load(folder, dtype="float32", budgets=[512], store=False)
    [item] = full.prepare(photos["coffee"])
    theirs = load_reference(folder, "qwen2_5_vl").encode(item)
    assert relative(full.encode(item)[0], theirs) <= 1e-5
