"""A sheet of panels: pictures with the grids of tokens, windows and tiles over them, titles above, a legend below.

Everything is measured in inches from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxvit.errors import DependencyError
from jaxvit.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = (5.6, 4.4)
"""Width and height of a panel at most."""
SEVERAL = 0.62
"""Size of the panels of one item among several, beside those of one alone."""
NARROWEST = 7.6
"""Width that titles and legends need."""
EDGE, GAP, HEAD, CAPTION, LINE = 0.35, 0.14, 0.72, 0.3, 0.24
INK, FAINT, ALARM, GOOD = "#1f2328", "#656d76", "#b3261e", "#1a7f37"
OURS, PEER = "#0b63c5", "#c2571a"
FINEST, SPARSE = 3, 16
"""Points between two lines: a finer grid is left out, and up to the second it is drawn faintly, not to be a veil."""


class Words(NamedTuple):
    """A part of a line of text."""

    text: str
    colour: str = FAINT
    size: float = 9
    weight: str = "normal"


@dataclass(frozen=True)
class Block:
    """One item.

    Attributes:
        paint: draws beside a view what is to be shown of it.
        heading: stands above it, where there are several.
    """

    views: Sequence[View]
    paint: Callable[[Any, View], None]
    heading: tuple[Words, ...] = ()


def sheet(
    blocks: Sequence[Block], captions: tuple[str, str], title: Sequence[Words], subtitle: str, foot: float
) -> Figure:
    """A figure with every block's panels drawn, and ``foot`` left free below them.

    Args:
        captions: of a block's left and right panels.
    """
    across = 1 if len(blocks) <= 3 else 2 if len(blocks) <= 8 else 3
    places = [_places(block.views, 1.0 if len(blocks) == 1 else SEVERAL) for block in blocks]
    above = CAPTION + (LINE if blocks[0].heading else 0)
    rows = [range(start, min(start + across, len(blocks))) for start in range(0, len(blocks), across)]
    cell = max(max(x + w for x, _, w, _ in place) for place in places)
    heights = [max(max(y + h for _, y, _, h in places[index]) for index in row) for row in rows]
    figure = figure_of(
        max(across * cell + (across - 1) * 3 * GAP, NARROWEST) + 2 * EDGE,
        HEAD + sum(heights) + len(rows) * (above + GAP) + foot,
    )
    line(figure, EDGE, 0.36, *title)
    line(figure, EDGE, 0.58, Words(subtitle, size=9.5))
    top = HEAD
    for row, tall in zip(rows, heights, strict=True):
        for column, index in enumerate(row):
            left = EDGE + column * (cell + 3 * GAP)
            line(figure, left, top + LINE, *blocks[index].heading)
            _panels(figure, blocks[index], places[index], captions, left, top + above)
        top += above + tall + GAP
    return figure


def _panels(
    figure: Figure, block: Block, places: Sequence[tuple], captions: tuple[str, str], left: float, top: float
) -> None:
    width, height = figure.get_size_inches()
    for number, (x, y, w, h) in enumerate(places):
        view, painted = block.views[number // 2], number % 2
        axes = figure.add_axes(((left + x) / width, 1 - (top + y + h) / height, w / width, h / height))
        axes.set_axis_off()
        if painted:
            block.paint(axes, view)
        else:
            axes.imshow(view.pixels)
        grid_lines(axes, view, 72 * w / view.pixels.shape[1])
        caption = captions[painted] if view.name == "picture" else "" if painted else view.name
        line(figure, left + x, top + y - 0.08, Words(caption))


def _places(found: Sequence[View], scale: float) -> list[tuple[float, float, float, float]]:
    """(x, y, width, height) of two panels a view: side by side; a thumbnail's one above the other, beside them."""
    places: list[tuple[float, float, float, float]] = []
    top = 0.0
    captioned = 1.45  # what the left one's caption takes
    for view in found:
        if view.name == "thumbnail":
            x, tall = places[1][0] + places[1][2] + GAP, places[0][3]
            w, h = _fit(view, PANEL[0] * scale, (tall - GAP) / 2)
            places += [(x, 0.0, w, h), (x, h + GAP, w, h)]
        else:
            w, h = _fit(view, *(length * scale for length in PANEL))
            places += [(0.0, top, w, h), (max(w, captioned) + GAP, top, w, h)]
            top += h + GAP + (CAPTION if len(found) > 1 else 0)
    return places


def _fit(view: View, width: float, height: float) -> tuple[float, float]:
    tall, wide = view.pixels.shape[:2]
    scale = min(width / wide, height / tall)
    return wide * scale, tall * scale


def grid_lines(axes: Axes, view: View, points: float) -> None:
    """The grid of tokens, and over it windows and tiles.

    Args:
        points: of a pixel of the picture. Lines that lie close together are drawn faintly, or not at all.
    """
    for step, width, alpha in _grid(view):
        apart = min(step) * view.side * points
        if apart < FINEST:
            continue
        style = {"color": "white", "alpha": alpha * min(1, apart / SPARSE), "linewidth": min(width, apart / 25)}
        rows, columns = view.tokens.shape
        for count, size, draw in ((rows, step[0], axes.axhline), (columns, step[1], axes.axvline)):
            for place in range(size, count, size):
                draw(place * view.side - 0.5, **style)


def _grid(view: View) -> list[tuple[tuple[int, int], float, float]]:
    """(step in tokens, width in points, opacity) of each set of lines."""
    found: list[tuple[tuple[int, int], float, float]] = [((1, 1), 0.35, 0.55)]
    if view.window:
        found.append(((view.window, view.window), 1.2, 0.95))
    if view.tile:
        found.append((view.tile, 1.8, 1.0))
    return found


def legend(figure: Figure, found: Sequence[View], y: float) -> None:
    """Names the lines of the views' grids, on one line of text."""
    from matplotlib.lines import Line2D

    view = max(found, key=lambda one: one.tile is not None)
    names = ["token"] + ["attention window"] * bool(view.window) + ["tile"] * bool(view.tile)
    width, height = figure.get_size_inches()
    x = EDGE
    for name, (step, thickness, _) in zip(names, _grid(view), strict=True):
        level = 1 - (y - 0.045) / height
        figure.add_artist(
            Line2D([x / width, (x + 0.26) / width], [level, level], color=INK, linewidth=thickness, alpha=0.8)
        )
        sides = times(length * view.side for length in step[::-1])
        x = line(figure, x + 0.34, y, Words(f"{name}, {sides} pixels")) + 0.16


def figure_of(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        DependencyError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError("pictures need matplotlib: pip install 'jaxvit[plots]'") from error
    return Figure(figsize=(width, height), facecolor="white")


def line(figure: Figure, x: float, y: float, *words: Words) -> float:
    """Words behind each other on one line, from the left edge and the top; returns where they end."""
    width, height = figure.get_size_inches()
    for text, colour, size, weight in words:
        shown = figure.text(
            x / width, 1 - y / height, text, color=colour, fontsize=size, fontweight=weight, parse_math=False
        )
        x += shown.get_window_extent().width / figure.dpi + 0.12
    return x


def shortened(name: str, most: int = 36) -> str:
    """A name without its middle, where it is too long for a title, and without what no font draws."""
    name = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
    return name if len(name) <= most else f"{name[: most // 2]}\u2026{name[-most // 2 + 1 :]}"


def times(sides: Iterable[int]) -> str:
    """448 \u00d7 308"""
    return " \u00d7 ".join(map(str, sides))


def plain(axes: Axes) -> None:
    """Axes of a diagram, reduced to what is read."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelsize=9)
    axes.tick_params(which="minor", length=0)
    axes.grid(color="#d8dee4", linewidth=0.6)
