"""From JPEG bytes to embeddings: pictures a second, and where the time goes."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from PIL import Image

from jaxvit.bench.loads import jpegs
from jaxvit.bench.subject import Subject
from jaxvit.preparation import THREADS
from jaxvit.stream import LARGE, Stream

ROUNDS = 3
"""Passes over the pictures; the quickest counts."""
SECONDS = 10.0
"""Of transformers' own pass, at most about so many."""


def pictures(subject: Subject, height: int, width: int, count: int, reference: bool = False) -> dict[str, Any]:
    """Images a second over JPEG files of one size.

    ``stream`` is ``Encoder.encode_iter``, ``call`` one ``Encoder.encode`` of all, each to float32 arrays on the host;
    ``preparation`` is decoding, resizing and cutting alone, in threads; ``device`` runs the same calls back to back on
    inputs that are there already. Nothing compiles in the timed passes; ``compilations`` says so. ``stream_share`` is
    where the stream's own thread was, as shares of its time: what it waited for, and what it did itself.

    Args:
        reference: also transformers, processor and eager model, a picture a call.
    """
    encoder, files = subject.encoder, jpegs(height, width, count)
    items = encoder.prepare(files)
    for _ in encoder.encode_iter(files):
        pass
    list(encoder.encode(files))
    before = encoder.stats()
    streams: list[tuple[float, dict[str, float]]] = []

    def stream() -> None:
        one, start = Stream(encoder.dispatcher, files, dtype="float32"), time.perf_counter()
        for entry in one:
            if entry.error is not None:
                raise entry.error
        streams.append((time.perf_counter() - start, one.seconds))

    result = {
        "height": height,
        "width": width,
        "count": count,
        "tokens": items[0].tokens,
        "patches": items[0].num_patches,
        "threads": min(os.cpu_count() or 1, THREADS),
        "stream": count / _quickest(stream),
        "call": count / _quickest(lambda: list(encoder.encode(files))),
        "preparation": count / _quickest(lambda: encoder.prepare(files)),
    }
    seconds, spent = min(streams, key=lambda one: one[0])
    result["stream_share"] = {name: value / seconds for name, value in spent.items()}
    after = encoder.stats()
    result["compilations"] = after["compilations"] - before["compilations"]
    result["device"] = count / _device(subject, items)
    result["stream_over_device"] = result["stream"] / result["device"]
    if reference:
        result["reference"] = _reference(subject, files)
        result["stream_over_reference"] = result["stream"] / result["reference"]
    return result


def _quickest(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _device(subject: Subject, items: list[Any]) -> float:
    """Seconds of the plan's calls on the first device, issued one behind the other, all inputs in place."""
    dispatcher = subject.encoder.dispatcher
    calls = []
    for call in dispatcher.plan(items, most=LARGE).calls:
        executable = dispatcher.executable(call.bucket, call.pixels)
        pieces = [items[slot.item].pieces[slot.piece] for slot in call.slots]
        calls.append((executable, executable.place(executable.program.fill(pieces))))
    jax.block_until_ready([placed for _, placed in calls])
    return _quickest(lambda: jax.block_until_ready([one.run(dispatcher.weights[0], placed) for one, placed in calls]))


def _reference(subject: Subject, files: list[bytes]) -> float:
    """Images a second of the reference's processor and model, a picture a call, to float32 on the host."""
    eager = subject.eager

    def one(file: bytes) -> None:
        picture = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
        eager.host(eager(eager.process(picture)))

    for file in files[:2]:
        one(file)
    start, done = time.perf_counter(), 0
    for file in files:
        one(file)
        done += 1
        if time.perf_counter() - start > SECONDS:
            break
    return done / (time.perf_counter() - start)
