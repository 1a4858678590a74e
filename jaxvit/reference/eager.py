"""The transformers reference on any device, whole batches at a time, for measuring: eager, as a user runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxvit.models.family import Item, Piece
from jaxvit.reference import Picture, load_reference
from jaxvit.reference.families import KimiK25, Lfm2VL
from jaxvit.reference.loading import need_torch


class Eager:
    """Tower, projector and processor of a checkpoint's folder.

    Args:
        folder: of the checkpoint.
        dtype: "float32" or "bfloat16".
        device: as PyTorch names it, "cpu" or "cuda".
        overrides: processing settings that beat the checkpoint's.
    """

    def __init__(self, folder: Path, dtype: str, device: str, overrides: Mapping[str, Any] | None = None):
        self.torch, self.device = need_torch(), device
        self.reference = load_reference(folder, dtype=dtype, settings_overrides=overrides)
        self.reference.model.to(device)

    def inputs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What the model takes for these stills, as its processor would hand it over, on the device.

        LFM2-VL pads tiles to the longest of the call.
        """
        reference, torch = self.reference, self.torch
        units = [unit for piece in pieces for unit in reference.units(Item((piece,), (piece.grid,), piece.tokens))]
        values = [torch.from_numpy(reference.table[unit.patches, reference._channels]) for unit in units]
        if isinstance(reference, Lfm2VL):
            mask = [torch.ones(len(each), dtype=torch.int32) for each in values]
            padded = torch.nn.utils.rnn.pad_sequence
            found = {
                "pixel_values": padded(values, batch_first=True),
                "pixel_attention_mask": padded(mask, batch_first=True),
                "spatial_shapes": torch.tensor([unit.grid[1:] for unit in units]),
            }
        else:
            grids = torch.tensor([unit.grid for unit in units])
            found = {"pixel_values": torch.cat(values), "image_grid_thw": grids}
        return self._placed(found)

    def process(self, picture: Picture) -> dict[str, Any]:
        """What its own processor makes of a picture, on the device."""
        return self._placed(self.reference.process(picture))

    def _placed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        tensors = {name: value.to(self.device) for name, value in inputs.items() if hasattr(value, "to")}
        return {**tensors, "pixel_values": tensors["pixel_values"].to(self.reference.model.dtype)}

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Embeddings [tokens, width], on the device."""
        model = self.reference.model
        with self.torch.inference_mode():
            if isinstance(self.reference, Lfm2VL):
                names = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
                out = model.get_image_features(**{name: inputs[name] for name in names}).pooler_output
                return self.torch.cat([tile.reshape(-1, tile.shape[-1]) for tile in out])
            if isinstance(self.reference, KimiK25):
                side = self.reference.patch
                pixels = inputs["pixel_values"].reshape(-1, 3, side, side)
                pooled = model.vision_tower(pixels, grid_thw=inputs["image_grid_thw"]).pooler_output
                return model.mm_projector(pooled).flatten(0, -2)
            return model(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output

    def host(self, out: Any) -> np.ndarray:
        """float32 on the host."""
        return out.float().cpu().numpy()
