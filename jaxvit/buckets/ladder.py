"""Ladders: which buckets an encoder has, from a family's rule, a list of budgets, or a TOML file.

``buckets/README.md`` explains the rule and the file format with examples.
"""

from __future__ import annotations

import json
import operator
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import ceil, inf, log2
from pathlib import Path
from typing import Any, NamedTuple

from jaxvit import paths
from jaxvit.errors import LadderError
from jaxvit.models.family import Bucket, Demand, Family

BLOCK = 64
"""Rows of an attention kernel's block: a bucket's patches are a multiple of it."""
MOST_SEGMENTS = 256
"""Segments of a bucket that does not say otherwise, at most."""
OVERFLOW_STEP = 1.25
"""Growth from one overflow bucket to the next."""
ATTENTION = ("auto", "dense", "xla", "cudnn", "tokamax")
"""Attention backends that a ladder may name, whether or not this machine has them."""


class Cost(NamedTuple):
    """Milliseconds of a bucket without measured cost: call + patch x its patches + square x sum of squared segments."""

    call: float
    patch: float
    square: float


@dataclass(frozen=True)
class Rule:
    """How a default ladder is made. The values here hold where a family's TOML is silent.

    Attributes:
        first: smallest budget, in tokens.
        step: budgets above it are its multiples.
        per_doubling: rungs from a budget to its double; fewer where the constant of a call outweighs its patches.
        reach: the largest budget is at least this, so that small pieces share a call.
        call, patch, square: see :class:`Cost`; only their ratios decide a plan. The values are those of the blocks of a
            27 x 1152 tower in bf16 on one H200: 1.75 ms at 1 x 256 patches, 8.8 at 4 x 1024, 33.4 at 16 x 1024, 55.2 at
            4 x 4096.
    """

    first: int = 64
    step: int = 16
    per_doubling: int = 4
    reach: int = 4096
    call: float = 1.2
    patch: float = 1.55e-3
    square: float = 4.3e-7

    @property
    def cost(self) -> Cost:
        return Cost(self.call, self.patch, self.square)


# The same tower in float32 on two cores: a call costs the reading of the weights, a patch its products.
# Compiling takes longer than running there, so the ladder doubles and ends at the largest piece.
CPU = Rule(per_doubling=1, reach=256, call=100.0, patch=8.0, square=2e-3)


@dataclass(frozen=True)
class Ladder:
    """Buckets in ascending order.

    Attributes:
        buckets: ascending by tokens, then patches, segments, windows; no two alike.
        source: where they come from, in words or as a path.
        cost: the model for buckets without measured cost.
    """

    buckets: tuple[Bucket, ...]
    source: str
    cost: Cost = Rule().cost

    def __post_init__(self) -> None:
        if not self.buckets:
            raise LadderError(f"{self.source}: a ladder needs at least one bucket")
        for low, high in pairwise(self.buckets):
            if _order(low) >= _order(high):
                raise LadderError(f"{self.source}: {_unsorted(low, high)}")

    def __hash__(self) -> int:  # asked for on every plan
        return hash((self.source, len(self.buckets)))

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def holds(self, demand: Demand) -> bool:
        """Whether a piece of that demand fits a bucket."""
        return any(bucket.holds(demand) for bucket in reversed(self.buckets))

    def constant(self, bucket: Bucket) -> float:
        """Milliseconds of a call of the bucket without attention."""
        return self.cost.call + self.cost.patch * bucket.patches if bucket.constant is None else bucket.constant

    def slope(self, bucket: Bucket) -> float:
        """Milliseconds per squared patch of a segment."""
        return self.cost.square if bucket.slope is None else bucket.slope


def resolve(
    family: Family,
    budgets: Sequence[int] | str | os.PathLike[str] | None,
    device: Any,
    max_pieces: int | None = None,
) -> Ladder:
    """The ladder for a call of ``jaxvit.load``.

    Args:
        family: its sizes and settings decide capacities and the largest piece.
        budgets: output tokens of each bucket, a ladder file, or None for this device's tuned ladder, else the default.
        device: a jax device (``platform`` and ``device_kind`` are read).
        max_pieces: most pieces of a call, None for no limit beyond the ladder's own.
    Raises:
        LadderError: names the value that is wrong.
    """
    if isinstance(budgets, str | os.PathLike):
        return from_file(budgets, family, max_pieces, device.platform)
    if budgets is not None:
        return from_budgets(family, budgets, max_pieces, device.platform)
    return find(family, device.device_kind, max_pieces) or default_ladder(family, device.platform, max_pieces)


def default_ladder(family: Family, platform: str, max_pieces: int | None = None) -> Ladder:
    """The ladder that the family's rule makes for a platform. Its last bucket holds the family's largest piece."""
    rule = rule_of(family, platform)
    smallest, _ = family.budget_range()
    budgets = [budget for budget in rungs(rule, family.largest(), family.merge**2) if budget >= smallest]
    buckets = tuple(_complete(family, {"tokens": budget}, max_pieces, BLOCK) for budget in budgets)
    return Ladder(buckets, f"default of {family.name} for {platform}", rule.cost)


def rungs(rule: Rule, largest: Demand, cells: int) -> list[int]:
    """Budgets in output tokens, ascending: each octave above ``rule.first`` in equal ratios of about equal cost.

    Two budgets are there in any case: the top, which holds the largest piece, and that piece's tokens, since pictures
    above a size limit all come out close to it.
    """
    top = _multiple(max(largest.tokens, -(-largest.patches // cells), rule.reach), rule.step)
    spare = rule.call / (rule.patch * cells)
    budgets = {rule.first, _multiple(largest.tokens, rule.step), top}
    low = rule.first
    while low < top:
        count = ceil(rule.per_doubling * log2((2 * low + spare) / (low + spare)))
        budgets |= {_multiple(ceil(low * 2 ** (number / count)), rule.step) for number in range(1, count + 1)}
        low *= 2
    return sorted(budget for budget in budgets if budget <= top)


def from_budgets(
    family: Family,
    budgets: Sequence[int],
    max_pieces: int | None = None,
    platform: str = "gpu",
    block: int = BLOCK,
) -> Ladder:
    """A ladder from output-token budgets, in any order, duplicates allowed; patches are rounded up to ``block``.

    Raises:
        LadderError: no budget, one that is no positive integer or below the smallest piece, or ``max_pieces`` above it.
    """
    given = sorted({_whole(value, "budgets") for value in budgets})
    if not given:
        raise LadderError("budgets is empty: give at least one budget in output tokens, or None for the default ladder")
    _check_pieces(max_pieces, given[0])
    buckets = tuple(_complete(family, {"tokens": budget}, max_pieces, block) for budget in given)
    return Ladder(buckets, f"budgets {given}", rule_of(family, platform).cost)


def from_file(
    path: str | os.PathLike[str],
    family: Family,
    max_pieces: int | None = None,
    platform: str = "gpu",
    block: int = BLOCK,
) -> Ladder:
    """A ladder from a TOML file: ``[[bucket]]`` tables, ascending, ``tokens`` in each, the other capacities as wanted.

    Raises:
        LadderError: names the file, the line of the bucket and the value.
    """
    buckets = _buckets_of(Path(path), family, max_pieces, block)
    _check_pieces(max_pieces, buckets[0].tokens)
    return Ladder(buckets, str(path), rule_of(family, platform).cost)


def _buckets_of(path: Path, family: Family, max_pieces: int | None, block: int = BLOCK) -> tuple[Bucket, ...]:
    table, lines = _read(path)
    _known(table, ("match", "record", "bucket"), str(path))
    entries = table.get("bucket")
    if not isinstance(entries, list) or not entries:
        raise LadderError(f"{path}: a ladder file needs at least one [[bucket]] table")
    buckets: list[Bucket] = []
    for line, entry in zip(lines, entries, strict=True):
        try:
            _known(entry, tuple(one.name for one in fields(Bucket)), "bucket")
            buckets.append(_complete(family, entry, max_pieces, block))
        except LadderError as error:
            raise LadderError(f"{path}:{line}: {error}") from None
    for line, (low, high) in zip(lines[1:], pairwise(buckets), strict=True):
        if _order(low) >= _order(high):
            raise LadderError(f"{path}:{line}: {_unsorted(low, high)}")
        if (low.constant is None) != (high.constant is None):
            raise LadderError(f"{path}:{line}: constant and slope must stand in every bucket or in none")
    return tuple(buckets)


def find(family: Family, device_kind: str, max_pieces: int | None = None, folder: Path | None = None) -> Ladder | None:
    """The tuned ladder ``buckets/<device>/*.toml`` whose ``[match]`` fits the family, its sizes and the device, if any.

    Of several, the one that names most sizes; of those, the first by path.
    """
    best: tuple[int, Path] | None = None
    for path in sorted((folder or paths.data("buckets")).glob("*/*.toml")):
        match = _read(path)[0].get("match", {})
        _known(match, ("family", "device", "sizes"), f"{path}: match")
        sizes = match.get("sizes", {})
        absent = object()
        if (
            match.get("family") == family.name
            and match.get("device") == device_kind
            and all(getattr(family.config, name, absent) == value for name, value in sizes.items())
            and (best is None or len(sizes) > best[0])
        ):
            best = len(sizes), path
    return Ladder(_buckets_of(best[1], family, max_pieces), str(best[1])) if best else None


def write(
    ladder: Ladder,
    path: str | os.PathLike[str],
    match: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Writes a ladder file that :func:`from_file` reads back to the same buckets.

    Args:
        ladder: the buckets.
        path: its folder is made where missing.
        match: ``family``, ``device`` and ``sizes`` (field of the family's config -> value), for :func:`find`.
        record: how it was measured, for readers; nothing reads it back.
    """
    lines = []
    for name, content in (("match", match), ("record", record)):
        if content:
            lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in content.items()), ""]
    for bucket in ladder.buckets:
        entries = ((one.name, getattr(bucket, one.name)) for one in fields(Bucket))
        lines += ["[[bucket]]", *(f"{key} = {_toml(value)}" for key, value in entries if value is not None), ""]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join(lines), encoding="utf-8")


def overflow_bucket(ladder: Ladder, demand: Demand, step: float = OVERFLOW_STEP, block: int = BLOCK) -> Bucket:
    """A bucket for a piece that the ladder does not hold.

    Overflow buckets form a ladder of their own: the largest capacity on every axis times the smallest power of ``step``
    that holds the piece, so that pieces of about one size share an executable.
    """
    tokens, patches, segments, windows = (
        max(getattr(bucket, axis) for bucket in ladder.buckets) for axis in ("tokens", "patches", "segments", "windows")
    )
    segments, windows = max(segments, demand.segments), windows or demand.windows
    scale = 1.0
    while True:
        capacities = (int(tokens * scale), _up(int(patches * scale), block), segments, int(windows * scale))
        bucket = Bucket(*capacities)
        if bucket.holds(demand):
            return bucket
        scale *= step


def rule_of(family: Family, platform: str) -> Rule:
    """The rule of a platform ("cpu", anything else is an accelerator), with what ``buckets/<family>.toml`` changes."""
    base, name = (CPU, "cpu") if platform == "cpu" else (Rule(), "gpu")
    path = paths.data("buckets") / f"{family.name}.toml"
    if not path.is_file():
        return base
    table = _read(path)[0]
    _known(table, ("gpu", "cpu"), str(path))
    changes = table.get(name, {})
    _known(changes, tuple(one.name for one in fields(Rule)), f"{path}: {name}")
    for key, value in changes.items():
        if isinstance(getattr(base, key), int):
            _whole(value, f"{path}: {key}")
        else:
            _milliseconds(value, f"{path}: {key}")
    return replace(base, **changes)


def _complete(family: Family, given: Mapping[str, Any], max_pieces: int | None, block: int) -> Bucket:
    """A valid bucket from its tokens and whatever else is given."""
    if "tokens" not in given:
        raise LadderError("a bucket needs tokens, its budget in output tokens")
    tokens = _whole(given["tokens"], "tokens")
    cells = family.merge**2
    smallest, _ = family.budget_range()
    if tokens < smallest:
        raise LadderError(f"tokens = {tokens}: no piece can use it, the smallest of {family.name} has {smallest}")
    patches = _whole(given.get("patches", _up(tokens * cells, block)), "patches")
    if patches % block:
        raise LadderError(
            f"patches = {patches} is not a multiple of the kernel's block of {block}; take {_up(patches, block)}"
        )
    if patches < (least := smallest * cells):
        raise LadderError(f"patches = {patches}: no piece can use it, the smallest of {family.name} has {least}")
    segments = _whole(given.get("segments", max(1, min(tokens // smallest, MOST_SEGMENTS))), "segments")
    if segments > tokens:
        raise LadderError(f"segments = {segments}: more pieces than the bucket's {tokens} tokens, and each has a token")
    if max_pieces is not None:
        segments = min(segments, _whole(max_pieces, "max_pieces"))
    windowed = "window" in family.segment_sets
    windows = given.get("windows", tokens // 4 + segments if windowed else 0)
    if windowed:
        _whole(windows, "windows")
    elif windows != 0:
        raise LadderError(f"windows = {windows!r}: {family.name} has no attention windows, leave it out")
    attention = given.get("attention", "auto")
    if attention not in ATTENTION:
        raise LadderError(f"attention = {attention!r} is not known; known: {', '.join(ATTENTION)}")
    constant, slope = given.get("constant"), given.get("slope")
    if (constant is None) != (slope is None):
        raise LadderError("constant and slope belong together; one of them is missing")
    for name, value in (("constant", constant), ("slope", slope)):
        if value is not None:
            _milliseconds(value, name)
    return Bucket(tokens, patches, segments, windows, attention, constant, slope)


def _order(bucket: Bucket) -> tuple[int, int, int, int]:
    return bucket.tokens, bucket.patches, bucket.segments, bucket.windows


def _unsorted(low: Bucket, high: Bucket) -> str:
    return f"a bucket of {high.tokens} tokens after one of {low.tokens}: buckets must ascend, without duplicates"


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _multiple(value: int, step: int) -> int:
    """Rounded up to a multiple of the step; up to one step, to one of 16."""
    return _up(value, step if value > step else min(step, 16))


def _whole(value: Any, name: str) -> int:
    """A positive integer; True is none."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise LadderError(f"{name}: {value!r} is not a positive integer")
    return number


def _milliseconds(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise LadderError(f"{name}: {value!r} is not a finite number of milliseconds, 0 or more")


def _check_pieces(max_pieces: int | None, budget: int) -> None:
    if max_pieces is not None and _whole(max_pieces, "max_pieces") > budget:
        raise LadderError(
            f"max_pieces = {max_pieces} is more than the smallest budget of {budget} tokens, and each piece has one: "
            f"lower max_pieces to {budget}, raise the budget, or leave one of the two out"
        )


def _known(table: Any, names: Sequence[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise LadderError(f"{where}: {table!r} is not a table")
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise LadderError(f"{where}: unknown key {', '.join(map(repr, unknown))}; known: {', '.join(names)}")


def _read(path: Path) -> tuple[dict[str, Any], list[int]]:
    """The parsed file and the line of each ``[[bucket]]``."""
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LadderError(f"{path}: not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise LadderError(f"{path}: the ladder file cannot be read: {error}") from error
    header = re.compile(r"\s*\[\[\s*bucket\s*\]\]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if header.match(line)]
    count = len(table["bucket"]) if isinstance(table.get("bucket"), list) else 0
    return table, lines if len(lines) == count else [1] * count


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
