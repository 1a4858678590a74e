"""Spreading pieces over devices: every device gets a plan of its own, and no device waits for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any, TypeVar

import jax

from jaxvit.buckets.ladder import Ladder
from jaxvit.errors import DeviceError, JaxvitError
from jaxvit.models.family import Demand

T = TypeVar("T")


def spread(demands: Sequence[Demand], ladder: Ladder, devices: int) -> list[list[int]]:
    """Indices of the pieces of each device, each list ascending.

    Longest processing time first: the costliest piece goes to the device with the least work so far, the lower device
    on ties. A device beyond the number of pieces gets an empty list.
    """
    if devices == 1:
        return [list(range(len(demands)))]
    largest = ladder.buckets[-1]
    per_patch = ladder.constant(largest) / largest.patches
    square = ladder.slope(largest)
    costs = [per_patch * demand.patches + square * demand.patches**2 for demand in demands]
    shares: list[list[int]] = [[] for _ in range(devices)]
    loads = [0.0] * devices
    for index in sorted(range(len(demands)), key=lambda index: -costs[index]):
        device = min(range(devices), key=lambda device: (loads[device], device))
        shares[device].append(index)
        loads[device] += costs[index]
    return [sorted(share) for share in shares]


def interleave(queues: Sequence[Sequence[T]]) -> list[T]:
    """One of each device, then the next of each: calls are issued by one thread, and every device gets work early."""
    absent: Any = object()
    return [one for one in chain.from_iterable(zip_longest(*queues, fillvalue=absent)) if one is not absent]


@contextmanager
def naming(device: jax.Device, kind: type[Exception] = Exception) -> Iterator[None]:
    """An error of that kind within becomes a DeviceError that names the device; errors of ours stay as they are."""
    try:
        yield
    except JaxvitError:
        raise
    except kind as error:
        raise DeviceError(
            f"device {device.id} ({device.device_kind}) failed: {type(error).__name__}: {error}; encode again, or load "
            "with other devices or smaller budgets",
            device.id,
        ) from error
