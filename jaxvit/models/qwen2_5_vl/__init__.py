"""Qwen2.5-VL: 3B, 7B, 32B and 72B, images and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np

from jaxvit.buffer import Buffer
from jaxvit.layers import swiglu
from jaxvit.layers.fuse import Pairing, Widening, head_halves, mlp_width
from jaxvit.layers.prune import retained
from jaxvit.models.family import Bucket, Family, Item, Piece, Rows
from jaxvit.models.qwen2_5_vl import keys, layout, processing
from jaxvit.models.qwen2_5_vl.config import Config
from jaxvit.models.qwen2_5_vl.module import VisionTower
from jaxvit.weights.keys import KeyTable


@dataclass(frozen=True)
class Qwen25VL(Family):
    """See :class:`jaxvit.models.family.Family`."""

    name: ClassVar[str] = "qwen2_5_vl"
    takes_video: ClassVar[bool] = True
    processing: ClassVar[ModuleType] = processing
    segment_sets: ClassVar[tuple[str, ...]] = ("full", "window")

    config: Config
    settings: processing.Settings

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> Qwen25VL:
        return cls(Config.from_files(files), processing.Settings.from_files(files, overrides))

    @property
    def merge(self) -> int:
        return self.config.spatial_merge_size

    @property
    def width(self) -> int:
        return self.config.out_hidden_size

    @property
    def keys(self) -> KeyTable:
        return keys.TABLE

    def buffers(self, bucket: Bucket, pixels: Literal["uint8", "float32"]) -> tuple[Buffer, ...]:
        return layout.buffers(self.config, bucket, pixels)

    def layout(self, pieces: Sequence[Piece], bucket: Bucket) -> dict[str, Rows]:
        return layout.layout(self.config, pieces)

    def lengths(self, pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
        return layout.lengths(self.config, pieces)

    def longest(self, reach: str) -> int | None:
        return (self.config.window_cells * self.merge) ** 2 if reach == "window" else None

    def most_windows(self, tokens: int, pieces: int) -> int:
        """A piece of A x B windows has at least s(A-1)+1 x s(B-1)+1 tokens, s being a window's side: so, whatever its
        shape, A x B is less than its tokens / s + 1."""
        return tokens // self.config.window_cells + pieces

    def random_piece(self, frames: int, height: int, width: int, generator: np.random.Generator) -> Piece:
        patches = generator.integers(0, 256, (height * width, self.settings.frame_values), dtype=np.uint8)
        plan = layout.windows(height, width, self.merge, self.config.window_cells)
        return Piece((1, height, width), patches, len(plan.order), len(plan.lengths))

    def widenings(self) -> tuple[Widening, ...]:
        block, config = r"blocks\.\d+", self.config
        return (
            mlp_width(config.intermediate_size, rf"{block}\.mlp\.(gate|up)_proj", rf"{block}\.mlp\.down_proj"),
            head_halves(config.head_dim, config.num_heads, rf"{block}\.attn\.qkv", rf"{block}\.attn\.proj"),
        )

    def pairings(self) -> tuple[Pairing, ...]:
        return (Pairing(r"blocks\.\d+\.mlp", "gate_proj", "up_proj", swiglu.COLUMNS),)

    def module(self) -> VisionTower:
        return VisionTower(self.config)

    def cells(self, piece: Piece) -> np.ndarray:
        return layout.of_piece(piece, self.config).order

    def finish(self, item: Item, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        if not item.prune:
            return embeddings, None
        kept = retained(embeddings, len(item.pieces), item.tokens)
        return embeddings[kept], kept
