"""Kimi-K2.5 and K2.6 (MoonViT3d): images, and videos in chunks of up to four frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np

from jaxvit.buffer import Buffer
from jaxvit.errors import CheckpointError
from jaxvit.layers.fuse import ByHead, Interleaving, Widening, head_halves, mlp_width
from jaxvit.models.family import Bucket, Demand, Family, Piece, Rows, rectangles
from jaxvit.models.kimi_k25 import keys, layout, processing
from jaxvit.models.kimi_k25.config import Config
from jaxvit.models.kimi_k25.module import VisionTower
from jaxvit.weights.keys import KeyTable

BLOCK = r"blocks\.\d+"
"""Pattern of a block's path."""


@dataclass(frozen=True)
class KimiK25(Family):
    """See :class:`jaxvit.models.family.Family`."""

    name: ClassVar[str] = "kimi_k25"
    takes_video: ClassVar[bool] = True
    processing: ClassVar[ModuleType] = processing

    config: Config
    settings: processing.Settings

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> KimiK25:
        config, settings = Config.from_files(files), processing.Settings.from_files(files, overrides)
        for name, asked, there in (
            ("patch_size", settings.patch_size, config.patch_size),
            ("merge_kernel_size", settings.merge_size, config.merge_kernel_size),
        ):
            if asked != there:
                raise CheckpointError(f"{name} is {asked} in the processor's settings, {there} in config.json")
        if settings.chunk > config.pos_emb_time:
            raise CheckpointError(
                f"the processor's settings make chunks of {settings.chunk} frames, and the tower of config.json has "
                f"positions for {config.pos_emb_time}"
            )
        return cls(config, settings)

    @property
    def merge(self) -> int:
        return self.config.merge_kernel_size

    @property
    def width(self) -> int:
        return self.config.text_hidden_size

    @property
    def keys(self) -> KeyTable:
        return keys.table(self.config.num_attention_heads)

    def largest(self) -> Demand:
        """A chunk of t frames has t times the patches of an image of as many tokens."""
        return Demand(self.settings.largest_patches(), self.budget_range()[1], 1, 0)

    def buffers(self, bucket: Bucket, pixels: Literal["uint8", "float32"]) -> tuple[Buffer, ...]:
        return layout.buffers(self.config, bucket, pixels)

    def layout(self, pieces: Sequence[Piece], bucket: Bucket) -> dict[str, Rows]:
        return layout.layout(self.config, pieces)

    def lengths(self, pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
        return layout.lengths(pieces)

    def example(self, bucket: Bucket) -> list[Piece]:
        """Images; where the bucket has more patches than its tokens' first frames take, chunks of frames."""
        generator = np.random.default_rng(0)
        cell, tokens = self.config.cell, min(bucket.tokens, bucket.patches // self.config.cell)
        largest = self._most_tokens(1) if bucket.patches > cell * tokens else self.budget_range()[1]
        shapes = rectangles(tokens, 1, largest, self.settings.image.side // self.merge)[: bucket.segments]
        spare = bucket.patches // cell - sum(rows * columns for rows, columns in shapes)
        pieces = []
        for rows, columns in shapes:
            area = rows * columns
            fits = (t for t in self.settings.chunks if area <= self._most_tokens(t) and (t - 1) * area <= spare)
            frames = max(fits, default=1)
            spare -= (frames - 1) * area
            pieces.append(self.random_piece(frames, rows * self.merge, columns * self.merge, generator))
        return pieces

    def _most_tokens(self, frames: int) -> int:
        """Tokens of the largest chunk of so many frames."""
        limits = self.settings.chunk_limits(frames)
        return processing.most_tokens(limits, self.config.patch_size, self.merge)

    def random_piece(self, frames: int, height: int, width: int, generator: np.random.Generator) -> Piece:
        patches = generator.integers(0, 256, (frames * height * width, self.config.patch_values), dtype=np.uint8)
        return Piece((frames, height, width), patches, height * width // self.config.cell)

    def widenings(self) -> tuple[Widening, ...]:
        config = self.config
        return (
            Widening(config.patch_values, 8, ((r"patch_embed\.kernel", 0, ()),)),
            mlp_width(config.intermediate_size, rf"{BLOCK}\.mlp\.fc1", rf"{BLOCK}\.mlp\.fc2"),
            self._halves(),
        )

    def by_head(self) -> tuple[Interleaving | ByHead, ...]:
        heads = 3 * self.config.num_attention_heads
        return (Interleaving(self._halves()), ByHead(rf"{BLOCK}\.attn\.qkv\.kernel", heads))

    def _halves(self) -> Widening:
        config = self.config
        return head_halves(config.head_dim, config.num_attention_heads, rf"{BLOCK}\.attn\.qkv", rf"{BLOCK}\.attn\.proj")

    def module(self) -> VisionTower:
        return VisionTower(self.config)
