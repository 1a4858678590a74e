"""Items -> plan -> bucket calls -> packed embeddings. Knows buckets and devices, and no family by name."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxvit.buckets import planner
from jaxvit.buckets.devices import interleave, naming, spread
from jaxvit.buckets.executable import Executable, Pixels, Program, check_weights, compile_program
from jaxvit.buckets.ladder import AXES, Ladder, overflow_bucket, words
from jaxvit.errors import CapacityError
from jaxvit.layers.attention import why_not
from jaxvit.models.family import Bucket, Demand, Family, Item, Piece
from jaxvit.threads import submitted, with_stack

log = logging.getLogger("jaxvit")

WARM_CALLS = 3
"""On a GPU: command buffers record on the second call and update on the third. On a CPU a full large bucket takes
minutes a call and the first call is as fast as any: none."""

COMPILE_STACK = 64 * 2**20
"""Bytes of stack of a compiling thread: XLA recurses deeply on unrolled towers, and whoever encodes may have little."""

EXACT_CACHE = 16
"""Executables of exact shapes (``bucketed=False``) kept at a time."""

Key = tuple[Bucket, Pixels, int]
"""What an executable is built for; the last is the device's place in the dispatcher's list."""


class Slot(NamedTuple):
    """Where a piece lies in a call: its rows of the packed embeddings start at ``offset``."""

    item: int
    piece: int
    offset: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Call:
    """One run of one bucket on one device."""

    bucket: Bucket
    pixels: Pixels
    slots: tuple[Slot, ...]
    patches: int
    device: int = 0

    @property
    def fill(self) -> float:
        """Share of the bucket's patches that are real."""
        return self.patches / self.bucket.patches


@dataclass(frozen=True, eq=False)
class Plan:
    """Which piece runs in which bucket, at which offset.

    Attributes:
        calls: in the order in which they run.
        overflows: (item, piece) that no bucket of the ladder holds.
    """

    calls: tuple[Call, ...]
    overflows: tuple[tuple[int, int], ...] = ()

    @property
    def padding(self) -> float:
        """Padded patches over patches run."""
        run = sum(call.bucket.patches for call in self.calls)
        return 1 - sum(call.patches for call in self.calls) / run if run else 0.0


@dataclass(frozen=True, eq=False)
class Output:
    """What a call left on the device: embeddings [tokens, width], finite bool [tokens]."""

    call: Call
    embeddings: jax.Array
    finite: jax.Array
    device: jax.Device

    def fetch_ahead(self) -> None:
        """Begins to bring the embeddings to the host. What goes wrong shows when they are asked for."""
        try:
            self.embeddings.copy_to_host_async()
        except Exception:
            log.debug("embeddings are not fetched ahead", exc_info=True)

    def host(self, array: jax.Array) -> np.ndarray:
        """One of the two arrays on the host. An error of the device shows here, when it ran asynchronously."""
        with naming(self.device):
            return np.asarray(array)


@dataclass
class Counts:
    """Counters of one bucket. ``seconds`` are the host's: padding the arrays and issuing the calls."""

    calls: int = 0
    pieces: int = 0
    patches: int = 0
    seconds: float = 0.0


@dataclass
class Statistics:
    """Counters since the encoder was loaded, guarded by the dispatcher's lock."""

    buckets: dict[Bucket, Counts] = field(default_factory=lambda: defaultdict(Counts))
    overflows: Counter[str] = field(default_factory=Counter)
    compilations: int = 0
    store_hits: int = 0
    compile_seconds: float = 0.0


class Dispatcher:
    """Runs pieces through the buckets of a ladder on one or several devices.

    Args:
        family: the model family.
        ladder: buckets in ascending order.
        dtype: compute dtype.
        devices: devices to spread over.
        weights: for each device, the flat list of weights.
        attention: "auto", or the backend that every bucket uses.
        on_overflow: "compile" or "error".
        build: program, device -> executable: compiles, or loads from the store.
    Raises:
        CapacityError: a bucket cannot fit on a device, whatever its program needs beside weights, inputs and outputs.
        OptionError: the weights are not those that the family's programs take.
    """

    def __init__(
        self,
        family: Family,
        ladder: Ladder,
        dtype: str,
        devices: Sequence[jax.Device],
        weights: Sequence[Sequence[jax.Array]],
        attention: str = "auto",
        on_overflow: str = "compile",
        build: Callable[[Program, jax.Device], Executable] = compile_program,
    ):
        self.family, self.ladder, self.dtype = family, ladder, dtype
        self.devices, self.weights = tuple(devices), [list(one) for one in weights]
        self.attention, self.on_overflow, self.build = attention, on_overflow, build
        for device, arrays in zip(self.devices, self.weights, strict=True):
            check_weights(family, dtype, device, arrays)
        self.strict = False
        self.statistics = Statistics()
        self._lock = threading.Lock()
        self._building: dict[Any, threading.Lock] = defaultdict(threading.Lock)
        self._ready: dict[Key, Executable] = {}
        self._exact: OrderedDict[Any, Executable] = OrderedDict()
        for device, one in zip(self.devices, self.weights, strict=True):
            self._check_ladder(device, one)
        planner.ready(ladder)

    def plan(self, items: Sequence[Item], most: int | None = None) -> Plan:
        """Packs the items' pieces into buckets, each device with its own plan.

        Args:
            most: pieces that fit a bucket of so many patches are packed into none that is larger.
        Raises:
            CapacityError: a piece fits no bucket and ``on_overflow`` is "error".
        """
        jobs = [(index, number, piece) for index, item in enumerate(items) for number, piece in enumerate(item.pieces)]
        demands = [piece.demand for _, _, piece in jobs]
        held = {demand: self.ladder.holds(demand) for demand in dict.fromkeys(demands)}
        too_large = [job for job, demand in zip(jobs, demands, strict=True) if not held[demand]]
        if too_large and self.on_overflow == "error":
            raise self._too_large(*too_large[0])
        small = None if most is None else self.ladder.up_to(most)
        queues: list[list[Call]] = []
        shares = spread(demands, self.ladder, len(self.devices))
        for device, share in enumerate(shares):
            calls: list[Call] = []
            groups: dict[tuple[str, bool], list[int]] = defaultdict(list)
            for index in share:
                if held[demands[index]]:
                    fits_small = small is not None and small.holds(demands[index])
                    groups[jobs[index][2].patches.dtype.str, fits_small].append(index)
                else:
                    calls.append(self._call(overflow_bucket(self.ladder, demands[index]), [jobs[index]], device))
            for (_, fits_small), group in sorted(groups.items()):  # one executable takes pixels of one dtype
                ladder = small if small is not None and fits_small else self.ladder
                for packed in planner.plan([demands[index] for index in group], ladder):
                    bucket = ladder.buckets[packed.bucket]
                    calls.append(self._call(bucket, [jobs[group[index]] for index in packed.pieces], device))
            queues.append(calls)
        return Plan(tuple(interleave(queues)), tuple(job[:2] for job in too_large))

    def refusal(self, index: int, item: Item) -> CapacityError | None:
        """Why :meth:`plan` would refuse the item, None if it would not."""
        if self.on_overflow == "error":
            for number, piece in enumerate(item.pieces):
                if not self.ladder.holds(piece.demand):
                    return self._too_large(index, number, piece)
        return None

    def _too_large(self, index: int, number: int, piece: Piece) -> CapacityError:
        nearest, axes = self.ladder.nearest(piece.demand)
        return CapacityError(
            f"item {index}: piece {number} of {piece.rows} patches and {piece.tokens} tokens fits no bucket: it needs "
            f"{words(piece.demand, axes)}, and the nearest bucket ({self.ladder.name(nearest)}) holds "
            f"{words(nearest, axes)}; load with larger budgets or a ladder file whose buckets hold more "
            f'{" and ".join(axes)}, or with on_overflow="compile"'
        )

    def _check_ladder(self, device: jax.Device, weights: Sequence[jax.Array]) -> None:
        """Refuses a bucket that cannot fit on the device, before anything is compiled. Temporaries come on top."""
        limit = memory_limit(device)
        if limit is None:
            return
        held = sum(array.nbytes for array in weights)
        row = self.family.width * jnp.dtype(self.dtype).itemsize + 1  # and whether it is finite
        for bucket in self.ladder.buckets:
            inputs = sum(buffer.nbytes for buffer in self.family.buffers(bucket, "uint8"))
            memory = {"weights": held, "inputs": inputs, "outputs": bucket.tokens * row}
            check_memory(self.ladder.name(bucket), memory, limit, device)

    def _call(self, bucket: Bucket, jobs: Sequence[tuple[int, int, Piece]], device: int) -> Call:
        offsets = accumulate((piece.tokens for _, _, piece in jobs[:-1]), initial=0)
        slots = tuple(
            Slot(item, number, offset, piece.tokens)
            for (item, number, piece), offset in zip(jobs, offsets, strict=True)
        )
        return Call(bucket, pixels_of(jobs[0][2]), slots, sum(piece.rows for _, _, piece in jobs), device)

    # running

    def run(self, items: Sequence[Item], plan: Plan) -> list[Output]:
        """Issues every call of the plan, in its order; results stay on the devices, which run at the same time.

        Raises:
            DeviceError: names the device that failed. The calls after it are not issued.
            CapacityError: a bucket of the plan cannot fit on its device, or was not warmed up under ``strict``; nothing
                ran.
        """
        if plan.overflows:
            self._count_overflows([items[index].pieces[number] for index, number in plan.overflows])
        keys: list[Key] = [(call.bucket, call.pixels, call.device) for call in plan.calls]
        missing = [key for key in dict.fromkeys(keys) if key not in self._ready]
        if len(missing) == 1:
            self.executable(*missing[0])
        elif missing:
            for _ in self._built(missing):
                pass
        return [self._run(call, [items[slot.item].pieces[slot.piece] for slot in call.slots]) for call in plan.calls]

    def _run(self, call: Call, pieces: Sequence[Piece]) -> Output:
        executable = self.executable(call.bucket, call.pixels, call.device)
        start = time.perf_counter()
        device = self.devices[call.device]
        arrays = executable.program.fill(pieces)
        with naming(device):
            embeddings, finite = executable(self.weights[call.device], arrays)
        with self._lock:
            counts = self.statistics.buckets[call.bucket]
            counts.calls += 1
            counts.pieces += len(pieces)
            counts.patches += call.patches
            counts.seconds += time.perf_counter() - start
        return Output(call, embeddings, finite, device)

    def run_exact(self, items: Sequence[Item]) -> list[Output]:
        """Every piece alone, in its exact shape, without padding: the path the buckets are compared with."""
        outputs = []
        for index, item in enumerate(items):
            for number, piece in enumerate(item.pieces):
                executable = self._exact_executable(piece)
                call = self._call(executable.program.bucket, [(index, number, piece)], 0)
                arrays = executable.program.fill([piece])
                outputs.append(Output(call, *executable(self.weights[0], arrays), self.devices[0]))
        return outputs

    # executables

    def program(self, bucket: Bucket, pixels: Pixels) -> Program:
        """What a bucket computes here: its attention backend settled."""
        platform, name = self.devices[0].platform, self.attention
        if name == "auto" and why_not(bucket.attention, platform, self.dtype) is None:
            name = bucket.attention  # a ladder tuned in another dtype may name what cannot run in this one
        return Program(self.family, replace(bucket, attention=name), self.dtype, pixels, platform)

    def executable(self, bucket: Bucket, pixels: Pixels = "uint8", device: int = 0) -> Executable:
        """The bucket's executable, built on first use, once however many threads ask."""
        key = (bucket, pixels, device)
        if key in self._ready:
            return self._ready[key]
        with self._lock:
            building = self._building[key]
        with building:
            if key not in self._ready:
                if self.strict:
                    own = "warm it up" if pixels == "uint8" else "warmup() is for uint8: encode one such item first"
                    raise CapacityError(
                        f"strict: the bucket of {self.ladder.name(bucket)} ({pixels} pixels) was not warmed up, and "
                        f"compiling after warm-up is forbidden; {own}, or pass strict=False"
                    )
                program = self.program(bucket, pixels)
                with naming(self.devices[device], jax.errors.JaxRuntimeError):
                    executable = with_stack(COMPILE_STACK, self.build, program, self.devices[device])
                self._count_build(executable)
                check_fits(executable, memory_limit(self.devices[device]), self.ladder.name(bucket))
                self._ready[key] = executable
        return self._ready[key]

    def _exact_executable(self, piece: Piece) -> Executable:
        program = self._exact_program(piece)
        key = (program.bucket, program.pixels)
        with self._lock:
            if key in self._exact:
                self._exact.move_to_end(key)
                return self._exact[key]
        executable = with_stack(COMPILE_STACK, compile_program, program, self.devices[0])
        with self._lock:
            self._exact[key] = executable
            while len(self._exact) > EXACT_CACHE:
                self._exact.popitem(last=False)
        return executable

    def intermediates(self, piece: Piece) -> dict[str, np.ndarray]:
        """Named intermediates of one piece on the exact path: float32 arrays. Compiles at each call."""
        program = self._exact_program(piece)
        return with_stack(COMPILE_STACK, program.intermediates, self.devices[0], self.weights[0], piece)

    def _exact_program(self, piece: Piece) -> Program:
        bucket = exact_bucket(piece.demand)
        return Program(self.family, bucket, self.dtype, pixels_of(piece), self.devices[0].platform)

    def warmup(self, up_to: int | None = None, progress: Callable[[Bucket, Executable], None] | None = None) -> None:
        """Builds every bucket on every device, in parallel threads; off the CPU each runs until it is at full speed.

        None runs before all are built.

        Args:
            up_to: the largest budget to build, in tokens.
            progress: called as each bucket is built.
        Raises:
            CapacityError: a bucket cannot fit on a device; nothing ran.
            OptionError: no bucket is as small as ``up_to``.
        """
        chosen = self.ladder.of_budgets(up_to)
        keys: list[Key] = [(bucket, "uint8", device) for bucket in chosen for device in range(len(self.devices))]
        built = []
        for (bucket, _, device), executable in self._built(keys):
            built.append((bucket, device, executable))
            if progress:
                progress(bucket, executable)
        for bucket, device, executable in built:
            if executable.program.platform != "cpu":
                arrays = executable.program.fill(self.family.example(bucket))
                for _ in range(WARM_CALLS):
                    jax.block_until_ready(executable(self.weights[device], arrays))

    def built(self, bucket: Bucket, pixels: Pixels = "uint8", device: int = 0) -> Executable | None:
        """The bucket's executable if it is compiled or loaded already."""
        return self._ready.get((bucket, pixels, device))

    def _built(self, keys: Sequence[Key]) -> Iterator[tuple[Key, Executable]]:
        """Executables in order, built in parallel threads."""
        with ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1) or 1, "jaxvit-build") as pool:
            built = [submitted(pool, self.executable, *key) for key in keys]
            try:
                for key, future in zip(keys, built, strict=True):
                    yield key, future.result()
            finally:
                for future in built:
                    future.cancel()

    def stats(self) -> dict[str, Any]:
        """A copy of the counters, ready for JSON."""
        with self._lock:
            statistics = self.statistics
            own = set(self.ladder.buckets)
            overflows = [bucket for bucket in statistics.buckets if bucket not in own]
            return {
                "buckets": {
                    self.ladder.name(bucket, () if bucket in own else overflows): {
                        "calls": counts.calls,
                        "pieces": counts.pieces,
                        "fill": counts.patches / (counts.calls * bucket.patches),
                        "milliseconds": counts.seconds * 1e3,
                    }
                    for bucket, counts in sorted(statistics.buckets.items(), key=lambda pair: pair[0].capacity)
                },
                "overflows": dict(statistics.overflows),
                "compilations": statistics.compilations,
                "compile_seconds": statistics.compile_seconds,
                "store_hits": statistics.store_hits,
            }

    def _count_build(self, executable: Executable) -> None:
        with self._lock:
            self.statistics.compile_seconds += executable.seconds
            if executable.source == "store":
                self.statistics.store_hits += 1
            else:
                self.statistics.compilations += 1

    def _count_overflows(self, pieces: Sequence[Piece]) -> None:
        """Counts a call's overflows by the bucket they need and the capacities they are past, and logs them: a line."""
        found: dict[str, list[Demand]] = defaultdict(list)
        for piece in pieces:
            bucket = overflow_bucket(self.ladder, piece.demand)
            nearest, axes = self.ladder.nearest(piece.demand)
            found[f"a bucket of {_sizes(bucket)}: past {words(nearest, axes)}"].append(piece.demand)
        with self._lock:
            self.statistics.overflows.update({need: len(demands) for need, demands in found.items()})
        lines = [
            f"{len(demands)} of up to {_sizes(Demand(*map(max, zip(*demands, strict=True))))} in {need}"
            for need, demands in found.items()
        ]
        log.info("overflow: %d pieces that no bucket of the ladder holds: %s", len(pieces), "; ".join(lines))


def _sizes(sizes: Bucket | Demand) -> str:
    return words(sizes, [axis for axis in AXES if getattr(sizes, axis)])


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that a process may use on the device, None where the device does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def check_fits(executable: Executable, limit: int | None, name: str | None = None) -> None:
    """Refuses a bucket that cannot run on the device, before it runs. ``name``: the bucket in words.

    Raises:
        CapacityError: it needs more than ``limit`` bytes.
    """
    name = name or words(executable.program.bucket, ["tokens"])
    check_memory(name, executable.memory(), limit, executable.device)


def check_memory(name: str, memory: Mapping[str, int], limit: int | None, device: jax.Device) -> None:
    """Refuses a bucket whose parts need more than ``limit`` bytes together.

    Raises:
        CapacityError: names the bucket, and its parts in MiB.
    """
    needed = sum(memory.values())
    if limit is not None and needed > limit:
        parts = ", ".join(f"{part} {size / 2**20:.0f}" for part, size in memory.items())
        raise CapacityError(
            f"the bucket of {name} needs {needed / 2**20:.0f} MiB ({parts}), and {device.device_kind} has "
            f"{limit / 2**20:.0f} MiB: load with smaller budgets"
        )


def pixels_of(piece: Piece) -> Pixels:
    return "uint8" if piece.patches.dtype == np.uint8 else "float32"


def exact_bucket(demand: Demand) -> Bucket:
    """A bucket without a spare row. Dense attention while its scores are small, else blockwise."""
    attention = "dense" if demand.patches <= 1024 else "xla"
    return Bucket(demand.tokens, demand.patches, demand.segments, demand.windows, attention)
