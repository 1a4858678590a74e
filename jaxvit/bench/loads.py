"""What is measured: packed pieces of given sizes in a bucket that they fill, and pictures as JPEG files."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from jaxvit.buckets.ladder import Ladder, complete
from jaxvit.errors import OptionError
from jaxvit.models.family import Bucket, Demand, Family, Item, Piece
from jaxvit.paths import data


@dataclass(frozen=True, eq=False)
class Load:
    """One call: pieces and the bucket that takes them.

    Attributes:
        name: "4x1024": four pieces of 1,024 patches.
    """

    name: str
    bucket: Bucket
    pieces: tuple[Piece, ...]

    @property
    def items(self) -> list[Item]:
        """Every piece as an item of its own."""
        return [Item((piece,), (piece.grid,), piece.tokens) for piece in self.pieces]


def load_of(family: Family, text: str, ladder: Ladder, attention: str = "auto") -> Load:
    """``"4x1024"``: four still pieces of 1,024 patches each, nearly square, random pixels, in a bucket of their size.

    Args:
        ladder: its bucket is taken where it has just this size, with its attention backend.
        attention: the backend where it does not.
    Raises:
        OptionError: the text is not of that form, or the family has no piece of so many patches.
    """
    count, piece = piece_of(family, text)
    pieces = repainted([piece] * count)
    total = total_of(pieces)
    for bucket in ladder:
        if bucket.tokens == total.tokens and bucket.holds(total):
            return Load(text, bucket, pieces)
    return Load(text, complete(family, {"tokens": total.tokens, "attention": attention}), pieces)


def piece_of(family: Family, text: str) -> tuple[int, Piece]:
    """How many pieces ``"4x1024"`` asks for, and one of them.

    Raises:
        OptionError: the text is not of that form, or the family has no piece of so many patches.
    """
    count, patches = size_of(text)
    tokens, left = divmod(patches, family.merge**2)
    smallest, largest = family.budget_range()
    if left or not smallest <= tokens <= largest:
        raise OptionError(
            f"{text!r}: a piece of {family.name} has {smallest * family.merge**2} to {largest * family.merge**2} "
            f"patches here, a multiple of {family.merge**2}"
        )
    piece = family.example(complete(family, {"tokens": tokens, "segments": 1}))[0]
    if piece.rows != patches:
        near = f"{piece.rows} patches ({piece.grid[1]} x {piece.grid[2]})"
        raise OptionError(f"{text!r}: no nearly square grid has {patches} patches; the next smaller has {near}")
    return count, piece


def size_of(text: str) -> tuple[int, int]:
    """Pieces, and patches of each, of ``"4x1024"``.

    Raises:
        OptionError: the text is not of that form.
    """
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text.strip())
    if not match:
        raise OptionError(f"{text!r:.80} is no load: write pieces x patches of each, such as 4x1024")
    count, patches = int(match[1]), int(match[2])
    if not count or not patches:
        raise OptionError(f"{text!r}: a load has at least one piece of at least one patch, such as 4x1024")
    return count, patches


def full(family: Family, bucket: Bucket) -> Load:
    """The bucket filled by the largest legal pieces."""
    return Load(f"{bucket.tokens} tokens", bucket, repainted(family.example(bucket)))


def split(family: Family, bucket: Bucket, parts: int) -> tuple[Piece, ...] | None:
    """Pieces that fill a bucket in ``parts`` equal shares; None where pieces are not as small or not as many."""
    smallest, _ = family.budget_range()
    tokens = bucket.tokens // parts
    if tokens < smallest or parts > bucket.segments:
        return None
    share = family.example(complete(family, {"tokens": tokens, "segments": max(1, bucket.segments // parts)}))
    pieces: list[Piece] = []
    for piece in share * parts:
        if bucket.holds(total_of([*pieces, piece])):
            pieces.append(piece)
    return repainted(pieces)


def total_of(pieces: Sequence[Piece]) -> Demand:
    """What pieces take together on each axis."""
    return Demand(*(sum(axis) for axis in zip(*(piece.demand for piece in pieces), strict=True)))


def repainted(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same pieces, each with random pixels of its own."""
    generator = np.random.default_rng(0)
    return tuple(
        replace(piece, patches=generator.integers(0, 256, piece.patches.shape, dtype=np.uint8)) for piece in pieces
    )


def jpegs(height: int, width: int, count: int) -> list[bytes]:
    """JPEG files of one size, each another part of a photograph of the demo: they decode as slowly as photographs."""
    folder = data("weights") / "demo" / "photos"
    photos = [Image.open(path).convert("RGB") for path in sorted(folder.glob("*.[jp][pn]g"))]
    generator = np.random.default_rng(0)
    if not photos:
        coarse = generator.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        photos = [Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC)]
    files = []
    for index in range(count):
        photo = photos[index % len(photos)]
        share = generator.uniform(0.6, 1.0)
        across, down = int(photo.width * share), int(photo.height * share)
        left, top = (int(generator.integers(0, room + 1)) for room in (photo.width - across, photo.height - down))
        part = photo.resize((width, height), Image.Resampling.BICUBIC, (left, top, left + across, top + down))
        buffer = io.BytesIO()
        part.save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files
