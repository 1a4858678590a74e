"""What a call of ``Encoder.encode`` gives back: packed outputs on the device, cut into one array an item when read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxvit.buckets.dispatcher import Output, Plan
from jaxvit.errors import NumericsError
from jaxvit.models.family import Family, Item
from jaxvit.threads import submitted

OnError = Literal["raise", "return"]
Given = tuple[Family, Item, list[np.ndarray], np.dtype]
"""Of :func:`finished`."""

LEAST = 2**24
"""Bytes of all arrays from which on threads put them together while all are read: new memory takes a while to get."""
JOINING, AHEAD = 4, 8
"""Such threads at most, and arrays that are put together before they are asked for; a stream's too."""


class Encodings(Sequence):
    """One array [tokens, hidden] an item, copied from the device when first read.

    A position of ``on_error="return"`` may hold a JaxvitError instead.

    Attributes:
        plan: the plan that ran, None for ``bucketed=False``. It counts the items that ran, bad ones left out.
    """

    def __init__(
        self,
        family: Family,
        results: Sequence[Any],
        order: Sequence[int],
        outputs: Sequence[Output],
        plan: Plan | None,
        dtype: str,
        on_error: OnError = "raise",
    ):
        self._family, self._results, self.plan, self._on_error = family, list(results), plan, on_error
        self._outputs, self._dtype = list(outputs), np.dtype(jnp.dtype(dtype))
        self._host: dict[int, np.ndarray] = {}
        self._arrays: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        self._fetching = threading.Lock()
        self._places: dict[int, dict[int, tuple[int, int, int]]] = {}
        for number, output in enumerate(self._outputs):
            for slot in output.call.slots:
                self._places.setdefault(order[slot.item], {})[slot.piece] = (number, slot.offset, slot.tokens)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        tokens = sum(item.tokens for item in self._results if isinstance(item, Item))
        bad = sum(isinstance(one, Exception) for one in self._results)
        errors = f", {bad} of them errors" if bad else ""
        return f"<Encodings of {len(self)} items{errors}: {tokens} tokens, {self._family.width} values each>"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        found = self._item(self._position(index))
        return found if isinstance(found, Exception) else found[0]

    def __iter__(self) -> Iterator[Any]:
        for number, output in enumerate(self._outputs):
            if number not in self._host:
                output.fetch_ahead()  # while the calls behind it run
        tokens = sum(item.tokens for item in self._results if isinstance(item, Item))
        if tokens * self._family.width * self._dtype.itemsize < LEAST or (os.cpu_count() or 1) < 2:
            return (self[index] for index in range(len(self)))
        return self._read_ahead()

    def _read_ahead(self) -> Iterator[Any]:
        """This thread waits for the device; others put together what is on the host, a few arrays ahead."""
        pool, begun = joiners(), dict[int, Future[Any]]()
        for index in range(len(self)):
            for near in range(index, min(index + AHEAD, len(self))):
                if near not in begun and (given := self._unmade(near, wait=near == index)):
                    begun[near] = submitted(pool, finished, *given)
            ahead = begun.pop(index, None)
            yield self[index] if ahead is None else self._arrays.setdefault(index, ahead.result())[0]

    def _unmade(self, index: int, wait: bool) -> Given | None:
        """What an array is made of, None if it is made, or never will be.

        Args:
            wait: for rows that are not on the host; else None for these too.
        """
        if index in self._arrays or isinstance(self._results[index], Exception):
            return None
        if not wait and any(number not in self._host for number, _, _ in self._placed(index)):
            return None
        with suppress(NumericsError):  # it comes when the item is asked for
            given = self._given(index)
            return None if isinstance(given, Exception) else given
        return None

    def kept(self, index: int) -> np.ndarray | None:
        """Positions that video pruning kept, int64, None for an item that was not pruned."""
        found = self._item(self._position(index))
        return None if isinstance(found, Exception) else found[1]

    @property
    def packed(self) -> list[tuple[jax.Array, int, int, int]]:
        """(device array [tokens, hidden], item, offset, length) of every piece, in item and piece order.

        Waits for the device. An item that is not finite raises NumericsError here too, or is left out with
        ``on_error="return"``. Video pruning is not applied.
        """
        views = []
        for item in sorted(self._places):
            places = self._checked(item)
            if not isinstance(places, Exception):
                views += [(self._outputs[number].embeddings, item, offset, tokens) for number, offset, tokens in places]
        return views

    def _position(self, index: Any) -> int:
        try:
            return range(len(self))[index]
        except IndexError:
            raise IndexError(f"there is no item {index}: there are {len(self)}") from None

    def _item(self, index: int) -> Exception | tuple[np.ndarray, np.ndarray | None]:
        if isinstance(self._results[index], Exception):
            return self._results[index]
        if index not in self._arrays:
            given = self._given(index)
            if isinstance(given, Exception):
                return given
            return self._arrays.setdefault(index, finished(*given))  # the same array, however many threads ask
        return self._arrays[index]

    def _given(self, index: int) -> NumericsError | Given:
        """What an item's array is made of."""
        places = self._checked(index)
        if isinstance(places, Exception):
            return places
        rows = [self._fetch(number)[offset : offset + tokens] for number, offset, tokens in places]
        return self._family, self._results[index], rows, self._dtype

    def _placed(self, index: int) -> list[tuple[int, int, int]]:
        """The item's (output, offset, tokens), piece by piece."""
        return [place for _, place in sorted(self._places[index].items())]

    def _checked(self, index: int) -> NumericsError | list[tuple[int, int, int]]:
        """The same, once they are known to be finite."""
        places = self._placed(index)
        try:
            check_finite(index, [(self._outputs[number], offset, tokens) for number, offset, tokens in places])
        except NumericsError as error:
            if self._on_error == "return":
                return error
            raise
        return places

    def _fetch(self, number: int) -> np.ndarray:
        if number not in self._host:
            with self._fetching:
                if number not in self._host:
                    output = self._outputs[number]
                    self._host[number] = output.host(output.embeddings)
        return self._host[number]


_joiners: dict[int, ThreadPoolExecutor] = {}


def joiners() -> ThreadPoolExecutor:
    """Threads of this process that put arrays together, and wait for nothing. They stay: an interrupt that meets a pool
    while it is collected is lost."""
    process = os.getpid()
    if process not in _joiners:  # a forked one has no threads of its parent's
        _joiners.setdefault(process, ThreadPoolExecutor(min(os.cpu_count() or 1, JOINING), "jaxvit-join"))
    return _joiners[process]


def finished(
    family: Family, item: Item, rows: Sequence[np.ndarray], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray | None]:
    """An item's embeddings, in memory of their own, and what pruning kept, from its pieces' rows of packed outputs."""
    array, kept = family.finish(item, rows[0] if len(rows) == 1 else np.concatenate(rows))
    return array.astype(dtype, copy=len(rows) == 1), kept


def check_finite(item: int, places: Sequence[tuple[Output, int, int]]) -> None:
    """Waits for an item's (output, offset, tokens); NumericsError unless all of its rows are finite."""
    for output, offset, tokens in places:
        finite = output.host(output.finite)[offset : offset + tokens]
        if not finite.all():
            raise NumericsError(
                f"item {item}: {int((~finite).sum())} of {tokens} embeddings are not finite; "
                'the weights overflow on it: check the checkpoint, or load with dtype="float32"',
                item,
            )
