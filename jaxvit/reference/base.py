"""What the three references share: pictures in, embeddings and named intermediates out."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxvit.models.family import Grid, Item, Piece
from jaxvit.reference.loading import as_numpy, float64_throughout, need_torch, quiet

Picture = np.ndarray | Sequence[np.ndarray]
"""uint8 RGB [h, w, 3], or a clip: frames of that kind."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """What the reference takes under one grid: an image, a tile, a chunk, a whole Qwen2.5-VL clip.

    Attributes:
        patches: [rows, values] in the reference's order: uint8, or float32 where the item was handed in normalised.
        grid: (t, h, w) in patches.
        pieces: the pieces it was made of.
    """

    patches: np.ndarray
    grid: Grid
    pieces: tuple[Piece, ...]


class Reference(ABC):
    """The reference encoder of one checkpoint, on the CPU.

    Attributes:
        dtype: "float32", "bfloat16" or "float64"; in float64 every step is, rotation and softmax included.
        model: transformers' module, with the tower and the projector in it.
        image_processor, video_processor: transformers' own; None for no video.
        merge: patches per token along a side.
        patch: pixels of a patch along a side.
    """

    dtype: str
    model: Any
    image_processor: Any
    video_processor: Any
    merge: int
    patch: int
    parts: ClassVar[tuple[str, ...]]
    """Parts of a tensor's name that mark the tower and the projector."""

    @classmethod
    def of(
        cls, folder: Path, files: Mapping[str, Any], dtype: str, attention: str, overrides: Mapping[str, Any]
    ) -> Reference:
        """Tower, projector and processors of a checkpoint of this family."""
        reference = cls()
        reference.dtype = dtype
        with quiet():
            reference._build(folder, files, {"dtype": getattr(need_torch(), dtype), "attn_implementation": attention})
            reference._processors(folder, files, dict(overrides))
        return reference

    @abstractmethod
    def _build(self, folder: Path, files: Mapping[str, Any], options: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _processors(self, folder: Path, files: Mapping[str, Any], overrides: dict[str, Any]) -> None: ...

    # pictures -> the reference's inputs

    def process(self, picture: Picture) -> Mapping[str, Any]:
        """What the reference's own processor makes of one picture or of one clip (frames as given, none dropped)."""
        torch, form = need_torch(), {"return_tensors": "pt", "input_data_format": "channels_first"}
        with quiet():
            if isinstance(picture, np.ndarray):
                pixels = torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1)))
                return self.image_processor(images=[pixels], **self._image_options, **form)
            frames = torch.from_numpy(np.ascontiguousarray(np.stack(picture).transpose(0, 3, 1, 2)))
            return self._process_frames(frames, do_sample_frames=False, **form)

    _image_options: ClassVar[Mapping[str, Any]] = {}

    def _process_frames(self, frames: Any, **options: Any) -> Mapping[str, Any]:
        return self.video_processor(videos=[frames], **options)

    @property
    def table(self) -> np.ndarray:
        """float32 [256, 3]: what the processor's own normalisation makes of each uint8 value of each channel."""
        torch, own = need_torch(), self.image_processor
        ramp = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
        flat = own.rescale_and_normalize(ramp, True, own.rescale_factor, True, own.image_mean, own.image_std)
        return flat.reshape(3, 256).T.numpy().copy()

    def pixels(self, inputs: Mapping[str, Any]) -> list[tuple[np.ndarray, Grid]]:
        """uint8 patches [rows, values] and grid of each unit in a processor's output of one item."""
        own = self.image_processor
        mean, std = (np.asarray(each, np.float32)[self._channels] for each in (own.image_mean, own.image_std))
        return [
            (np.clip(np.rint((values.numpy() * std + mean) * np.float32(255)), 0, 255).astype(np.uint8), grid)
            for values, grid in self._split(inputs)
        ]

    def units(self, item: Item) -> list[Unit]:
        """The item's pixels in the reference's order and layout."""
        pieces, units = iter(item.pieces), []
        for grid in item.grids:
            taken, rows = [], 0
            while rows < grid[0] * grid[1] * grid[2]:
                taken.append(next(pieces))
                rows += taken[-1].rows
            patches = np.concatenate([self._values(piece) for piece in taken])
            units.append(Unit(self._reordered(patches, grid, back=True), grid, tuple(taken)))
        return units

    def _values(self, piece: Piece) -> np.ndarray:
        """A piece's patches, each patch's values in the reference's order."""
        return piece.patches

    # inputs -> embeddings

    def encode(self, item: Item) -> np.ndarray:
        """Embeddings [tokens, hidden] of one item (nothing pruned), from its own pixels: float32, or float64."""
        return np.concatenate([self._run(unit) for unit in self.units(item)])

    def encode_inputs(self, inputs: Mapping[str, Any]) -> np.ndarray:
        """Embeddings [tokens, hidden] of everything in a processor's output."""
        with self._evaluating():
            return np.concatenate([as_numpy(self._forward(values, grid)) for values, grid in self._split(inputs)])

    def taps(self, item: Item) -> list[dict[str, np.ndarray]]:
        """For each piece, named intermediates [rows, features], named and ordered as ``Encoder.intermediates`` does."""
        found: list[dict[str, np.ndarray]] = []
        for unit in self.units(item):
            caught, rows, start = self._taps_of(unit), sum(piece.rows for piece in unit.pieces), 0
            for piece in unit.pieces:
                stop = start + piece.rows
                found.append({k: v[start * len(v) // rows : stop * len(v) // rows] for k, v in caught.items()})
                start = stop
        return found

    def _taps_of(self, unit: Unit) -> dict[str, np.ndarray]:
        caught: dict[str, np.ndarray] = {}

        def hook(name: str, ordered: bool) -> Any:
            def catch(_module: Any, _inputs: Any, output: Any) -> None:
                rows = as_numpy(output[0] if isinstance(output, tuple) else output)
                rows = rows.reshape(-1, rows.shape[-1])
                caught[name] = rows if ordered else self._reordered(rows, unit.grid, back=False)

            return catch

        hooks = [module.register_forward_hook(hook(name, ordered)) for name, module, ordered in self._tapped()]
        try:
            self._run(unit)
        finally:
            for each in hooks:
                each.remove()
        return caught

    def _run(self, unit: Unit) -> np.ndarray:
        patches = unit.patches
        values = self.table[patches, self._channels] if patches.dtype == np.uint8 else patches
        with self._evaluating():
            return as_numpy(self._forward(need_torch().from_numpy(values), unit.grid))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        torch = need_torch()
        with torch.inference_mode():
            if self.dtype == "float64":
                with float64_throughout(torch):
                    yield
            else:
                yield

    @abstractmethod
    def _forward(self, values: Any, grid: Grid) -> Any:
        """Normalised patches [rows, values] of one unit -> embeddings [tokens, hidden]."""

    @abstractmethod
    def _split(self, inputs: Mapping[str, Any]) -> list[tuple[Any, Grid]]:
        """Normalised patches [rows, values] and grid of each unit of a processor's output."""

    @abstractmethod
    def _tapped(self) -> list[tuple[str, Any, bool]]:
        """(name, module, whether its rows come in our order already) of every tap."""

    @property
    @abstractmethod
    def _channels(self) -> np.ndarray:
        """Colour channel of each value of a patch, in the reference's order."""

    @abstractmethod
    def _order(self, height: int, width: int) -> np.ndarray:
        """For each row of a frame in our order, its row in the reference's."""

    def _reordered(self, rows: np.ndarray, grid: Grid, back: bool) -> np.ndarray:
        """Rows of t frames from the reference's order to ours, or back."""
        frames = rows.reshape(grid[0], grid[1] * grid[2], -1)
        order = self._order(grid[1], grid[2])
        return frames[:, np.argsort(order) if back else order].reshape(rows.shape)

    def _cells(self, height: int, width: int) -> np.ndarray:
        """Row-major numbers of a frame's patches, cell by cell: [cells, merge * merge]."""
        numbers, m = np.arange(height * width), self.merge
        return numbers.reshape(height // m, m, width // m, m).swapaxes(1, 2).reshape(-1, m * m)
