"""The rule behind default ladders and modelled costs, and reading ladder files safely."""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, inf, log2
from pathlib import Path
from typing import Any

from jaxvit import paths
from jaxvit.errors import LadderError
from jaxvit.models.family import Demand

MOST = 2**31 - 1
"""Rows that a device's 32-bit indices reach."""


@dataclass(frozen=True)
class Rule:
    """How a default ladder is made, and what a bucket costs that nobody measured.

    A call is modelled as ``call + patch x its bucket's patches + square x the sum of its pieces' squared patches``
    milliseconds; only the ratios of the three decide a plan. The values here hold where a family's TOML is silent. They
    are those of the blocks of a 27 x 1152 tower in bf16 on one H200: 1.75 ms at 1 x 256 patches, 8.8 at 4 x 1024, 33.4
    at 16 x 1024, 55.2 at 4 x 4096.

    Attributes:
        first: smallest budget, in output tokens.
        step: budgets above it are its multiples.
        per_doubling: rungs from a budget to its double; fewer where the constant of a call outweighs its patches.
        reach: the largest budget is at least this, so that small pieces share a call.
        call: milliseconds of a call however small.
        patch: milliseconds per patch of the bucket.
        square: milliseconds per squared patch of a segment.
    """

    first: int = 64
    step: int = 32
    per_doubling: int = 4
    reach: int = 4096
    call: float = 1.2
    patch: float = 1.55e-3
    square: float = 4.3e-7


CPU = Rule(per_doubling=1, reach=256, call=100.0, patch=8.0, square=2e-3)
"""The same tower in float32 on two cores: a call reads the weights once, a patch is its products. A bucket takes many
seconds to compile there, so the ladder only doubles."""

ACCELERATOR = Rule()


def rule_of(name: str, platform: str) -> Rule:
    """A family's rule: the platform's ("cpu", else the accelerator's), changed by ``buckets/<name>.toml``."""
    base, section = (CPU, "cpu") if platform == "cpu" else (ACCELERATOR, "gpu")
    path = paths.data("buckets") / f"{name}.toml"
    if not path.is_file():
        return base
    table, _ = read(path)
    known(table, ("gpu", "cpu"), str(path))
    changes = table.get(section, {})
    known(changes, [one.name for one in fields(Rule)], f"{path}: [{section}]")
    for key, value in changes.items():
        check = whole if isinstance(getattr(base, key), int) else milliseconds
        check(value, f"{path}: {key}")
    return replace(base, **changes)


def rungs(rule: Rule, largest: Demand, cells: int) -> list[int]:
    """Budgets in output tokens, ascending: each doubling from ``rule.first`` on, cut into equal ratios.

    Two budgets are there in any case: the top, which holds the largest piece, and that piece's tokens, since pictures
    above a size limit all come out close to it.

    Args:
        rule: the family's rule.
        largest: what the family's largest piece takes.
        cells: patches per token.
    """
    top = _multiple(max(largest.tokens, -(-largest.patches // cells), rule.reach), rule.step)
    spare = rule.call / max(rule.patch * cells, 1e-9)
    budgets = {rule.first, _multiple(largest.tokens, rule.step), top}
    low = rule.first
    while low < top:
        count = ceil(rule.per_doubling * log2((2 * low + spare) / (low + spare)))
        budgets |= {_multiple(ceil(low * 2 ** (number / count)), rule.step) for number in range(1, count + 1)}
        low *= 2
    return sorted(budget for budget in budgets if budget <= top)


def _multiple(value: int, step: int) -> int:
    """Rounded up to a multiple of the step; up to one step, to one of 32."""
    return up(value, step if value > step else min(step, 32))


def up(value: int, multiple: int) -> int:
    """Rounded up to a multiple."""
    return -(-value // multiple) * multiple


def whole(value: Any, name: str) -> int:
    """A positive integer, or a LadderError that names it. True is none."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        shown = "a negative number" if number < -(10**80) else repr(value)
        raise LadderError(f"{name}: {shown:.80} is not a positive integer")
    if number > MOST:
        shown = number if number < 10**80 else f"a number of {number.bit_length()} bits"  # longer ones may not print
        raise LadderError(f"{name}: {shown} is more than a device's indices reach; give {MOST} at most")
    return number


def milliseconds(value: Any, name: str) -> float:
    """A finite number of 0 or more, or a LadderError that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise LadderError(f"{name}: {value!r} is not a number of milliseconds, finite and at least 0")
    return float(value)


def known(table: Any, names: Sequence[str], where: str) -> None:
    """A LadderError where the table is none, or holds a key that is not among the names."""
    if not isinstance(table, Mapping):
        raise LadderError(f"{where}: {table!r} is not a table")
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise LadderError(f"{where}: unknown key {', '.join(map(repr, unknown))}; known: {', '.join(names)}")


def read(path: Path) -> tuple[dict[str, Any], list[int]]:
    """A TOML file, and the line of each of its ``[[bucket]]`` tables."""
    try:
        if path.exists() and not path.is_file():
            raise LadderError(f"{path}: it is no file; give a ladder file, or budgets such as 256,1024,4096")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LadderError(
            f"{path}: the ladder file cannot be read: {error}; give a ladder file, or budgets such as 256,1024,4096"
        ) from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+)", str(error))
        line = place[1] if place else len(text.splitlines())
        raise LadderError(f"{path}:{line}: not valid TOML: {error}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise LadderError(f"{path}: not a ladder file: {error}") from error
    header = re.compile(r"\s*\[\[\s*bucket\s*\]\]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if header.match(line)]
    count = len(table["bucket"]) if isinstance(table.get("bucket"), list) else 0
    return table, lines if len(lines) == count else [1] * count
