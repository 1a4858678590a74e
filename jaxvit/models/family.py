"""What every model family provides, and the values that travel from pictures to a bucket's buffers.

The way of the data: picture -> :class:`Item` of :class:`Piece` -> plan -> buffers of a :class:`Bucket` -> executable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxvit.buffer import Buffer
from jaxvit.errors import MediaError
from jaxvit.layers.fuse import ByHead, Interleaving, Pairing, Widening

Grid = tuple[int, int, int]
"""(t, h, w): frames (or frame pairs), rows and columns, in patches."""

Probe = Callable[[str, Any], Any]
"""``probe(name, value) -> value``: called at each named intermediate of a forward pass."""


def no_probe(name: str, value: Any) -> Any:
    return value


class Demand(NamedTuple):
    """What a piece takes on each axis of a bucket."""

    patches: int
    tokens: int
    segments: int
    windows: int


@dataclass(frozen=True, eq=False)
class Piece:
    """The smallest unit that attends only within itself: an image, a tile, a chunk, a frame pair.

    Attributes:
        grid: (t, h, w) in patches of this piece alone.
        patches: uint8 or float32 [rows, values], rows in the order in which the family's executable wants them.
        tokens: rows of embeddings that come out.
        windows: attention windows, 0 where the family has none.
    """

    grid: Grid
    patches: np.ndarray
    tokens: int
    windows: int = 0

    @property
    def rows(self) -> int:
        """Rows of the packed patch axis: t * h * w."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def demand(self) -> Demand:
        return Demand(self.rows, self.tokens, 1, self.windows)


@dataclass(frozen=True, eq=False)
class Item:
    """One image or video, ready for the encoder.

    Attributes:
        pieces: in the order in which their tokens are put together.
        grids: (t, h, w) in patches as the family's Hugging Face processor reports them.
        tokens: rows of embeddings the item will get, pruning included.
        layout: what a language model needs beside the embeddings (the family's ``processing.py`` says which keys).
        prune: share of a video's tokens to drop, 0 for none.
    """

    pieces: tuple[Piece, ...]
    grids: tuple[Grid, ...]
    tokens: int
    layout: Mapping[str, Any] = field(default_factory=dict)
    prune: float = 0.0

    @property
    def num_patches(self) -> int:
        """Patches over all pieces."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def patches(self) -> np.ndarray:
        """The pieces' patches, one behind the other: uint8 [rows, values] (float32 if it was handed in so)."""
        return np.concatenate([piece.patches for piece in self.pieces])


Rows = np.ndarray | list[np.ndarray]
"""An array, or arrays that lie one behind the other: those are copied once, into the padded buffer."""


def joined(rows: Rows) -> np.ndarray:
    return np.concatenate(rows) if isinstance(rows, list) else rows


@dataclass(frozen=True)
class Bucket:
    """Capacities of one executable, on every axis.

    Attributes:
        tokens: budget in output tokens.
        patches: rows of the packed patch axis.
        segments: pieces at most.
        windows: attention windows at most, 0 where the family has none.
        attention: name of the attention backend.
        constant: fitted milliseconds of a call without attention, None when not measured.
        slope: fitted milliseconds per squared patch of a segment, None when not measured.
    """

    tokens: int
    patches: int
    segments: int
    windows: int = 0
    attention: str = "auto"
    constant: float | None = None
    slope: float | None = None

    @property
    def capacity(self) -> Demand:
        return Demand(self.patches, self.tokens, self.segments, self.windows)

    def holds(self, demand: Demand) -> bool:
        patches, tokens, segments, windows = demand
        return (
            patches <= self.patches and tokens <= self.tokens and segments <= self.segments and windows <= self.windows
        )


class Family(ABC):
    """A model family: what the shared encoder, planner, loader and store ask of it.

    ``models/<family>/__init__.py`` subclasses this and delegates to the family's five files.
    """

    name: ClassVar[str]
    """The ``model_type``, which is also the folder's name."""
    prefixes: ClassVar[tuple[str, ...]]
    """Every prefix that marks a tensor of the vision tower or projector in a checkpoint."""
    segment_sets: ClassVar[tuple[str, ...]] = ("full",)
    """Names of the ways in which patches are cut into attention segments; Qwen2.5-VL adds "window"."""
    takes_video: ClassVar[bool] = False
    """Where it is False, no file of a video is opened; else ``processing`` has ``prepare_video``, ``settings``
    ``sample_frames``."""
    processing: ClassVar[ModuleType]
    """The family's module of that name: ``prepare``, ``items``."""

    config: Any
    """Frozen dataclass of the vision tower and projector."""
    settings: Any
    """Frozen dataclass of the processing settings."""

    @classmethod
    @abstractmethod
    def from_files(cls, files: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any] | None = None) -> Family:
        """Builds the family from a checkpoint's JSON files.

        Args:
            files: file name -> parsed JSON, for those that exist (config.json, preprocessor_config.json,
                processor_config.json, video_preprocessor_config.json).
            overrides: processing settings that beat the files.
        Raises:
            CheckpointError: a field that this family cannot honour; the message names it.
        """

    @property
    @abstractmethod
    def merge(self) -> int:
        """Patches per token along one side."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Hidden size of the embeddings that come out."""

    @property
    def table(self) -> np.ndarray:
        """float32 [256, 3]: the normalised value of each uint8 value of each channel, bit-equal to the reference."""
        return self.settings.table

    @property
    def channels(self) -> np.ndarray:
        """int32 [values]: the colour channel of each value of a patch."""
        return self.settings.channels

    def budget_range(self) -> tuple[int, int]:
        """Output tokens of the smallest and of the largest piece that the settings can produce."""
        return self.settings.budget_range()

    def largest(self) -> Demand:
        """The largest piece's need on each axis; patches = tokens x merge^2 unless the family says otherwise."""
        tokens = self.budget_range()[1]
        return Demand(tokens * self.merge**2, tokens, 1, self.most_windows(tokens, 1))

    def most_windows(self, tokens: int, pieces: int) -> int:
        """Attention windows that so many pieces, of so many tokens together, never exceed; 0 where there are none."""
        return 0

    def prepare(self, picture: np.ndarray) -> Item:
        """One RGB picture, uint8 [h, w, 3], to an item. Raises MediaError for a size the family refuses."""
        return self.processing.prepare(picture, self.settings)

    def prepare_video(self, frames: Sequence[np.ndarray], fps: float | None, timestamps: Any, prune: float) -> Item:
        """RGB frames, uint8 [h, w, 3], all of one size, to an item. Raises MediaError where there is no video input."""
        if not self.takes_video:
            raise self.no_video()
        return self.processing.prepare_video(frames, self.settings, fps, timestamps, prune)

    def no_video(self) -> MediaError:
        """What a family without video answers to one."""
        return MediaError(f"{self.name} has no video input; pass the frames as images")

    def sample_frames(self, total: int, native: float, fps: float | None) -> Sequence[int]:
        """Which of a file's ``total`` frames at ``native`` a second are taken, at ``fps`` (None: the default)."""
        return self.settings.sample_frames(total, native, fps)

    def items(self, inputs: Mapping[str, Any], pieces_per_item: Sequence[int] | None = None) -> list[Item]:
        """Items from the output of the family's Hugging Face processor."""
        return self.processing.items(inputs, self.settings, pieces_per_item)

    @abstractmethod
    def buffers(self, bucket: Bucket, pixels: Literal["uint8", "float32"]) -> tuple[Buffer, ...]:
        """The family's own inputs of a bucket; attention metadata is the backend's."""

    @abstractmethod
    def layout(self, pieces: Sequence[Piece], bucket: Bucket) -> dict[str, Rows]:
        """Rows for those buffers, not padded, the pieces packed one behind the other from row 0."""

    @abstractmethod
    def lengths(self, pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
        """For each segment set: int32 lengths in patches of its segments, from row 0 without gaps."""

    def longest(self, reach: str) -> int | None:
        """Patches that no segment of a set exceeds, None where there is no such bound."""
        return None

    def example(self, bucket: Bucket) -> list[Piece]:
        """Legal pieces with random pixels that fill the bucket, for warm-up, tuning and benchmarks."""
        generator = np.random.default_rng(0)
        smallest, largest = self.budget_range()
        shapes = rectangles(bucket.tokens, smallest, largest, side=largest)[: bucket.segments]
        return [self.random_piece(1, rows * self.merge, columns * self.merge, generator) for rows, columns in shapes]

    @abstractmethod
    def random_piece(self, frames: int, height: int, width: int, generator: np.random.Generator) -> Piece:
        """A piece of (frames, height, width) patches, its pixels random; of one frame where pieces have no more."""

    @abstractmethod
    def module(self) -> Any:
        """The Flax NNX module in float32 (build it under ``nnx.eval_shape`` to get shapes alone).

        Called with ``(arrays, attend, probe)``: the named buffers, with normalised ``pixels``; one attention function
        ``(qkv, rotation) -> out`` a segment set, from [patches, 3, heads, head_dim]; and the probe. Returns
        [tokens, width].
        """

    def widenings(self) -> tuple[Widening, ...]:
        """Sizes of the tower that may be padded with zeros for speed, with what accelerators like them to be."""
        return ()

    def by_head(self) -> tuple[Interleaving | ByHead, ...]:
        """Where that kernel runs: how the projections that it rotates lie, and what reads their results."""
        return ()

    def pairings(self) -> tuple[Pairing, ...]:
        """Layers of the tower that one kernel can compute, where it runs."""
        return ()

    @property
    @abstractmethod
    def keys(self) -> Any:
        """The key table: anchored pattern of a tensor's name -> parameter path and transform."""

    def cells(self, piece: Piece) -> np.ndarray:
        """int [cells]: the merged cell, row-major in its frame, that stands at each place of a frame's patches."""
        return np.arange(piece.grid[1] * piece.grid[2] // self.merge**2)

    def finish(self, item: Item, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The item's embeddings after pruning, and the kept positions (None when nothing was pruned)."""
        return embeddings, None


def rectangles(cells: int, smallest: int, largest: int, side: int) -> list[tuple[int, int]]:
    """(rows, columns) of merged cells, nearly square, that fill ``cells`` as far as pieces of legal sizes can.

    Args:
        smallest, largest: cells of a legal piece.
        side: the longest legal side, in cells.
    """
    found = []
    while cells >= smallest:
        area = min(cells, largest)
        rows = min(max(int(area**0.5), 1), side)
        columns = min(area // rows, side)
        if rows * columns < smallest:
            rows, columns = 1, smallest
        found.append((rows, columns))
        cells -= rows * columns
    return found
