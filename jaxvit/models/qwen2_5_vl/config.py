"""Configuration of the Qwen2.5-VL vision tower, from ``vision_config`` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxvit.models.options import LAYERS, Options


@dataclass(frozen=True)
class Config:
    """Fields carry the names of the checkpoint's ``vision_config``; sizes in features, patches or pixels as noted."""

    hidden_size: int
    depth: int = 32
    num_heads: int = 16
    intermediate_size: int = 3420
    out_hidden_size: int = 3584
    patch_size: int = 14  # pixels
    temporal_patch_size: int = 2  # frames
    spatial_merge_size: int = 2  # patches per token along a side
    window_size: int = 112  # pixels
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    tokens_per_second: float = 2.0
    hidden_act: str = "silu"
    in_channels: int = 3
    eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def window_cells(self) -> int:
        """Merged cells along a side of a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]]) -> Config:
        """Reads config.json; missing fields take the defaults above, unknown ones are ignored."""
        options = Options.vision(files["config.json"], "Qwen2.5-VL")
        defaults = {name: value.default for name, value in cls.__dataclass_fields__.items()}
        config = cls(
            hidden_size=options.integer("hidden_size"),
            depth=options.integer("depth", default=defaults["depth"], most=LAYERS),
            num_heads=options.integer("num_heads", "num_attention_heads", default=defaults["num_heads"]),
            intermediate_size=options.integer("intermediate_size", default=defaults["intermediate_size"]),
            out_hidden_size=options.integer("out_hidden_size", default=defaults["out_hidden_size"]),
            patch_size=options.integer("patch_size", default=defaults["patch_size"]),
            temporal_patch_size=options.integer("temporal_patch_size", default=defaults["temporal_patch_size"]),
            spatial_merge_size=options.integer("spatial_merge_size", default=defaults["spatial_merge_size"]),
            window_size=options.integer("window_size", default=defaults["window_size"]),
            fullatt_block_indexes=options.integers("fullatt_block_indexes", defaults["fullatt_block_indexes"]),
            tokens_per_second=options.number("tokens_per_second", defaults["tokens_per_second"]),
            in_channels=options.integer("in_channels", "in_chans", default=defaults["in_channels"]),
            rope_theta=options.section("rope_parameters").number("rope_theta", defaults["rope_theta"]),
        )
        options.require("hidden_act", (config.hidden_act,))
        options.require("in_channels", (3,), value=config.in_channels)
        options.require("temporal_patch_size", (2,), value=config.temporal_patch_size)
        options.divides("num_heads", config.num_heads, "hidden_size", config.hidden_size)
        options.divides("4", 4, "the head dim", config.head_dim)
        options.divides(
            "a merged cell in pixels", config.spatial_merge_size * config.patch_size, "window_size", config.window_size
        )
        return config
