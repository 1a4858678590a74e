"""What XLA made of a bucket: products with what they end in, kernels, copies, recorded graphs.

    python3 tests/gpu/program.py kimi qwen lfm --loads 4x1024

A row each: the instructions of the compiled program by kind, in recorded graphs (where the text of the program knows
of them) and outside of them. A matrix that is copied would be a ``copy``; biases that XLA takes out of their packed
array are in a fusion. Then a full bucket beside one that holds a small piece: milliseconds, back to back. It needs no
installed package: run it in the repository.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
from gpu.measure import TOWERS

import jaxvit
from jaxvit.bench.clock import timed
from jaxvit.bench.loads import load_of
from jaxvit.bench.report import show
from jaxvit.bench.subject import random_checkpoint
from jaxvit.buckets.executable import Executable
from jaxvit.machine import issue_beside

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<kind>[a-z][\w-]*)\((?P<rest>.*)$")
NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}
"""No kernel and no copy."""


def computations(text: str) -> dict[str, list[re.Match[str]]]:
    """Instructions of a compiled program by computation; the entry is "ENTRY"."""
    found: dict[str, list[re.Match[str]]] = {}
    here: list[re.Match[str]] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
            here = found.setdefault(name, [])
        elif match := INSTRUCTION.match(line):
            here.append(match)
    return found


def kind_of(instruction: re.Match[str]) -> str:
    """An instruction in a word or two: what a product ends in stands behind it."""
    rest, kind = instruction["rest"], instruction["kind"]
    target = re.search(r'custom_call_target="([^"]+)"', rest)
    if target is None:
        return kind
    ending = re.search(r'"epilogue":"(\w+)"', rest)
    residual = ', "beta":0' not in rest and '"beta":1' in rest
    words = [target[1].removeprefix("__"), ending[1] if ending else "", "+ residual" if residual else ""]
    return " ".join(word for word in words if word)


def parts(text: str) -> tuple[Counter[str], Counter[str], int]:
    """(in recorded graphs, outside of them, how many graphs): instructions that run something."""
    found = computations(text)
    graphs = [name for name in found if name.startswith("command_buffer")]
    inside = Counter(kind_of(one) for name in graphs for one in found[name])
    apart = [one for one in found["ENTRY"] if not (one["kind"] == "call" and "command_buffer" in one["rest"])]
    outside = Counter(kind_of(one) for one in apart)
    return without(inside), without(outside), len(graphs)


def without(kinds: Counter[str]) -> Counter[str]:
    return Counter({kind: count for kind, count in kinds.items() if kind not in NOTHING})


def run(executable: Executable, weights: Any, pieces: Any) -> float:
    placed = executable.place(executable.program.fill(pieces))
    return timed(lambda: executable.run(weights, placed)[0], jax.block_until_ready).back_to_back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("towers", nargs="+", choices=TOWERS)
    parser.add_argument("--loads", default="4x1024")
    asked = parser.parse_args()
    issue_beside()
    rows, times = [], []
    for tower in asked.towers:
        with random_checkpoint(TOWERS[tower][0]) as folder:
            encoder = jaxvit.load(folder, dtype="bfloat16", store=False)
        for text in asked.loads.split(","):
            load = load_of(encoder.family, text, encoder.ladder, "auto")
            executable, weights = encoder.dispatcher.executable(load.bucket), encoder.dispatcher.weights[0]
            inside, outside, graphs = parts(executable.compiled.as_text())
            for where, kinds in ((f"{graphs} graphs", inside), ("outside", outside)):
                rows += [[tower, text, where, kind, str(count)] for kind, count in kinds.most_common()]
            smallest = min(encoder.family.example(encoder.ladder.buckets[0]), key=lambda piece: piece.tokens)
            full, empty = (run(executable, weights, pieces) for pieces in (load.pieces, [smallest]))
            times.append([tower, text, f"{full:.3f}", f"{empty:.3f}", str(smallest.tokens)])
        del encoder
    show("instructions", ["tower", "load", "where", "what", "times"], rows)
    show("full and nearly empty, ms back to back", ["tower", "load", "full", "nearly empty", "its tokens"], times)


if __name__ == "__main__":
    main()
