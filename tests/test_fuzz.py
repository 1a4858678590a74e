"""Random media, sizes, ladders and call orders: each good item gets its own embeddings, each bad one its error."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxvit
from jaxvit.errors import JaxvitError, MediaError
from tests.families import FAMILIES, VIDEO, checkpoint, clip, picture, relative

LADDERS: tuple[dict[str, Any], ...] = (
    {"budgets": [100]},
    {"budgets": [100, 320]},
    {"budgets": [320]},
    {"budgets": [100, 320], "max_pieces": 2},
    {"budgets": [320], "attention": "dense"},
)


@cache
def loaded(name: str, ladder: int) -> jaxvit.Encoder:
    """Encoders of one family share the executables of equal buckets, so that few are compiled."""
    found = jaxvit.load(checkpoint(name), dtype="float32", store=False, **LADDERS[ladder])
    if "attention" not in LADDERS[ladder]:
        found.dispatcher._ready = ready(name)
    return found


@cache
def ready(name: str) -> dict[Any, Any]:
    return {}


@dataclass(frozen=True)
class Medium:
    """One item as it is passed, and the array or frames that it must count for; None for a bad one."""

    passed: Any
    plain: Any


def png(rgb: np.ndarray) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(rgb).save(file, "PNG", compress_level=1)
    return file.getvalue()


FORMS: dict[str, Any] = {
    "array": lambda rgb: rgb,
    "fortran": np.asfortranarray,
    "chw": lambda rgb: jaxvit.Image(rgb.transpose(2, 0, 1), layout="chw"),
    "PIL": PIL.Image.fromarray,
    "bytes": png,
    "file": lambda rgb: io.BytesIO(png(rgb)),
    "opaque": lambda rgb: np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)]),
}
BAD: tuple[Any, ...] = (
    *(None, b"", b"GIF89a", "absent.png", 7, [], {}, object(), np.zeros((4, 4, 3)), np.zeros((4, 4, 5), np.uint8)),
    *(np.zeros((0, 4, 3), np.uint8), PIL.Image.new("F", (4, 4)), jaxvit.Video([]), jaxvit.Image(np.zeros(3, np.uint8))),
)


def media(name: str) -> st.SearchStrategy[Medium]:
    side = st.one_of(st.integers(1, 40), st.integers(1, 230), st.sampled_from([1, 27, 28, 29, 56, 112, 224]))
    sizes = st.tuples(side, side).filter(lambda size: max(size) <= 60 * min(size))
    seeds = st.integers(0, 1000)

    def still(size: tuple[int, int], seed: int, form: str) -> Medium:
        rgb = picture(*size, seed)
        return Medium(FORMS[form](rgb), rgb)

    kinds = [st.builds(still, sizes, seeds, st.sampled_from(sorted(FORMS)))] * 4
    kinds.append(st.builds(Medium, st.sampled_from(BAD), st.none()))
    if name in VIDEO:
        small = st.tuples(st.integers(20, 90), st.integers(20, 90))
        clips = st.builds(lambda frames, size, seed: clip(frames, *size, seed), st.integers(1, 9), small, seeds)
        kinds.append(clips.map(lambda video: Medium(video, video)))
    return st.one_of(kinds)


@dataclass
class Tally:
    """What an exploration met."""

    examples: int = 0
    calls: int = 0
    items: int = 0
    refused: int = 0
    largest: float = 0.0


@st.composite
def orders(draw: st.DrawFn, name: str) -> tuple[int, list[list[Medium]], list[int]]:
    """A ladder, one to three calls, and the order, with repeats, in which they are made."""
    calls = draw(st.lists(st.lists(media(name), max_size=7), min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(calls) - 1), min_size=1, max_size=5))
    return draw(st.integers(0, len(LADDERS) - 1)), calls, order


def explore(name: str, examples: int, derandomize: bool) -> Tally:
    tally, canary = Tally(), picture(56, 56)
    canaries: dict[int, np.ndarray] = {}

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(orders(name))
    def run(drawn: tuple[int, list[list[Medium]], list[int]]) -> None:
        ladder, calls, order = drawn
        encoder = loaded(name, ladder)
        before = canaries.setdefault(ladder, encoder.encode(canary)[0])
        first: dict[int, list[Any]] = {}
        for index in order:
            found = checked(encoder, calls[index], tally)
            for ours, theirs in zip(found, first.setdefault(index, found), strict=True):
                if isinstance(theirs, np.ndarray):
                    assert ours.tobytes() == theirs.tobytes(), "the same call gives the same bits"
            np.testing.assert_array_equal(encoder.encode(canary)[0], before)
        tally.examples += 1

    run()
    return tally


def checked(encoder: jaxvit.Encoder, call: list[Medium], tally: Tally) -> list[Any]:
    """One call's results, each held against the plain picture alone."""
    encodings = encoder.encode([medium.passed for medium in call], on_error="return")
    found = list(encodings)
    assert len(found) == len(call)
    for index, (medium, rows) in enumerate(zip(call, found, strict=True)):
        if medium.plain is None:
            assert isinstance(rows, MediaError)
            assert str(rows).startswith(f"item {index}: ")
            tally.refused += 1
            continue
        assert isinstance(rows, np.ndarray), rows
        alone = encoder.encode(medium.plain)[0]
        assert rows.shape == alone.shape
        difference = relative(rows, alone)
        assert difference <= 1e-5
        tally.largest = max(tally.largest, difference)
    if any(medium.plain is None for medium in call):
        with pytest.raises(JaxvitError):
            encoder.encode([medium.passed for medium in call])
    bad = {index for index, medium in enumerate(call) if medium.plain is None}
    assert Counter(item for _, item, _, _ in encodings.packed).keys() == set(range(len(call))) - bad
    tally.calls += 1
    tally.items += len(call)
    return found


def told(name: str, tally: Tally) -> None:
    print(
        f"{name}: {tally.examples} examples, {tally.calls} calls, {tally.items} items, {tally.refused} refused; "
        f"packed and alone differ by {tally.largest:.1e} at most"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_random_calls_in_random_order_give_each_item_its_own(name: str):
    tally = explore(name, 15, derandomize=True)
    told(name, tally)
    assert tally.examples >= 15
    assert tally.refused > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_1000_random_orders_of_calls_give_each_item_its_own(name: str):
    tally = explore(name, 1000, derandomize=False)
    told(name, tally)
    assert tally.examples >= 1000
