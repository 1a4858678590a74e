"""The stripped reference equals transformers' own whole model, from the same files, pictures and processors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvit.errors import CheckpointError, DependencyError
from jaxvit.models.family import Item, Piece

pytestmark = pytest.mark.reference
FAMILIES = ("qwen2_5_vl", "kimi_k25", "lfm2_vl")

QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 200704,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
KIMI_PROCESSOR = {
    "media_proc_cfg": {
        "in_patch_limit": 1024,
        "in_patch_limit_each_frame": 256,
        "in_patch_limit_video": None,
        "patch_limit_on_one_side": 512,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
}
LFM2_PROCESSOR = {"image_processor": {"resample": 2, "min_tiles": 2, "max_tiles": 10, "return_row_col_info": True}}


def whole_model(name: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """transformers' model with a small language model, its config.json in the hub's form, and its processor files."""
    import transformers

    if name == "qwen2_5_vl":
        vision = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 44, "out_hidden_size": 24}
        vision |= {"fullatt_block_indexes": [1], "window_size": 112, "hidden_act": "silu", "in_chans": 3}
        text = {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        text |= {"num_key_value_heads": 2, "vocab_size": 64, "rope_parameters": {"mrope_section": [2, 2, 2]}}
        text["rope_parameters"] |= {"rope_type": "default", "rope_theta": 1e4}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=dict(vision))
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        return model, {"vision_config": vision}, {"preprocessor_config.json": QWEN_PROCESSOR}
    if name == "kimi_k25":
        vision = {"hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "num_hidden_layers": 2}
        vision |= {"pos_emb_height": 16, "pos_emb_width": 16}
        text = {"hidden_size": 24, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
        text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
        text |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
        text |= {"n_group": 1, "topk_group": 1, "vocab_size": 64, "model_type": "deepseek_v3"}
        config = transformers.Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=36)
        model = transformers.Kimi_K25ForConditionalGeneration(config)
        hub = {"vt_hidden_size": 36, "vt_intermediate_size": 44, "vt_num_attention_heads": 3, "mm_hidden_size": 36}
        hub |= {"vt_num_hidden_layers": 2, "init_pos_emb_height": 16, "init_pos_emb_width": 16, "init_pos_emb_time": 4}
        hub |= {"text_hidden_size": 24, "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "model_type": ""}
        files = {"text_config": {"hidden_size": 24}, "vision_config": hub | {"merge_kernel_size": [2, 2]}}
        return model, files, {"preprocessor_config.json": KIMI_PROCESSOR}
    vision = {"hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 2, "num_hidden_layers": 2}
    vision |= {"num_patches": 64, "patch_size": 16, "vision_use_head": False, "model_type": "siglip2_vision_model"}
    text = {"model_type": "lfm2", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    text |= {"num_key_value_heads": 2, "intermediate_size": 16, "layer_types": ["conv"]}
    root = {"projector_hidden_size": 40, "projector_use_layernorm": True, "downsample_factor": 2}
    config = transformers.Lfm2VlConfig(text_config=text, vision_config=vision, **root)
    model = transformers.Lfm2VlForConditionalGeneration(config)
    files = {"text_config": text, "vision_config": vision | {"dtype": "bfloat16"}, **root}
    return model, files, {"processor_config.json": LFM2_PROCESSOR}


def hub_name(name: str) -> str:
    """A name of transformers' default re-save -> the hub's."""
    name = re.sub(r"^model\.mm_projector", "mm_projector", name)
    name = name.replace("vision_tower.encoder.patch_embed", "vision_tower.patch_embed")
    name = re.sub(r"^model\.visual\.", "visual.", name)
    return re.sub(
        r"^model\.vision_tower\.(?!vision_model)(?=embeddings|encoder|post)", "model.vision_tower.vision_model.", name
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Family -> a folder in the hub's layout, sharded, and transformers' whole model loaded from those tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    from jaxvit.reference.loading import quiet

    made = {}
    for number, name in enumerate(FAMILIES):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(number)
        with quiet():
            model, files, processors = whole_model(name)
            with torch.no_grad():
                for path, parameter in model.named_parameters():
                    noise = torch.randn_like(parameter) * 0.1
                    parameter.copy_((noise + (1 if "norm" in path and "weight" in path else 0)).bfloat16())
            model.save_pretrained(folder / "saved")
        weights = {
            hub_name(key): value.bfloat16() for key, value in load_file(folder / "saved/model.safetensors").items()
        }
        parts = {"model-1.safetensors": {}, "model-2.safetensors": {}}
        for key, value in weights.items():
            parts["model-2.safetensors" if "vis" in key or "proj" in key else "model-1.safetensors"][key] = value
        for shard, tensors in parts.items():
            save_file(tensors, folder / shard, metadata={"format": "pt"})
        index = {"weight_map": {key: shard for shard, tensors in parts.items() for key in tensors}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({"model_type": name, "torch_dtype": "bfloat16", **files}))
        for file, value in processors.items():
            (folder / file).write_text(json.dumps(value))
        with quiet():
            whole = type(model).from_pretrained(
                None, config=model.config, state_dict=weights, dtype=torch.float32, attn_implementation="sdpa"
            )
        made[name] = (folder, whole.eval())
    return made


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def clip(frames: int, height: int, width: int) -> list[np.ndarray]:
    return [picture(height, width, seed) for seed in range(frames)]


def features(model: Any, inputs: Any) -> np.ndarray:
    """Embeddings by the whole model's own call."""
    import torch
    import transformers
    from packaging.version import Version

    video = "pixel_values_videos" in inputs
    if (
        video
        and hasattr(model.config.vision_config, "pos_emb_time")
        and Version(transformers.__version__) < Version("5.24")
    ):
        pytest.skip("the whole Kimi-K2.5 model takes chunks of different t in one call only from transformers 5.24 on")
    names = {"pixel_values_videos", "video_grid_thw", "pixel_values", "image_grid_thw"}
    names |= {"spatial_shapes", "pixel_attention_mask"}
    with torch.inference_mode():
        call = model.model.get_video_features if video else model.model.get_image_features
        out = call(**{name: value for name, value in inputs.items() if name in names}).pooler_output
    return torch.cat(list(out)).float().numpy()


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours.astype(np.float64) - theirs) / np.linalg.norm(theirs.astype(np.float64)))


def item_of(reference: Any, inputs: Any) -> Item:
    """The item that jaxvit's canonical order makes of a processor's output: written out, apart from the families."""
    pieces, grids = [], []
    for patches, (t, h, w) in reference.pixels(inputs):
        grids.append((t, h, w))
        rows = patches.reshape(t, h * w, -1)
        rows = rows[:, np.array(canonical_rows(type(reference).__name__, h, w))]
        if type(reference).__name__ == "Qwen25VL":
            values = rows.reshape(t, h * w, 3, 2, 196).swapaxes(2, 3)
            still = "pixel_values" in inputs
            for frame in values:
                flat = frame[:, :1] if still else frame
                pieces.append(Piece((1, h, w), flat.reshape(h * w, -1), h * w // 4))
        else:
            pieces.append(Piece((t, h, w), rows.reshape(t * h * w, -1), h * w // 4))
    return Item(tuple(pieces), tuple(grids), sum(piece.tokens for piece in pieces))


def canonical_rows(name: str, h: int, w: int) -> list[int]:
    """For each row of a frame in jaxvit's order, its row in the reference's processor's output."""
    cells = [(y, x) for y in range(h // 2) for x in range(w // 2)]
    if name == "Qwen25VL":
        ordered = sorted(cells, key=lambda cell: (cell[0] // 4, cell[1] // 4))
        return [(y * (w // 2) + x) * 4 + k for y, x in ordered for k in range(4)]
    return [(2 * y + dy) * w + 2 * x + dx for y, x in cells for dy in (0, 1) for dx in (0, 1)]


MEDIA = {
    "qwen2_5_vl": [picture(140, 140), picture(28, 812), picture(61, 300), clip(1, 56, 84), clip(5, 150, 120)],
    "kimi_k25": [picture(224, 100), picture(15, 400), clip(1, 60, 60), clip(11, 100, 60)],
    "lfm2_vl": [picture(256, 256), picture(100, 500), picture(1100, 700)],
}
CASES = [(name, index) for name, media in MEDIA.items() for index in range(len(media))]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_equals_the_whole_model_on_its_own_inputs(folders, name: str, index: int) -> None:
    from jaxvit.reference import load_reference

    folder, whole = folders[name]
    reference = load_reference(folder)
    inputs = reference.process(MEDIA[name][index])
    expected = features(whole, inputs)
    assert distance(reference.encode_inputs(inputs), expected) < 1e-6


@pytest.mark.parametrize(("name", "index"), CASES)
def test_an_item_goes_back_to_the_very_pixels_it_was_made_from(folders, name: str, index: int) -> None:
    from jaxvit.reference import load_reference

    reference = load_reference(folders[name][0])
    inputs = reference.process(MEDIA[name][index])
    units = reference.units(item_of(reference, inputs))
    for unit, (patches, grid), (values, _) in zip(
        units, reference.pixels(inputs), reference._split(inputs), strict=True
    ):
        assert unit.grid == grid
        np.testing.assert_array_equal(unit.patches, patches)
        np.testing.assert_array_equal(reference.table[unit.patches, reference._channels], values.numpy())


@pytest.mark.parametrize(("name", "index"), CASES)
def test_an_item_gives_the_embeddings_of_the_whole_model(folders, name: str, index: int) -> None:
    from jaxvit.reference import load_reference

    folder, whole = folders[name]
    reference = load_reference(folder)
    inputs = reference.process(MEDIA[name][index])
    item = item_of(reference, inputs)
    embeddings = reference.encode(item)
    assert embeddings.dtype == np.float32
    assert embeddings.shape == (item.tokens, 24)
    assert distance(embeddings, features(whole, inputs)) < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_eager_attention_and_float64_stay_within_float32_of_sdpa(folders, name: str) -> None:
    from jaxvit.reference import load_reference

    folder, _ = folders[name]
    results = {}
    for dtype, attention in (("float32", "sdpa"), ("float32", "eager"), ("float64", "sdpa"), ("float64", "eager")):
        reference = load_reference(folder, dtype=dtype, attention=attention)
        item = item_of(reference, reference.process(MEDIA[name][-1]))
        results[dtype, attention] = reference.encode(item)
    assert results["float64", "sdpa"].dtype == np.float64
    assert distance(results["float64", "eager"], results["float64", "sdpa"]) < 1e-14
    for attention in ("sdpa", "eager"):
        assert 1e-9 < distance(results["float32", attention], results["float64", "sdpa"]) < 3e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_equals_the_whole_model_built_in_bfloat16_and_keeps_frequencies_in_float32(folders, name: str) -> None:
    import torch

    from jaxvit.reference import load_reference

    folder, whole = folders[name]
    reference = load_reference(folder, dtype="bfloat16")
    floats = {n: b.dtype for n, b in reference.model.named_buffers() if b.is_floating_point()}
    assert set(floats.values()) <= {torch.float32}
    assert name == "lfm2_vl" or any("inv_freq" in buffer for buffer in floats)
    inputs = reference.process(MEDIA[name][0])
    small = (
        type(whole)
        .from_pretrained(
            None, config=whole.config, state_dict=whole.state_dict(), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        .eval()
    )
    expected = features(small, {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()})
    np.testing.assert_array_equal(reference.encode_inputs(inputs), expected)


@pytest.mark.parametrize("layout", ["native", "resaved"])
def test_kimi_layouts_of_transformers_give_the_same_embeddings(folders, layout: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    from jaxvit.reference import load_reference
    from jaxvit.reference.loading import quiet

    folder, whole = folders["kimi_k25"]
    with quiet():
        whole.save_pretrained(tmp_path, save_original_format=layout == "resaved")
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        names = set(file.keys())
    assert ("model.vision_tower.layers.0.attn.q_proj.weight" in names) == (layout == "native")
    assert ("vision_tower.encoder.patch_embed.proj.weight" in names) == (layout == "resaved")
    inputs = load_reference(folder).process(MEDIA["kimi_k25"][0])
    # config.json of the re-save spells the tower's fields as transformers does
    ours = load_reference(tmp_path).encode_inputs(inputs)
    np.testing.assert_array_equal(ours, load_reference(folder).encode_inputs(inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_are_in_our_order_down_to_the_last(folders, name: str) -> None:
    import torch

    from jaxvit.reference import load_reference

    reference = load_reference(folders[name][0], dtype="float64")
    item = item_of(reference, reference.process(MEDIA[name][-1]))
    taps = reference.taps(item)
    assert len(taps) == len(item.pieces)
    last = "merger" if name == "qwen2_5_vl" else "projector"
    deepest = "final_norm" if name != "qwen2_5_vl" else "blocks.2"
    for piece, tap in zip(item.pieces, taps, strict=True):
        assert list(tap)[:3] == ["patch_embed", "blocks.0", "blocks.1"]
        assert list(tap)[-1] == last
        assert tap["patch_embed"].shape == tap["blocks.0"].shape == (piece.rows, tap["patch_embed"].shape[1])
        # In our order the patches of a token are neighbours, so merging is a plain reshape.
        rows = torch.from_numpy(tap[deepest]).reshape(piece.grid[0], -1, tap[deepest].shape[1])
        with reference._evaluating():
            if name == "qwen2_5_vl":
                tokens = reference.model.merger(rows[0])
            elif name == "kimi_k25":
                tokens = reference.model.mm_projector(rows.mean(0).reshape(-1, 4, rows.shape[-1])).flatten(0, -2)
            else:
                tokens = reference.model.multi_modal_projector
                tokens = tokens.linear_2(tokens.act(tokens.linear_1(tokens.layer_norm(rows.reshape(piece.tokens, -1)))))
        assert distance(tap[last], tokens.numpy()) < 1e-14


def test_embeddings_follow_the_first_tap_of_our_order(folders) -> None:
    from jaxvit.reference import load_reference

    reference = load_reference(folders["qwen2_5_vl"][0], dtype="float64")
    item = item_of(reference, reference.process(picture(140, 140)))
    tap = reference.taps(item)[0]["patch_embed"]
    values = reference.table[item.patches, np.repeat(np.arange(3), 196)].astype(np.float64)
    weight = reference.model.patch_embed.proj.weight.numpy().sum(axis=2).reshape(32, -1)
    assert distance(tap, values @ weight.T) < 1e-14


def test_processing_settings_come_from_the_files_that_transformers_ignores(folders, tmp_path: Path) -> None:
    from jaxvit.reference import load_reference

    files = copied(folders["lfm2_vl"][0], tmp_path)
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"max_pixels_tolerance": 1.5, "use_thumbnail": False, "min_tiles": 2, "max_tiles": 10})
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 3, "do_resize": False}))
    (tmp_path / "config.json").write_text(json.dumps(files["config.json"] | {"use_thumbnail": True, "tile_size": 256}))
    own = load_reference(tmp_path).image_processor
    assert (own.max_pixels_tolerance, own.use_thumbnail, int(own.resample), own.tile_size) == (1.5, False, 3, 256)
    assert load_reference(tmp_path, settings_overrides={"resample": 2}).image_processor.resample == 2


def test_an_override_of_pictures_leaves_clips_alone(folders) -> None:
    from jaxvit.reference import load_reference

    folder = folders["qwen2_5_vl"][0]
    small = load_reference(folder, settings_overrides={"max_pixels": 28 * 28 * 4, "video_max_pixels": 28 * 28 * 9})
    assert reference_tokens(small, picture(280, 280)) == 4
    assert reference_tokens(small, clip(2, 280, 280)) == 9
    sized = {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 16}}
    assert reference_tokens(load_reference(folder, settings_overrides=sized), picture(280, 280)) == 16
    assert reference_tokens(load_reference(folder, settings_overrides=sized), clip(2, 280, 280)) == 100


@pytest.mark.parametrize("hub", [True, False])
def test_keywords_beat_kimis_files_in_both_spellings(folders, tmp_path: Path, hub: bool) -> None:
    from jaxvit.reference import load_reference

    copied(folders["kimi_k25"][0], tmp_path)
    if not hub:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_patches": 1024, "patch_size": 14}))
    reference = load_reference(tmp_path, settings_overrides={"max_patches": 64, "video_max_patches": 36, "fps": 1.0})
    assert reference_tokens(reference, picture(280, 280)) == 16
    assert reference_tokens(reference, clip(2, 280, 280)) == 9


def test_a_limit_of_patches_a_chunk_is_divided_by_its_frames(folders, tmp_path: Path) -> None:
    from jaxvit.reference import load_reference

    copied(folders["kimi_k25"][0], tmp_path)
    limited = {"media_proc_cfg": KIMI_PROCESSOR["media_proc_cfg"] | {"in_patch_limit_video": 400}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(limited))
    reference = load_reference(tmp_path)
    grids = [tuple(grid) for grid in reference.process(clip(6, 280, 280))["video_grid_thw"].tolist()]
    # 100 patches a frame in a chunk of 4, 200 in one of 2: 280 * sqrt(limit / 400) = 140 and 197 pixels, padded
    assert grids == [(4, 10, 10), (2, 16, 16)]


def test_a_dropped_last_layer_is_left_out_of_the_tower(folders, tmp_path: Path) -> None:
    from jaxvit.reference import load_reference

    files = copied(folders["lfm2_vl"][0], tmp_path)
    full = load_reference(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(files["config.json"] | {"vision_feature_layer": -2}))
    short = load_reference(tmp_path)
    item = item_of(full, full.process(MEDIA["lfm2_vl"][0]))
    taps, all_taps = short.taps(item)[0], full.taps(item)[0]
    assert "blocks.1" not in taps
    np.testing.assert_array_equal(taps["blocks.0"], all_taps["blocks.0"])
    assert distance(taps["projector"], all_taps["projector"]) > 1e-3


def test_a_missing_tensor_is_named(folders, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from jaxvit.reference import load_reference

    folder = folders["qwen2_5_vl"][0]
    for path in folder.glob("*config.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model-2.safetensors")
    del tensors["visual.merger.ln_q.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"merger\.ln_q\.weight: missing"):
        load_reference(tmp_path)


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from jaxvit.reference import load_reference

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DependencyError, match=r"torch: pip install 'jaxvit\[compare\]'"):
        load_reference(tmp_path)


def test_the_shard_of_the_language_model_may_be_absent(folders, tmp_path: Path) -> None:
    from jaxvit.reference import load_reference

    folder = folders["kimi_k25"][0]
    copied(folder, tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    inputs = load_reference(folder).process(MEDIA["kimi_k25"][0])
    np.testing.assert_array_equal(
        load_reference(tmp_path).encode_inputs(inputs), load_reference(folder).encode_inputs(inputs)
    )
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-2"):
        load_reference(tmp_path)


def copied(folder: Path, to: Path) -> dict[str, Any]:
    """Copies a folder's files; returns its parsed JSON."""
    for path in folder.iterdir():
        if path.is_file():
            (to / path.name).write_bytes(path.read_bytes())
    return {path.name: json.loads(path.read_text()) for path in to.glob("*config.json")}


def reference_tokens(reference: Any, medium: Any) -> int:
    return len(reference.encode_inputs(reference.process(medium)))
