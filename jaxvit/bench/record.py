"""What a tuned ladder's file records of every bucket, beside what the planner reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxvit.bench.subject import Subject, product_rates
from jaxvit.buckets.store import Store
from jaxvit.encoder import Encoder
from jaxvit.models.family import Bucket

COLUMNS = ("compile_seconds", "stored_bytes", "temporary_bytes", "few_large_ms", "many_small_ms", "share_of_floor")
"""Names in the record: seconds to compile; bytes in the store, and of temporaries on the device; milliseconds of a call
filled by few large and by many small pieces, back to back; and of the first, the floor's share that bench explains."""


def columns_of(
    encoder: Encoder, measured: Sequence[tuple[Bucket, Sequence[tuple[float, float]]]], *, floor: bool
) -> dict[str, list[Any]]:
    """A list a column, a value a bucket. A column is left out where a bucket lacks its value; what is to be known of an
    executable is NaN where there is none.

    Args:
        measured: buckets, and of each (sum of squared segment lengths, milliseconds), from few large to many small.
        floor: also the share of the floor, for which the rate of products is measured.
    """
    subject, dispatcher = Subject(encoder), encoder.dispatcher
    store = getattr(dispatcher.build, "__self__", None)
    entries = {entry["file"]: entry for entry in store.entries()} if isinstance(store, Store) else {}
    rate = max(product_rates(subject).values()) if floor else None
    rows = []
    for bucket, points in measured:
        executable = dispatcher.built(bucket)
        made: list[Any] = [math.nan, math.nan if isinstance(store, Store) else None, math.nan]
        if executable is not None:
            entry: dict[str, Any] = {}
            if isinstance(store, Store):
                entry = entries.get(store.path(executable.program, executable.device).name, {})
            seconds = executable.seconds if executable.source == "compiled" else entry.get("seconds")
            made = [seconds and round(seconds, 2), entry.get("bytes"), executable.memory()["temporaries"]]
        large, small = points[0][1], points[-1][1]
        share = rate and subject.flops(encoder.family.example(bucket)) / rate * 1e3 / large
        rows.append([*made, round(large, 4), round(small, 4), share and round(share, 4)])
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    return {name: column for name, column in columns.items() if None not in column}
