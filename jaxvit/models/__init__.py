"""The model families, picked by ``model_type`` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxvit.errors import CheckpointError
from jaxvit.models.family import Family
from jaxvit.models.kimi_k25 import KimiK25
from jaxvit.models.lfm2_vl import Lfm2VL
from jaxvit.models.qwen2_5_vl import Qwen25VL

REGISTRY: dict[str, type[Family]] = {
    "kimi_k25": KimiK25,
    "lfm2-vl": Lfm2VL,
    "lfm2_vl": Lfm2VL,
    "qwen2_5_vl": Qwen25VL,
}
"""``model_type``, all its spellings -> family."""

RELATIVES = {
    "qwen2_vl": "its blocks have LayerNorm and no windows",
    "qwen3_vl": "its tower has LayerNorm, learned positions and deepstack outputs",
    "qwen3_vl_moe": "its tower has LayerNorm, learned positions and deepstack outputs",
    "kimi_vl": "its tower has no temporal positions and another projector",
    "kimi_k3": "its tower has RMSNorm, no biases, bilinear positions and another projector",
    "lfm3_vl": "its tower mixes convolution and attention",
    "siglip2": "it has no projector; load the LFM2-VL checkpoint it belongs to",
}
"""Model types that look alike and differ inside: refused, never approximated."""


def family_of(files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> Family:
    """The family of a checkpoint's files, with its configuration and processing settings."""
    model_type = files["config.json"].get("model_type")
    if isinstance(model_type, str) and model_type in RELATIVES:
        raise CheckpointError(f"model_type {model_type!r} is not supported: {RELATIVES[model_type]}")
    if not isinstance(model_type, str) or model_type not in REGISTRY:
        known = ", ".join(sorted(REGISTRY))
        raise CheckpointError(f"config.json: model_type {model_type!r} is not supported; jaxvit has {known}")
    return REGISTRY[model_type].from_files(files, overrides)
