"""Spreading pieces over devices: every device gets a plan of its own, and no device waits for another."""

from __future__ import annotations

from collections.abc import Sequence

from jaxvit.buckets.ladder import Ladder
from jaxvit.models.family import Demand


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
