"""``jaxvit tune``: measures what every bucket costs on this device, and makes a ladder of the ones worth having.

For each bucket, every attention backend that can run here is timed alone; the whole encoder is compiled for the winner
only, and timed with the bucket filled by few large and by many small pieces. A line through these times over the sum of
squared segment lengths gives the bucket's constant and slope. A bucket that costs as much as a larger one, full of few
large pieces and of many small ones, is left out.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxvit import checks, paths
from jaxvit.bench.alone import Alone
from jaxvit.bench.clock import timed
from jaxvit.bench.loads import repainted, split
from jaxvit.bench.record import columns_of
from jaxvit.bench.report import environment
from jaxvit.buckets import ladder as _ladder
from jaxvit.encoder import Encoder
from jaxvit.errors import CapacityError, OptionError
from jaxvit.layers import attention
from jaxvit.models.family import Bucket, Piece
from jaxvit.reference.tower import tower_of

log = logging.getLogger("jaxvit")

PARTS = (1, 4, 16, 64)
"""Equal shares into which a bucket is cut; each share is one piece, or as few as are legal."""
CALL_PATIENCE = 1.0
"""Seconds of a measurement of whole calls."""
DENSE_SCORES = 2 * 2**30
"""Bytes of float32 scores above which dense attention is not tried."""
LOST = 2.0
"""A backend this many times slower than the best is not tried on larger buckets, from ``LOST_FROM`` patches on."""
LOST_BELOW = "lost on a smaller bucket"
LOST_FROM = 1024
APART = 4
"""Every so many buckets of a ladder are tried first."""
POLL = 0.5
"""Seconds between looks at the clock while others compile."""
THREADS = 16
"""That compile at once."""
SAME = 0.02
"""Buckets whose calls differ by no more than this cost the same."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "depth", "num_attention_heads", "num_heads"),
    *("vision_feature_layer", "window_size", "patch_size"),
)
"""Fields of a family's configuration that decide its tower's speed; a ladder is for towers that agree in them."""


@dataclass
class Measured:
    """One bucket.

    Attributes:
        attention: milliseconds of all the tower's attention by backend, or why there are none.
        points: (sum of squared segment lengths, milliseconds of a call).
        interpolated: time was too short for calls; the costs, and the points, come of the buckets around it.
        dropped: why the bucket is not in the ladder, None if it is.
    """

    bucket: Bucket
    attention: dict[str, float | str] = field(default_factory=dict)
    points: list[tuple[float, float]] = field(default_factory=list)
    interpolated: bool = False
    dropped: str | None = None

    def cost(self, squares: float) -> float:
        """Milliseconds of a call by the fit."""
        return (self.bucket.constant or 0.0) + (self.bucket.slope or 0.0) * squares

    def alone(self) -> float | None:
        """Milliseconds of its own backend's attention alone, None where that was not timed."""
        value = self.attention.get(self.bucket.attention)
        return value if isinstance(value, float) else None


@dataclass
class Tuned:
    """What tuning found.

    Attributes:
        ladder: the buckets worth having, with measured costs.
        measured: all that were measured, ascending.
        match: for which family, device and sizes the ladder is.
        record: on what it was measured, and the columns of ``bench/record.py``.
    """

    ladder: _ladder.Ladder
    measured: list[Measured]
    match: dict[str, Any]
    record: dict[str, Any]

    def write(self, path: Path) -> None:
        _ladder.write(self.ladder, path, self.match, self.record)

    def table(self) -> tuple[str, list[str], list[list[str]]]:
        """Title, column names, rows."""
        names = [name for name in attention.BACKENDS if any(name in one.attention for one in self.measured)]
        columns = ["tokens", "patches", *(f"{name}, ms" for name in names), "attention"]
        columns += ["few large, ms", "many small, ms", "constant, ms", "slope, ms per Mpatch²", ""]
        rows = []
        for one in self.measured:
            bucket = one.bucket
            alone = [one.attention.get(name) for name in names]
            cells = [str(bucket.tokens), str(bucket.patches)]
            cells += [f"{value:.3f}" if isinstance(value, float) else "-" for value in alone]
            cells.append(bucket.attention)
            cells += [f"{point[1]:.3f}" for point in (one.points[0], one.points[-1])] if one.points else ["-", "-"]
            if one.points and bucket.constant is not None and bucket.slope is not None:
                cells += [f"{bucket.constant:.3f}", f"{bucket.slope * 1e6:.3f}"]
            else:
                cells += ["-", "-"]
            rows.append([*cells, one.dropped or ("between its neighbours" if one.interpolated else "")])
        return f"{self.match['family']} on {self.match['device']}; attention is all blocks' together", columns, rows


def tune(
    encoder: Encoder,
    ladder: _ladder.Ladder | None = None,
    *,
    seconds: float | None = None,
    note: Callable[[str], None] = log.info,
) -> Tuned:
    """Measures a ladder's buckets.

    Args:
        encoder: loaded with ``attention="auto"``; its first device is measured.
        ladder: the candidates; None for the family's default.
        seconds: after half of them, a bucket that was not tried takes the backend of the nearest that was; after three
            quarters no further bucket is compiled; when they are over, no further one is timed. The largest and the
            smallest are in any case, and the costs of the others are interpolated. What is being compiled or timed
            then is waited for.
        note: told what is being done.
    Raises:
        OptionError: the encoder's attention backend is fixed. CapacityError: no bucket fits on the device.
    """
    checks.positive("seconds", seconds, (int, float), "a number of seconds")
    dispatcher, family = encoder.dispatcher, encoder.family
    if dispatcher.attention != "auto":
        raise OptionError(f'this encoder has attention={dispatcher.attention!r} for every bucket; load it with "auto"')
    device = dispatcher.devices[0]
    candidates = ladder or _ladder.default_ladder(family, device.platform)
    begun = time.monotonic()

    def late(share: float) -> bool:
        return seconds is not None and time.monotonic() - begun > share * seconds

    def told(text: str) -> None:
        note(f"{time.monotonic() - begun:.0f} s: {text}")

    absent = {
        name: reason[:200]
        for name, backend in attention.BACKENDS.items()
        if (reason := backend.why_not(device.platform, encoder.dtype)) is not None
    }
    for name, reason in absent.items():
        told(f"attention {name} is left out: {reason}")
    measured = _backends(encoder, list(candidates), lambda: late(0.5), told)
    built = [one.bucket for one in measured]  # as the dispatcher knows them: with measured costs it would build anew
    waiting = [one for one in measured if one.dropped is None]
    first = list(reversed(_spread(range(len(waiting)))))
    order = dict.fromkeys([*first[:1], *first[-1:], *first, *reversed(range(len(waiting)))])  # both ends first
    able = _build(encoder, [waiting[place] for place in order], lambda: late(0.75), told)
    _time(encoder, able, lambda: late(1.0), told)
    _interpolate(encoder, measured)
    drop_equals(measured)
    kept = [one for one in measured if one.dropped is None]
    if not kept:
        raise CapacityError(f"no bucket of {candidates.source} runs on {device.device_kind}: {measured[0].dropped}")
    sizes = {name: getattr(family.config, name) for name in SIZES if hasattr(family.config, name)}
    facts = environment(device)
    used = [name for name in attention.BACKENDS if name not in absent]
    libraries = [each for each in facts["packages"] if any(name in each for name in used)]
    packages = ("jaxvit", "jax", "jaxlib", *libraries)
    record = {name: facts["packages"][name] for name in packages if name in facts["packages"]}
    record |= {"driver": facts["driver"]} if facts["driver"] else {}
    record |= {"dtype": encoder.dtype, "candidates": candidates.source, "left_out": absent}
    if between := [one.bucket.tokens for one in kept if one.interpolated]:
        record["interpolated"] = between
    points = [(bucket, one.points) for bucket, one in zip(built, measured, strict=True) if one.dropped is None]
    record |= columns_of(encoder, points, floor=not late(1.0))
    if times := attention_of(kept):
        record["attention_ms"] = times
    match = {"family": family.name, "device": device.device_kind, "sizes": sizes}
    return Tuned(_ladder.Ladder(tuple(one.bucket for one in kept), "tuned", candidates.rule), measured, match, record)


def attention_of(measured: Sequence[Measured]) -> dict[str, list[float]]:
    """Milliseconds of attention alone by backend, a value a bucket: NaN where it was not timed. A backend that was
    timed in none is left out."""
    found = {}
    for name in attention.BACKENDS:
        times = [one.attention.get(name) for one in measured]
        if any(isinstance(value, float) for value in times):
            found[name] = [round(value, 4) if isinstance(value, float) else math.nan for value in times]
    return found


def default_path(model: str, device_kind: str) -> Path:
    """``buckets/<device>/<model>.toml``, such as ``buckets/h200/lfm2_5_vl_450m.toml``."""
    device = _slug(device_kind.lower().replace("nvidia", ""))
    return paths.data("buckets") / device / f"{_slug(re.sub('-Instruct$', '', Path(model).name))}.toml"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


# Attention alone


def _backends(
    encoder: Encoder, buckets: Sequence[Bucket], late: Callable[[], bool], note: Callable[[str], None]
) -> list[Measured]:
    """Every bucket with its fastest backend. Some buckets, spread over the ladder, come first; what is clearly slower
    there is not compiled for larger ones. When it is late, a bucket takes the backend of the nearest that was tried."""
    found: dict[int, Measured] = {}
    lost: dict[str, int] = {}
    every = range(len(buckets))
    first = _spread(every)
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    try:
        for places in (first, [place for place in every if place not in first]):
            if found and late():
                break
            note(f"compiling the attention of {len(places)} buckets")
            trials = [(place, _trial(encoder, buckets[place], pool, lost)) for place in places]
            _wait(trials, late, spare=bool(found))
            while trials and not (found and late()):
                place, trial = trials.pop(0)  # and with it, its arrays on the device
                note(f"attention of {buckets[place].tokens} tokens")
                _choose(trial, lost)
                found[place] = trial.measured
    finally:
        pool.shutdown(cancel_futures=True)
    tried = [one for one in found.values() if one.dropped is None] or list(found.values())
    return [found.get(place) or Measured(_as_nearest(buckets[place], tried)) for place in every]


def _spread(places: range) -> list[int]:
    """Every so many of a ladder's places, both ends among them: what is tried, compiled and timed first."""
    return sorted({*places[::APART], *places[-1:]})


def _as_nearest(bucket: Bucket, tried: Iterable[Measured]) -> Bucket:
    """The bucket with the backend of the tried one whose patches are nearest, as a ratio."""
    nearest = min(tried, key=lambda one: abs(math.log(one.bucket.patches / bucket.patches)))
    return replace(bucket, attention=nearest.bucket.attention)


def _wait(trials: Sequence[tuple[int, _Trial]], late: Callable[[], bool], spare: bool) -> None:
    """Until all is compiled, for a measurement has the machine alone; when it is late, until the first bucket is.

    Args:
        spare: not even for that.
    """
    everything = [ready for _, trial in trials for ready in trial.ready.values()]
    needed = [] if spare or not trials else list(trials[0][1].ready.values())
    while wait(everything, timeout=POLL).not_done:
        if late():
            for ready in everything:
                if ready not in needed:
                    ready.cancel()
            wait(needed)
            return


@dataclass
class _Trial:
    """One bucket's attention.

    Attributes:
        ready: each backend being compiled.
        spared: those that lost on a smaller bucket, for the case that no other runs.
    """

    measured: Measured
    alone: Alone
    ready: dict[str, Future[Any]]
    spared: tuple[str, ...]


def _trial(encoder: Encoder, bucket: Bucket, pool: ThreadPoolExecutor, lost: Mapping[str, int]) -> _Trial:
    """Every backend that can run the bucket and did not lose on one of fewer patches, handed to the pool.

    Args:
        lost: the patches at which a backend was clearly slower.
    """
    one, platform = Measured(bucket), encoder.dispatcher.devices[0].platform
    alone = Alone(encoder, bucket, _loads_alone(encoder, bucket))
    able = []
    for name, backend in attention.BACKENDS.items():
        scores = 4.0 * bucket.patches**2 * tower_of(encoder.family).heads
        reason = backend.why_not(platform, encoder.dtype)
        if reason is None and name == "dense" and scores > DENSE_SCORES:
            reason = "its scores are too large"
        if reason is None:
            able.append(name)
        else:
            one.attention[name] = reason
    spared = tuple(name for name in able if lost.get(name, bucket.patches) < bucket.patches)
    one.attention |= dict.fromkeys(spared, LOST_BELOW)
    return _Trial(one, alone, {name: pool.submit(alone.prepare, name) for name in able if name not in spared}, spared)


def _choose(trial: _Trial, lost: dict[str, int]) -> None:
    """Times a bucket's backends, puts the fastest into it, and adds to ``lost`` what is clearly slower."""
    one, times = trial.measured, dict[str, float]()

    def attempt(name: str, ready: Callable[[], Any]) -> None:
        try:
            one.attention[name] = times[name] = trial.alone.milliseconds(ready())
        except Exception as error:
            log.warning("tune: %s at %d tokens", name, one.bucket.tokens, exc_info=True)
            one.attention[name] = f"{type(error).__name__}: {error}"[:200]

    def lost_before(name: str) -> bool:
        return lost.get(name, one.bucket.patches) < one.bucket.patches

    for name in sorted(trial.ready, key=lost_before):  # those that lost since this one was compiled come last
        if lost_before(name) and times:
            one.attention[name] = LOST_BELOW
        else:
            attempt(name, trial.ready[name].result)
    for name in () if times else trial.spared:
        attempt(name, partial(trial.alone.prepare, name))
    if not times:
        one.dropped = "no attention backend ran"
        return
    best = min(times, key=lambda name: times[name])
    if one.bucket.patches >= LOST_FROM:
        slow = [name for name, value in times.items() if value > LOST * times[best]]
        lost |= {name: min(one.bucket.patches, lost.get(name, one.bucket.patches)) for name in slow}
    one.bucket = replace(one.bucket, attention=best)


def _loads_alone(encoder: Encoder, bucket: Bucket) -> list[tuple[Piece, ...]]:
    """What fills a bucket while attention alone is timed: few large pieces and, where there are such, sixteen."""
    return [pieces for parts in (PARTS[0], PARTS[2]) if (pieces := _filled(encoder, bucket, parts))]


def _filled(encoder: Encoder, bucket: Bucket, parts: int) -> tuple[Piece, ...] | None:
    return repainted(encoder.family.example(bucket)) if parts == 1 else split(encoder.family, bucket, parts)


# Whole calls


def _build(
    encoder: Encoder, waiting: Sequence[Measured], late: Callable[[], bool], note: Callable[[str], None]
) -> list[Measured]:
    """Compiles the encoder for every bucket's winner, in parallel threads; when it is late, only the first two of them
    are begun. Returns those that may be timed. One that fails is among them and met again there."""
    dispatcher, pool = encoder.dispatcher, ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    note(f"compiling {len(waiting)} buckets")

    def compiled(number: int, bucket: Bucket) -> bool:
        if number > 1 and late():
            return False
        dispatcher.executable(bucket)
        return True

    able = []
    try:
        futures = [pool.submit(compiled, number, one.bucket) for number, one in enumerate(waiting)]
        for one, future in zip(waiting, futures, strict=True):
            try:
                ready = future.result()
            except Exception:
                log.warning("tune: compiling %d tokens failed", one.bucket.tokens, exc_info=True)
                ready = True
            if ready:
                able.append(one)
    finally:
        pool.shutdown(cancel_futures=True)
    return able


def _time(encoder: Encoder, waiting: Sequence[Measured], late: Callable[[], bool], note: Callable[[str], None]) -> None:
    """Times whole calls: of the first two buckets in any case, of the others until it is late."""
    for number, one in enumerate(waiting):
        if number > 1 and late():
            break
        note(f"calls of {one.bucket.tokens} tokens")
        try:
            one.points = _calls(encoder, one.bucket)
            one.bucket = fitted(one.bucket, one.points)
        except Exception as error:
            log.warning("tune: the bucket of %d tokens", one.bucket.tokens, exc_info=True)
            one.dropped = f"{type(error).__name__}: {error}"[:200]


def _interpolate(encoder: Encoder, measured: Sequence[Measured]) -> None:
    """Gives buckets whose calls were not timed a cost between those of the buckets around them. Where attention was
    timed alone, theirs and its own, only what a call takes beside it is between: attention steps with the tiles."""
    known = [one for one in measured if one.points]
    timed_alone = [one for one in known if one.alone()]
    places = [one.bucket.patches for one in timed_alone]
    beside = [_mean_cost(encoder, one) - (one.alone() or 0.0) for one in timed_alone]
    for one in measured:
        if one.points or one.dropped is not None:
            continue
        place, patches = one.bucket.patches, [each.bucket.patches for each in known]
        if not known or not patches[0] < place < patches[-1]:
            one.dropped = "not measured: the time was over"
            continue
        constant, slope = (
            float(np.interp(place, patches, [getattr(each.bucket, name) for each in known]))
            for name in ("constant", "slope")
        )
        one.bucket = replace(one.bucket, constant=constant, slope=slope)
        alone = one.alone()
        within = bool(places) and places[0] < place < places[-1]
        if alone and within and (rest := float(np.interp(place, places, beside))) > 0:
            scale = (rest + alone) / (_mean_cost(encoder, one) or rest + alone)
            constant, slope = constant * scale, slope * scale
        one.bucket = replace(one.bucket, constant=float(f"{constant:.5g}"), slope=float(f"{slope:.5g}"))
        one.points = [(squares, one.cost(squares)) for squares, _ in _fillings(encoder, one.bucket)]
        one.interpolated = True


def _mean_cost(encoder: Encoder, one: Measured) -> float:
    """Milliseconds of a call by the bucket's costs, the mean of the loads by which attention alone is timed."""
    loads = _loads_alone(encoder, one.bucket)
    return sum(one.cost(float(sum(piece.rows**2 for piece in load))) for load in loads) / len(loads)


def _fillings(encoder: Encoder, bucket: Bucket) -> Iterator[tuple[float, tuple[Piece, ...]]]:
    """(sum of squared segment lengths, pieces) that fill a bucket, from few large to many small pieces."""
    least = math.inf
    for parts in PARTS:
        pieces = _filled(encoder, bucket, parts)
        squares = float(sum(piece.rows**2 for piece in pieces or ()))
        if pieces and squares < least:
            least = squares
            yield squares, pieces


def _calls(encoder: Encoder, bucket: Bucket) -> list[tuple[float, float]]:
    """(sum of squared segment lengths, milliseconds of a call back to back), from few large to many small pieces."""
    dispatcher = encoder.dispatcher
    executable = dispatcher.executable(bucket)
    points = []
    for squares, pieces in _fillings(encoder, bucket):
        placed = executable.place(executable.program.fill(pieces))
        jax.block_until_ready(placed)
        times = timed(
            lambda placed=placed: executable.run(dispatcher.weights[0], placed), jax.block_until_ready, CALL_PATIENCE
        )
        points.append((squares, times.back_to_back))
    return points


def fitted(bucket: Bucket, points: Sequence[tuple[float, float]]) -> Bucket:
    """The bucket with constant and slope of the line through the points; neither is negative."""
    squares, milliseconds = np.array(points, float).T
    spread = squares - squares.mean()
    slope = 0.0 if len(points) < 2 else max(0.0, float(spread @ milliseconds / (spread @ spread)))
    constant = float(milliseconds.mean() - slope * squares.mean())
    if constant < 0:  # all of it is attention
        slope, constant = float(squares @ milliseconds / (squares @ squares)), 0.0
    return replace(bucket, constant=float(f"{constant:.5g}"), slope=float(f"{slope:.5g}"))


def drop_equals(measured: Sequence[Measured]) -> None:
    """Marks buckets that cost no less than a larger bucket that is kept, full of few large pieces and of many small."""
    kept: list[Measured] = []
    for one in reversed([one for one in measured if one.dropped is None]):
        loads = [one.points[place][0] for place in (0, -1)]
        for larger in kept:
            dear = any(larger.cost(squares) > (1 + SAME) * one.cost(squares) for squares in loads)
            if larger.bucket.holds(one.bucket.capacity) and not dear:
                one.dropped = f"costs as much as {larger.bucket.tokens} tokens"
                break
        else:
            kept.append(one)
