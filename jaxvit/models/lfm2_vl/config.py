"""Configuration of the LFM2-VL vision tower (SigLIP2 NaFlex) and projector, from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxvit.errors import CheckpointError
from jaxvit.layers.linear import ACTIVATIONS
from jaxvit.models.options import LAYERS, Options


@dataclass(frozen=True)
class Config:
    """Fields carry the checkpoint's names, the first nine ``vision_config``'s; a default is what absence means."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    patch_size: int = 16  # pixels
    num_channels: int = 3
    num_patches: int = 256  # entries of the position table, a square
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    vision_feature_layer: int = -1  # the last layer that runs, counted from the end
    downsample_factor: int = 2  # patches per token along a side
    projector_hidden_size: int = 2560
    projector_hidden_act: str = "gelu"
    projector_bias: bool = True
    projector_use_layernorm: bool = True
    projector_eps: float = 1e-5  # not in the file: PyTorch's default
    text_hidden_size: int = 2560  # hidden_size of text_config

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def table_side(self) -> int:
        """Entries of the position table along a side."""
        return math.isqrt(self.num_patches)

    @property
    def layers(self) -> int:
        """Layers that run. The checkpoint may hold those behind them all the same."""
        return self.num_hidden_layers + 1 + self.vision_feature_layer

    @property
    def merged(self) -> int:
        """Features of a token before the projector."""
        return self.hidden_size * self.downsample_factor**2

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]]) -> Config:
        """Reads config.json; missing fields take the defaults above, unknown ones are ignored."""
        root = Options(files["config.json"], "config.json")
        vision = Options.vision(files["config.json"], "LFM2-VL")
        text = root.section("text_config")
        vision.require("model_type", ("siglip2_vision_model",))
        # The head pools what the projector never reads, so both values give the same embeddings.
        vision.require("vision_use_head", (False, True))
        vision.require("hidden_act", tuple(ACTIVATIONS))
        root.require("projector_hidden_act", tuple(ACTIVATIONS))
        root.require("projector_bias", (True, False))
        root.require("projector_use_layernorm", (True, False))
        root.require("vision_feature_layer", (-1, -2))

        def size(options: Options, name: str, **bounds: int) -> int:
            return options.integer(name, default=getattr(cls, name), **bounds)

        config = cls(
            hidden_size=size(vision, "hidden_size"),
            intermediate_size=size(vision, "intermediate_size"),
            num_hidden_layers=size(vision, "num_hidden_layers", most=LAYERS),
            num_attention_heads=size(vision, "num_attention_heads"),
            patch_size=size(vision, "patch_size"),
            num_channels=size(vision, "num_channels"),
            num_patches=size(vision, "num_patches"),
            hidden_act=vision.raw.get("hidden_act", cls.hidden_act),
            layer_norm_eps=vision.number("layer_norm_eps", cls.layer_norm_eps),
            vision_feature_layer=root.raw.get("vision_feature_layer", cls.vision_feature_layer),
            downsample_factor=size(root, "downsample_factor"),
            projector_hidden_size=size(root, "projector_hidden_size"),
            projector_hidden_act=root.raw.get("projector_hidden_act", cls.projector_hidden_act),
            projector_bias=root.raw.get("projector_bias", cls.projector_bias),
            projector_use_layernorm=root.raw.get("projector_use_layernorm", cls.projector_use_layernorm),
            text_hidden_size=text.integer("hidden_size"),
        )
        vision.require("num_channels", (3,), value=config.num_channels)
        vision.divides("num_attention_heads", config.num_attention_heads, "hidden_size", config.hidden_size)
        root.require("downsample_factor", (2,), value=config.downsample_factor)
        if config.table_side**2 != config.num_patches:
            raise CheckpointError(
                f"vision_config of config.json: num_patches is {config.num_patches}, and only a square is implemented"
            )
        return config
