"""Pictures (extra ``plots``): features and errors on a photograph, a ladder as a staircase.

Every function writes a file; matplotlib's global state is neither used nor changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxvit.compare import FLOOR, Report
from jaxvit.models.family import Family, Item
from jaxvit.sheet import (
    ALARM,
    EDGE,
    FAINT,
    GOOD,
    INK,
    OURS,
    PEER,
    Block,
    Words,
    figure_of,
    legend,
    line,
    plain,
    sheet,
    shortened,
    times,
)
from jaxvit.views import View, views

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
SHOWN = 48
"""Pieces of a clip that are shown, evenly spaced over it, at most."""
DECADES = 1e6
"""From one end of a scale of differences to the other, at most."""
SUFFIXES = ".png", ".svg", ".pdf"
"""Of the files that are written."""


def need() -> None:
    """Raises a DependencyError where the extra is missing: before the work whose picture is wanted."""
    figure_of(1.0, 1.0)


def show(family: Family, item: Item, embeddings: np.ndarray, path: Path, *, title: str, random: bool = False) -> None:
    """The item's embeddings [tokens, hidden] as colours, beside what the tower sees of it.

    A clip has two panels a piece (frame pair, chunk of frames) under the frames that it holds, in one set of colours.

    Args:
        random: the weights are drawn, so that the colours mean nothing; the picture says so.
    Raises:
        DependencyError: matplotlib is missing.
    """
    projected, shares = components(embeddings)
    tint = colours(projected)
    found = views(family, item)

    def paint(axes: Axes, view: View) -> None:
        gray = view.pixels.mean(-1, keepdims=True) / 255
        axes.imshow(np.clip(0.82 * _enlarged(tint[view.tokens], view) + 0.18 * gray, 0, 1))

    captions = "what the tower sees", "its embeddings, as colours"
    name = Words(shortened(title), INK, 13, "bold")
    warning = Words("random weights: the colours carry no meaning" if random else "", ALARM, 10)
    size = times(found[0].pixels.shape[1::-1])
    subtitle = f"{family.name}: {size} pixels, {item.tokens} tokens, {embeddings.shape[1]} values each"
    blocks = [Block(found, paint)]
    if found[-1].frames and len(found) > 1:
        places = sorted({round(place) for place in np.linspace(0, len(found) - 1, SHOWN)})
        blocks = [Block([replace(found[place], name="picture")], paint, _frames(found[place])) for place in places]
        subtitle += f", {found[-1].frames[1]} frames" + f", {SHOWN} of {len(found)} pieces" * (len(found) > SHOWN)
    figure = sheet(blocks, captions, (name, warning), subtitle, foot=0.62)
    foot = figure.get_figheight()
    legend(figure, found, foot - 0.46)
    percent = ", ".join(f"{share:.0%}" for share in shares)
    explained = f"red, green, blue: first three principal components of the embeddings ({percent} of their variance)"
    line(figure, EDGE, foot - 0.24, Words(explained))
    figure.savefig(path, dpi=DPI)


def _frames(view: View) -> tuple[Words, ...]:
    """The heading of a piece of a clip."""
    assert view.frames
    first, last = view.frames
    said = f"frame {first}" if first == last else f"frames {first} to {last}, the first is shown"
    return Words(view.name, INK, 10, "bold"), Words(said)


def differences(family: Family, items: Sequence[Item], report: Report, path: Path) -> None:
    """Where ours and the reference differ, token by token on every picture of a report, on one logarithmic scale.

    A token that is not finite gets the scale's upper end, one that does not differ its lower end.

    Args:
        items: what was compared, in the order of the report.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    errors = [item.tokens_off for item in report.items]
    shown = np.concatenate([*errors, [item.bound for item in report.items], [FLOOR]])
    shown = shown[np.isfinite(shown) & (shown > 0)]
    high = 10.0 ** ceil(log10(shown.max()))
    low = max(min(10.0 ** floor(log10(shown.min())), high / 10), high / DECADES)
    scale = ScalarMappable(LogNorm(low, high), "magma")
    blocks = []
    for item, compared, error in zip(items, report.items, errors, strict=True):
        painted = scale.to_rgba(np.clip(np.nan_to_num(error, nan=high), low, high))[:, :3]

        def paint(axes: Axes, view: View, painted: np.ndarray = painted) -> None:
            axes.imshow(_enlarged(painted[view.tokens], view))

        said = Words(
            f"relative RMS {compared.last.relative_rms:.1e}, bound {compared.bound:.1e}",
            GOOD if compared.encoder_ok else ALARM,
        )
        blocks.append(Block(views(family, item), paint, (Words(shortened(compared.name), INK, 10, "bold"), said)))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    figure = sheet(
        blocks,
        ("what the tower sees", "difference of each token"),
        [Words(f"{report.family} in {report.dtype}, beside PyTorch", INK, 13, "bold")],
        versions,
        foot=1.15,
    )
    legend(figure, [view for block in blocks for view in block.views], figure.get_figheight() - 0.98)
    _colour_bar(figure, scale, {item.bound for item in report.items})
    figure.savefig(path, dpi=DPI)


# Colours of embeddings


def components(embeddings: np.ndarray, count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """The first principal components of embeddings [tokens, hidden], and each one's share of the variance.

    Returns:
        float64 [tokens, count], each with the sign that makes its largest entry positive, and [count]; zeros where
        there are fewer.
    """
    centred = np.asarray(embeddings, np.float64)
    centred = centred - centred.mean(0)
    wide = len(centred) <= centred.shape[1]
    values, vectors = np.linalg.eigh(centred @ centred.T if wide else centred.T @ centred)
    values, vectors = np.maximum(values[::-1][:count], 0), vectors[:, ::-1][:, :count]
    projected = vectors * np.sqrt(values) if wide else centred @ vectors
    largest = projected[np.abs(projected).argmax(0), np.arange(projected.shape[1])]
    shares = values / ((centred**2).sum() or 1.0)
    missing = count - len(values)
    return np.pad(projected * np.where(largest < 0, -1, 1), ((0, 0), (0, missing))), np.pad(shares, (0, missing))


def colours(projected: np.ndarray) -> np.ndarray:
    """Components [tokens, 3] as red, green, blue in 0..1: each from its 1st to its 99th percentile."""
    low, high = np.percentile(projected, [1, 99], axis=0)
    return np.clip((projected - low) / np.where(high > low, high - low, 1), 0, 1)


def _enlarged(values: np.ndarray, view: View) -> np.ndarray:
    """[rows, columns, 3] of tokens -> [height, width, 3] of pixels."""
    return values.repeat(view.side, axis=0).repeat(view.side, axis=1)


def _colour_bar(figure: Figure, scale: Any, bounds: Iterable[float]) -> None:
    """The scale of the differences at the foot, with marks where the bounds on whole pictures lie."""
    width, height = figure.get_size_inches()
    explained = "RMS of a token's difference, over the RMS of PyTorch's embeddings of that picture"
    end = line(figure, EDGE, height - 0.62, Words(explained))
    axes = figure.add_axes((EDGE / width, 0.36 / height, (end - EDGE) / width, 0.14 / height))
    bar = figure.colorbar(scale, cax=axes, orientation="horizontal")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(labelsize=8, colors=FAINT, length=2)
    bar.ax.minorticks_off()
    for bound in bounds:
        bar.ax.plot([bound, bound], [-0.35, 1.35], color=OURS, linewidth=1.8, clip_on=False)
    line(figure, end + 0.1, height - 0.38, Words("blue mark: the bound on a whole picture", OURS))


# A ladder


def ladder_plot(
    rows: Sequence[Mapping[str, Any]], path: Path, *, title: str, subtitle: str = "", peer: str = "PyTorch"
) -> None:
    """A ladder as a staircase: the milliseconds of the bucket that a piece of so many patches takes.

    Args:
        rows: one a bucket, in any order: ``patches`` (its capacity), ``milliseconds`` (a full call), and, where they
            are known, ``floor`` and ``peer``: milliseconds that the device's limits leave for so many patches, and
            those of what the ladder is compared with.
        peer: its name.
    """
    rows = sorted(rows, key=lambda row: row["patches"])
    figure = figure_of(8.6, 5.0)
    line(figure, EDGE, 0.36, Words(title, INK, 13, "bold"))
    line(figure, EDGE, 0.58, Words(subtitle, size=9.5))
    axes = figure.add_axes((0.085, 0.12, 0.785, 0.72))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends: list[tuple[float, str, str]] = []
    for name, label, colour in (("floor", "floor", FAINT), ("peer", peer, PEER), ("milliseconds", "jaxvit", OURS)):
        known = [(row["patches"], row[name]) for row in rows if row.get(name) is not None]
        if not known:
            continue
        x, y = zip(*known, strict=True)
        if name == "milliseconds":
            steps = [x[0] / 2, *x], [y[0], *y]
            axes.step(*steps, where="pre", color=colour, linewidth=2.2)
        else:
            axes.plot(x, y, color=colour, linewidth=1.4, linestyle=":" if name == "floor" else "-")
        axes.plot(x, y, "o", color=colour, markersize=4 if name == "milliseconds" else 2.5, clip_on=False)
        ends.append((float(y[-1]), f"{label} {y[-1]:.3g} ms", colour))
    last = rows[-1]["patches"]
    axes.set_xlim(rows[0]["patches"] / 2, last)
    _labels(axes, last, ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.set_xlabel("patches of the piece", color=FAINT, fontsize=9.5)
    axes.set_ylabel("milliseconds of its call", color=FAINT, fontsize=9.5)
    plain(axes)
    figure.savefig(path, dpi=DPI)


def _labels(axes: Axes, x: int, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names curves (y, text, colour) at their right ends, at least a line of text apart."""
    lowest = -float("inf")
    for y, text, colour in sorted(ends):
        place = axes.transData.transform((x, y))[1] * 72 / axes.figure.dpi
        level = max(place, lowest + 12)
        lowest = level
        offset = 8, level - place
        axes.annotate(text, (x, y), offset, textcoords="offset points", color=colour, fontsize=9, va="center")
