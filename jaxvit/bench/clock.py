"""How long a call takes: alone, and one behind the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

CALLS = 30
"""Calls of a measurement, and of each round of calls back to back."""
WARM = 4
"""Calls before it: command buffers record on the second and update on the third."""
ROUNDS = 2
"""Rounds back to back; the quicker one counts."""
KEPT = 8
"""Results that are kept where a caller's are to be."""
PATIENCE = 20.0
"""Seconds of a measurement: a slow device gets fewer calls, though never fewer than three."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call.

    Attributes:
        one_call: from the call until its result is there; median.
        back_to_back: of calls issued without waiting, until the last result is there; mean.
        calls: how many of each.
    """

    one_call: float
    back_to_back: float
    calls: int


def timed(run: Callable[[], Any], wait: Callable[[Any], Any], patience: float | None = None) -> Times:
    """Times a call.

    Args:
        run: issues the work and may return before it is done.
        wait: takes what ``run`` returned, and returns when that is there.
        patience: seconds that all calls may take before they become fewer; None for :data:`PATIENCE`.
    """
    wait(run())
    first = _seconds(run, wait)
    share = (PATIENCE if patience is None else patience) / (1 + ROUNDS)
    calls = max(3, min(CALLS, int(share / max(first, 1e-9))))
    if calls == CALLS:
        for _ in range(WARM - 2):
            wait(run())
    singles = [_seconds(run, wait) for _ in range(calls)]
    rounds = [_seconds(lambda: _last(run, calls), wait) / calls for _ in range(ROUNDS)]
    return Times(median(singles) * 1e3, min(rounds) * 1e3, calls)


def renewed(prepare: Callable[[], Any], run: Callable[[Any], Any], wait: Callable[[Any], Any]) -> float:
    """Median milliseconds of a call as an encoder makes it: its inputs are new arrays, made before the clock starts,
    and the results of the calls before are still there.

    Args:
        prepare: makes the inputs and returns when they are there.
        run, wait: as in :func:`timed`.
    """
    kept: deque[Any] = deque(maxlen=KEPT)
    seconds: list[float] = []
    for _ in range(WARM + CALLS):
        inputs = prepare()
        start = time.perf_counter()
        kept.append(wait(run(inputs)))
        seconds.append(time.perf_counter() - start)
        if len(seconds) >= 3 and sum(seconds) > PATIENCE / (1 + ROUNDS):
            break
    return median(seconds[WARM:] or seconds) * 1e3


def _last(run: Callable[[], Any], calls: int) -> Any:
    """The last result; those before it are let go."""
    for _ in range(calls - 1):
        run()
    return run()


def _seconds(run: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    start = time.perf_counter()
    wait(run())
    return time.perf_counter() - start


def milliseconds(run: Callable[[], Any], calls: int = CALLS) -> float:
    """Median milliseconds of a function that returns when its work is done."""
    run()
    return median(_seconds(run, lambda _: None) for _ in range(calls)) * 1e3
