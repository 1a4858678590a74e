"""Configuration of the Kimi-K2.5/K2.6 vision tower (MoonViT3d) and projector, from config.json in either spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxvit.layers.linear import ACTIVATIONS
from jaxvit.models.options import LAYERS, Options

HUB = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_hidden_layers": "vt_num_hidden_layers",
    "num_attention_heads": "vt_num_attention_heads",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
}
"""transformers' name of a field -> the hub's. What is not here has one name."""

KINDS: Mapping[str, Any] = {
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bicubic",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "norm_type": "layernorm",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": True,
    "linear_bias": True,
    "patch_embed_proj_bias": True,
}
"""Fields of relatives (Kimi-K3 has most of them) -> the one value that is this tower's. K2.5 omits some of them."""


@dataclass(frozen=True)
class Config:
    """Fields carry transformers' names; the defaults, those of every published K2.x, are what absence means."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    patch_size: int = 14  # pixels
    pos_emb_height: int = 64  # rows of the position table
    pos_emb_width: int = 64  # columns
    pos_emb_time: int = 4  # frames of a chunk, at most
    merge_kernel_size: int = 2  # patches per token along a side
    hidden_act: str = "gelu_pytorch_tanh"
    eps: float = 1e-5  # not in the file
    rope_theta: float = 10000.0
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5
    text_hidden_size: int = 7168
    num_channels: int = 3

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def cell(self) -> int:
        """Patches of a token."""
        return self.merge_kernel_size**2

    @property
    def patch_values(self) -> int:
        return self.num_channels * self.patch_size**2

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]]) -> Config:
        """Reads config.json. Unknown fields are ignored; those of :data:`KINDS` must have this tower's value.

        The tower is described by ``vision_config`` alone. The projector's output is as wide as the language model:
        ``text_hidden_size`` there (hub), else ``hidden_size`` of ``text_config`` (transformers).
        """
        root = Options(files["config.json"], "config.json")
        vision = Options.vision(files["config.json"], "Kimi-K2.5")
        text = root.section("text_config")
        for name, value in KINDS.items():
            vision.require(name, (value,))

        def size(name: str, **bounds: int) -> int:
            return vision.integer(*filter(None, (HUB.get(name), name)), default=getattr(cls, name), **bounds)

        vision.require("merge_kernel_size", (2, [2, 2]))
        rope = vision.section("rope_parameters")
        rope.require("rope_type", ("axial",))
        for name in ("hidden_act", "projector_hidden_act"):
            vision.require(name, tuple(ACTIVATIONS))
        eps = root.number("projection_layer_norm_eps", cls.projector_ln_eps)
        config = cls(
            hidden_size=size("hidden_size"),
            intermediate_size=size("intermediate_size"),
            num_hidden_layers=size("num_hidden_layers", most=LAYERS),
            num_attention_heads=size("num_attention_heads"),
            patch_size=size("patch_size"),
            pos_emb_height=size("pos_emb_height"),
            pos_emb_width=size("pos_emb_width"),
            pos_emb_time=size("pos_emb_time"),
            merge_kernel_size=2,
            hidden_act=vision.raw.get("hidden_act", cls.hidden_act),
            rope_theta=rope.number("rope_theta", cls.rope_theta),
            projector_hidden_act=vision.raw.get("projector_hidden_act", cls.projector_hidden_act),
            projector_ln_eps=vision.number("projector_ln_eps", eps),
            text_hidden_size=vision.integer(
                "text_hidden_size", default=text.integer("hidden_size", default=cls.text_hidden_size)
            ),
        )
        for name, value in (
            ("mm_hidden_size", vision.raw.get("mm_hidden_size")),
            ("qkv_hidden_size", vision.raw.get("qkv_hidden_size")),
            ("projection_hidden_size of the root", root.raw.get("projection_hidden_size")),
        ):
            if value is not None:
                vision.require(name, (config.hidden_size,), value=value)
        vision.divides("num_attention_heads", config.num_attention_heads, "hidden_size", config.hidden_size)
        vision.divides("4", 4, "the head dim", config.head_dim)
        return config
