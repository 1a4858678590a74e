"""The pictures and tables of the guides, made by ``python -m jaxvit.guides`` (extra ``plots``).

Each picture carries the data that it was drawn from; the tests hold that data, not the pixels, against the code.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import jaxvit
from jaxvit import media, paths, plots, tiny
from jaxvit.buckets import planner
from jaxvit.buckets.ladder import default_ladder
from jaxvit.models import family_of
from jaxvit.models.family import Family
from jaxvit.sheet import EDGE, FAINT, INK, OURS, Words, figure_of, line
from jaxvit.tune import PARTS
from jaxvit.weights import manifests
from jaxvit.weights.files import read_config_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHOTOS = ("chelsea.png", "coffee.png", "rocket.jpg")
DATA = "Description"
"""The PNG text that holds a picture's data, as JSON."""
FILL = "#eaeef2"


def photo(name: str) -> np.ndarray:
    return media.picture(paths.data("weights") / "demo" / "photos" / name)


def families() -> dict[str, Family]:
    """One of each, with the settings of the first real checkpoint."""
    found: dict[str, Family] = {}
    for name in manifests.names():
        family = family_of(manifests.load(name).files)
        found.setdefault(family.name, family)
    return found


# Ladders


def ladders_data() -> dict[str, Any]:
    """Budgets of every default ladder, and how the demo's photographs lie in one call of the longest of them."""
    ladders = {
        name: {platform: [bucket.tokens for bucket in default_ladder(family, platform)] for platform in ("gpu", "cpu")}
        for name, family in families().items()
    }
    name = max(ladders, key=lambda name: len(ladders[name]["gpu"]))
    family = families()[name]
    ladder = default_ladder(family, "gpu")
    items = [family.prepare(photo(one)) for one in PHOTOS]
    (call,) = planner.plan([piece.demand for item in items for piece in item.pieces], ladder)
    tokens = [items[piece].tokens for piece in call.pieces]
    return {
        "ladders": ladders,
        "call": {"family": name, "bucket": ladder.buckets[call.bucket].tokens, "tokens": tokens},
    }


def draw_ladders(path: Path) -> None:
    data = ladders_data()
    rows, call = data["ladders"], data["call"]
    width, head, bar, tall = 10.4, 0.86, 1.0, 0.96
    height = head + bar + 0.95 + tall * len(rows) + 0.55
    figure = figure_of(width, height)
    padding = call["bucket"] - sum(call["tokens"])
    line(figure, EDGE, 0.36, Words("A call, and the ladders it is chosen from", INK, 13, "bold"))
    said = f"{len(call['tokens'])} photographs in one call of the bucket of {call['bucket']} tokens ({call['family']})"
    line(figure, EDGE, 0.66, Words(said, size=9.5))
    axes = figure.add_axes((EDGE / width, 1 - (head + bar) / height, 1 - 2 * EDGE / width, bar / height))
    _bucket(axes, call, (width - 2 * EDGE) / bar)
    start = 0
    for tokens, text in [*((count, f"{count} tokens") for count in call["tokens"]), (padding, f"{padding} padding")]:
        x = EDGE + start / call["bucket"] * (width - 2 * EDGE)
        line(figure, x + (0.03 if start else 0), head + bar + 0.2, Words(text))
        start += tokens
    top = head + bar + 0.95
    line(figure, EDGE, top - 0.22, Words("default ladders: budgets in output tokens", INK, 10.5, "bold"))
    most = max(budgets[-1] for ladder in rows.values() for budgets in ladder.values())
    axes = figure.add_axes((1.75 / width, 0.55 / height, 1 - (1.75 + EDGE + 0.15) / width, tall * len(rows) / height))
    _ladders(axes, rows, call, most)
    for number, (name, ladder) in enumerate(rows.items()):
        middle = top + tall * (number + 0.5)
        line(figure, EDGE, middle - 0.12, Words(name, INK, 10, "bold"))
        line(figure, EDGE, middle + 0.08, Words(f"accelerator: {len(ladder['gpu'])}", OURS))
        line(figure, EDGE, middle + 0.27, Words(f"CPU: {len(ladder['cpu'])}"))
    figure.savefig(path, dpi=plots.DPI)


def _bucket(axes: Axes, call: Mapping[str, Any], aspect: float) -> None:
    """The rows of a bucket from left to right: a photograph on those of each piece, the rest hatched."""
    whole, start = call["bucket"], 0
    for name, tokens in zip(PHOTOS, call["tokens"], strict=True):
        wide = tokens / whole * aspect
        axes.imshow(_cut(photo(name), wide), extent=(start, start + tokens, 0, 1), aspect="auto")
        start += tokens
        axes.axvline(start, color="white", linewidth=2)
    axes.axvspan(start, whole, facecolor=FILL, edgecolor=FAINT, hatch="////", linewidth=0)
    axes.set_xlim(0, whole)
    axes.set_ylim(0, 1)
    axes.set_axis_off()


def _cut(picture: np.ndarray, aspect: float) -> np.ndarray:
    """The middle of a picture, so many times as wide as it is high."""
    height, width = picture.shape[:2]
    rows, columns = min(height, round(width / aspect)), min(width, round(height * aspect))
    top, left = (height - rows) // 2, (width - columns) // 2
    return picture[top : top + rows, left : left + columns]


def _ladders(axes: Axes, rows: Mapping[str, Any], call: Mapping[str, Any], most: int) -> None:
    for number, (name, ladder) in enumerate(rows.items()):
        for budgets, level, colour in ((ladder["gpu"], number + 0.54, OURS), (ladder["cpu"], number + 0.74, FAINT)):
            axes.hlines(level, budgets[0], budgets[-1], color=colour, linewidth=1, alpha=0.5)
            axes.vlines(budgets, level - 0.085, level + 0.085, color=colour, linewidth=2)
            axes.text(budgets[-1] * 1.04, level, f"{budgets[-1]:,}", color=colour, fontsize=8.5, va="center")
        if name == call["family"]:
            level = number + 0.54
            axes.plot(call["bucket"], level - 0.19, marker="v", color=INK, markersize=6)
            axes.text(call["bucket"], level - 0.27, "the call above", color=INK, fontsize=8.5, ha="center", va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xlim(56, most * 1.3)
    axes.set_ylim(len(rows), 0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_yticks([])
    axes.tick_params(colors=FAINT, labelsize=9, length=3)
    axes.grid(axis="x", color="#d8dee4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


# A feature picture


MAP = {"checkpoint": "lfm2_vl", "photo": "coffee.png", "processor": {"min_image_tokens": 16, "max_image_tokens": 64}}
"""Tiles from a small photograph: with the settings of a real checkpoint it would be one view."""


def map_data() -> dict[str, Any]:
    """What the feature picture shows, and of which weights."""
    folder = tiny.tiny_checkpoint(MAP["checkpoint"])
    family = family_of(read_config_files(folder), MAP["processor"])
    item = family.prepare(photo(MAP["photo"]))
    return MAP | {"weights": tiny.digest(folder), "grids": [list(grid) for grid in item.grids]}


def draw_map(path: Path) -> None:
    folder = tiny.tiny_checkpoint(MAP["checkpoint"])
    encoder = jaxvit.load(folder, dtype="float32", budgets=[256], processor=MAP["processor"])
    (item,) = encoder.prepare(photo(MAP["photo"]))
    (embeddings,) = encoder.encode(item)
    plots.show(encoder.family, item, embeddings, path, title=MAP["photo"], random=True)


# Tuned ladders

MARKS = "<!-- made by python -m jaxvit.guides -->", "<!-- until here -->"
"""In buckets/README.md, around what is made from the tuned ladders of that folder."""
COLUMNS = {
    "compile_seconds": ("compile, s", lambda value: f"{value:.1f}"),
    "stored_bytes": ("in the store, MB", lambda value: f"{value / 1e6:.1f}"),
    "few_large_ms": ("few large, ms", lambda value: f"{value:.3f}"),
    "many_small_ms": ("many small, ms", lambda value: f"{value:.3f}"),
    "share_of_floor": ("share of the floor", lambda value: f"{value:.2f}"),
}
"""Column of a ladder's record (``jaxvit/bench/record.py``) -> its head and how a value is written."""
BETWEEN = {"few_large_ms": "between its neighbours", "many_small_ms": "between its neighbours", "share_of_floor": "-"}
"""What stands in the columns of a bucket whose calls were not timed."""


def tuned_tables() -> str:
    """A section with a table for every tuned ladder that ships, from the files alone; empty where there is none."""
    folder = paths.data("buckets")
    tables = [_tuned_table(path, path.relative_to(folder).as_posix()) for path in sorted(folder.glob("*/*.toml"))]
    if not tables:
        return ""
    head = (
        "## Tuned ladders that ship\n\n"
        "Each is taken by `budgets=None` where family, sizes and device are those of the file. The two times are of a\n"
        "call of the full bucket, back to back: few large fills it by as few pieces as are legal, many small by equal\n"
        f"shares, the most of {', '.join(map(str, PARTS[1:]))} that bucket and pieces allow. A bucket between its\n"
        "neighbours was not timed; its cost is interpolated. The floor's share is for few large ones. Buckets are\n"
        "compiled in parallel threads, which share the processor: alone, each would take fewer seconds than listed.\n"
    )
    return "\n".join([head, *tables])


def _tuned_table(path: Path, name: str) -> str:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    match, record, buckets = content.get("match", {}), content.get("record", {}), content["bucket"]
    columns = {key: said for key, said in COLUMNS.items() if len(record.get(key, ())) == len(buckets)}
    between = record.get("interpolated", ())
    facts = [f"{key} {record[key]}" for key in ("dtype", "jax", "driver") if key in record]
    sizes = ", ".join(f"{key} {value}" for key, value in match.get("sizes", {}).items())
    heads = ["tokens", "patches", "attention", *(head for head, _ in columns.values())]
    lines = [
        f"### `{name}`",
        f"{match.get('family')} on {', '.join([str(match.get('device')), *facts])}; {sizes}.",
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
    ]
    for index, bucket in enumerate(buckets):
        cells = [f"{bucket['tokens']:,}", f"{bucket['patches']:,}" if "patches" in bucket else "-"]
        cells.append(bucket.get("attention", "auto"))
        marks = BETWEEN if bucket["tokens"] in between else {}
        for key, (_, write) in columns.items():
            value = record[key][index]
            cells.append(marks.get(key) or ("-" if math.isnan(value) else write(value)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def marked(text: str) -> tuple[str, str, str]:
    """A guide cut at its marks: before, between, after; the marks belong to the outer parts."""
    before, mark, rest = text.partition(MARKS[0] + "\n")
    between, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise ValueError(f"the guide lacks the lines {' and '.join(MARKS)}")
    return before + mark, between, end + after


def write_tables(path: Path) -> None:
    """Puts the tables of the tuned ladders into buckets/README.md."""
    before, _, after = marked(path.read_text(encoding="utf-8"))
    path.write_text(before + tuned_tables() + after, encoding="utf-8")


# Files

PICTURES = {
    "buckets/ladders.png": (draw_ladders, ladders_data),
    "weights/demo/map.png": (draw_map, map_data),
}
"""File in the data folders -> how it is drawn, and from what."""


def place(name: str) -> Path:
    folder, _, file = name.partition("/")
    return paths.data(folder) / file


def write(name: str, path: Path) -> None:
    """Draws one of the pictures, with few colours so that it is small, and with its data."""
    draw, data = PICTURES[name]
    draw(path)
    info = PngInfo()
    info.add_text(DATA, json.dumps(data()))
    with Image.open(path) as drawn:
        small = drawn.convert("RGB").quantize(255)
    small.save(path, pnginfo=info, optimize=True)


def data_of(path: Path) -> Any:
    """The data that a picture was drawn from."""
    with Image.open(path) as drawn:
        return json.loads(drawn.info[DATA])


if __name__ == "__main__":
    for name in PICTURES:
        write(name, place(name))
        print(place(name))
    write_tables(place("buckets/README.md"))
    print(place("buckets/README.md"))
