"""``jaxvit bench``: how fast an encoder is, beside PyTorch on the same pixels and weights in the same run.

- a call of a bucket (``calls.py``): alone, back to back, its share of the floor, temporaries; with ``peer`` beside the
  packed PyTorch encoder, with ``reference`` beside transformers;
- from JPEG bytes (``pictures.py``), and from the start of a process (``start.py``).

The floor of a call is the operations of its matrix products, at the checkpoint's own widths, over the best rate of
large matrix products that was measured in the same run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxvit import checks
from jaxvit.bench.loads import Load, full, load_of
from jaxvit.bench.report import Report, environment
from jaxvit.bench.subject import Subject, product_rates, share_memory
from jaxvit.encoder import Encoder
from jaxvit.errors import JaxvitError, OptionError

__all__ = ["Load", "Report", "Subject", "bench", "share_memory"]

log = logging.getLogger("jaxvit")

HOST_LOAD = 4096
"""Patches of the bucket whose cost on the host is measured: the largest bucket of no more."""


def bench(
    encoder: Encoder,
    loads: Sequence[str] | None = None,
    *,
    name: str | None = None,
    up_to: int | None = None,
    peer: bool = False,
    compiled: bool = True,
    reference: bool = False,
    pictures: Sequence[tuple[int, int, int]] = (),
    host: bool = True,
    start: bool = False,
    seconds: float | None = None,
    note: Callable[[str], None] = log.info,
    changed: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Measures an encoder. A step that fails is in the report's ``failures``; the others go on.

    Args:
        encoder: made by ``jaxvit.load`` from a folder.
        loads: "4x1024" (four pieces of 1,024 patches), ...; None for every bucket of the ladder, full.
        name: of the model in the record; None for its folder's.
        up_to: of the ladder, the largest bucket to measure, in tokens.
        peer: beside the packed PyTorch encoder; ``compiled`` with ``torch.compile`` as well, where there is CUDA.
        reference: beside transformers, eager.
        pictures: (height, width, count) of JPEG files to encode from their bytes.
        host: also what the host spends on a call.
        start: also the start of a process with an empty and with a filled executable store.
        seconds: no step begins later than this.
        note: told what is being done.
        changed: given the report after every step, to save it.
    Raises:
        OptionError: an argument cannot be used. A load that cannot be made is in ``failures``.
    """
    from jaxvit.bench import calls

    if isinstance(loads, str):
        raise OptionError(f"loads is {loads!r}; give a list, such as {loads.split(',')!r}")
    checks.positive("up_to", up_to, int, "a number of tokens")
    checks.positive("seconds", seconds, (int, float), "a number of seconds")
    subject, family, begun = Subject(encoder), encoder.family, time.monotonic()
    model = name or (encoder.folder.name if encoder.folder else family.name)
    report = Report(model, family.name, encoder.dtype, environment(subject.device))

    @contextmanager
    def step(name: str) -> Iterator[None]:
        note(f"{time.monotonic() - begun:.0f} s: {name}")
        try:
            yield
        except Exception as error:
            told = isinstance(error, JaxvitError) and not log.isEnabledFor(logging.INFO)
            log.warning("bench: %s failed: %s", name, error, exc_info=not told)
            report.failures[name] = f"{type(error).__name__}: {error}"[:400]
        changed(report)

    def late(name: str) -> bool:
        if seconds is None or time.monotonic() - begun < seconds:
            return False
        report.failures[name] = f"not begun: {seconds:.0f} s were over"
        changed(report)
        return True

    with step("rate of products"):
        report.rates = product_rates(subject)
    rate = max(report.rates.values(), default=float("nan"))
    for text, make in _loads(encoder, loads, up_to).items():
        if late(text):
            continue
        row = None
        with step(text):
            load = make()
            row, embeddings = calls.ours(subject, load, rate)
            report.rows.append(row)
        if row is None:
            continue
        if peer and not late(f"{text}: torch"):
            with step(f"{text}: torch"):
                calls.torch_peers(subject, load, embeddings, row, compiled, note)
        if reference and not late(f"{text}: transformers"):
            with step(f"{text}: transformers"):
                calls.reference_peer(subject, load, embeddings, row)
    if host and not late("host"):
        with step("host"):
            held = [bucket for bucket in encoder.ladder if bucket.patches <= HOST_LOAD] or encoder.ladder.buckets[:1]
            report.host = calls.host(subject, full(family, held[-1]))
    for height, width, count in pictures:
        if not late(f"{height}x{width}"):
            with step(f"{height}x{width}"):
                from jaxvit.bench.pictures import pictures as measure

                report.pictures.append(measure(subject, height, width, count, reference))
    if start and not late("start"):
        with step("start"):
            from jaxvit.bench.start import RUNGS, starts

            smallest, _ = family.budget_range()
            folder = encoder.folder or Path()
            report.start = starts(folder, encoder.dtype, [rung for rung in RUNGS if rung >= smallest])
    return report


def _loads(encoder: Encoder, loads: Sequence[str] | None, up_to: int | None) -> dict[str, Callable[[], Load]]:
    """Made one by one, when their turn comes: a large one is hundreds of megabytes of pixels."""
    family, ladder = encoder.family, encoder.ladder
    if loads is not None:
        attention = encoder.dispatcher.attention
        return {text: lambda text=text: load_of(family, text, ladder, attention) for text in loads}
    return {f"{one.tokens} tokens": lambda one=one: full(family, one) for one in ladder.of_budgets(up_to)}
