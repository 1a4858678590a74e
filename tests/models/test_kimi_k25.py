"""Kimi-K2.5 against transformers, on identical pixels; its configurations, tensor layouts and buckets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxvit
from jaxvit import tiny
from jaxvit.buckets.ladder import default_ladder
from jaxvit.errors import CheckpointError, MediaError
from jaxvit.layers.fuse import parameter_shapes
from jaxvit.layers.rope import angles_interleaved, frequencies, rotate, rotation
from jaxvit.models import family_of
from jaxvit.models.family import Bucket, Item, Piece, joined
from jaxvit.models.kimi_k25 import KimiK25, keys
from jaxvit.models.kimi_k25.config import Config
from jaxvit.models.kimi_k25.module import VisionTower, time_table
from jaxvit.reference import Reference, load_reference
from jaxvit.weights import manifests
from jaxvit.weights.load import load_parameters
from tests.families import clip, copied, encoder, picture, relative

FULL = manifests.load("moonshotai--Kimi-K2.5").files


# The configuration ---------------------------------------------------------------------------------------------------

HUB = {
    "vt_hidden_size": 96,
    "vt_intermediate_size": 200,
    "vt_num_hidden_layers": 5,
    "vt_num_attention_heads": 6,
    "init_pos_emb_height": 12,
    "init_pos_emb_width": 14,
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 96,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-4,
    "text_hidden_size": 80,
    "patch_size": 14,
}
OWN = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "pos_emb_height": 12,
    "pos_emb_width": 14,
    "pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 14,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
# Fields of the language model under the vision tower's names: none of them may be taken for it.
TEXT = {"hidden_size": 80, "num_hidden_layers": 61, "num_attention_heads": 64, "intermediate_size": 18432}
TEXT |= {"patch_size": 3, "rope_theta": 50000.0, "hidden_act": "silu"}


def config_of(vision: Mapping[str, Any] | None, **root: Any) -> Config:
    config = {"model_type": "kimi_k25", "text_config": TEXT, **root}
    return Config.from_files({"config.json": config if vision is None else {**config, "vision_config": vision}})


def test_both_spellings_give_the_same_configuration():
    ours = config_of(HUB)
    assert ours == config_of(OWN, projection_hidden_size=96, projection_layer_norm_eps=1e-4)
    assert (ours.hidden_size, ours.num_attention_heads, ours.pos_emb_height, ours.text_hidden_size) == (96, 6, 12, 80)
    assert ours.projector_ln_eps == 1e-4


def test_the_published_configuration_equals_the_defaults():
    assert Config.from_files(FULL) == config_of({}, text_config={}) == Config()


def test_values_of_the_root_and_of_the_text_never_stand_in_for_the_tower():
    ours = config_of({}, **{name: value for name, value in TEXT.items() if name != "model_type"})
    assert ours == Config(text_hidden_size=80)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merge_type": "sd2"}, "merge_type is 'sd2'"),
        ({"pos_emb_type": "fixed"}, "pos_emb_type is 'fixed'"),
        ({"video_attn_type": "spatial"}, "video_attn_type"),
        ({"mm_projector_type": "patchmergerv2"}, "mm_projector_type is 'patchmergerv2'"),
        ({"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'"),
        ({"pos_emb_interpolation_mode": "bilinear"}, "pos_emb_interpolation_mode"),
        ({"attn_bias": False}, "attn_bias is False"),
        ({"linear_bias": False}, "linear_bias"),
        ({"patch_embed_proj_bias": False}, "patch_embed_proj_bias"),
        ({"qkv_hidden_size": 1536}, "qkv_hidden_size is 1536"),
        ({"activation_func": "silu"}, "activation_func"),
        ({"mm_hidden_size": 7168}, "mm_hidden_size is 7168"),
        ({"merge_kernel_size": [2, 1]}, r"merge_kernel_size is \[2, 1\]"),
        ({"merge_kernel_size": [3, 3]}, r"merge_kernel_size is \[3, 3\]"),
        ({"projector_hidden_act": "mish"}, "projector_hidden_act is 'mish'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"vt_num_attention_heads": 17}, r"num_attention_heads \(17\) does not divide hidden_size \(96\)"),
        ({"vt_num_attention_heads": 48}, r"4 \(4\) does not divide the head dim"),
        ({"vt_num_hidden_layers": 0}, "vt_num_hidden_layers must be a positive integer"),
        ({"hidden_size": 7168}, "vt_hidden_size is 96 and hidden_size is 7168"),
    ],
    ids=str,
)
def test_what_the_tower_does_not_do_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        config_of(HUB | change)


def test_a_checkpoint_without_vision_config_and_kimi_k3_are_refused():
    with pytest.raises(CheckpointError, match="vision_config"):
        config_of(None)
    with pytest.raises(CheckpointError, match="RMSNorm"):
        family_of({"config.json": {"model_type": "kimi_k3", "vision_config": HUB}})


def test_chunks_longer_than_the_time_table_are_refused():
    files = {**FULL, "preprocessor_config.json": {"media_proc_cfg": {"temporal_merge_kernel_size": 8}}}
    with pytest.raises(CheckpointError, match="chunks of 8 frames"):
        family_of(files)


# The tensors ---------------------------------------------------------------------------------------------------------


def parameters(folder: Path) -> dict[str, np.ndarray]:
    config = Config.from_files({"config.json": json.loads((folder / "config.json").read_text())})
    shapes = parameter_shapes(nnx.eval_shape(lambda: VisionTower(config)))
    return dict(load_parameters(folder, keys.table(config.num_attention_heads), shapes, np.float32))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random model as transformers saves it, in its own layout and in the hub's, and as the hub has it."""
    import torch
    import transformers

    torch.manual_seed(0)
    vision = {"hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "num_hidden_layers": 2}
    text = {"hidden_size": 24, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    text |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    text |= {"n_group": 1, "topk_group": 1, "vocab_size": 64, "model_type": "deepseek_v3"}
    vision |= {"pos_emb_height": 8, "pos_emb_width": 8}
    config = transformers.Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=36)
    model = transformers.Kimi_K25ForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folders = {name: tmp_path_factory.mktemp(name) for name in ("own", "resaved", "hub")}
    model.save_pretrained(folders["own"], save_original_format=False)
    model.save_pretrained(folders["resaved"])
    tensors = load_file(folders["resaved"] / "model.safetensors")
    renamed = {
        name.replace("vision_tower.encoder.patch_embed", "vision_tower.patch_embed").replace(
            "model.mm_projector", "mm_projector"
        ): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folders["hub"] / "model.safetensors")
    shutil.copy(folders["resaved"] / "config.json", folders["hub"])
    return folders


@pytest.mark.reference
@pytest.mark.parametrize("layout", ["own", "resaved"])
def test_every_layout_of_the_tensors_loads_to_identical_parameters(saved: dict[str, Path], layout: str):
    hub, other = parameters(saved["hub"]), parameters(saved[layout])
    assert hub.keys() == other.keys()
    for name in hub:
        np.testing.assert_array_equal(other[name], hub[name], err_msg=name)


@pytest.mark.reference
def test_a_missing_tensor_is_named_as_its_checkpoint_spells_it(saved: dict[str, Path], tmp_path: Path):
    for layout, name in (
        ("own", "model.vision_tower.layers.1.attn.k_proj.weight"),
        ("hub", "vision_tower.encoder.blocks.1.wqkv.weight"),
        ("hub", "vision_tower.patch_embed.proj.bias"),
        ("resaved", "model.mm_projector.pre_norm.bias"),
    ):
        tensors = load_file(saved[layout] / "model.safetensors")
        del tensors[name]
        save_file(tensors, tmp_path / "model.safetensors")
        shutil.copy(saved[layout] / "config.json", tmp_path)
        with pytest.raises(CheckpointError) as caught:
            parameters(tmp_path)
        assert caught.value.tensors == (name,)


@pytest.mark.reference
def test_two_layouts_in_one_checkpoint_are_refused(saved: dict[str, Path], tmp_path: Path):
    shutil.copy(saved["own"] / "config.json", tmp_path)
    for layout in ("own", "hub"):
        shutil.copy(saved[layout] / "model.safetensors", tmp_path / f"{layout}.safetensors")
    files = {f"{name}.safetensors": load_file(tmp_path / f"{name}.safetensors") for name in ("own", "hub")}
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="mixes spellings"):
        parameters(tmp_path)


def rotated_neighbours(x: np.ndarray, y_x: np.ndarray, theta: float = 10000.0) -> np.ndarray:
    """The original code's rotation in float64: pair p of neighbours by x * fr(p / 2) for even p, by y for odd p."""
    dim = x.shape[-1]
    exponents = 4 * (np.arange(dim // 2) // 2) / dim
    angles = y_x[:, [1, 0] * (dim // 4)] * theta**-exponents
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize("grid", [(8, 20), (20, 8)], ids=str)
def test_attention_logits_equal_those_of_rotated_neighbours(grid: tuple[int, int]):
    generator = np.random.default_rng(0)
    heads, dim, hidden = 3, 12, 36
    fused, x = generator.standard_normal((3 * hidden, hidden)), generator.standard_normal((grid[0] * grid[1], hidden))
    places = np.stack(np.divmod(np.arange(len(x)), grid[1]), axis=1).astype(np.int32)

    def logits(rotation: Any, weight: np.ndarray) -> np.ndarray:
        q, k, _ = np.split(x @ weight.T, 3, axis=-1)
        q, k = (np.asarray(rotation(one.reshape(-1, heads, dim), places), np.float64) for one in (q, k))
        return np.einsum("qhd,khd->hqk", q, k)

    def ours(x: np.ndarray, places: np.ndarray) -> Any:
        turn = rotation(angles_interleaved(jnp.asarray(places), dim // 4, 10000.0))
        return rotate(jnp.asarray(x, jnp.float32), turn)

    expected = logits(rotated_neighbours, fused)
    assert relative(logits(ours, keys.halves_of_fused(fused, heads)), expected) <= 1e-6
    assert relative(logits(ours, fused), expected) > 0.1, "without the permutation the logits are others"
    assert relative(logits(rotated_neighbours, fused[:, ::-1]), expected) > 0.1


@pytest.mark.reference
def test_rotary_frequencies_are_the_reference_s_bit_for_bit():
    from transformers.models.kimi_k25 import modeling_kimi_k25 as modeling
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig

    theirs, _ = modeling.Kimi_K25VisionRotaryEmbedding.compute_axial_rope_parameters(Kimi_K25VisionConfig())
    np.testing.assert_array_equal(frequencies(18, 10000.0), theirs.numpy())


def test_rotation_stays_in_float32_at_the_longest_side():
    places = np.stack([np.full(512, 511), np.arange(512)], axis=1).astype(np.int32)
    angles = np.asarray(angles_interleaved(jnp.asarray(places), 18, 10000.0), np.float64)
    exact = (places[:, ::-1, None] * 10000.0 ** (-np.arange(18) / 18)).swapaxes(1, 2).reshape(512, 36)
    assert np.abs(angles - exact).max() <= 511 * 3 * 2**-24
    x = np.random.default_rng(0).standard_normal((512, 2, 72)).astype(jnp.bfloat16)
    turn = rotation(jnp.asarray(angles, jnp.float32))
    wide = rotate(jnp.asarray(x, jnp.float32), turn)
    narrow = rotate(jnp.asarray(x), turn)
    np.testing.assert_array_equal(np.asarray(narrow), np.asarray(wide.astype(jnp.bfloat16)))


def test_an_image_has_no_term_of_time_and_frame_zero_of_a_clip_has_one():
    table = np.asarray(time_table(4, 8))
    np.testing.assert_array_equal(table[0], np.zeros(8))
    np.testing.assert_array_equal(table[1], [0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(table[3, :2], np.sin([2.0, 2.0 * 10000 ** (-2 / 8)]), rtol=1e-6)


# Embeddings ----------------------------------------------------------------------------------------------------------

IMAGES = [(64, 64), (22, 30), (2, 512), (512, 2), (18, 90)]
CLIPS = [(1, 8, 20), (2, 20, 8), (3, 4, 6), (4, 12, 10)]


def item_of(*grids: tuple[int, int, int], seed: int = 0) -> Item:
    generator = np.random.default_rng(seed)
    pieces = [
        Piece((t, h, w), generator.integers(0, 256, (t * h * w, 588), dtype=np.uint8), h * w // 4) for t, h, w in grids
    ]
    return Item(tuple(pieces), grids, sum(piece.tokens for piece in pieces))


SHARPER = {"wqkv": 8, "pos_emb": 16, "mlp.fc0": 16}
"""Scales under which swapped axes, other rotations, a missing term of time or the other GELU each cost over 4e-5."""


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> tuple[jaxvit.Encoder, Reference]:
    """A tiny tower in which a wrong position, segment or activation shows, in float32, and its reference."""
    folder = tmp_path_factory.mktemp("sharp")
    copied("kimi_k25", folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            scale = next((scale for part, scale in SHARPER.items() if part in name), 1)
            tensors[name] = tensor * np.asarray(scale, tensor.dtype)
        save_file(tensors, file)
    return jaxvit.load(folder, dtype="float32", budgets=[64, 1024], store=False), load_reference(folder)


@pytest.mark.reference
@pytest.mark.parametrize("grid", IMAGES, ids=str)
def test_an_image_agrees_with_the_reference(sharp: tuple[jaxvit.Encoder, Reference], grid: tuple[int, int]):
    ours, reference = sharp
    item = item_of((1, *grid))
    assert relative(ours.encode(item)[0], reference.encode(item)) <= 1e-5


@pytest.mark.reference
@pytest.mark.slow
def test_an_image_beyond_the_limit_by_its_padding_agrees_with_the_reference(sharp: tuple[jaxvit.Encoder, Reference]):
    ours, reference = sharp
    item = item_of((1, 130, 130))
    assert relative(ours.encode(item)[0], reference.encode(item)) <= 1e-5


@pytest.mark.reference
def test_clips_of_one_to_four_frames_and_images_share_a_bucket_and_agree_with_the_reference(
    sharp: tuple[jaxvit.Encoder, Reference],
):
    ours, reference = sharp
    items = [item_of(grid, seed=seed) for seed, grid in enumerate([*CLIPS, (1, 22, 30), *CLIPS[::-1]])]
    found = ours.encode(items)
    assert len(found.plan.calls) == 1
    for item, rows in zip(items, found, strict=True):
        assert relative(rows, reference.encode(item)) <= 1e-5


@pytest.mark.reference
def test_every_intermediate_of_a_clip_agrees_with_the_reference(sharp: tuple[jaxvit.Encoder, Reference]):
    ours, reference = sharp
    item = item_of((3, 8, 20), (1, 8, 20))
    for mine, theirs in zip(ours.intermediates(item), reference.taps(item), strict=True):
        assert theirs.keys() <= mine.keys()
        assert max(relative(mine[name], theirs[name]) for name in theirs) <= 1e-5


@pytest.mark.reference
def test_a_clip_of_eleven_frames_is_three_chunks_and_agrees_with_the_reference(sharp: tuple[jaxvit.Encoder, Reference]):
    ours, reference = sharp
    [item] = ours.prepare(clip(11, 112, 84))
    assert item.grids == ((4, 8, 6), (4, 8, 6), (3, 8, 6))
    assert relative(ours.encode(item)[0], reference.encode(item)) <= 1e-5


@pytest.mark.reference
def test_the_projector_s_activation_and_epsilon_are_the_configuration_s(tmp_path: Path):
    copied("kimi_k25", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] |= {"projector_hidden_act": "relu", "projector_ln_eps": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    item = item_of((1, 8, 8))
    rows = jaxvit.load(tmp_path, dtype="float32", budgets=[64], store=False).encode(item)[0]
    assert relative(rows, load_reference(tmp_path).encode(item)) <= 1e-5
    assert relative(rows, encoder("kimi_k25").encode(item)[0]) > 1e-2


@pytest.mark.reference
def test_bfloat16_is_no_farther_from_float32_than_the_reference_s_own(sharp: tuple[jaxvit.Encoder, Reference]):
    exact, folder = sharp[1], sharp[0].folder
    assert folder is not None
    grids = [(1, 14, 18), (1, 10, 26), (1, 2, 128), (1, 16, 16), *CLIPS]
    items = [item_of(grid, seed=seed) for seed, grid in enumerate(grids)]
    expected = [exact.encode(item) for item in items]

    def error(rows: list[np.ndarray]) -> float:
        return relative(np.concatenate(rows), np.concatenate(expected))

    ours = error(list(jaxvit.load(folder, dtype="bfloat16", budgets=[384], store=False).encode(items)))
    for attention in ("sdpa", "eager"):
        theirs = load_reference(folder, dtype="bfloat16", attention=attention)  # pyright: ignore
        assert ours <= 1.1 * error([theirs.encode(item) for item in items])


def test_frames_of_a_chunk_see_each_other_and_chunks_do_not():
    ours = encoder("kimi_k25")
    item = item_of((4, 4, 6), (4, 4, 6))
    first, second = item.pieces
    other = item_of((4, 4, 6), seed=1).pieces[0]
    changed = Piece(first.grid, np.concatenate([first.patches[:72], other.patches[72:]]), first.tokens)
    orders = ((first, second), (second, first), (changed, second))
    rows, swapped, mixed = (ours.encode(Item(pieces, (), item.tokens))[0] for pieces in orders)
    np.testing.assert_array_equal(mixed[6:], rows[6:])
    assert (mixed[:6] != rows[:6]).any(axis=-1).all(), "the last frame is seen by, and averaged into, every token"
    assert relative(swapped, np.concatenate([rows[6:], rows[:6]])) <= 1e-6


def test_one_frame_left_over_is_encoded_as_an_image():
    ours = encoder("kimi_k25")
    frames = clip(5, 84, 112).frames
    clip_rows = ours.encode(jaxvit.Video(frames))[0]
    assert relative(clip_rows[12:], ours.encode(frames[4])[0]) <= 1e-6


def test_the_black_padding_takes_part():
    ours = encoder("kimi_k25")
    [item] = ours.prepare(np.full((448, 449, 3), 255, np.uint8))
    assert (item.grids, item.tokens) == (((1, 32, 34),), 272)
    cut = Item((item_of((1, 32, 32)).pieces[0],), ((1, 32, 32),), 256)
    full = Piece((1, 32, 32), np.full((1024, 588), 255, np.uint8), 256)
    rows = ours.encode([item, Item((full,), cut.grids, 256)])
    kept = rows[0].reshape(16, 17, -1)[:, :16].reshape(256, -1)
    assert relative(kept, rows[1]) > 1e-4


# Buckets -------------------------------------------------------------------------------------------------------------


def full_family() -> KimiK25:
    family = family_of(FULL)
    assert isinstance(family, KimiK25)
    return family


def test_the_largest_image_and_the_largest_chunk_fit_the_default_ladder():
    family = full_family()
    assert family.budget_range() == (1, 4464)
    assert (family.largest().patches, family.largest().tokens) == (21408, 4464)
    for platform in ("cpu", "gpu"):
        ladder = default_ladder(family, platform)
        for grid in ((1, 36, 496), (4, 12, 446), (1, 2, 512), (1, 512, 2)):
            assert ladder.holds(item_of(grid).pieces[0].demand)


@pytest.mark.parametrize(
    ("grid", "message"),
    [((5, 4, 4), "5 frames"), ((1, 514, 2), "514 x 2"), ((1, 2, 514), "2 x 514"), ((1, 3, 4), "multiples of 2")],
    ids=str,
)
def test_grids_that_the_tower_has_no_positions_for_are_refused(grid: tuple[int, int, int], message: str):
    family = encoder("kimi_k25").family
    pixels = np.zeros((np.prod(grid), 3, 14, 14), np.float32)
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": np.array([grid]), "num_chunks_per_video": [1]}
    with pytest.raises(MediaError, match=message):
        family.items(inputs)


@pytest.mark.parametrize(
    "bucket",
    [
        Bucket(64, 256, 64),
        Bucket(64, 1024, 64),
        Bucket(64, 640, 8),
        Bucket(509, 2048, 8),
        Bucket(1024, 4096, 1),
        Bucket(1024, 16384, 4),
        Bucket(4480, 17920, 256),
        Bucket(5376, 21504, 256),
    ],
    ids=lambda bucket: f"{bucket.tokens}-{bucket.patches}-{bucket.segments}",
)
def test_example_pieces_are_legal_and_fill_the_bucket(bucket: Bucket):
    family = full_family()
    pieces = family.example(bucket)
    frames, sides = zip(*[(piece.grid[0], piece.grid[1:]) for piece in pieces], strict=True)
    assert max(frames) <= 4
    assert max(map(max, sides)) <= 512
    assert not any(side % 2 for grid in sides for side in grid)
    assert max(piece.rows for piece in pieces) <= family.largest().patches
    assert all(piece.patches.shape == (piece.rows, 588) for piece in pieces)
    assert all(piece.tokens * 4 * piece.grid[0] == piece.rows for piece in pieces)
    assert len(pieces) <= bucket.segments
    assert bucket.tokens * 0.95 <= sum(piece.tokens for piece in pieces) <= bucket.tokens
    assert bucket.patches * 0.75 <= sum(piece.rows for piece in pieces) <= bucket.patches


def test_mean_weights_are_one_over_the_frames_and_unused_slots_name_an_own_cell():
    family = full_family()
    pieces = item_of((3, 4, 6), (1, 2, 4), (4, 2, 2)).pieces
    arrays = {key: joined(rows) for key, rows in family.layout(pieces, Bucket(16, 96, 3)).items()}
    starts, stops = [0, 18, 20], [18, 20, 24]
    token = 0
    for piece, start, stop in zip(pieces, starts, stops, strict=True):
        for index, weight in zip(
            arrays["mean_index"][token : token + piece.tokens],
            arrays["mean_weight"][token : token + piece.tokens],
            strict=True,
        ):
            assert ((start <= index) & (index < stop)).all()
            assert np.count_nonzero(weight) == piece.grid[0]
            assert weight.sum() == pytest.approx(1.0)
        token += piece.tokens
    assert arrays["frame"].tolist() == [1] * 24 + [2] * 24 + [3] * 24 + [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4


def test_the_mean_over_an_image_s_one_frame_reads_its_own_cell():
    family = full_family()
    alone = family.layout(item_of((1, 4, 6), (1, 2, 4)).pieces, Bucket(16, 96, 3))
    beside = family.layout(item_of((1, 4, 6), (1, 2, 4), (2, 2, 2)).pieces, Bucket(16, 96, 3))
    for arrays in (alone, beside):
        assert joined(arrays["mean_index"])[:8].tolist() == [[token] * 4 for token in range(8)]
        assert joined(arrays["mean_weight"])[:8].tolist() == [[1.0, 0.0, 0.0, 0.0]] * 8
        assert not joined(arrays["frame"])[:32].any()
    assert joined(beside["mean_index"])[8:].tolist() == [[8, 9, 8, 8]]
    assert joined(beside["mean_weight"])[8:].tolist() == [[0.5, 0.5, 0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.reference
def test_the_full_tower_agrees_with_the_reference_on_a_photograph(tmp_path: Path, photos: dict[str, Path]):
    folder = tiny.random_full_size("moonshotai--Kimi-K2.5", tmp_path)
    full = jaxvit.load(folder, dtype="float32", budgets=[512], store=False)
    [item] = full.prepare(picture(300, 417))
    [photo] = full.prepare(photos["coffee"])
    reference = load_reference(folder)
    for one in (item, photo):
        assert relative(full.encode(one)[0], reference.encode(one)) <= 1e-5
