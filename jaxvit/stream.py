"""Streams: any iterable of media -> embeddings in input order, read ahead, prepared in threads, packed across items.

The caller's thread alone reads the iterable, plans and issues calls; threads prepare, and put results together. What is
packed with what depends on the items and their order, never on time, so the same stream gives the same bits.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from weakref import WeakSet

import jax.numpy as jnp
import numpy as np

from jaxvit import media as _media
from jaxvit.buckets.dispatcher import Call, Dispatcher, Output, Plan
from jaxvit.encodings import AHEAD, check_finite, finished, joiners
from jaxvit.errors import JaxvitError, NumericsError
from jaxvit.models.family import Item, Piece
from jaxvit.preparation import THREADS, prepared
from jaxvit.threads import submitted

LOOKAHEAD = 1024
"""Items read and not yet yielded, at most."""
BATCH = 2
"""Prepared pieces run once they would fill so many of the largest buckets that many pieces share, on every device;
twice as many are held."""
LARGE = 16384
"""Patches of such a bucket at most: a larger one is no quicker for its size, and runs for pieces that need it."""
FIRST = 1 / 16
"""Share of that at which the first pieces run, so that the device does not wait for long; it doubles each time."""
ENOUGH = 8
"""As many of the smallest bucket are waited for on every device in any case: few pieces pack badly."""
FULL = 0.95
"""A call this full on some axis is not held back for pieces to come."""

SPENT: Sequence[str] = ("reading", "preparation", "issue", "device", "transfer", "finish")


@dataclass(eq=False)
class Entry:
    """One item on its way through the stream.

    Attributes:
        index: position in the stream.
        prepared: what a thread is making of the medium.
        item: what was made, None while it is not, or where that failed.
        error: why there is no array.
        places: piece -> (output, offset, tokens) of the call that it runs in, until its rows are on the host.
        joined: what a thread is making of the rows.
        array: [tokens, width], once the entry is handed out.
    """

    index: int
    prepared: Future[Any] | None = None
    item: Item | None = None
    error: Exception | None = None
    places: dict[int, tuple[Output, int, int]] = field(default_factory=dict)
    joined: Future[Any] | None = None
    array: np.ndarray | None = None

    @property
    def issued(self) -> bool:
        done = self.error is not None or self.joined is not None
        return done or (self.item is not None and len(self.places) == len(self.item.pieces))

    @property
    def patches(self) -> int:
        return self.item.num_patches if self.item else 0


class Stream:
    """One pass over an iterable of media.

    Args:
        dispatcher: runs what is packed.
        media: what ``Encoder.encode`` takes, in any iterable; it may have no end.
        dtype: of the arrays.
        lookahead: most items read and not yet handed out.
        cut: asked for every entry in order, as soon as it is prepared: does the packing end behind it? What is packed
            between two cuts does not depend on what lies outside.

    Attributes:
        seconds: where the caller's thread has been: reading the iterable, waiting for preparation, planning and issuing
            calls, waiting for the device, for its results on the host, and until arrays are put together.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        media: Any,
        *,
        dtype: str,
        lookahead: int = LOOKAHEAD,
        cut: Callable[[Entry], bool] = lambda entry: False,
    ):
        self.dispatcher, self.cut, self.lookahead = dispatcher, cut, lookahead
        self.dtype = np.dtype(jnp.dtype(dtype))
        self.source: Iterator[Any] | None = iter(_media.as_iterable(media))
        sizes = [bucket.patches for bucket in self.dispatcher.ladder]
        self.batch = BATCH * min(max(sizes), LARGE) * len(self.dispatcher.devices)
        self.first = min(self.batch, max(FIRST * self.batch, ENOUGH * min(sizes) * len(self.dispatcher.devices)))
        self.due = self.first  # patches to wait for before the next calls
        self.read = 0  # items
        self.held = self.waiting = 0  # patches since the last cut: not yet handed out, not yet run
        self.closed = self.earlier = 0  # entries from before the last cut that are not yet handed out; their patches
        self.run = self.room = 0  # patches that ran, and those of their buckets
        self.seconds: dict[str, float] = dict.fromkeys(SPENT, 0.0)
        self.unprepared: deque[Entry] = deque()
        self.entries: deque[Entry] = deque()
        self.pending: list[tuple[Entry, int]] = []
        self.fetched: WeakSet[Output] = WeakSet()

    @property
    def fill(self) -> float:
        """Share of the patches run that were real, so far."""
        return self.run / self.room if self.room else 0.0

    def __iter__(self) -> Generator[Entry, None, None]:
        """Entries in order, each with its array or its error."""
        threads = min(os.cpu_count() or 1, THREADS)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="jaxvit-stream")
        try:
            while True:
                self._read(pool, 2 * threads)
                if self.unprepared and self.held < 2 * self.batch and self.earlier + self.held < 4 * self.batch:
                    self._take(self.unprepared.popleft())
                elif self.entries and self.entries[0].issued:
                    yield self._finish(self.entries.popleft())
                elif self.entries:
                    self._issue(everything=self.source is None and not self.unprepared)
                else:
                    return
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, pool: ThreadPoolExecutor, most: int) -> None:
        """Hands media to the pool, up to ``most`` at a time. An error of the iterable takes the place of an item."""
        while len(self.unprepared) < most and len(self.unprepared) + len(self.entries) < self.lookahead:
            if self.source is None:
                return
            entry = Entry(self.read)
            try:
                with self._spent("reading"):
                    entry.prepared = submitted(pool, self._prepare, self.read, next(self.source))
            except StopIteration:
                self.source = None
                return
            except Exception as error:
                self.source, entry.error = None, error
            self.unprepared.append(entry)
            self.read += 1

    def _prepare(self, index: int, medium: Any) -> Item | Exception:
        try:
            found = prepared(self.dispatcher.family, index, medium)
        except Exception as error:
            return error
        return found if isinstance(found, Exception) else self.dispatcher.refusal(index, found) or found

    def _take(self, entry: Entry) -> None:
        """Waits until the entry is prepared; runs what is pending once it is enough."""
        if entry.prepared is not None:
            with self._spent("preparation"):
                found, entry.prepared = entry.prepared.result(), None
            if isinstance(found, Exception):
                entry.error = found
            else:
                entry.item = found
                self.pending += [(entry, number) for number in range(len(found.pieces))]
        self.entries.append(entry)
        self.held += entry.patches
        self.waiting += entry.patches
        if self.cut(entry):
            self._issue(everything=True)
            self.closed, self.earlier, self.held = len(self.entries), self.earlier + self.held, 0
            self.due = self.first
        elif self.waiting >= self.due:
            self._issue(everything=False)
            self.due = min(2 * self.due, self.batch)

    def _issue(self, everything: bool) -> None:
        """Runs pending pieces; unless everything is to run, each device's emptiest call waits for pieces to fill it."""
        with self._spent("issue"):
            self._run_pending(everything)

    def _run_pending(self, everything: bool) -> None:
        pieces = [entry.item.pieces[number] for entry, number in self.pending if entry.item]
        singles = [Item((piece,), (piece.grid,), piece.tokens) for piece in pieces]
        plan = self.dispatcher.plan(singles, most=LARGE)
        late = [] if everything else self._late(plan, pieces)
        calls = tuple(call for call in plan.calls if call not in late)
        issued = {slot.item for call in calls for slot in call.slots}
        overflows = tuple(one for one in plan.overflows if one[0] in issued)
        for output in self.dispatcher.run(singles, replace(plan, calls=calls, overflows=overflows)):
            output.fetch_ahead()
            for slot in output.call.slots:
                entry, number = self.pending[slot.item]
                entry.places[number] = (output, slot.offset, slot.tokens)
            self.run += output.call.patches
            self.room += output.call.bucket.patches
        self.pending = [one for index, one in enumerate(self.pending) if index not in issued]
        self.waiting -= sum(pieces[index].rows for index in issued)

    def _late(self, plan: Plan, pieces: Sequence[Piece]) -> list[Call]:
        """The emptiest call of each device that has several, unless it is full, overflows or holds the oldest piece."""
        several = Counter(call.device for call in plan.calls)
        emptiest: dict[int, tuple[float, Call]] = {}
        for call in plan.calls:
            if several[call.device] == 1:
                continue
            demands = [pieces[slot.item].demand for slot in call.slots]
            taken = [sum(axis) for axis in zip(*demands, strict=True)]
            full = max(need / room for need, room in zip(taken, call.bucket.capacity, strict=True) if room)
            kept = call.slots[0].item == 0 or (call.slots[0].item, 0) in plan.overflows
            if not kept and full < min(FULL, emptiest.get(call.device, (FULL,))[0]):
                emptiest[call.device] = (full, call)
        return [call for _, call in emptiest.values()]

    @contextmanager
    def _spent(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def _finish(self, entry: Entry) -> Entry:
        """Waits for the entry's calls, and until its rows are put together; beside it, those of the next entries are
        that came back with the same calls: an array is new memory, which takes a while to get."""
        if self.closed:
            self.closed, self.earlier = self.closed - 1, self.earlier - entry.patches
        else:
            self.held -= entry.patches
        self._join(entry)
        for other in islice(self.entries, AHEAD):
            if other.issued and all(output in self.fetched for output, _, _ in other.places.values()):
                self._join(other)
        if entry.joined is not None:
            with self._spent("finish"):
                entry.array, _ = entry.joined.result()
            entry.joined = None
        return entry

    def _join(self, entry: Entry) -> None:
        """Waits until the entry's rows are on the host, and has a thread put them together, once."""
        if entry.item is None or entry.error is not None or entry.joined is not None:
            return
        try:
            places = [entry.places[number] for number in range(len(entry.item.pieces))]
            with self._spent("device"):
                check_finite(entry.index, places)
            with self._spent("transfer"):
                hosts = [output.host(output.embeddings) for output, _, _ in places]
            self.fetched.update(output for output, _, _ in places)
            rows = [host[start : start + size] for host, (_, start, size) in zip(hosts, places, strict=True)]
            entry.joined = submitted(joiners(), finished, self.dispatcher.family, entry.item, rows, self.dtype)
        except NumericsError as error:
            entry.error = error
        entry.places = {}


def encode_iter(stream: Stream, on_error: str) -> Iterator[np.ndarray | Exception]:
    """The arrays of a stream; an item's error is handed out in its place, or raised there."""
    with closing(iter(stream)) as entries:
        for entry in entries:
            if entry.array is not None:
                yield entry.array
            elif on_error == "return" and isinstance(entry.error, JaxvitError):
                yield entry.error
            elif entry.error is not None:
                raise entry.error
