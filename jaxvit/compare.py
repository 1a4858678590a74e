"""Ours beside the PyTorch reference: PyTorch | exact shapes | bucketed, with the gap of the pixels apart.

Both encoders get identical uint8 pixels, ours, so that their gap holds nothing of the preprocessing; whether the
reference's processor makes the same pixels is counted beside it. The bounds:

- float32: relative RMS at most 1e-5, or twice the reference's own float32 error against float64 if that is more;
- bfloat16: our error against the float32 reference at most 1.5 times the bfloat16 reference's for an item, and at most
  1.1 times over all items of a call of at least 8 (the reference's error is pooled over its sdpa and eager attention).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxvit import media as _media
from jaxvit.errors import CheckpointError
from jaxvit.metrics import Metrics, Tally, metrics, relative_rms, token_errors
from jaxvit.models.family import Item

if TYPE_CHECKING:
    from rich.table import Table

    from jaxvit.encoder import Encoder
    from jaxvit.reference import Reference

FLOOR = 1e-5
OWN = 2.0
ITEM, POOLED, POOL = 1.5, 1.1, 8


class PixelGap(NamedTuple):
    """Our uint8 pixels beside those of the reference's processor.

    Attributes:
        values: how many differ.
        largest: by how much at most.
        fault: what is not even comparable (grids, normalisation), empty when nothing.
    """

    values: int = 0
    largest: int = 0
    fault: str = ""

    @property
    def ok(self) -> bool:
        return not self.values and not self.fault


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """One item.

    Attributes:
        pixels: None for an item that was handed in prepared.
        exact: the exact path against PyTorch.
        bucketed, between: the bucketed path against PyTorch and against the exact one; None when it did not run.
        own: the reference's own error: float32 against float64 (None where 1e-5 was enough), bfloat16 against float32.
        bound: on the relative RMS of all three.
        layers: (name, metrics) of the exact path's intermediates; empty unless asked for.
        tokens_off: float32 [tokens]: see :func:`token_errors`, of the bucketed path where it ran.
    """

    name: str
    tokens: int
    pixels: PixelGap | None
    exact: Metrics
    bucketed: Metrics | None
    between: Metrics | None
    own: float | None
    bound: float
    layers: tuple[tuple[str, Metrics], ...]
    tokens_off: np.ndarray

    @property
    def encoder_ok(self) -> bool:
        measured = (self.exact, self.bucketed, self.between)
        return all(each.relative_rms <= self.bound for each in measured if each is not None)

    @property
    def ok(self) -> bool:
        return self.encoder_ok and (self.pixels is None or self.pixels.ok)

    @property
    def last(self) -> Metrics:
        """The bucketed path against PyTorch, the exact one where buckets did not run."""
        return self.bucketed or self.exact


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What :func:`compare` found; ``print`` shows it.

    Attributes:
        pooled: our bfloat16 error over the reference's, pooled over all items; None in float32.
        versions: of torch, transformers and jax.
    """

    items: tuple[Comparison, ...]
    family: str
    dtype: str
    pooled: float | None
    versions: Mapping[str, str]

    @property
    def ok(self) -> bool:
        return all(item.ok for item in self.items) and self.pooled_ok

    @property
    def pooled_ok(self) -> bool:
        return self.pooled is None or len(self.items) < POOL or self.pooled <= POOLED

    def table(self) -> Table:
        """The items as a rich table."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.family}, {self.dtype}: relative RMS against PyTorch on identical pixels")
        table.add_column("item", overflow="fold")
        for name in ("tokens", "pixels off", "exact", "bucketed", "bucketed to exact", "max abs", "cosine", "bound"):
            table.add_column(name, justify="right")
        table.add_column("verdict")
        for item in self.items:
            gaps = [f"{each.relative_rms:.1e}" if each else "-" for each in (item.exact, item.bucketed, item.between)]
            last = (f"{item.last.max_abs:.1e}", f"{item.last.cosine:.6f}", f"{item.bound:.1e}")
            said = "equal" if item.ok else "pixels differ" if item.encoder_ok else "differs"
            verdict = Text(said, "green" if item.ok else "bold red")
            table.add_row(Text(item.name), str(item.tokens), _pixels(item.pixels), *gaps, *last, verdict)
        return table

    def layers(self) -> Table | None:
        """The worst item at each intermediate, as a rich table; None when layers were not compared."""
        from rich.table import Table

        found: dict[str, list[Metrics]] = {}
        for item in self.items:
            for name, measured in item.layers:
                found.setdefault(name, []).append(measured)
        if not found:
            return None
        table = Table("layer", title="exact shapes against PyTorch, the worst item at each layer")
        for name in ("relative RMS", "max abs", "cosine"):
            table.add_column(name, justify="right")
        for name, each in found.items():
            rms, largest, lowest = (max(m[0] for m in each), max(m[1] for m in each), min(m[2] for m in each))
            table.add_row(name, f"{rms:.1e}", f"{largest:.1e}", f"{lowest:.6f}")
        return table

    def summary(self) -> str:
        """One line."""
        good = sum(item.ok for item in self.items)
        pool = f"; error over all items {self.pooled:.2f} x the reference's own" if self.pooled is not None else ""
        pool += "" if self.pooled_ok else f", more than {POOLED}"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{good} of {len(self.items)} items equal the reference{pool} ({versions})"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=132, color_system=None, force_terminal=False)
        with console.capture() as captured:
            for part in (self.table(), self.layers(), self.summary()):
                if part is not None:
                    console.print(part, markup=False, highlight=False)
        return captured.get().rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it, but the error of each token."""
        items = []
        for item in self.items:
            entry: dict[str, Any] = {"name": item.name, "tokens": item.tokens, "ok": item.ok}
            entry |= {"own": item.own, "bound": item.bound}
            for name in ("pixels", "exact", "bucketed", "between"):
                value = getattr(item, name)
                entry[name] = None if value is None else value._asdict()
            entry["layers"] = {name: measured._asdict() for name, measured in item.layers}
            items.append(entry)
        shared = {"family": self.family, "dtype": self.dtype, "pooled": self.pooled, "versions": dict(self.versions)}
        return {"ok": self.ok, **shared, "items": items}


def compare(encoder: Encoder, media: Any, *, per_layer: bool = False, bucketed: bool = True) -> Report:
    """Compares an encoder with the PyTorch reference of the same checkpoint.

    Args:
        encoder: from ``jaxvit.load`` (its folder is read again).
        media: what ``Encoder.encode`` takes. Video pruning is left out of the comparison.
        per_layer: also every named intermediate of the exact path.
        bucketed: also the bucketed path.
    Raises:
        DependencyError: the extra ``compare`` is missing. MediaError: an item cannot be used.
    """
    from jaxvit.reference.loading import need_torch

    need_torch()
    if encoder.folder is None:
        raise CheckpointError("this encoder knows no checkpoint folder to load the reference from; use jaxvit.load")
    sequence = _media.as_sequence(media)
    decoded = [_media.decode(medium, index, encoder.family) for index, medium in enumerate(sequence)]
    items = [_unpruned(item) for item in encoder.prepare(decoded)]
    reference = _reference(encoder, "float32", "sdpa")
    pixels = [_pixel_gap(encoder, reference, medium, item) for medium, item in zip(decoded, items, strict=True)]
    theirs = [reference.encode(item) for item in items]
    layers = [_layers(encoder, reference, item) if per_layer else () for item in items]
    del reference
    exact = encoder.encode(items, bucketed=False)
    packed = encoder.encode(items) if bucketed else [None] * len(items)
    gaps = [_gaps(*each) for each in zip(exact, packed, theirs, strict=True)]
    own = _own_errors(encoder, items, theirs, gaps)
    found = []
    for index, (item, gap, mine) in enumerate(zip(items, gaps, own, strict=True)):
        bound = max(FLOOR, OWN * (mine or 0.0)) if encoder.dtype == "float32" else ITEM * (mine or 0.0)
        last = packed[index]
        errors = token_errors(exact[index] if last is None else last, theirs[index])
        name = _name(sequence[index], index)
        found.append(Comparison(name, item.tokens, pixels[index], *gap, mine, bound, layers[index], errors))
    pooled = None if encoder.dtype == "float32" else _pooled(found, theirs)
    return Report(tuple(found), encoder.family.name, encoder.dtype, pooled, _versions())


def _gaps(
    exact: np.ndarray, packed: np.ndarray | None, theirs: np.ndarray
) -> tuple[Metrics, Metrics | None, Metrics | None]:
    """Exact against PyTorch, bucketed against PyTorch, bucketed against exact."""
    if packed is None:
        return metrics(exact, theirs), None, None
    return metrics(exact, theirs), metrics(packed, theirs), metrics(packed, exact)


def _reference(encoder: Encoder, dtype: str, attention: str) -> Reference:
    from jaxvit.reference import load_reference

    assert encoder.folder is not None
    return load_reference(encoder.folder, encoder.family.name, dtype, attention, encoder.overrides)


def _unpruned(item: Item) -> Item:
    return dataclasses.replace(item, prune=0.0, tokens=sum(piece.tokens for piece in item.pieces))


def _pixel_gap(encoder: Encoder, reference: Reference, picture: Any, item: Item) -> PixelGap | None:
    """Counts the uint8 pixels in which the reference's processor differs."""
    if isinstance(picture, Item):
        return None
    made = reference.pixels(reference.process(picture.frames if isinstance(picture, _media.Video) else picture))
    units = reference.units(item)
    grids = [grid for _, grid in made]
    if grids != list(item.grids):
        return PixelGap(fault=f"grids {list(item.grids)}, the reference's {grids}")
    if not np.array_equal(encoder.family.table, reference.table):
        return PixelGap(fault="normalised differently")
    gaps = [np.abs(unit.patches.astype(np.int16) - patches) for unit, (patches, _) in zip(units, made, strict=True)]
    return PixelGap(sum(int(np.count_nonzero(gap)) for gap in gaps), max(int(gap.max()) for gap in gaps))


def _layers(encoder: Encoder, reference: Reference, item: Item) -> tuple[tuple[str, Metrics], ...]:
    """Metrics of every intermediate, a piece at a time."""
    tallies: dict[str, Tally] = {}
    for piece in item.pieces:
        alone = dataclasses.replace(item, pieces=(piece,), grids=(piece.grid,), tokens=piece.tokens)
        ours, theirs = encoder.intermediates(alone)[0], reference.taps(alone)[0]
        for name, value in theirs.items():
            tallies.setdefault(name, Tally()).add(ours[name], value)
    return tuple((name, tally.metrics) for name, tally in tallies.items())


def _own_errors(
    encoder: Encoder,
    items: Sequence[Item],
    theirs: Sequence[np.ndarray],
    gaps: Sequence[tuple[Metrics, Metrics | None, Metrics | None]],
) -> list[float | None]:
    """The reference's own error of each item, where the bound needs it."""
    own: list[float | None] = [None] * len(items)
    if encoder.dtype == "float32":
        good = [all(each.relative_rms <= FLOOR for each in gap if each is not None) for gap in gaps]
        wanted = [index for index, enough in enumerate(good) if not enough]
        if wanted:
            reference = _reference(encoder, "float64", "sdpa")
            for index in wanted:
                own[index] = relative_rms(theirs[index], reference.encode(items[index]))
        return own
    squares = np.zeros(len(items))
    for attention in ("sdpa", "eager"):
        reference = _reference(encoder, encoder.dtype, attention)
        squares += [relative_rms(reference.encode(item), goal) ** 2 for item, goal in zip(items, theirs, strict=True)]
    return [float(np.sqrt(each / 2)) for each in squares]


def _pooled(found: Sequence[Comparison], theirs: Sequence[np.ndarray]) -> float:
    """Our error over the reference's, both pooled over all items: the larger of the exact and the bucketed path's."""
    power = np.array([np.sum(goal.astype(np.float64) ** 2) for goal in theirs])
    own = np.array([item.own for item in found], np.float64)
    ratios = []
    for path in ("exact", "bucketed"):
        if getattr(found[0], path) is not None:
            ours = np.array([getattr(item, path).relative_rms for item in found])
            ratios.append(np.sqrt((ours**2 * power).sum() / (own**2 * power).sum()))
    return float(max(ratios))


def _pixels(gap: PixelGap | None) -> str:
    if gap is None:
        return "-"
    return gap.fault or (f"{gap.values} (by {gap.largest})" if gap.values else "0")


def _name(medium: Any, index: int) -> str:
    path = getattr(medium, "path", None) or medium
    return (
        str(path).replace("\\", "/").rsplit("/", 1)[-1]
        if isinstance(path, str) or hasattr(path, "parts")
        else f"item {index}"
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "jax")}
