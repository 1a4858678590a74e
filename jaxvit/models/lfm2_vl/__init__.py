"""LFM2-VL and LFM2.5-VL: SigLIP2 NaFlex towers of 12, 26 and 27 layers, images cut into tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np

from jaxvit.buffer import Buffer
from jaxvit.layers.fuse import Widening, head_halves, mlp_width
from jaxvit.models.family import Bucket, Family, Piece, Rows
from jaxvit.models.lfm2_vl import keys, layout, processing
from jaxvit.models.lfm2_vl.config import Config
from jaxvit.models.lfm2_vl.module import VisionTower
from jaxvit.weights.keys import KeyTable


@dataclass(frozen=True)
class Lfm2VL(Family):
    """See :class:`jaxvit.models.family.Family`."""

    name: ClassVar[str] = "lfm2_vl"
    processing: ClassVar[ModuleType] = processing

    config: Config
    settings: processing.Settings

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> Lfm2VL:
        return cls(Config.from_files(files), processing.Settings.from_files(files, overrides))

    @property
    def merge(self) -> int:
        return self.config.downsample_factor

    @property
    def width(self) -> int:
        return self.config.text_hidden_size

    @property
    def keys(self) -> KeyTable:
        return keys.table(self.config)

    def buffers(self, bucket: Bucket, pixels: Literal["uint8", "float32"]) -> tuple[Buffer, ...]:
        return layout.buffers(self.config, bucket, pixels)

    def layout(self, pieces: Sequence[Piece], bucket: Bucket) -> dict[str, Rows]:
        return layout.layout(self.config, pieces)

    def lengths(self, pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
        return layout.lengths(pieces)

    def random_piece(self, frames: int, height: int, width: int, generator: np.random.Generator) -> Piece:
        patches = generator.integers(0, 256, (height * width, len(self.channels)), dtype=np.uint8)
        return Piece((1, height, width), patches, height * width // self.merge**2)

    def widenings(self) -> tuple[Widening, ...]:
        block, config = r"blocks\.\d+", self.config
        return (
            mlp_width(config.intermediate_size, rf"{block}\.mlp\.fc1", rf"{block}\.mlp\.fc2"),
            head_halves(
                config.head_dim, config.num_attention_heads, rf"{block}\.attn\.qkv", rf"{block}\.attn\.out_proj"
            ),
        )

    def module(self) -> VisionTower:
        return VisionTower(self.config)
