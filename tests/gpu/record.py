"""The table of targets in ``buckets/h200/README.md``, made from the JSON files beside it.

python3 tests/gpu/record.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.measure import BARS, holds

RECORD = Path(__file__).resolve().parents[2] / "buckets" / "h200"
FILES = {
    "kimi": ("Kimi-K2.5", "kimi_k25.json"),
    "qwen": ("Qwen2.5-VL-7B", "qwen2_5_vl.json"),
    "lfm": ("LFM2.5-VL-450M", "lfm2_5_vl_450m.json"),
}
PICTURES = {448: 15, 1080: 10}
"""Of a height: how many times as fast as transformers they are to be."""
BEGIN, END = "<!-- made by python3 tests/gpu/record.py -->\n", "<!-- until here -->\n"


def reports(tower: str) -> list[dict[str, Any]]:
    """What was measured of a tower, the latest first."""
    return json.loads((RECORD / FILES[tower][1]).read_text(encoding="utf-8"))


def rows() -> list[tuple[str, float, str, float]]:
    """(what, measured, "at most" or "at least", target), each of the latest report that has both sides."""
    found = []
    for (tower, load), (most, figure, least) in BARS.items():
        ratio = f"{figure}_over_torch"
        row = next(row for one in reports(tower) for row in one["rows"] if row["load"] == load and ratio in row)
        what = f"{FILES[tower][0]}, {load.replace('x', ' x ').replace('1024', '1,024').replace('4096', '4,096')}"
        found.append((f"{what}, {figure.replace('_', ' ')}, over the best torch", row[ratio], "at most", most))
        if least is not None:
            found.append((f"{what}, share of the floor", row["share_of_floor"], "at least", least))
    for height, times in PICTURES.items():
        one = next(
            one
            for report in reports("qwen")
            for one in report.get("pictures", [])
            if one["height"] == height and "stream_over_reference" in one
        )
        what = f"{FILES['qwen'][0]}, JPEG, {height:,} x {one['width']:,}"
        found.append((f"{what}, over transformers", one["stream_over_reference"], "at least", times))
        found.append((f"{what}, of the device alone", one["stream_over_device"], "at least", 0.85))
    return found


def table() -> str:
    lines = ["| what | measured | target | |\n", "|---|---|---|---|\n"]
    for what, value, kind, target in rows():
        met = "held" if holds(value, kind, target) else "**missed**"
        lines.append(f"| {what} | {value:.3f} | {kind} {target:g} | {met} |\n")
    return "".join(lines)


def place(text: str) -> tuple[str, str, str]:
    """Before, in and behind the marked part."""
    before, rest = text.split(BEGIN)
    between, behind = rest.split(END, 1)
    return before + BEGIN, between, END + behind


def main() -> None:
    path = RECORD / "README.md"
    before, _, behind = place(path.read_text(encoding="utf-8"))
    path.write_text(before + table() + behind, encoding="utf-8")


if __name__ == "__main__":
    main()
