"""The measurements of the benchmark record on an accelerator, with random weights of full size, in one go.

    python3 tests/gpu/measure.py kimi qwen lfm --peer --out results
    python3 tests/gpu/measure.py qwen --pictures --start --host --reference --loads 20x576 --out results

It needs no installed package: run it in the repository. Every result is written as soon as it is there, to
``<out>/<tower>.json``; the tables come last. ``--seconds`` ends it in time. A rehearsal on a CPU:

    python3 tests/gpu/measure.py lfm --layers 1 --dtype float32 --loads 1x256 --peer --reference --host
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jaxvit
from jaxvit.bench import Report, bench, share_memory
from jaxvit.bench.report import show
from jaxvit.bench.subject import random_checkpoint
from jaxvit.machine import issue_beside

TOWERS = {
    "kimi": ("moonshotai/Kimi-K2.5", "1x256,1x1024,4x1024,16x1024,4x4096"),
    "qwen": ("Qwen/Qwen2.5-VL-7B-Instruct", "1x256,4x1024,16x1024,20x576"),
    "lfm": ("LiquidAI/LFM2.5-VL-450M", "1x256,1x1024,16x1024"),
    "lfm-1.6b": ("LiquidAI/LFM2.5-VL-1.6B", "1x256,1x1024,16x1024"),
}
PICTURES = [(448, 448, 512), (1080, 1920, 96)]
BARS = {
    # (tower, load): (most of the best torch, in which figure; least share of the floor)
    ("kimi", "1x256"): (0.85, "one_call", None),
    ("kimi", "1x1024"): (0.80, "one_call", None),
    ("kimi", "4x1024"): (0.68, "back_to_back", 0.64),
    ("kimi", "16x1024"): (0.71, "back_to_back", 0.66),
    ("kimi", "4x4096"): (0.67, "back_to_back", 0.60),
    ("qwen", "1x256"): (0.90, "one_call", None),
    ("qwen", "4x1024"): (0.88, "back_to_back", 0.66),
    ("qwen", "16x1024"): (0.88, "back_to_back", 0.66),
    ("lfm", "1x256"): (1.0, "one_call", None),
    ("lfm", "16x1024"): (0.80, "back_to_back", 0.58),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("towers", nargs="+", choices=TOWERS)
    parser.add_argument("--loads", help="pieces x patches of each, with commas between; 'none' for no calls")
    parser.add_argument("--peer", action="store_true", help="beside packed PyTorch")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--reference", action="store_true", help="beside transformers, eager")
    parser.add_argument("--pictures", action="store_true", help="from JPEG bytes")
    parser.add_argument("--start", action="store_true", help="the start of a process, empty and filled store")
    parser.add_argument("--host", action="store_true", help="the host's part of a 4,096-patch call")
    parser.add_argument("--attention", default="auto", help="one backend for every bucket")
    parser.add_argument("--budgets", help="a ladder file, for the calls and the pictures")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, help="only the first layers")
    parser.add_argument("--seconds", type=float, default=540, help="no step begins later than this")
    parser.add_argument("--out", type=Path, default=Path("results"))
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stdout)
    share_memory()
    issue_beside()
    asked.out.mkdir(parents=True, exist_ok=True)
    begun, reports = time.monotonic(), {}
    for tower in asked.towers:
        left = asked.seconds - (time.monotonic() - begun)
        name, loads = TOWERS[tower]
        loads = asked.loads or loads
        with random_checkpoint(name, asked.layers) as folder:
            say(f"{tower}: weights written, {time.monotonic() - begun:.0f} s")
            encoder = jaxvit.load(
                folder, dtype=asked.dtype, store=False, attention=asked.attention, budgets=asked.budgets
            )
            say(f"{tower}: loaded, {time.monotonic() - begun:.0f} s; {encoder.ladder.source}")
            reports[tower] = bench(
                encoder,
                [] if loads == "none" else loads.split(","),
                name=name,
                peer=asked.peer,
                compiled=not asked.no_compile,
                reference=asked.reference,
                pictures=PICTURES if asked.pictures else (),
                host=asked.host,
                start=asked.start,
                seconds=max(left, 1.0),
                note=lambda text, tower=tower: say(f"{tower}: {text}"),
                changed=lambda report, tower=tower: report.save(asked.out / f"{tower}.json"),
            )
        del encoder
    for tower, report in reports.items():
        report.print()
        (asked.out / f"{tower}.md").write_text(report.markdown(), encoding="utf-8")
    rows = [row for tower, report in reports.items() for row in verdicts(tower, report)]
    if rows:
        show("against the bars", ["what", "measured", "bar", "holds"], rows)
    return 0 if all(report.ok for report in reports.values()) else 1


def verdicts(tower: str, report: Report) -> list[list[str]]:
    """What is measured, its value, its bar, and whether it holds."""
    found: list[tuple[str, float, str, float]] = []
    for row in report.rows:
        most, figure, share = BARS.get((tower, row["load"]), (None, "", None))
        where = f"{tower} {row['load']}"
        if most is not None and f"{figure}_over_torch" in row:
            words = figure.replace("_", " ")
            found.append((f"{where}, {words} over the best torch", row[f"{figure}_over_torch"], "at most", most))
        if share is not None:
            found.append((f"{where}, share of the floor", row["share_of_floor"], "at least", share))
    if report.host:
        host = report.host
        found.append((f"{tower}, planning and padding, ms", host["plan"] + host["fill"], "at most", 0.5))
        found.append((f"{tower}, dispatch, ms", host["dispatch"], "at most", 0.6))
    for one in report.pictures:
        where = f"{tower} {one['height']}x{one['width']}"
        found.append((f"{where}, stream over the device alone", one["stream_over_device"], "at least", 0.85))
        if "stream_over_reference" in one:
            bar = 15 if one["height"] == 448 else 10
            found.append((f"{where}, stream over transformers", one["stream_over_reference"], "at least", bar))
    if report.start:
        filled = report.start["filled"]
        found.append((f"{tower}, compile over load", report.start["compile_over_load"], "at least", 10))
        found.append((f"{tower}, first embedding, filled store, s", filled["first_embedding"], "at most", 8))
        found.append((f"{tower}, compilations, filled store", filled["backend_compilations"], "at most", 0))
    return [
        [what, f"{value:.3g}", f"{kind} {bar:g}", "yes" if holds(value, kind, bar) else "NO"]
        for what, value, kind, bar in found
    ]


def holds(value: float, kind: str, bar: float) -> bool:
    return value <= bar if kind == "at most" else value >= bar


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
