"""LFM2-VL: configuration, names of tensors, order of patches, and parity with the PyTorch reference."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxvit
from jaxvit import tiny
from jaxvit.errors import CheckpointError
from jaxvit.layers.fuse import parameter_shapes
from jaxvit.layers.position import cell_coordinates, cell_order
from jaxvit.models import family_of
from jaxvit.models.family import Item, Piece
from jaxvit.models.lfm2_vl import layout
from jaxvit.models.lfm2_vl.config import Config
from jaxvit.weights import manifests
from jaxvit.weights.files import read_config_files
from jaxvit.weights.load import load_parameters
from tests.families import checkpoint, copied, encoder, picture, relative

NAMES = ("lfm2_vl", "lfm2_5_vl")
GRIDS = [(16, 16), (10, 100), (6, 100), (32, 32), (2, 2), (100, 6), (14, 20)]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def view(height: int, width: int, seed: int = 0) -> Item:
    patches = np.random.default_rng(seed).integers(0, 256, (height * width, 768), dtype=np.uint8)
    piece = Piece((1, height, width), patches, height * width // 4)
    return Item((piece,), (piece.grid,), piece.tokens)


@cache
def reference(name: str, dtype: str = "float32", attention: str = "sdpa", **overrides: Any) -> Any:
    from jaxvit.reference import load_reference

    return load_reference(checkpoint(name), dtype=dtype, attention=attention, settings_overrides=overrides)


# Configuration -------------------------------------------------------------------------------------------------------


def files(repo: str = "LiquidAI/LFM2-VL-1.6B", **changes: Any) -> dict[str, dict[str, Any]]:
    """A real checkpoint's files with fields of config.json replaced; ``vision_x`` is field x of vision_config."""
    found = copy.deepcopy(manifests.load(repo).files)
    for key, value in changes.items():
        inside = key.startswith("vision_") and key not in ("vision_config", "vision_feature_layer")
        target = found["config.json"]["vision_config"] if inside else found["config.json"]
        target[key.removeprefix("vision_") if inside else key] = value
    return found


@pytest.mark.parametrize(
    ("repo", "layers", "hidden", "layernorm", "projector", "width"),
    [
        ("LFM2-VL-450M", 12, 768, True, 2560, 1024),
        ("LFM2-VL-1.6B", 26, 1152, True, 2560, 2048),
        ("LFM2-VL-3B", 27, 1152, True, 2560, 2048),
        ("LFM2.5-VL-450M", 12, 768, False, 2048, 1024),
        ("LFM2.5-VL-1.6B", 27, 1152, False, 2048, 2048),
    ],
)
def test_real_configs_are_read(repo: str, layers: int, hidden: int, layernorm: bool, projector: int, width: int):
    config = Config.from_files(files(f"LiquidAI/{repo}"))
    assert (config.layers, config.hidden_size, config.head_dim) == (
        layers,
        hidden,
        hidden // config.num_attention_heads,
    )
    assert (config.projector_use_layernorm, config.projector_hidden_size) == (layernorm, projector)
    assert config.text_hidden_size == family_of(files(f"LiquidAI/{repo}")).width == width
    assert (config.table_side, config.projector_eps, config.layer_norm_eps) == (16, 1e-5, 1e-6)


def test_absent_fields_take_the_reference_s_defaults():
    assert Config.from_files({"config.json": {"vision_config": {}, "text_config": {"hidden_size": 2560}}}) == Config()


def test_vision_values_are_never_read_from_the_root_or_the_text_model():
    stray = {"hidden_size": 999, "num_hidden_layers": 99, "patch_size": 99, "hidden_act": "relu"}
    plain = files()
    stuffed = files(**stray)
    stuffed["config.json"]["text_config"] |= {"num_patches": 4, "layer_norm_eps": 1.0}
    assert Config.from_files(stuffed) == Config.from_files(plain)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vision_hidden_act", "quick_gelu"),
        ("projector_hidden_act", "gelu_new"),
        ("downsample_factor", 4),
        ("vision_feature_layer", 5),
        ("vision_feature_layer", [-2, -1]),
        ("vision_feature_layer", -3),
        ("vision_num_attention_heads", 17),
        ("vision_num_channels", 1),
        ("vision_num_patches", 200),
        ("vision_model_type", "siglip_vision_model"),
        ("vision_patch_size", [16, 16]),
        ("projector_use_layernorm", "yes"),
    ],
)
def test_a_value_that_is_not_implemented_is_refused_by_name(field: str, value: Any):
    with pytest.raises(CheckpointError, match=field if field.startswith("vision_f") else field.removeprefix("vision_")):
        Config.from_files(files(**{field: value}))


@pytest.mark.parametrize("absent", ["vision_config", "text_config"])
def test_a_config_without_vision_or_text_is_refused(absent: str):
    with pytest.raises(CheckpointError, match=absent):
        Config.from_files(files(**{absent: None}))


@pytest.mark.parametrize("spelling", ["lfm2-vl", "lfm2_vl"])
def test_both_spellings_of_the_model_type_are_this_family(spelling: str):
    assert family_of(files(model_type=spelling)).name == "lfm2_vl"


# Names of tensors ----------------------------------------------------------------------------------------------------


def rewritten(name: str, folder: Path, change: Any, **config: Any) -> Path:
    """A copy of a tiny checkpoint: ``change`` takes and returns the tensors, fields of config.json are replaced."""
    copied(name, folder)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(change(tensors), folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    for key, value in config.items():
        target = content["vision_config"] if key in content["vision_config"] else content
        target[key] = value
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def parameters(folder: Path) -> dict[str, np.ndarray]:
    family = family_of(read_config_files(folder))
    shapes = parameter_shapes(nnx.eval_shape(family.module))
    return dict(load_parameters(folder, family.keys, shapes, np.float32))


HUB = "model.vision_tower.vision_model."
PROJECTOR = "model.multi_modal_projector."


def test_a_projector_with_layernorm_and_no_tensors_for_it_is_refused(tmp_path: Path):
    folder = rewritten("lfm2_5_vl", tmp_path / "x", dict, projector_use_layernorm=True)
    with pytest.raises(CheckpointError, match=r"layer_norm\.weight: missing"):
        parameters(folder)


def test_q_k_and_v_stand_side_by_side_in_the_fused_parameter():
    with safe_open(checkpoint("lfm2_vl") / "model.safetensors", "numpy") as file:
        stem = HUB + "encoder.layers.2.self_attn."
        weights = [file.get_tensor(f"{stem}{letter}_proj.weight").astype(np.float32) for letter in "qkv"]
    np.testing.assert_array_equal(
        parameters(checkpoint("lfm2_vl"))["blocks.2.attn.qkv.kernel"], np.concatenate(weights).T
    )


def test_the_pooling_head_is_known_and_unused(tmp_path: Path):
    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        heads = ("head.probe", "head.attention.in_proj_weight", "head.attention.out_proj.bias", "head.mlp.fc1.weight")
        return tensors | {HUB + head: np.ones((3, 4), np.float32) for head in heads}

    expected = parameters(checkpoint("lfm2_vl"))
    found = parameters(rewritten("lfm2_vl", tmp_path / "x", change, vision_use_head=True))
    assert all(np.array_equal(found[path], expected[path]) for path in expected)


def without_last(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: value for key, value in tensors.items() if ".encoder.layers.2." not in key}


@pytest.mark.reference
@pytest.mark.parametrize("change", [dict, without_last], ids=["stored", "left out"])
def test_vision_feature_layer_drops_the_last_layer_and_keeps_the_norm(change: Any, tmp_path: Path):
    from jaxvit.reference import load_reference

    item = view(16, 16)
    folder = rewritten("lfm2_vl", tmp_path / "x", change, vision_feature_layer=-2)
    ours = jaxvit.load(folder, dtype="float32", budgets=[64], store=False).encode(item)[0]
    shallow = rewritten("lfm2_vl", tmp_path / "y", without_last, num_hidden_layers=2)
    assert relative(ours, load_reference(shallow).encode(item)) <= 1e-5
    assert relative(ours, reference("lfm2_vl").encode(item)) > 1e-2


# Order of patches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_reshape_of_rows_in_cell_order_is_the_reference_s_pixel_unshuffle(grid: tuple[int, int]):
    height, width = grid
    features = np.arange(height * width * 3).reshape(height, width, 3)
    # The reference's form, in numpy: its code names the axes width and height the other way round.
    folded = features.reshape(height, width // 2, 6).swapaxes(0, 1).reshape(width // 2, height // 2, 12).swapaxes(0, 1)
    # The gather of vLLM's ``gather_idx``.
    y, x = np.divmod(np.arange(height * width // 4), width // 2)
    gathered = np.stack([features[2 * y + dh, 2 * x + dw] for dh in (0, 1) for dw in (0, 1)], axis=1)
    ours = features.reshape(-1, 3)[cell_order(height, width, 2)].reshape(-1, 12)
    np.testing.assert_array_equal(ours, folded.reshape(-1, 12))
    np.testing.assert_array_equal(ours, gathered.reshape(-1, 12))


@pytest.mark.reference
@pytest.mark.parametrize("grid", [(4, 6), (10, 100)], ids=str)
def test_that_form_is_the_reference_s(grid: tuple[int, int]):
    import torch
    from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlMultiModalProjector

    features = torch.arange(grid[0] * grid[1] * 3).reshape(1, *grid, 3)
    projector = Lfm2VlMultiModalProjector.__new__(Lfm2VlMultiModalProjector)
    object.__setattr__(projector, "factor", 2)
    expected = Lfm2VlMultiModalProjector.pixel_unshuffle(projector, features).reshape(-1, 12).numpy()
    np.testing.assert_array_equal(features.reshape(-1, 3)[cell_order(*grid, 2)].reshape(-1, 12).numpy(), expected)


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (5, 1), (4, 6)])
def test_coordinates_are_those_of_the_patches_in_cell_order(grid: tuple[int, int], merge: int):
    height, width = (side * merge for side in grid)
    coordinates = cell_coordinates(height, width, merge)
    assert coordinates.dtype == np.int32
    np.testing.assert_array_equal(coordinates @ [width, 1], cell_order(height, width, merge))
    assert ((coordinates >= 0) & (coordinates < (height, width))).all()


def test_each_row_s_position_is_its_own_patch_s():
    y, x = np.divmod(cell_order(16, 16, 2), 16)
    weights = layout.positions(16, 16, 2, 16)
    np.testing.assert_array_equal(weights.y.argmax(-1), y)
    np.testing.assert_array_equal(weights.x.argmax(-1), x)


# Parity --------------------------------------------------------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_one_view_equals_the_reference_in_float32(name: str, grid: tuple[int, int]):
    item = view(*grid)
    expected = reference(name).encode(item)
    bound = max(1e-5, 2 * relative(expected, reference(name, "float64").encode(item)))
    assert relative(encoder(name).encode(item)[0], expected) <= bound
    assert relative(encoder(name).encode(item, bucketed=False)[0], expected) <= bound


@pytest.mark.reference
def test_every_intermediate_equals_the_reference_s(name: str):
    item = view(10, 12)
    ours, theirs = encoder(name).intermediates(item)[0], reference(name).taps(item)[0]
    assert theirs.keys() == ours.keys() - {"output"}
    assert max(relative(ours[tap], theirs[tap]) for tap in theirs) <= 1e-5


@pytest.mark.reference
@pytest.mark.parametrize(
    ("size", "thumbnail", "pieces"), [((768, 1024), True, 7), ((768, 1024), False, 6), ((1024, 1024), True, 5)]
)
def test_a_tiled_image_equals_the_reference_whole(name: str, size: tuple[int, int], thumbnail: bool, pieces: int):
    image = picture(*size)
    overrides = {"use_thumbnail": thumbnail}
    loaded = jaxvit.load(checkpoint(name), dtype="float32", budgets=[320], store=False, processor=overrides)
    item = loaded.prepare(image)[0]
    assert len(item.pieces) == pieces
    theirs = reference(name, **overrides)
    inputs = theirs.process(image)
    expected = theirs.encode_inputs(inputs)
    assert item.tokens == len(expected)
    assert len({number for _, number, _, _ in loaded.encode(item).packed}) == 1
    assert relative(loaded.encode(image)[0], expected) <= 1e-5
    assert relative(loaded.encode(loaded.items(inputs))[0], expected) <= 1e-5


def test_an_item_split_over_buckets_equals_the_same_item_in_one(name: str):
    pieces = tuple(view(h, w, h).pieces[0] for h, w in [(16, 16), (8, 20), (12, 12), (6, 30)])
    item = Item(pieces, tuple(piece.grid for piece in pieces), 185)
    wide, narrow = (jaxvit.load(checkpoint(name), dtype="float32", budgets=[n], store=False) for n in (256, 64))
    joint, split = wide.encode(item), narrow.encode(item)
    assert (len(joint.plan.calls), len(split.plan.calls)) == (1, 4)
    assert joint[0].shape == split[0].shape == (185, 96)
    assert relative(split[0], joint[0]) <= 1e-5
    assert relative(wide.encode(item, bucketed=False)[0], joint[0]) <= 1e-5


@pytest.mark.reference
def test_the_projector_s_activation_and_biases_follow_the_config(tmp_path: Path):
    from jaxvit.reference import load_reference

    item = view(8, 8)
    plain = encoder("lfm2_5_vl").encode(item)[0]

    def unbiased(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {k: v for k, v in tensors.items() if not (PROJECTOR in k and k.endswith("bias"))}

    changes = [({"projector_hidden_act": "gelu_pytorch_tanh"}, dict), ({"projector_bias": False}, unbiased)]
    for number, (config, change) in enumerate(changes):
        folder = rewritten("lfm2_5_vl", tmp_path / str(number), change, **config)
        found = jaxvit.load(folder, dtype="float32", budgets=[64], store=False).encode(item)[0]
        assert relative(found, plain) > 1e-6
        assert relative(found, load_reference(folder).encode(item)) <= 1e-5


@pytest.mark.reference
def test_pixels_that_were_never_uint8_equal_the_reference_s(name: str):
    item = view(10, 12)
    noise = np.random.default_rng(1).standard_normal(item.patches.shape).astype(np.float32)
    piece = Piece(item.pieces[0].grid, noise, item.tokens)
    handed_in = Item((piece,), item.grids, item.tokens)
    assert relative(encoder(name).encode(handed_in)[0], reference(name).encode(handed_in)) <= 1e-5


@pytest.mark.reference
def test_bfloat16_is_as_near_to_float32_as_the_reference_s_bfloat16(name: str):
    items = [view(*grid, seed) for seed, grid in enumerate([(16, 16), (10, 12), (6, 40), (8, 8)] * 2)]
    exact = [reference(name).encode(item) for item in items]

    def error(encode: Any) -> float:
        errors = [relative(encode(item), expected) for item, expected in zip(items, exact, strict=True)]
        return float(np.sqrt(np.mean(np.square(errors))))

    theirs = [error(reference(name, "bfloat16", attention).encode) for attention in ("sdpa", "eager")]
    ours = error(lambda item: encoder(name, "bfloat16").encode(item)[0])
    assert ours <= 1.1 * np.sqrt(np.mean(np.square(theirs)))


@pytest.mark.slow
@pytest.mark.reference
def test_full_depth_and_width_equals_the_reference(tmp_path: Path):
    from jaxvit.reference import load_reference

    folder = tiny.random_full_size("LiquidAI/LFM2.5-VL-1.6B", tmp_path)
    item = view(16, 22)
    ours = jaxvit.load(folder, dtype="float32", budgets=[128], store=False).encode(item)[0]
    expected = load_reference(folder).encode(item)
    bound = max(1e-5, 2 * relative(expected, load_reference(folder, dtype="float64").encode(item)))
    assert relative(ours, expected) <= bound
