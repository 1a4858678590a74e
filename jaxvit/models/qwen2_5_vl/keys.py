"""Names of the checkpoint's tensors -> parameters of ``module.py``."""

from __future__ import annotations

import numpy as np

from jaxvit.weights.keys import Key, KeyTable, transpose


def patch_kernel(weight: np.ndarray) -> np.ndarray:
    """Conv3d weight [hidden, C, T, py, px] -> [T * C * py * px, hidden]: the first frame's values come first."""
    return weight.transpose(2, 1, 3, 4, 0).reshape(-1, weight.shape[0])


TABLE = KeyTable(
    spellings=({"visual.": ""}, {"model.visual.": ""}),
    keys=(
        Key(r"patch_embed\.proj\.weight", "patch_embed.kernel", patch_kernel),
        Key(r"blocks\.(\d+)\.norm([12])\.weight", r"blocks.\1.norm\2.scale"),
        Key(r"blocks\.(\d+)\.attn\.(qkv|proj)\.weight", r"blocks.\1.attn.\2.kernel", transpose),
        Key(r"blocks\.(\d+)\.attn\.(qkv|proj)\.bias", r"blocks.\1.attn.\2.bias"),
        Key(r"blocks\.(\d+)\.mlp\.(gate|up|down)_proj\.weight", r"blocks.\1.mlp.\2_proj.kernel", transpose),
        Key(r"blocks\.(\d+)\.mlp\.(gate|up|down)_proj\.bias", r"blocks.\1.mlp.\2_proj.bias"),
        Key(r"merger\.ln_q\.weight", "merger.ln_q.scale"),
        Key(r"merger\.mlp\.([02])\.weight", r"merger.fc\1.kernel", transpose),
        Key(r"merger\.mlp\.([02])\.bias", r"merger.fc\1.bias"),
    ),
)
