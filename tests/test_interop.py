"""Embeddings handed to others: PyTorch, safetensors, a JAX language model's prefill."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxvit
from jaxvit import interop
from jaxvit.errors import MediaError
from jaxvit.examples import prefill
from tests.families import FAMILIES, checkpoint, clip, encoder, media, picture


def test_torch_sees_packed_embeddings_where_they_lie() -> None:
    torch = pytest.importorskip("torch")
    encodings = encoder("qwen2_5_vl").encode([picture(112, 140), picture(84, 84)])
    for packed, item, offset, length in encodings.packed:
        tensor = torch.from_dlpack(packed)
        assert tensor.data_ptr() == packed.unsafe_buffer_pointer()
        np.testing.assert_array_equal(tensor[offset : offset + length].numpy(), encodings[item])
    assert len({id(packed) for packed, *_ in encodings.packed}) == 1, "both lie in one call"


def test_torch_takes_bfloat16_as_it_is() -> None:
    torch = pytest.importorskip("torch")
    encodings = encoder("lfm2_vl", "bfloat16").encode(picture(300, 300), out_dtype=None)
    ((packed, _, offset, length),) = encodings.packed
    tensor = torch.from_dlpack(packed)
    assert tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() == packed.unsafe_buffer_pointer()
    np.testing.assert_array_equal(tensor[offset : offset + length].float().numpy(), encodings[0].astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_safetensors_keeps_embeddings_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    (array,) = encoder("lfm2_vl", "bfloat16").encode(picture(300, 300), out_dtype=dtype)
    save_file({"0": array}, tmp_path / "one.safetensors")
    found = load_file(tmp_path / "one.safetensors")["0"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found.view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_embedding_is_inserted_at_its_image_token_and_nothing_else_changes(name: str) -> None:
    encoding = encoder(name)
    items = encoding.prepare(media(name))
    generator = np.random.default_rng(0)
    ids: list[int] = []
    for item in items:
        ids += [*generator.integers(0, 9, 3), *[99] * item.tokens]
    ids += [5]
    encodings = encoding.encode(items)
    before = generator.normal(size=(len(ids), encoding.family.width)).astype(np.float32)
    after = jnp.asarray(before)
    where = interop.places(np.array(ids), 99, items)
    for packed, rows in interop.destinations(encodings, items, where, len(ids)):
        assert len(rows) == len(packed)
        after = interop.insert(after, packed, rows)
    expected = before.copy()
    expected[np.array(ids) == 99] = np.concatenate(list(encodings))
    np.testing.assert_array_equal(np.asarray(after), expected)


def test_tokens_that_pruning_drops_are_not_inserted() -> None:
    video = clip(4, 112, 112)
    pruned = jaxvit.Video(video.frames, prune=0.4)
    encoding = encoder("qwen2_5_vl")
    items = encoding.prepare([picture(84, 84), pruned])
    ids = np.array([99] * sum(item.tokens for item in items) + [1])
    encodings = encoding.encode(items)
    assert items[1].tokens < 32
    after = jnp.zeros((len(ids), encoding.family.width))
    for packed, rows in interop.destinations(encodings, items, interop.places(ids, 99, items), len(ids)):
        after = interop.insert(after, packed, rows)
    np.testing.assert_array_equal(np.asarray(after)[:-1], np.concatenate(list(encodings)))
    assert not np.asarray(after)[-1].any()


def test_one_more_picture_compiles_nothing(compilations) -> None:
    encoding = encoder("qwen2_5_vl")
    embeddings = jnp.zeros((200, encoding.family.width))
    for number, seed in enumerate((1, 2)):
        items = encoding.prepare([picture(112, 112 + 28 * seed, seed)])
        ids = np.array([99] * items[0].tokens + [0] * (200 - items[0].tokens))
        encodings = encoding.encode(items)
        compilations.reset()
        for packed, rows in interop.destinations(encodings, items, interop.places(ids, 99, items), len(ids)):
            interop.insert(embeddings, packed, rows).block_until_ready()
        assert number == 0 or compilations.count == 0


def test_a_prompt_with_another_number_of_image_tokens_is_refused() -> None:
    items = encoder("qwen2_5_vl").prepare([picture(112, 112)])
    with pytest.raises(MediaError, match=r"15 image tokens.*the items have 16"):
        interop.places(np.full(15, 99), 99, items)


# The example


def test_the_prefill_gets_the_pictures_between_their_marks() -> None:
    encoding = encoder("qwen2_5_vl")
    table = jax.random.normal(jax.random.key(0), (prefill.VIDEO_PAD + 1, 96), jnp.float32)
    pictures = [picture(112, 140), picture(84, 84)]
    embeddings, positions = prefill.inputs(encoding, pictures, [7, 8], table)
    first, second = encoding.encode(pictures)
    marks = np.asarray(table[jnp.array([prefill.VISION_START, prefill.VISION_END])])
    expected = np.concatenate(
        [marks[:1], first, marks[1:], marks[:1], second, marks[1:], np.asarray(table[jnp.array([7, 8])])]
    )
    np.testing.assert_array_equal(np.asarray(embeddings), expected)
    assert positions.shape == (3, len(expected))


@pytest.mark.reference
@pytest.mark.parametrize("video", [False, True])
def test_the_positions_are_those_of_transformers(video: bool) -> None:
    torch = importlib.import_module("torch")
    reference = importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl").Qwen2_5_VLModel
    pieces = [jaxvit.Video(clip(6, 112, 168).frames, fps=1.0)] if video else [picture(112, 140), picture(84, 168)]
    items = encoder("qwen2_5_vl").prepare(pieces)
    ids = prefill.prompt(items, range(5))
    kinds = torch.tensor(np.where(ids == prefill.IMAGE_PAD, 2 if video else 1, 0))[None]
    grids = torch.tensor([item.layout["grid_thw"] for item in items])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2.0)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *a, **k: reference.get_vision_position_ids(model, *a, **k)
    options = (
        {"video_grid_thw": grids, "second_per_grid_ts": torch.tensor([2.0])} if video else {"image_grid_thw": grids}
    )
    found, _ = reference.get_rope_index(model, torch.tensor(ids)[None], kinds, **options)
    np.testing.assert_array_equal(prefill.rotary_positions(ids, items), found[:, 0].numpy())


def test_the_example_runs_as_a_command(photos: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    prefill.main(str(checkpoint("qwen2_5_vl")), str(photos["chelsea"]))
    assert "embeddings bfloat16 (182, 96), positions (3, 182) up to" in capsys.readouterr().out
