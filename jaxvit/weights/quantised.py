"""Quantised tensors: which ones a checkpoint holds by the look of their names and dtypes, and float8 made plain.

The decision falls tensor by tensor: a quantised language model beside a plain vision tower concerns nobody here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import numpy as np

from jaxvit.weights.files import Stored

PLAIN = ("BF16", "F16", "F32")
FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALES = ("_scale_inv", "_scale")
"""What a scale's name adds to its weight's; both multiply, whatever the name says."""
ACTIVATIONS = ("input_scale", "output_scale", "activation_scale", "input_activation_scale")
"""Scales of activations: not used, since the weights are made plain."""
SCHEMES = {
    ("qweight", "qzeros", "scales", "g_idx", "exllama_perm"): "AWQ or GPTQ, packed integers",
    ("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"): "compressed-tensors, packed",
    ("weight_global_scale", "weight_scale_2", "input_global_scale"): "NVFP4, packed",
    ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB", "weight_format"): "bitsandbytes",
    ("weight_blocks", "weight_scales"): "MXFP4, packed",
}


def scheme(name: str, stored: Stored) -> str | None:
    """Why a tensor cannot be used as it is stored: the scheme that it seems to come from; None for a plain float."""
    last = name.rpartition(".")[2]
    for endings, title in SCHEMES.items():
        if last in endings or (title == "bitsandbytes" and ".quant_state." in name):
            return f"{stored.dtype}, {title}"
    if last.endswith(SCALES) or last in ACTIVATIONS:
        return f"{stored.dtype}, the scale of a quantised weight"
    if stored.dtype in FLOAT8:
        return f"{stored.dtype} without a scale"
    return None if stored.dtype in PLAIN else f"{stored.dtype}, not one of BF16, F16, F32"


def scale_of(name: str, tensors: Mapping[str, Stored]) -> str | None:
    """The name of a float8 tensor's scale."""
    if tensors[name].dtype not in FLOAT8:
        return None
    return next((name + ending for ending in SCALES if name + ending in tensors), None)


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share one float8 scale in a checkpoint scaled by blocks."""
    for part in (config, config.get("text_config")):
        quantization = part.get("quantization_config") if isinstance(part, Mapping) else None
        block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
        if isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block):
            return block[0], block[1]
    return 128, 128


def scale_fault(weight: Stored, scale: Stored, block: tuple[int, int]) -> str | None:
    """Why a scale cannot be applied, None when it can: one value, one a row, or one a block."""
    shape = scale.shape
    if scale.dtype not in PLAIN:
        return f"{weight.dtype} with a scale of dtype {scale.dtype}"
    if shape in ((), (1,), (1, 1)):
        return None
    rows = weight.shape[:1]
    if weight.shape and shape in (rows, rows + (1,) * (len(weight.shape) - 1)):
        return None
    if len(weight.shape) == 2 and shape == tuple(ceil(n / side) for n, side in zip(weight.shape, block, strict=True)):
        return None
    return (
        f"{weight.dtype} {list(weight.shape)} with a scale {list(shape)}, which is neither one value, nor one a row, "
        f"nor one a block of {block[0]} x {block[1]}"
    )


def apply_scale(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> None:
    """Multiplies a weight, in place, by the scale that :func:`scale_fault` found fit. Both are float32."""
    if scale.size == 1:
        weight *= scale.reshape(())
    elif scale.shape[0] == weight.shape[0] and scale.size == weight.shape[0]:
        weight *= scale.reshape((-1,) + (1,) * (weight.ndim - 1))
    else:
        for row in range(scale.shape[0]):  # a row of blocks at a time keeps the spread scale small
            band = weight[row * block[0] : (row + 1) * block[0]]
            band *= np.repeat(scale[row], block[1])[: weight.shape[1]]
