"""One call of a bucket: ours, the peers on the same pixels, and what the host spends on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxvit.bench.clock import CALLS, Times, milliseconds, renewed, timed
from jaxvit.bench.loads import Load
from jaxvit.bench.subject import Subject
from jaxvit.metrics import relative_rms

Note = Callable[[str], None]
Row = dict[str, Any]


def ours(subject: Subject, load: Load, rate: float) -> tuple[Row, np.ndarray]:
    """Our call, its inputs on the device: the row of the record, and the embeddings [tokens, width] as float32.

    ``renewed_call`` is one call with new inputs, results kept, as ``Encoder.encode`` makes them.

    Args:
        rate: FLOP/s by which the floor is reckoned.
    """
    dispatcher = subject.encoder.dispatcher
    executable = dispatcher.executable(load.bucket)
    arrays = executable.program.fill(load.pieces)
    placed = jax.block_until_ready(executable.place(arrays))
    run = partial(executable.run, dispatcher.weights[0])
    times = timed(lambda: run(placed), jax.block_until_ready)
    one = renewed(lambda: jax.block_until_ready(executable.place(arrays)), run, jax.block_until_ready)
    embeddings, finite = executable.run(dispatcher.weights[0], placed)
    tokens = sum(piece.tokens for piece in load.pieces)
    if not np.asarray(finite)[:tokens].all():
        raise FloatingPointError("the embeddings are not finite")
    flops = subject.flops(load.pieces)
    floor = flops / rate * 1e3
    row = {
        "load": load.name,
        "tokens": load.bucket.tokens,
        "patches": load.bucket.patches,
        "pieces": len(load.pieces),
        "attention": executable.program.backend.name,
        "source": executable.source,
        "compile_seconds": executable.seconds,
        "memory": executable.memory(),
        "flops": flops,
        "floor_ms": floor,
        "ours": asdict(times),
        "renewed_call": one,
        "share_of_floor": floor / times.back_to_back,
    }
    return row, np.asarray(embeddings)[:tokens].astype(np.float32)


def torch_peers(subject: Subject, load: Load, embeddings: np.ndarray, row: Row, compiled: bool, note: Note) -> None:
    """Adds the packed torch encoder to a row: each variant's times, its distance from ours, our time over the best."""
    packed = subject.packed
    inputs = packed.inputs(load.pieces)
    row["torch"], row["torch_attention"] = {}, "varlen" if packed.varlen else "sdpa a segment"
    best: list[Times] = []
    for name, run in packed.variants(inputs, compiled):
        note(f"{load.name}: torch {name}")
        theirs = run().float().cpu().numpy()
        times = timed(run, subject.synchronise)
        best.append(times)
        row["torch"][name] = {**asdict(times), "relative_rms": relative_rms(embeddings, theirs)}
        row["one_call_over_torch"] = row["ours"]["one_call"] / min(one.one_call for one in best)
        row["back_to_back_over_torch"] = row["ours"]["back_to_back"] / min(one.back_to_back for one in best)


def reference_peer(subject: Subject, load: Load, embeddings: np.ndarray, row: Row) -> None:
    """Adds transformers, eager, to a row. It takes stills alone."""
    if any(piece.grid[0] > 1 for piece in load.pieces):
        return
    eager = subject.eager
    inputs = eager.inputs(load.pieces)
    theirs = eager.host(eager(inputs))
    times = timed(lambda: eager(inputs), subject.synchronise)
    row["reference"] = {**asdict(times), "relative_rms": relative_rms(embeddings, theirs)}


def host(subject: Subject, load: Load) -> Row:
    """What the host spends on a full bucket, in milliseconds, each step by itself.

    ``plan`` packs the pieces; ``fill`` lays them out and pads; ``transfer`` brings the arrays to the device, until they
    are there; ``dispatch`` issues the call on an idle device, until it returns.
    """
    encoder = subject.encoder
    dispatcher, items = encoder.dispatcher, load.items
    executable = dispatcher.executable(load.bucket)
    arrays = executable.program.fill(load.pieces)
    placed = executable.place(arrays)
    dispatch = []
    for _ in range(3 + CALLS if subject.device.platform != "cpu" else 3):
        jax.block_until_ready(placed)
        start = time.perf_counter()
        out = executable.run(dispatcher.weights[0], placed)
        dispatch.append(time.perf_counter() - start)
        jax.block_until_ready(out)
    return {
        "load": load.name,
        "plan": milliseconds(lambda: encoder.plan(items)),
        "fill": milliseconds(lambda: executable.program.fill(load.pieces)),
        "transfer": milliseconds(lambda: jax.block_until_ready(executable.place(arrays))),
        "dispatch": median(dispatch[3:] or dispatch) * 1e3,
        "bytes": sum(array.nbytes for array in arrays.values() if array is not None),
    }
