"""The planner: every piece once, every capacity kept, cost at most that of vLLM's greedy rule, and fast."""

from __future__ import annotations

import json
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvit.buckets import planner
from jaxvit.buckets.ladder import Ladder, default_ladder, from_budgets
from jaxvit.buckets.planner import Call, cost, plan
from jaxvit.errors import CapacityError
from jaxvit.models.family import Bucket, Demand
from tests.buckets import planning
from tests.buckets.photos import FAMILIES, demands, family, sizes

DOUBLING = [64 * 2**power for power in range(8)]
"""vLLM's budgets at its default settings, 64 to 8192, with at most 64 items a call."""


def total(pieces: Sequence[Demand]) -> Demand:
    return Demand(*(sum(axis) for axis in zip(*pieces, strict=True)))


def greedy(tokens: Sequence[int], budgets: Sequence[int], most: int) -> list[tuple[int, list[int]]]:
    """vLLM's packing: (budget, items) of each call, the budget infinite where none fits.

    Items in ascending order of tokens, ties in input order. A call is closed before an item joins it if the item would
    make it exceed the maximum of items or the largest budget; or if the smallest budgets that fit call and item apart
    add up to less than the smallest that fits both, and the item's own budget is at least the call's.
    """

    def budget_of(count: int) -> float:
        place = bisect_left(budgets, count)
        return budgets[place] if place < len(budgets) else float("inf")

    calls: list[list[int]] = []
    batch: list[int] = []
    held = 0
    for item in sorted(range(len(tokens)), key=lambda item: tokens[item]):
        full = len(batch) == most or held + tokens[item] > budgets[-1]
        apart = budget_of(held) + budget_of(tokens[item])
        deferred = apart < budget_of(held + tokens[item]) and budget_of(tokens[item]) >= budget_of(held)
        if batch and (full or deferred):
            calls.append(batch)
            batch, held = [], 0
        batch.append(item)
        held += tokens[item]
    if batch:
        calls.append(batch)
    return [(budget_of(sum(tokens[item] for item in call)), call) for call in calls]


def greedy_plan(pieces: Sequence[Demand], ladder: Ladder, most: int) -> list[Call] | None:
    """The greedy rule's calls on the ladder, None where one exceeds its bucket on any axis."""
    budgets = [bucket.tokens for bucket in ladder]
    calls = []
    for budget, items in greedy([piece.tokens for piece in pieces], budgets, most):
        if budget not in budgets:
            return None
        index = budgets.index(budget)
        if not ladder.buckets[index].holds(total([pieces[item] for item in items])):
            return None
        calls.append(Call(index, tuple(sorted(items))))
    return calls


def item_limits(ladder: Ladder) -> set[int]:
    """The maximum of items as vLLM infers it, and as the ladder states it."""
    budgets = [bucket.tokens for bucket in ladder]
    return {min(budgets[-1] // budgets[0], budgets[0]), max(bucket.segments for bucket in ladder)}


def check(calls: Sequence[Call], pieces: Sequence[Demand], ladder: Ladder) -> None:
    """Every piece once, no capacity exceeded, one order."""
    assert sorted(index for call in calls for index in call.pieces) == list(range(len(pieces)))
    for call in calls:
        assert ladder.buckets[call.bucket].holds(total([pieces[index] for index in call.pieces]))
        assert list(call.pieces) == sorted(call.pieces)
    assert [call.pieces[0] for call in calls] == sorted(call.pieces[0] for call in calls)


# Properties


@st.composite
def buckets(draw: st.DrawFn) -> Bucket:
    tokens = draw(st.integers(1, 60))
    costs = draw(st.none() | st.tuples(st.floats(0.01, 10), st.floats(0, 1e-3)))
    return Bucket(
        tokens,
        draw(st.sampled_from([4 * tokens, 8 * tokens, 2 * tokens + 1, 64])),
        draw(st.integers(1, tokens)),
        draw(st.integers(1, tokens + 2)),
        "auto",
        *(costs or (None, None)),
    )


def order(bucket: Bucket) -> tuple[int, int, int, int]:
    """In which a ladder's buckets ascend."""
    return bucket.tokens, bucket.patches, bucket.segments, bucket.windows


Task = tuple[tuple[Bucket, ...], list[Demand]]


@st.composite
def tasks(draw: st.DrawFn, most: int = 40) -> Task:
    """Buckets whose capacities may cross, some of them of equal tokens, and pieces that each fit one of them."""
    chosen = draw(st.lists(buckets(), min_size=1, max_size=6))
    if draw(st.booleans()):
        twin = draw(buckets())
        chosen.append(replace(twin, tokens=chosen[0].tokens, segments=min(twin.segments, chosen[0].tokens)))
    chosen = sorted({order(bucket): bucket for bucket in chosen}.values(), key=order)

    def piece_of(bucket: Bucket) -> st.SearchStrategy[Demand]:
        return st.builds(
            Demand,
            st.integers(1, bucket.patches),
            st.integers(1, bucket.tokens),
            st.integers(1, min(2, bucket.segments)),
            st.integers(0, bucket.windows),
        )

    return tuple(chosen), draw(st.lists(st.sampled_from(chosen).flatmap(piece_of), max_size=most))


@settings(max_examples=200, deadline=None)
@given(task=tasks())
def test_every_piece_is_placed_once_and_no_capacity_is_exceeded(task: Task):
    ladder, pieces = Ladder(task[0], "drawn"), task[1]
    check(plan(pieces, ladder), pieces, ladder)


@settings(max_examples=200, deadline=None)
@given(task=tasks())
def test_cost_is_never_above_the_greedy_rule_s(task: Task):
    never_above_the_greedy_rule_s(task)


def never_above_the_greedy_rule_s(task: Task) -> None:
    ladder, pieces = Ladder(task[0], "drawn"), task[1]
    ours = cost(plan(pieces, ladder), pieces, ladder)
    for most in item_limits(ladder):
        theirs = greedy_plan(pieces, ladder, most)
        if theirs is not None:
            assert ours <= cost(theirs, pieces, ladder) * (1 + 1e-9)


@st.composite
def coarse(draw: st.DrawFn) -> Task:
    """Many pieces on a ladder of few buckets that only tokens fill: there the greedy rule may be the cheapest."""
    budgets = draw(st.lists(st.integers(4, 60), min_size=2, max_size=3, unique=True).map(sorted))
    costs = st.tuples(st.floats(0.01, 10), st.floats(0, 1e-3))
    chosen = [Bucket(tokens, 4 * tokens, tokens) for tokens in budgets]
    if draw(st.booleans()):
        chosen = [replace(one, constant=c, slope=s) for one in chosen for c, s in [draw(costs)]]
    most = draw(st.integers(max(1, budgets[-1] // 4), budgets[-1]))
    tokens = draw(st.lists(st.integers(1, most), min_size=8, max_size=24))
    return tuple(chosen), [Demand(4 * count, count, 1, 0) for count in tokens]


MANY = [15, 2, 7, 13, 6, 12, 1, 9, 2, 14, 17, 9, 16, 2, 8, 3, 6]
PINNED = [
    ((Bucket(14, 56, 14), Bucket(17, 68, 15)), [5, 2, 4, 3, 5, 7, 7, 3, 4, 3, 6, 4, 3, 4]),
    ((Bucket(37, 148, 37, 0, "auto", 0.41, 6e-4), Bucket(39, 156, 39, 0, "auto", 6.5, 1.2e-4)), MANY),
]
"""Buckets, and tokens of pieces, that the greedy rule packs cheaper than the planner would without it: few pieces,
which are improved afterwards one by one, and more."""


@settings(max_examples=200, deadline=None)
@given(task=coarse())
def test_cost_is_never_above_the_greedy_rule_s_where_that_is_good(task: Task):
    never_above_the_greedy_rule_s(task)


@pytest.mark.parametrize(("chosen", "tokens"), PINNED)
def test_where_the_greedy_rule_s_packing_is_cheaper_it_is_taken(
    chosen: tuple[Bucket, ...], tokens: list[int], monkeypatch: pytest.MonkeyPatch
):
    task: Task = chosen, [Demand(4 * count, count, 1, 0) for count in tokens]
    never_above_the_greedy_rule_s(task)
    monkeypatch.setattr(planner, "_greedy", lambda *_: None)
    with pytest.raises(AssertionError):
        never_above_the_greedy_rule_s(task)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 100),
    name=st.sampled_from(FAMILIES),
    doubling=st.booleans(),
    most=st.integers(1, 64),
)
def test_cost_is_never_above_the_greedy_rule_s_on_photos(seed: int, count: int, name: str, doubling: bool, most: int):
    ladder = from_budgets(family(name), DOUBLING) if doubling else default_ladder(family(name), "gpu")
    pieces = [piece for size in sizes(count, seed) for piece in demands(family(name), *size)]
    calls = plan(pieces, ladder)
    check(calls, pieces, ladder)
    theirs = greedy_plan(pieces, ladder, most)
    assert theirs is None or cost(calls, pieces, ladder) <= cost(theirs, pieces, ladder) * (1 + 1e-9)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place, group in enumerate(rest):
            yield [*rest[:place], [items[0], *group], *rest[place + 1 :]]


def cheapest(pieces: Sequence[Demand], ladder: Ladder) -> float:
    """Cost of one call of the pieces, infinite where no bucket holds them."""
    load, square = total(pieces), sum(piece.patches**2 for piece in pieces)
    fitting = [bucket for bucket in ladder if bucket.holds(load)]
    return min((ladder.constant(one) + ladder.slope(one) * square for one in fitting), default=float("inf"))


@settings(max_examples=200, deadline=None)
@given(task=tasks(most=4), again=st.lists(st.integers(0, 3), max_size=3))
def test_a_few_pieces_are_planned_at_the_least_cost_there_is(task: Task, again: list[int]):
    ladder, pieces = Ladder(task[0], "drawn"), task[1]
    pieces = pieces + [pieces[index % len(pieces)] for index in again if pieces]
    least = min(
        sum(cheapest([pieces[index] for index in group], ladder) for group in groups)
        for groups in partitions(list(range(len(pieces))))
    )
    calls = plan(pieces, ladder)
    check(calls, pieces, ladder)
    assert cost(calls, pieces, ladder) == pytest.approx(least, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(task=tasks(most=1), count=st.integers(2, 64), other=st.none() | st.integers(0, 63))
def test_many_equal_pieces_are_planned_at_the_least_cost_there_is(task: Task, count: int, other: int | None):
    ladder, pieces = Ladder(task[0], "drawn"), task[1] * count
    if other is not None and pieces:  # and one of another kind among a few
        pieces = pieces[:32]
        pieces[other % len(pieces)] = Demand(1, 1, 1, 0)
    equal = [piece for piece in pieces if piece == task[1][0]] if pieces else []
    odd = [piece for piece in pieces if piece not in equal]
    least = [0.0]
    for number in range(1, len(equal) + 1):
        least.append(min(cheapest(equal[:some], ladder) + least[number - some] for some in range(1, number + 1)))
    expected = least[-1]
    if odd:
        expected = min(cheapest(odd + equal[:some], ladder) + least[len(equal) - some] for some in range(len(least)))
    calls = plan(pieces, ladder)
    check(calls, pieces, ladder)
    assert cost(calls, pieces, ladder) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "pieces",
    [
        [Demand(4 * tokens, tokens, 1, 0) for tokens in range(64, 71)],
        [Demand(256, 64, 1, 0)] * 64,
        [Demand(256, 64, 1, 0)] * 32 + [Demand(300, 75, 1, 0)],
        [Demand(4096, 1024, 1, 0)] * 2000,
    ],
    ids=["seven sizes", "64 equal", "32 equal and another", "2,000 of which few fit a call"],
)
def test_such_pieces_are_planned_exactly(pieces: list[Demand], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "_pack", lambda *_: pytest.fail("the packing of many pieces is not exact"))
    ladder = default_ladder(family("lfm2_vl"), "gpu")
    check(plan(pieces, ladder), pieces, ladder)


@settings(max_examples=50, deadline=None)
@given(task=tasks())
def test_the_same_pieces_get_the_same_plan(task: Task):
    ladder, pieces = Ladder(task[0], "drawn"), task[1]
    first = plan(pieces, ladder)
    planner._costs.cache_clear()
    assert plan(list(pieces), Ladder(ladder.buckets, ladder.source)) == first


# Examples


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([300, 4096], [512, 4096]),
        ([1000, 1100], [1024, 2048]),
        ([200, 300], [512]),
        ([256] * 10 + [2816], [8192]),
        ([9000, 10], [64, float("inf")]),
        ([1] * 65, [64, 64]),
    ],
)
def test_the_greedy_rule_here_is_vllm_s(tokens: list[int], expected: list[float]):
    assert [budget for budget, _ in greedy(tokens, DOUBLING, 64)] == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([300, 4096], [512, 4096]),
        ([1000, 1100], [1024, 2048]),
        ([200, 300], [512]),
        # Where the greedy rule runs 8192 tokens, a third of them padding: no padding at all.
        ([256] * 10 + [2816], [256, 1024, 4096]),
    ],
)
def test_plans_on_vllm_s_budgets(tokens: list[int], expected: list[int]):
    ladder = from_budgets(family("kimi_k25"), DOUBLING)
    pieces = [Demand(4 * count, count, 1, 0) for count in tokens]
    calls = plan(pieces, ladder)
    check(calls, pieces, ladder)
    assert sorted(ladder.buckets[call.bucket].tokens for call in calls) == expected


def test_nothing_needs_no_call():
    assert plan([], default_ladder(family("kimi_k25"), "gpu")) == []


def test_a_video_chunk_is_charged_by_its_patches():
    ladder = from_budgets(family("kimi_k25"), [256, 1024])
    chunk = Demand(4096, 256, 1, 0)  # four frames of 448 x 448 pixels
    assert plan([chunk], ladder) == [Call(1, (0,))]
    assert plan([chunk, Demand(4, 1, 1, 0)], ladder) == [Call(1, (0,)), Call(0, (1,))]


def test_a_cheaper_larger_bucket_is_preferred():
    ladder = Ladder((Bucket(64, 256, 4, 0, "dense", 5.0, 0.0), Bucket(128, 512, 4, 0, "xla", 1.0, 0.0)), "odd")
    assert plan([Demand(4, 1, 1, 0)], ladder) == [Call(1, (0,))]
    assert {call.bucket for call in plan([Demand(40, 10, 1, 0)] * 20, ladder)} == {1}


def test_a_bucket_with_a_lower_slope_takes_the_long_pieces():
    ladder = Ladder((Bucket(64, 256, 64, 0, "dense", 1.0, 1.0), Bucket(128, 512, 64, 0, "xla", 10.0, 1e-3)), "slopes")
    calls = plan([Demand(200, 50, 1, 0)] + [Demand(1, 1, 1, 0)] * 3, ladder)
    assert [call.bucket for call in calls if 0 in call.pieces] == [1]


# Boundaries

CAPACITY = Demand(400, 90, 7, 60)
SMALL = Ladder((Bucket(90, 400, 7, 60),), "one bucket")
LARGE = Ladder((Bucket(90, 400, 7, 60), Bucket(200, 1000, 20, 200)), "two buckets")


@pytest.mark.parametrize("axis", Demand._fields)
def test_one_piece_at_capacity_fits_and_one_more_does_not(axis: str):
    over = CAPACITY._replace(**{axis: getattr(CAPACITY, axis) + 1})
    assert plan([CAPACITY], SMALL) == [Call(0, (0,))]
    assert plan([CAPACITY], LARGE) == [Call(0, (0,))]
    assert plan([over], LARGE) == [Call(1, (0,))]
    words = f"needs {over.patches} patches, {over.tokens} tokens, {over.segments} segments, {over.windows} windows"
    several: list[tuple[list[Demand], int]] = [([over], 0), ([CAPACITY, over, over], 1), ([CAPACITY] * 9 + [over], 9)]
    for pieces, place in several:
        with pytest.raises(CapacityError, match=f"piece {place} fits no bucket: it {words}"):
            plan(pieces, SMALL)


@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("axis", ["patches", "tokens", "windows"])
def test_several_pieces_at_capacity_share_a_call_and_one_more_splits_them(axis: str, count: int):
    place = Demand._fields.index(axis)
    share, rest = divmod(CAPACITY[place], count)
    pieces = [Demand(1, 1, 1, 0)._replace(**{axis: share + (index < rest)}) for index in range(count)]
    assert plan(pieces, SMALL) == [Call(0, tuple(range(count)))]
    pieces[-1] = pieces[-1]._replace(**{axis: pieces[-1][place] + 1})
    assert len(plan(pieces, SMALL)) == 2
    # With a larger bucket, one call of it or two of the smaller: whichever is cheaper, within every capacity.
    check(plan(pieces, LARGE), pieces, LARGE)


@pytest.mark.parametrize("count", [7, 8, 20, 21])
def test_segments_bound_the_pieces_of_a_call(count: int):
    pieces = [Demand(4, 1, 1, 1)] * count
    assert len(plan(pieces, SMALL)) == -(-count // 7)
    assert max(len(call.pieces) for call in plan(pieces, LARGE)) <= 20


def test_crossed_capacities_are_each_kept():
    """A bucket with more tokens may have fewer patches: no bucket holds all that another does."""
    ladder = Ladder((Bucket(64, 1024, 4), Bucket(128, 512, 9)), "crossed")
    pieces = [Demand(1000, 10, 1, 0), Demand(400, 100, 1, 0), Demand(10, 1, 1, 0)] * 9
    calls = plan(pieces, ladder)
    check(calls, pieces, ladder)
    assert {call.bucket for call in calls} == {0, 1}
    with pytest.raises(CapacityError, match="piece 1 fits no bucket"):
        plan([Demand(10, 1, 1, 0), Demand(1000, 100, 1, 0)], ladder)


# Photos: padding and cost

SEEDS = (11, 12, 13)


def over_ideal(name: str, photos: int, ladder: Ladder, planned: Callable[..., list[Call]]) -> tuple[float, float]:
    """(patches, cost) over what the same calls would take without padding, less 1; pooled over calls of all seeds."""
    ran = real = spent = unpadded = 0.0
    for seed in SEEDS:
        pictures = sizes(256 if photos == 1 else 16 * photos, seed)
        for start in range(0, len(pictures), photos):
            pieces = [piece for size in pictures[start : start + photos] for piece in demands(family(name), *size)]
            calls = planned(pieces, ladder)
            patches = sum(ladder.buckets[call.bucket].patches for call in calls)
            needed = sum(piece.patches for piece in pieces)
            price = cost(calls, pieces, ladder)
            ran, real = ran + patches, real + needed
            spent, unpadded = spent + price, unpadded + price - ladder.rule.patch * (patches - needed)
    return ran / real - 1, spent / unpadded - 1


def by_tokens(pieces: Sequence[Demand], ladder: Ladder) -> list[Call]:
    """The greedy rule on vLLM's budgets, which checks tokens and items alone."""
    found = greedy([piece.tokens for piece in pieces], DOUBLING, 64)
    return [Call(DOUBLING.index(int(budget)), tuple(items)) for budget, items in found]


@pytest.mark.parametrize("photos", [1, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_of_photos_stays_within_its_bounds(name: str, photos: int, root: Path):
    patches, spent = over_ideal(name, photos, default_ladder(family(name), "gpu"), plan)
    their_patches, their_cost = over_ideal(name, photos, from_budgets(family(name), DOUBLING), by_tokens)
    row = (
        f"| {name} | {photos} | {100 * patches:.1f}% | {100 * spent:.1f}% "
        f"| {100 * their_patches:.0f}% | {100 * their_cost:.0f}% |"
    )
    print(row)
    assert patches <= 0.12
    assert spent <= 0.06
    assert patches < their_patches
    assert spent < their_cost
    assert row in (root / "buckets" / "README.md").read_text(), f"the table of buckets/README.md is stale; now:\n{row}"


@pytest.mark.parametrize("name", FAMILIES)
def test_plans_of_many_photos_cost_little_more_than_one_endless_bucket(name: str):
    """The bound: every patch at the rate of the largest bucket, no padding, attention as it is."""
    ladder = default_ladder(family(name), "gpu")
    rate = min(ladder.constant(bucket) / bucket.patches for bucket in ladder)
    for seed in SEEDS:
        pieces = [piece for size in sizes(64, seed) for piece in demands(family(name), *size)]
        bound = sum(rate * piece.patches + ladder.rule.square * piece.patches**2 for piece in pieces)
        assert cost(plan(pieces, ladder), pieces, ladder) <= 1.02 * bound


# Time


@pytest.fixture(scope="module")
def times(root: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by family, pieces and what was timed, of a process of its own."""
    command = [sys.executable, "-m", "tests.buckets.planning"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("what", planning.WHAT)
@pytest.mark.parametrize("count", planning.BARS)
@pytest.mark.parametrize("name", FAMILIES)
def test_planning_is_fast(times: dict[str, dict[str, dict[str, float]]], name: str, count: int, what: str):
    milliseconds = times[name][str(count)][what]
    print(f"{name}: {count} pieces planned in {milliseconds:.3f} ms ({what})")
    assert milliseconds <= planning.BARS[count]
