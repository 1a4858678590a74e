"""Which piece runs in which bucket: the cheapest calls found, every capacity kept on every axis.

The cost of a call, in milliseconds, is its bucket's constant + the bucket's slope x the sum of its pieces' squared
patches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, islice
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from jaxvit.buckets.ladder import Ladder
from jaxvit.errors import CapacityError
from jaxvit.models.family import Demand

FEW = 7
"""Up to so many pieces, the cheapest of all plans is found."""
EFFORT, MORE = 6400, 128
"""And of more, where that is so little work, and so much more for every piece: for 64 that are all equal, or 2,000 of
which few fit a call."""
STATE = 32
"""Work of a state of :func:`_exact`; comparing two calls is 1, some 70 ns."""
POLISH = 16
"""Else, up to so many pieces, a packing is improved piece by piece; more, of many sizes, are within half a percent of
ideal as they are."""
GAPS = (0.0, 0.02, 0.06)
"""Shares of the work by which a packing expects to exceed the ideal; each makes one candidate."""
NEAR = 1.002
"""A packing this near to the ideal cost is taken without trying others."""
MANY = 64
"""Calls of a packing beyond which no other gap is tried: there the gaps even out."""
MISSES = 32
"""Pieces that a call skips because they exceed another axis than the one sorted by."""

Load = tuple[int, int, int, int, int]
"""Patches, tokens, segments, windows and squared patches, summed over the pieces of a call."""
Kinds = Mapping[Demand, Sequence[int]]
"""A demand -> the pieces that have it, ascending; in the order of their first pieces."""


class Call(NamedTuple):
    """One run of a bucket: the bucket's index in the ladder, and the indices of its pieces, ascending."""

    bucket: int
    pieces: tuple[int, ...]


class _Draft(NamedTuple):
    cost: float
    bucket: int
    pieces: list[int]
    load: Load


def ready(ladder: Ladder) -> None:
    """Computes what every plan on the ladder reads, a few milliseconds: its first plan is then as fast as the next."""
    _ = _costs(ladder).table


def plan(demands: Sequence[Demand], ladder: Ladder) -> list[Call]:
    """Packs pieces into calls so that the sum of their costs is small. The same input gives the same plan.

    A few pieces are planned exactly. For more, several packings compete, vLLM's greedy rule among them, so that no plan
    costs more than the greedy one where that is feasible.

    Args:
        demands: what each piece takes on each axis.
        ladder: the buckets.
    Returns:
        The calls in the order of their first pieces.
    Raises:
        CapacityError: a piece fits no bucket.
    """
    costs = _costs(ladder)
    if len(demands) == 1:
        return [Call(costs.alone(0, demands[0]).bucket, (0,))]
    kinds: dict[Demand, list[int]] = {}
    for index, demand in enumerate(demands):
        kinds.setdefault(demand, []).append(index)
    costs.check(kinds)
    if len(demands) <= FEW or _effort(kinds, costs) <= EFFORT + MORE * len(demands):
        drafts = _exact(kinds, costs)
    else:
        drafts = _pack(demands, costs)
        if len(demands) <= POLISH:
            drafts = _polish(drafts, demands, costs)
    return sorted((Call(draft.bucket, tuple(sorted(draft.pieces))) for draft in drafts), key=lambda call: call.pieces)


def cost(calls: Sequence[Call], demands: Sequence[Demand], ladder: Ladder) -> float:
    """Milliseconds of the calls by the ladder's costs."""
    costs = _costs(ladder)
    spent = 0.0
    for bucket, pieces in calls:
        squares = sum(demands[index].patches ** 2 for index in pieces)
        spent += costs.constant[bucket] + costs.slope[bucket] * squares
    return spent


class _Costs:
    """A ladder's capacities and costs as lists, and what patches cost at least."""

    def __init__(self, ladder: Ladder):
        buckets = ladder.buckets
        self.patches = [bucket.patches for bucket in buckets]
        self.tokens = [bucket.tokens for bucket in buckets]
        self.segments = [bucket.segments for bucket in buckets]
        self.windows = [bucket.windows for bucket in buckets]
        self.constant = [ladder.constant(bucket) for bucket in buckets]
        self.slope = [ladder.slope(bucket) for bucket in buckets]
        self.least_slope = min(self.slope)
        self.least_constant = list(accumulate(reversed(self.constant), min))[::-1]
        self.axes = (self.patches, self.tokens, self.segments, self.windows)
        self.most = tuple(max(axis) for axis in self.axes)
        self.last = buckets[-1].capacity
        self.unit = max(64, self.most[0] // 1024)
        self.units = [max(1, patches // self.unit) for patches in self.patches]
        # Where slopes differ, a bucket's attention within segments of 1,024 patches counts with its constant.
        self.price = [
            constant + (slope - self.least_slope) * 1024 * patches
            for constant, slope, patches in zip(self.constant, self.slope, self.patches, strict=True)
        ]
        self.rate = min(price / units for price, units in zip(self.price, self.units, strict=True))

    @cached_property
    def table(self) -> list[float]:
        """Price of n units of patches packed without a gap, for n up to twice the largest bucket."""
        price, units = np.array(self.price), np.array(self.units)
        table = np.zeros(2 * units.max() + 1)
        for count in range(1, len(table)):
            table[count] = (price + table[np.maximum(count - units, 0)]).min()
        return table.tolist()

    def cheapest(self, load: Load) -> tuple[float, int]:
        """Cost and index of the cheapest bucket that holds the load; infinity and -1 where none does."""
        patches, tokens, segments, windows, squares = load
        low, best, spent = inf, -1, self.least_slope * squares
        for index in range(bisect_left(self.tokens, tokens), len(self.tokens)):
            if self.least_constant[index] + spent >= low:
                break
            value = self.constant[index] + self.slope[index] * squares
            if (
                value < low
                and patches <= self.patches[index]
                and segments <= self.segments[index]
                and windows <= self.windows[index]
            ):
                low, best = value, index
        return low, best

    def alone(self, index: int, demand: Demand) -> _Draft:
        """A call of one piece."""
        load = _load(demand)
        value, bucket = self.cheapest(load)
        if bucket < 0:
            raise CapacityError(
                f"piece {index} fits no bucket: it needs {_words(demand)}; the ladder has at most {_words(self.most)}"
            )
        return _Draft(value, bucket, [index], load)

    def together(self, demand: Demand) -> int:
        """So many equal pieces share a call at most."""
        return min(room // need for room, need in zip(self.most, demand, strict=True) if need)

    def check(self, kinds: Kinds) -> None:
        """Raises CapacityError if a piece fits no bucket; it names the first."""
        if any(max(axis) > room for axis, room in zip(zip(*kinds, strict=True), self.last, strict=False)):
            for demand, pieces in kinds.items():
                self.alone(pieces[0], demand)


@lru_cache(maxsize=64)
def _costs(ladder: Ladder) -> _Costs:
    return _Costs(ladder)


def _words(axes: Sequence[int]) -> str:
    return ", ".join(f"{value} {name}" for name, value in zip(Demand._fields, axes, strict=True))


def _total(drafts: Sequence[_Draft]) -> float:
    return sum((draft[0] for draft in drafts), 0.0)


def _load(demand: Demand) -> Load:
    patches, tokens, segments, windows = demand
    return patches, tokens, segments, windows, patches * patches


def _add(load: Load, more: Load, sign: int = 1) -> Load:
    a, b, c, d, e = load
    p, t, s, w, q = more
    return a + sign * p, b + sign * t, c + sign * s, d + sign * w, e + sign * q


def _effort(kinds: Kinds, costs: _Costs) -> float:
    """What :func:`_exact` has to do."""
    states = calls = 1.0
    for demand, pieces in kinds.items():
        count, most = len(pieces), min(len(pieces), costs.together(demand))
        states *= count + 1
        calls *= (most + 1) * (most + 2) / 2 + (count - most) * (most + 1)
    return STATE * states + calls


def _exact(kinds: Kinds, costs: _Costs) -> list[_Draft]:
    """The cheapest partition. What is planned is how many pieces of each kind a call takes; which of them, comes last.

    A state is so many pieces of each kind: a number of mixed base, a digit a kind. For every state in ascending order,
    the best call for a piece of its last kind and some others, and the cheapest calls for what that leaves.
    """
    loads: list[Load] = [(0, 0, 0, 0, 0)]
    value, total, taken = [0.0], [0.0], [0]  # of the state as one call, of its cheapest calls, the first of those
    within = [[0]]  # the states that a state contains, the largest first, but for those that are too many for a call
    strides = []
    for demand, pieces in kinds.items():
        stride, one = len(loads), _load(demand)
        strides.append(stride)
        together = stride * costs.together(demand)
        for most in range(stride, stride * (len(pieces) + 1), stride):
            for rest in range(stride):
                state = most + rest
                loads.append(_add(loads[state - stride], one))
                value.append(costs.cheapest(loads[state])[0])
                some = range(min(most, together), 0, -stride)
                calls = [own + others for own in some for others in within[rest]]
                sums = [value[call] + total[state - call] for call in calls]
                total.append(min(sums))
                taken.append(calls[sums.index(total[state])])
                within.append(calls + within[rest])
    drafts, state = [], len(loads) - 1
    queues = [iter(pieces) for pieces in kinds.values()]
    while state:
        call = rest = taken[state]
        chosen: list[int] = []
        for stride, queue in zip(reversed(strides), reversed(queues), strict=True):
            count, rest = divmod(rest, stride)
            chosen += islice(queue, count)
        drafts.append(_Draft(*costs.cheapest(loads[call]), chosen, loads[call]))
        state -= call
    return drafts


def _pack(demands: Sequence[Demand], costs: _Costs) -> list[_Draft]:
    """The cheapest of several packings."""
    squares = sum(demand[0] * demand[0] for demand in demands)
    units = sum(demand[0] for demand in demands) / costs.unit
    best = _fill(demands, costs, GAPS[0])
    ideal = costs.least_slope * squares + (
        costs.table[ceil(units)] if units < len(costs.table) - 1 else costs.rate * units
    )
    for gap in GAPS[1:]:
        if _total(best) > NEAR * ideal and len(best) <= MANY:
            best = min(best, _fill(demands, costs, gap), key=_total)
    for most in sorted({costs.most[2], min(costs.tokens[-1] // costs.tokens[0], costs.tokens[0])}):
        best = min(best, _greedy(demands, costs, most) or best, key=_total)
    return best


def _fill(demands: Sequence[Demand], costs: _Costs, gap: float) -> list[_Draft]:
    """Opens for the largest piece the bucket that makes it and the ideal rest cheapest, then fills that best-fit.

    Large and small are measured on the axis that the pieces together need most of.
    """
    rooms, price, units, table, rate = costs.axes, costs.price, costs.units, costs.table, costs.rate
    left = [sum(axis) for axis in zip(*demands, strict=True)]
    axis = max(range(4), key=lambda axis: left[axis] / (costs.most[axis] or 1))
    order = sorted(range(len(demands)), key=lambda index: (demands[index][axis], -index))
    sizes = [demands[index][axis] for index in order]
    scales = [(1 + gap) * costs.most[0] / (most or 1) / costs.unit for most in costs.most]
    end = len(table) - 1
    drafts = []
    while order:
        patches, tokens, segments, windows = demands[order[-1]]
        need = ceil(max(one * scale for one, scale in zip(left, scales, strict=True)))
        low, best = inf, -1
        for index in range(bisect_left(costs.tokens, tokens), len(price)):
            if patches <= rooms[0][index] and segments <= rooms[2][index] and windows <= rooms[3][index]:
                over = need - units[index]
                value = price[index]
                if over > end:
                    value += table[end] + rate * (over - end)
                elif over > 0:
                    value += table[over]
                if value <= low:
                    low, best = value, index
        most_patches, most_tokens, most_segments, most_windows = (room[best] for room in rooms)
        room = rooms[axis][best] - sizes.pop()
        pieces = [order.pop()]
        squares, high, misses = patches * patches, len(sizes), 0
        while high := bisect_right(sizes, room, 0, high):
            high -= 1
            a, b, c, d = demands[order[high]]
            if (
                patches + a <= most_patches
                and tokens + b <= most_tokens
                and segments + c <= most_segments
                and windows + d <= most_windows
            ):
                patches, tokens, segments, windows, squares = (
                    patches + a,
                    tokens + b,
                    segments + c,
                    windows + d,
                    squares + a * a,
                )
                room -= sizes.pop(high)
                pieces.append(order.pop(high))
            elif segments >= most_segments or (misses := misses + 1) > MISSES:
                break
        load = (patches, tokens, segments, windows, squares)
        drafts.append(_Draft(*costs.cheapest(load), pieces, load))
        left = [one - taken for one, taken in zip(left, load, strict=False)]
    return drafts


def _greedy(demands: Sequence[Demand], costs: _Costs, most: int) -> list[_Draft] | None:
    """vLLM's rule, with at most so many pieces a call: ascending tokens, close a call when the next piece exceeds it or
    is cheaper apart by sums of budgets. None where a call exceeds its bucket on another axis than tokens.
    """
    budgets = costs.tokens
    if max(demand[1] for demand in demands) > budgets[-1]:
        return None
    groups: list[list[int]] = [[]]
    tokens = 0
    for index in sorted(range(len(demands)), key=lambda index: demands[index][1]):
        one = demands[index][1]
        if groups[-1]:
            closed = len(groups[-1]) >= most or tokens + one > budgets[-1]
            if not closed:
                batch, alone = budgets[bisect_left(budgets, tokens)], budgets[bisect_left(budgets, one)]
                closed = batch + alone < budgets[bisect_left(budgets, tokens + one)] and alone >= batch
            if closed:
                groups.append([])
                tokens = 0
        groups[-1].append(index)
        tokens += one
    drafts = []
    for pieces in groups:
        load = reduce(_add, (_load(demands[index]) for index in pieces))
        value, bucket = costs.cheapest(load)
        if bucket < 0:
            return None
        drafts.append(_Draft(value, bucket, pieces, load))
    return drafts


def _polish(drafts: Sequence[_Draft], demands: Sequence[Demand], costs: _Costs) -> list[_Draft]:
    """Moves one piece, or a whole call, into another call as long as that pays."""
    drafts = list(drafts)
    while better := _move(drafts, demands, costs):
        drafts = better
    return drafts


def _move(drafts: list[_Draft], demands: Sequence[Demand], costs: _Costs) -> list[_Draft] | None:
    for source, (value, _, pieces, load) in enumerate(drafts):
        moves = [([index], _load(demands[index])) for index in pieces] if len(pieces) > 1 else []
        for moved, share in [*moves, (pieces, load)]:
            kept = [index for index in pieces if index not in moved]
            rest = _add(load, share, -1)
            remains = [_Draft(*costs.cheapest(rest), kept, rest)] if kept else []
            gain = value - _total(remains)
            for target, other in enumerate(drafts):
                if target != source and gain > 0:
                    both = _add(other.load, share)
                    joined = _Draft(*costs.cheapest(both), other.pieces + moved, both)
                    if joined.cost - other.cost < gain * (1 - 1e-9):
                        others = [draft for index, draft in enumerate(drafts) if index not in (source, target)]
                        return [*others, *remains, joined]
    return None
