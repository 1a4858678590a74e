"""Ladders: which buckets an encoder has, from the family's rule, a list of budgets, or a TOML file.

``buckets/README.md`` explains rule and file format with examples.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxvit import paths
from jaxvit.buckets.rule import ACCELERATOR, Rule, known, milliseconds, read, rule_of, rungs, up, whole
from jaxvit.errors import LadderError, OptionError
from jaxvit.layers.attention import BACKENDS
from jaxvit.models.family import Bucket, Demand, Family

log = logging.getLogger("jaxvit")

BLOCK = 64
"""Rows of an attention kernel's block: a bucket's patches are a multiple of it."""
LARGE, LARGE_BLOCK = 1024, 128
"""Above so many patches, kernels take twice the rows at a time: a bucket that does not say otherwise is a multiple of
those, or slower ones would run."""
MOST_SEGMENTS = 256
"""Segments of a bucket that does not say otherwise, at most."""
OVERFLOW_STEP = 1.25
"""Growth from one overflow bucket to the next."""
ATTENTION = ("auto", *BACKENDS)
"""Attention backends that a ladder may name, whether or not this machine has them."""
AXES = ("tokens", "patches", "segments", "windows")
"""Axes of a bucket, as a ladder file names and sorts them."""


@dataclass(frozen=True)
class Ladder:
    """Buckets in ascending order.

    Attributes:
        buckets: ascending by tokens, then patches, segments, windows; no two alike.
        source: where they come from, in words or as a path.
        rule: its costs hold for buckets without measured ones.
    """

    buckets: tuple[Bucket, ...]
    source: str
    rule: Rule = ACCELERATOR

    def __post_init__(self) -> None:
        if not self.buckets:
            raise LadderError(f"{self.source}: a ladder needs at least one bucket")
        for low, high in pairwise(self.buckets):
            if _order(low) >= _order(high):
                raise LadderError(f"{self.source}: {_unsorted(low, high)}")

    def __hash__(self) -> int:  # asked for on every plan: short
        return hash((self.source, len(self.buckets)))

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def holds(self, demand: Demand) -> bool:
        """Whether a piece of that demand fits a bucket."""
        return any(bucket.holds(demand) for bucket in reversed(self.buckets))

    def nearest(self, demand: Demand) -> tuple[Bucket, tuple[str, ...]]:
        """The bucket nearest to holding a piece of that demand, and the axes on which it does not.

        Of the buckets that fall short on fewest axes, the one that falls short by the least factor; the larger on ties.
        """

        def shortfall(bucket: Bucket) -> tuple[int, float]:
            short = [need / max(room, 1) for need, room in zip(demand, bucket.capacity, strict=True) if need > room]
            return len(short), sum(short, 0.0)

        bucket = min(reversed(self.buckets), key=shortfall)
        return bucket, tuple(axis for axis in AXES if getattr(demand, axis) > getattr(bucket, axis))

    def name(self, bucket: Bucket, others: Sequence[Bucket] = ()) -> str:
        """A bucket in words: its tokens, and where buckets have as many, the axes on which those differ.

        Args:
            bucket: of the ladder or beside it.
            others: further buckets that it is not to be mistaken for.
        """
        alike = [one for one in (*self.buckets, *others, bucket) if one.tokens == bucket.tokens]
        differ = [axis for axis in AXES[1:] if len({getattr(one, axis) for one in alike}) > 1]
        return words(bucket, ("tokens", *differ))

    def up_to(self, patches: int) -> Ladder | None:
        """The buckets of at most so many patches, None if there are none."""
        kept = tuple(bucket for bucket in self.buckets if bucket.patches <= patches)
        return replace(self, buckets=kept) if kept else None

    def of_budgets(self, up_to: int | None) -> tuple[Bucket, ...]:
        """The buckets of at most so many tokens, all where it is None.

        Raises:
            OptionError: there are none.
        """
        kept = tuple(bucket for bucket in self.buckets if up_to is None or bucket.tokens <= up_to)
        if not kept:
            raise OptionError(f"the smallest bucket has {self.buckets[0].tokens} tokens, and up_to is {up_to}")
        return kept

    def constant(self, bucket: Bucket) -> float:
        """Milliseconds of a call of the bucket without attention: measured, else modelled."""
        modelled = self.rule.call + self.rule.patch * bucket.patches
        return modelled if bucket.constant is None else bucket.constant

    def slope(self, bucket: Bucket) -> float:
        """Milliseconds per squared patch of a segment: measured, else modelled."""
        return self.rule.square if bucket.slope is None else bucket.slope


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
        device: a jax device; its ``platform`` and ``device_kind`` are read.
        max_pieces: most pieces of a call, None for no limit beyond the ladder's own.
    Raises:
        LadderError: names the value that is wrong.
    """
    if isinstance(budgets, str | os.PathLike):
        return from_file(budgets, family, max_pieces, device.platform)
    if budgets is not None:
        return from_budgets(family, budgets, max_pieces, device.platform)
    return find(family, device.device_kind, max_pieces) or default_ladder(family, device.platform, max_pieces)


def say_replaced(ladder: Ladder, platform: str, dtype: str) -> None:
    """Warns of attention backends of a ladder that cannot run there. Buckets that name one take what "auto" takes."""
    for name, count in Counter(bucket.attention for bucket in ladder if bucket.attention != "auto").items():
        if reason := BACKENDS[name].why_not(platform, dtype):
            log.warning(
                "%s: attention %r, which %d buckets name, cannot run here (%s): they take what 'auto' takes",
                ladder.source, name, count, reason,
            )  # fmt: skip


def default_ladder(family: Family, platform: str, max_pieces: int | None = None) -> Ladder:
    """The ladder that the family's rule makes for a platform. Its last bucket holds the family's largest piece."""
    rule = rule_of(family.name, platform)
    smallest, _ = family.budget_range()
    budgets = [budget for budget in rungs(rule, family.largest(), family.merge**2) if budget >= smallest]
    buckets = tuple(complete(family, {"tokens": budget}, max_pieces) for budget in budgets)
    return Ladder(buckets, f"default of {family.name} for {platform}", rule)


def from_budgets(
    family: Family, budgets: Sequence[Any], max_pieces: int | None = None, platform: str = "gpu", block: int = BLOCK
) -> Ladder:
    """A ladder from output-token budgets, in any order, duplicates allowed; patches are rounded up to ``block``.

    Raises:
        LadderError: no budget, one that is no positive integer or below the smallest piece, or ``max_pieces`` above it.
    """
    if isinstance(budgets, bytes) or not isinstance(budgets, Iterable):
        raise LadderError(f"budgets is {budgets!r}; give a list of output tokens, or the path of a ladder file")
    given = sorted({whole(value, "budgets") for value in budgets})
    if not given:
        raise LadderError("budgets is empty: give at least one budget in output tokens, or None for the default ladder")
    _check_pieces(max_pieces, given[0])
    try:
        buckets = tuple(complete(family, {"tokens": budget}, max_pieces, block) for budget in given)
    except LadderError as error:
        raise LadderError(f"budgets: {error}") from None
    return Ladder(buckets, f"budgets {given}", rule_of(family.name, platform))


def from_file(
    path: str | os.PathLike[str],
    family: Family,
    max_pieces: int | None = None,
    platform: str = "gpu",
    block: int = BLOCK,
) -> Ladder:
    """A ladder from a TOML file: ``[[bucket]]`` tables, ascending; ``tokens`` in each, the other fields as wanted.

    Raises:
        LadderError: names the file, the line of the bucket and the value.
    """
    buckets = _buckets_of(Path(path), family, max_pieces, block)
    _check_pieces(max_pieces, buckets[0].tokens)
    return Ladder(buckets, str(path), rule_of(family.name, platform))


def find(family: Family, device_kind: str, max_pieces: int | None = None) -> Ladder | None:
    """The tuned ladder ``buckets/<device>/*.toml`` whose ``[match]`` fits the family, its sizes and the device, if any.

    Of several, the one that names most sizes; of those, the first by path.
    """
    best: tuple[int, Path] | None = None
    for path in sorted(paths.data("buckets").glob("*/*.toml")):
        match = read(path)[0].get("match", {})
        known(match, ("family", "device", "sizes"), f"{path}: [match]")
        sizes = match.get("sizes", {})
        known(sizes, list(sizes), f"{path}: sizes")
        fits = (
            match.get("family") == family.name
            and match.get("device") == device_kind
            and all(getattr(family.config, name, None) == value for name, value in sizes.items())
        )
        if fits and (best is None or len(sizes) > best[0]):
            best = len(sizes), path
    return Ladder(_buckets_of(best[1], family, max_pieces, BLOCK), str(best[1])) if best else None


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
    Path(path).write_text("\n".join(lines), encoding="utf-8", errors="replace")


def overflow_bucket(ladder: Ladder, demand: Demand, step: float = OVERFLOW_STEP, block: int = BLOCK) -> Bucket:
    """A bucket for a piece that the ladder does not hold.

    Overflow buckets form a ladder of their own: the largest capacity on every axis times the smallest power of ``step``
    that holds the piece, so that pieces of about one size share an executable.
    """
    patches, tokens, segments, windows = (
        max(axis) for axis in zip(*(bucket.capacity for bucket in ladder), strict=True)
    )
    segments, windows = max(segments, demand.segments), windows or demand.windows
    scale = 1.0
    while True:
        capacities = int(tokens * scale), whole_blocks(int(patches * scale), block), segments, int(windows * scale)
        bucket = Bucket(*capacities)
        if bucket.holds(demand):
            return bucket
        scale *= step


def words(sizes: Bucket | Demand, axes: Iterable[str] = AXES) -> str:
    """Capacities or needs in words, such as "64 tokens, 256 patches"."""
    return ", ".join(f"{getattr(sizes, axis)} {axis}" for axis in axes)


def whole_blocks(patches: int, block: int = BLOCK) -> int:
    """Rounded up to what the kernels take at a time."""
    return up(patches, block if patches <= LARGE else max(block, LARGE_BLOCK))


def complete(family: Family, given: Mapping[str, Any], max_pieces: int | None = None, block: int = BLOCK) -> Bucket:
    """A valid bucket from its tokens and whatever else is given.

    Raises:
        LadderError: names the field and the value.
    """
    if "tokens" not in given:
        raise LadderError("a bucket needs tokens, its budget in output tokens")
    tokens = whole(given["tokens"], "tokens")
    smallest, _ = family.budget_range()
    least = smallest * family.merge**2
    if tokens < smallest:
        legal = f"the smallest of {family.name} has {smallest}: give {smallest} or more"
        raise LadderError(f"tokens = {tokens}: no piece can use it, {legal}")
    patches = whole(given.get("patches", whole_blocks(tokens * family.merge**2, block)), "patches")
    if patches % block:
        multiple = whole_blocks(patches, block)
        raise LadderError(f"patches = {patches} is not a multiple of the kernel's block of {block}; take {multiple}")
    if patches < least:
        raise LadderError(f"patches = {patches}: no piece can use it, the smallest of {family.name} has {least}")
    segments = whole(given.get("segments", min(tokens // smallest, MOST_SEGMENTS)), "segments")
    if segments > tokens:
        raise LadderError(f"segments = {segments}: more pieces than the bucket's {tokens} tokens, and each has a token")
    if max_pieces is not None:
        segments = min(segments, whole(max_pieces, "max_pieces"))
    windowed = "window" in family.segment_sets
    windows = given.get("windows", family.most_windows(tokens, segments))
    if windowed:
        windows = whole(windows, "windows")
    elif windows != 0:
        raise LadderError(f"windows = {windows!r}: {family.name} has no attention windows, leave it out")
    attention = given.get("attention", "auto")
    if attention not in ATTENTION:
        raise LadderError(f"attention = {attention!r} is not known; known: {', '.join(ATTENTION)}")
    if ("constant" in given) != ("slope" in given):
        raise LadderError("constant and slope belong together; one of them is missing")
    costs = [milliseconds(given[name], name) for name in ("constant", "slope") if name in given]
    return Bucket(tokens, patches, segments, windows, attention, *costs)


def _buckets_of(path: Path, family: Family, max_pieces: int | None, block: int) -> tuple[Bucket, ...]:
    table, lines = read(path)
    known(table, ("match", "record", "bucket"), str(path))
    match = table.get("match")
    if isinstance(match, Mapping) and match.get("family", family.name) != family.name:
        log.warning("%s: its costs were measured for %s, not for %s", path, match["family"], family.name)
    entries = table.get("bucket")
    if not isinstance(entries, list) or not entries:
        raise LadderError(f"{path}: a ladder file needs at least one [[bucket]] table")
    buckets: list[Bucket] = []
    for line, entry in zip(lines, entries, strict=True):
        try:
            known(entry, [one.name for one in fields(Bucket)], "bucket")
            buckets.append(complete(family, entry, max_pieces, block))
        except LadderError as error:
            raise LadderError(f"{path}:{line}: {error}") from None
    for line, (low, high) in zip(lines[1:], pairwise(buckets), strict=True):
        if _order(low) >= _order(high):
            raise LadderError(f"{path}:{line}: {_unsorted(low, high)}")
        if (low.constant is None) != (high.constant is None):
            raise LadderError(f"{path}:{line}: constant and slope must stand in every bucket or in none")
    return tuple(buckets)


def _order(bucket: Bucket) -> tuple[int, int, int, int]:
    return bucket.tokens, bucket.patches, bucket.segments, bucket.windows


def _unsorted(low: Bucket, high: Bucket) -> str:
    return f"a bucket of {high.tokens} tokens after one of {low.tokens}: buckets must ascend, without duplicates"


def _check_pieces(max_pieces: int | None, budget: int) -> None:
    """Against the smallest budget where the user gave both; elsewhere ``max_pieces`` only lowers capacities."""
    if max_pieces is not None and whole(max_pieces, "max_pieces") > budget:
        raise LadderError(
            f"max_pieces = {max_pieces} is more than the smallest budget of {budget} tokens, and each piece has one: "
            f"lower max_pieces to {budget}, raise the budget, or leave one of the two out"
        )


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))  # nan, inf, -inf: TOML's words, not JSON's
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON may hold as it is
