"""Qwen2.5-VL, Kimi-K2.5 and LFM2-VL of transformers: configuration, processors, order of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxvit.errors import CheckpointError
from jaxvit.models.family import Grid, Piece
from jaxvit.reference.base import Reference
from jaxvit.reference.loading import as_numpy, filled, from_folder, known, need_torch, tensors

_KIMI_NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}
"""The hub's names of the tower's fields -> transformers', which does not map them itself."""

_LFM2_SETTINGS = (
    *("downsample_factor", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens"),
    *("max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "resample"),
    *("image_mean", "image_std", "rescale_factor"),
)


def by_medium(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of pictures, and those of frames (``video_...``) without the prefix. Frames come sampled: no fps."""
    images = {name: value for name, value in overrides.items() if not name.startswith("video_") and name != "fps"}
    frames = {name.removeprefix("video_"): value for name, value in overrides.items() if name.startswith("video_")}
    return images, frames


def by_grid(inputs: Mapping[str, Any]) -> list[tuple[Any, Grid]]:
    """Normalised patches [rows, values] and grid of each image or clip of a processor's output."""
    kinds = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
    found: list[tuple[Any, Grid]] = []
    for pixels, grids in kinds:
        if pixels in inputs:
            shapes = [(int(t), int(h), int(w)) for t, h, w in inputs[grids]]
            parts = inputs[pixels].flatten(1).split([t * h * w for t, h, w in shapes])
            found += zip(parts, shapes, strict=True)
    return found


class Qwen25VL(Reference):
    parts = ("visual.",)

    def _build(self, folder: Path, files: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

        raw = dict(files["config.json"]["vision_config"])
        raw["in_channels"] = raw.get("in_channels", raw.get("in_chans", 3))
        config: Any = Qwen2_5_VLVisionConfig(**known(raw, Qwen2_5_VLVisionConfig))
        weights = {name.split("visual.", 1)[1]: value for name, value in tensors(folder, self.parts).items()}
        self.model = filled(modeling.Qwen2_5_VisionTransformerPretrainedModel, config, weights, options)
        self.merge = config.spatial_merge_size
        self.patch = config.patch_size

    def _processors(self, folder: Path, files: Mapping[str, Any], overrides: dict[str, Any]) -> None:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        # The video processor falls back to preprocessor_config.json, and a keyword of pictures does not reach it.
        images, frames = by_medium(overrides)
        if "size" in images:
            images = {"min_pixels": None, "max_pixels": None} | images  # else those of the file beat the keyword
        published = {"min_pixels": 3136, "max_pixels": 12845056}
        self.image_processor = from_folder(Qwen2VLImageProcessor, folder, files, images, published)
        self.video_processor = from_folder(Qwen2VLVideoProcessor, folder, files, frames, published)

    def _process_frames(self, frames: Any, **options: Any) -> Mapping[str, Any]:
        capped = bool(self.video_processor.cap_pixels_per_frame)  # None would only add a warning
        return self.video_processor(videos=[frames], cap_pixels_per_frame=capped, **options)

    def _forward(self, values: Any, grid: Grid) -> Any:
        grids = need_torch().tensor([grid])
        return self.model(values.to(self.model.dtype), grid_thw=grids).pooler_output

    def _split(self, inputs: Mapping[str, Any]) -> list[tuple[Any, Grid]]:
        return by_grid(inputs)

    def _values(self, piece: Piece) -> np.ndarray:
        # Ours: a still's one frame, or a pair's frames side by side. The reference's: (C, T, py, px).
        frames = piece.patches.reshape(piece.rows, -1, 3, self.patch**2)
        return np.broadcast_to(frames, (piece.rows, 2, 3, self.patch**2)).swapaxes(1, 2).reshape(piece.rows, -1)

    def _tapped(self) -> list[tuple[str, Any, bool]]:
        blocks = [(f"blocks.{i}", block, True) for i, block in enumerate(self.model.blocks)]
        return [("patch_embed", self.model.patch_embed, False), *blocks, ("merger", self.model.merger, True)]

    @property
    def _channels(self) -> np.ndarray:
        return np.repeat(np.arange(3), 2 * self.patch**2)

    def _order(self, height: int, width: int) -> np.ndarray:
        from transformers.vision_utils import get_vision_window_index

        sizes = (self.merge, self.model.config.window_size, self.patch)
        cells, _ = get_vision_window_index(need_torch().tensor([(1, height, width)]), *sizes)
        return (cells.numpy()[:, None] * self.merge**2 + np.arange(self.merge**2)).reshape(-1)


class KimiK25(Reference):
    parts = ("vision_tower.", "mm_projector.")

    def _build(self, folder: Path, files: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        from transformers.activations import ACT2FN
        from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config, Kimi_K25VisionConfig
        from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25Model

        root = files["config.json"]
        vision = {_KIMI_NAMES.get(name) or name: value for name, value in root["vision_config"].items()}
        tower = known(vision, Kimi_K25VisionConfig)
        width = vision.get("text_hidden_size") or root["text_config"]["hidden_size"]
        config: Any = Kimi_K25Config(
            text_config={"model_type": "deepseek_v3", "hidden_size": width, "num_hidden_layers": 0, "vocab_size": 1},
            vision_config=tower,
            projection_hidden_size=Kimi_K25VisionConfig(**tower).hidden_size,
            projection_layer_norm_eps=vision.get("projector_ln_eps", root.get("projection_layer_norm_eps", 1e-5)),
        )
        self.model = filled(Kimi_K25Model, config, tensors(folder, self.parts), options)
        self.model.mm_projector.act = ACT2FN[vision.get("projector_hidden_act", "gelu")]
        self.merge, self.patch = config.vision_config.merge_kernel_size[0], config.vision_config.patch_size

    def _processors(self, folder: Path, files: Mapping[str, Any], overrides: dict[str, Any]) -> None:
        from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
        from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

        images, frames = by_medium(overrides)
        hub = files.get("preprocessor_config.json", {}).get("media_proc_cfg")
        if hub is None:
            self.image_processor = from_folder(Kimi_K25ImageProcessor, folder, files, images, {})
            self.video_processor = from_folder(Kimi_K25VideoProcessor, folder, files, frames, {})
            self.video_limit = None
            return
        # transformers does not read the hub's form of this file, so its processors are given what the file says.
        names = {"patch_size": "patch_size", "merge_kernel_size": "merge_size"}
        names |= {"image_mean": "image_mean", "image_std": "image_std"}
        shared = {name: hub[key] for key, name in names.items() if hub.get(key) is not None}
        side = hub.get("patch_limit_on_one_side", 512)
        shared["size"] = {"max_height": side, "max_width": side}
        images = {"max_patches": hub.get("in_patch_limit", 16384)} | images
        frames = {"max_patches": hub.get("in_patch_limit_each_frame", 4096)} | frames
        frames["temporal_patch_size"] = hub.get("temporal_merge_kernel_size", 4)
        self.image_processor = Kimi_K25ImageProcessor(**images, **shared)
        self.video_processor = Kimi_K25VideoProcessor(**frames, **shared)
        self.video_limit = hub.get("in_patch_limit_video")

    def _process_frames(self, frames: Any, **options: Any) -> Mapping[str, Any]:
        own = self.video_processor
        if self.video_limit is None:
            return own(videos=[frames], **options)
        # transformers knows no limit a chunk; the hub's code divides it by the chunk's frames.
        chunks = frames.split(own.temporal_patch_size)
        limits = [min(round(self.video_limit / len(chunk)), own.max_patches) for chunk in chunks]
        parts = [own(videos=[c], max_patches=limit, **options) for c, limit in zip(chunks, limits, strict=True)]
        names = ("pixel_values_videos", "video_grid_thw")
        joined = {name: need_torch().cat([part[name] for part in parts]) for name in names}
        return {**joined, "num_chunks_per_video": need_torch().tensor([len(chunks)])}

    def _forward(self, values: Any, grid: Grid) -> Any:
        # One medium a call: 5.17 takes no mixed t, and its get_image_features cannot count tokens of t > 1.
        pixels = values.to(self.model.dtype).reshape(-1, 3, self.patch, self.patch)
        pooled = self.model.vision_tower(pixels, grid_thw=need_torch().tensor([grid])).pooler_output
        return self.model.mm_projector(pooled).flatten(0, -2)

    def _split(self, inputs: Mapping[str, Any]) -> list[tuple[Any, Grid]]:
        return by_grid(inputs)

    def _tapped(self) -> list[tuple[str, Any, bool]]:
        tower = self.model.vision_tower
        blocks = [(f"blocks.{i}", block, False) for i, block in enumerate(tower.layers)]
        norm = ("final_norm", tower.final_layernorm, False)
        return [("patch_embed", tower.patch_embed, False), *blocks, norm, ("projector", self.model.mm_projector, True)]

    @property
    def _channels(self) -> np.ndarray:
        return np.repeat(np.arange(3), self.patch**2)

    def _order(self, height: int, width: int) -> np.ndarray:
        return self._cells(height, width).reshape(-1)


class Lfm2VL(Reference):
    parts = ("vision_tower.", "multi_modal_projector.")
    video_processor = None
    _image_options: ClassVar[Mapping[str, Any]] = {"return_row_col_info": True}

    def _build(self, folder: Path, files: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        from transformers.models.lfm2_vl.configuration_lfm2_vl import Lfm2VlConfig
        from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlModel
        from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig

        root = files["config.json"]
        vision = known(root["vision_config"], Siglip2VisionConfig)
        weights = tensors(folder, self.parts)
        # The old remote code's field, which transformers ignores: -2 leaves out the last layer, not the norm after it.
        skipped = -1 - int(root.get("vision_feature_layer", -1))
        layers = vision.get("num_hidden_layers", 12) - skipped
        vision |= {"num_hidden_layers": layers, "vision_use_head": False, "model_type": "siglip2_vision_model"}
        dropped = tuple(f".layers.{layers + i}." for i in range(skipped))
        text = {"model_type": "lfm2", "hidden_size": root["text_config"]["hidden_size"]}
        config: Any = Lfm2VlConfig(
            text_config={**text, "num_hidden_layers": 0, "layer_types": [], "vocab_size": 1},
            vision_config=vision,
            **{name: value for name, value in root.items() if name.startswith("projector_")},
            downsample_factor=root.get("downsample_factor", 2),
        )
        kept = {name: value for name, value in weights.items() if not any(each in name for each in dropped)}
        self.model = filled(Lfm2VlModel, config, kept, options)
        self.merge, self.patch = config.downsample_factor, config.vision_config.patch_size

    def _processors(self, folder: Path, files: Mapping[str, Any], overrides: dict[str, Any]) -> None:
        from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

        # transformers reads one file and ignores the rest; the settings of a checkpoint may lie in four places.
        processor = files.get("processor_config.json", {})
        places = (processor.get("image_processor") or {}, files.get("preprocessor_config.json", {}), processor)
        settings: dict[str, Any] = {}
        for place in (overrides, *places, files["config.json"]):
            for name in _LFM2_SETTINGS:
                if place.get(name) is not None:
                    settings.setdefault(name, place[name])
        self.image_processor = Lfm2VlImageProcessor(**settings)

    def _forward(self, values: Any, grid: Grid) -> Any:
        torch = need_torch()
        mask = torch.ones((1, len(values)), dtype=torch.int32)
        out = self.model.get_image_features(
            pixel_values=values[None], spatial_shapes=torch.tensor([grid[1:]]), pixel_attention_mask=mask
        )
        return out.pooler_output[0]

    def _split(self, inputs: Mapping[str, Any]) -> list[tuple[Any, Grid]]:
        shapes = [(1, *shape) for shape in inputs["spatial_shapes"].tolist()]
        return [(v[: h * w], (1, h, w)) for v, (_, h, w) in zip(inputs["pixel_values"], shapes, strict=True)]

    def encode_inputs(self, inputs: Mapping[str, Any]) -> np.ndarray:
        names = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
        with self._evaluating():
            out = self.model.get_image_features(**{name: inputs[name] for name in names}).pooler_output
            return np.concatenate([as_numpy(tile).reshape(-1, tile.shape[-1]) for tile in out])

    def _tapped(self) -> list[tuple[str, Any, bool]]:
        tower = self.model.vision_tower
        blocks = [(f"blocks.{i}", block, False) for i, block in enumerate(tower.encoder.layers)]
        norm = ("final_norm", tower.post_layernorm, False)
        projector = ("projector", self.model.multi_modal_projector, True)
        return [("patch_embed", tower.embeddings, False), *blocks, norm, projector]

    @property
    def _channels(self) -> np.ndarray:
        return np.tile(np.arange(3), self.patch**2)

    def _order(self, height: int, width: int) -> np.ndarray:
        return self._cells(height, width).reshape(-1)


FAMILIES: dict[str, type[Reference]] = {"qwen2_5_vl": Qwen25VL, "kimi_k25": KimiK25, "lfm2_vl": Lfm2VL}


def load_reference(
    folder: str | Path,
    model_type: str | None = None,
    dtype: str = "float32",
    attention: str = "sdpa",
    settings_overrides: Mapping[str, Any] | None = None,
) -> Reference:
    """Builds tower, projector and processors.

    Args:
        folder: a checkpoint in the hub's layout; shards of the language model may be absent.
        model_type: the family; None reads config.json.
        dtype: "float32", "bfloat16" or "float64".
        attention: "sdpa" or "eager".
        settings_overrides: processing settings that beat the files, as ``jaxvit.load(processor=...)`` takes them.
    Raises:
        DependencyError: the extra ``compare`` is missing. CheckpointError: the files do not fit the model.
    """
    need_torch()
    folder = Path(folder)
    files = {path.name: json.loads(path.read_text()) for path in folder.glob("*config.json")}
    if "config.json" not in files:
        raise CheckpointError(f"{folder} has no config.json")
    name = (model_type or files["config.json"]["model_type"]).replace("-", "_")
    if name not in FAMILIES:
        raise CheckpointError(f"{folder}: there is no PyTorch reference for model_type {name!r}")
    return FAMILIES[name].of(folder, files, dtype, attention, settings_overrides or {})
