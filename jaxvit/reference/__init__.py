"""The PyTorch reference: transformers' own vision tower, projector and processors, loaded from a checkpoint's folder.

Needs the optional extra ``compare``. Only the tower and the projector are built (the language model around them has no
layers) and only their tensors are read, in any layout that transformers itself loads. Written for transformers 5.24;
5.17 works too.

Kimi-K2.5 comes in three layouts, and transformers makes equal parameters of each:

- the hub's: ``vision_tower.encoder.blocks.{i}.{norm0,norm1,wqkv,wo,mlp.fc0,mlp.fc1}``, ``mm_projector.proj.{0,2}``;
- transformers' own (``save_pretrained(save_original_format=False)``): ``model.vision_tower.layers.{i}.{norm1,norm2,
  attn.{q,k,v}_proj,attn.proj,mlp.fc1,mlp.fc2}``, ``model.mm_projector.{in,out}_proj``: norms and MLP counted from 1;
- its default re-save of the hub's: the hub's names but ``vision_tower.encoder.patch_embed.proj`` and
  ``model.mm_projector.pre_norm``.

In transformers' own layout the rows of q and k (weight and bias, not v) are permuted for half-split rotation: row
``h * d + j * (d // 2) + p`` is the hub's row ``h * d + 2 * p + j``, d the head dim and j 0 or 1.
"""

from __future__ import annotations

from jaxvit.reference.base import Picture, Reference, Unit
from jaxvit.reference.families import load_reference

__all__ = ["Picture", "Reference", "Unit", "load_reference"]
