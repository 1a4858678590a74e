"""Qwen2.5-VL: 3B, 7B, 32B and 72B, images and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from jaxvit.models.family import Bucket, Buffer, Family, Item, Piece
from jaxvit.models.qwen2_5_vl import keys, layout, processing
from jaxvit.models.qwen2_5_vl.config import Config
from jaxvit.models.qwen2_5_vl.module import VisionTower


@dataclass(frozen=True)
class Qwen25VL(Family):
    name: ClassVar[str] = "qwen2_5_vl"
    segment_sets: ClassVar[tuple[str, ...]] = ("full", "window")
    keys: ClassVar = keys.TABLE

    config: Config
    settings: processing.Settings

    @classmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> Qwen25VL:
        return cls(Config.from_files(files), processing.Settings.from_files(files, overrides))
