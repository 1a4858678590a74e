"""What the host spends on a call of one bucket that is compiled in several ways, in turns, in one process.

    python3 tests/gpu/issuing.py kimi --loads 1x256,4x1024 --ways ours,loose --kept 8,1000

Ways: ``ours``, as the package compiles it; ``loose``, its intermediates in XLA's own temporaries instead of memory that
stays in place (``jaxvit/buckets/scratch.py``); ``apart``, the same with every bias an argument of its own; ``norms``,
with XLA's norms; ``serial`` and ``loose-serial``, with recorded graphs whose nodes follow one another.

Columns: arguments; milliseconds to issue a call, inputs the same again: on an idle device, the call before waited for
(issue), asked for without rest (polled), waited for and some time passed (rested); behind a call that is not done
(behind). Then one call and back to back; calls with new inputs one behind the other whose results are all kept (flow);
and one such call while so many results are kept. It needs no installed package: run it in the repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

import jaxvit
from jaxvit.bench import clock
from jaxvit.bench.loads import Load, load_of
from jaxvit.bench.report import show
from jaxvit.bench.subject import random_checkpoint
from jaxvit.buckets.executable import Executable, Program, compiler_options
from jaxvit.layers import fuse
from jaxvit.layers.hopper import norms
from tests.gpu.measure import TOWERS

WAYS = ("ours", "loose", "apart", "norms", "serial", "loose-serial")
CALLS, WARM, ROUNDS = 40, 8, 2
REST = 10e-3
unpack = fuse.Weights.unpack


@contextmanager
def way(name: str) -> Iterator[dict[str, Any]]:
    """What is lowered in here is lowered that way; gives further XLA options."""
    with ExitStack() as patched:
        if name in ("loose", "apart", "loose-serial"):
            patched.enter_context(mock.patch.object(Program, "scratch", ()))
        if name == "apart":
            patched.enter_context(mock.patch.object(fuse.Weights, "unpack", unpack_apart))
        if name == "norms":
            patched.enter_context(mock.patch.object(norms, "suits", return_value=False))
        yield {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"} if "serial" in name else {}


def unpack_apart(self: fuse.Weights, arrays: Sequence[Any], apart: bool = False) -> dict[str, Any]:
    return unpack(self, arrays, apart=True)


def issuing(run: Callable[[Any], Any], placed: Any, wait: Callable[[Any], Any], calls: int = 1) -> float:
    """Median milliseconds until a call returns; of several issued without waiting, the last."""
    seconds = []
    for _ in range(WARM + CALLS):
        for _ in range(calls):
            start = perf_counter()
            out = run(placed)
            end = perf_counter()
        seconds.append(end - start)
        wait(out)
    return median(seconds[WARM:]) * 1e3


def poll(out: Any) -> None:
    """Waits without letting the core rest."""
    while not all(array.is_ready() for array in jax.tree.leaves(out)):
        pass


def rest(out: Any) -> None:
    """Waits, and some milliseconds more."""
    jax.block_until_ready(out)
    sleep(REST)


def flowing(run: Callable[[Any], Any], place: Callable[[], Any]) -> float:
    """Mean milliseconds of calls issued without waiting, each with inputs of its own, whose results are kept."""
    for _ in range(WARM):
        jax.block_until_ready(run(place()))
    inputs = [place() for _ in range(CALLS)]
    start = perf_counter()
    jax.block_until_ready([run(each) for each in inputs])
    return (perf_counter() - start) / CALLS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tower", choices=TOWERS)
    parser.add_argument("--loads", default="1x256,4x1024")
    parser.add_argument("--ways", default="ours,loose")
    parser.add_argument("--kept", default="8", help="results kept while new calls are made, with commas between")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    kept, ways = [int(each) for each in asked.kept.split(",")], asked.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    with random_checkpoint(TOWERS[asked.tower][0], asked.layers) as folder:
        encoder = jaxvit.load(folder, dtype=asked.dtype, store=False)
        dispatcher = encoder.dispatcher
        device, weights = dispatcher.devices[0], dispatcher.weights[0]
        trials: list[tuple[str, Load, Any, Any]] = []
        with ThreadPoolExecutor(8) as pool:
            for text in asked.loads.split(","):
                load = load_of(encoder.family, text, encoder.ladder)
                for name in ways:
                    with way(name) as options:
                        program = dispatcher.program(load.bucket, "uint8")
                        rooms, lowered = program.scratch, program.lower(device)
                    vars(program)["scratch"] = rooms
                    options |= compiler_options(program)
                    trials.append((name, load, program, pool.submit(lowered.compile, compiler_options=options)))
        rows = []
        for _ in range(ROUNDS):
            for name, load, program, compiled in trials:
                executable = Executable(program, compiled.result(), device, 0.0, "compiled")
                arrays = program.fill(load.pieces)
                place = partial(lambda one, arrays: jax.block_until_ready(one.place(arrays)), executable, arrays)
                run, placed = partial(executable.run, weights), place()
                cells = [issuing(run, placed, wait) for wait in (jax.block_until_ready, poll, rest)]
                cells.append(issuing(run, placed, jax.block_until_ready, calls=2))
                times = clock.timed(partial(run, placed), jax.block_until_ready)
                cells += [times.one_call, times.back_to_back, flowing(run, place)]
                for count in kept:
                    with mock.patch.object(clock, "KEPT", count):
                        cells.append(clock.renewed(place, run, jax.block_until_ready))
                arguments = len(compiled.result()._executable._kept_var_idx)
                rows.append([load.name, name, str(arguments), *(f"{cell:.3f}" for cell in cells)])
                print(*rows[-1], flush=True)
    columns = [
        "load",
        "way",
        "arguments",
        "issue",
        "polled",
        "rested",
        "behind",
        "one call",
        "back to back",
        "flow",
        *(f"renewed, {one} kept" for one in kept),
    ]
    show(f"{asked.tower}, {asked.dtype}, {device.device_kind}; ms", columns, sorted(rows))


if __name__ == "__main__":
    main()
