"""One bucket as a compiled program: its buffers, how pieces fill them, what is traced, and the executable itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxvit.buckets import scratch
from jaxvit.buckets.launch import Launch, launcher, own_settings
from jaxvit.buckets.scratch import Scratch
from jaxvit.buffer import Buffer
from jaxvit.errors import CapacityError, OptionError
from jaxvit.layers import attention, hopper
from jaxvit.layers.fuse import Pairing, Step, Weights, bind, parameter_shapes
from jaxvit.layers.hopper import hold
from jaxvit.layers.pixels import normalise
from jaxvit.models.family import Bucket, Family, Piece, Probe, Rows, no_probe

Pixels = Literal["uint8", "float32"]

GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""With Triton products on, autotuning takes most of a minute a bucket and finds nothing faster than cuBLAS."""


@dataclass(frozen=True, eq=False)
class Program:
    """What one bucket computes, before it is compiled.

    Attributes:
        family: the model family with its configuration.
        bucket: capacities; ``attention`` names the backend.
        dtype: compute dtype, "float32" or "bfloat16".
        pixels: dtype in which patches arrive.
        platform: "cpu", "cuda", ...
    """

    family: Family
    bucket: Bucket
    dtype: str
    pixels: Pixels
    platform: str

    @cached_property
    def backend(self) -> attention.Backend:
        return attention.choose(self.bucket.attention, self.platform, self.dtype, self.bucket.patches)

    @cached_property
    def module(self) -> nnx.Module:
        return module_of(self.family)

    @cached_property
    def weights(self) -> Weights:
        return weights_of(self.family, self.platform, self.dtype)

    @cached_property
    def holds_result(self) -> bool:
        """Whether the result's memory is held from the start of a call.

        XLA lays temporaries where the result will be. A caller keeps results, so each has a new address, and with it
        all those temporaries; a recorded graph is then updated at every kernel that reads or writes one, some
        microseconds each, before the device begins.
        """
        return self.platform in ("gpu", "cuda")

    @cached_property
    def scratch(self) -> tuple[int, ...]:
        """Length of each array of the memory that stays in place, in int32; none where it gains nothing."""
        if hopper.why_not(self.platform, self.dtype) is not None:
            return ()
        return scratch.words(self.weights.matrices, self.bucket.patches, np.dtype(jnp.dtype(self.dtype)).itemsize)

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every input, in the order of the arguments: the family's, then the attention backend's."""
        metadata = [
            replace(buffer, name=f"{reach}/{buffer.name}")
            for reach in self.family.segment_sets
            for buffer in self.backend.buffers(self.bucket.patches, self._segments(reach))
        ]
        return (*self.own_buffers, *metadata)

    @cached_property
    def own_buffers(self) -> tuple[Buffer, ...]:
        """The family's."""
        return self.family.buffers(self.bucket, self.pixels)

    def _segments(self, reach: str) -> int:
        return self.bucket.windows if reach == "window" else self.bucket.segments

    def fill(self, pieces: Sequence[Piece]) -> dict[str, np.ndarray | None]:
        """Pieces -> one array a buffer, padded; None for an optional buffer that nothing needs."""
        arrays = self.family.layout(pieces, self.bucket)
        filled = {buffer.name: pad(buffer, arrays.get(buffer.name)) for buffer in self.own_buffers}
        for reach, lengths in self.family.lengths(pieces).items():
            metadata = self.backend.metadata(lengths, self.bucket.patches, self._segments(reach))
            filled |= {f"{reach}/{name}": array for name, array in metadata.items()}
        return filled

    def apply(self, weights: Sequence[Any], *arrays: Any, probe: Probe = no_probe) -> tuple[Any, Any]:
        """The traced function: [tokens, width] embeddings, and bool [tokens]: is the row finite."""
        dtype = jnp.dtype(self.dtype)
        named = {buffer.name: array for buffer, array in zip(self.buffers, arrays, strict=True)}
        for name in [name for name in named if name.startswith("pixels")]:
            if self.pixels == "uint8":
                named[name] = normalise(named[name], self.family.table, self.family.channels, dtype)
            else:
                named[name] = named[name].astype(dtype)
        scale = self.family.config.head_dim**-0.5

        def attend(reach: str) -> attention.Attend:
            metadata = {name.split("/")[1]: value for name, value in named.items() if name.startswith(f"{reach}/")}
            metadata = attention.held(self.backend, metadata)
            longest = self.family.longest(reach)
            return lambda qkv, rotation: attention.attend(self.backend, qkv, rotation, metadata, scale, longest)

        room = None

        def watched(name: str, value: Any) -> Any:
            nonlocal room
            if name == "patch_embed" and self.holds_result:
                result = jnp.full((self.bucket.tokens, self.family.width), jnp.nan, dtype)
                value, room = lax.optimization_barrier((value, result))
            return probe(name, value)

        with hopper.kernels_for(self.platform, self.dtype):
            module = bind(self.module, self.weights.unpack(weights, apart=bool(self.scratch)))
            out = module(named, {reach: attend(reach) for reach in self.family.segment_sets}, watched)
        out = out[: self.bucket.tokens]  # patches are rounded up to the kernel's block, and so may be the tokens
        if room is not None:  # NaN where the embeddings are NaN
            out = jnp.where(out == out, out, room)
        return out, jnp.isfinite(out).all(-1)

    def lower(self, device: jax.Device, probe: Probe = no_probe) -> jax.stages.Lowered:
        """Lowered under settings of its own: the process's are neither used nor changed."""
        place = jax.sharding.SingleDeviceSharding(device)
        avals = [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype, sharding=place) for buffer in self.buffers]
        weights = self.weights.avals(np.dtype(jnp.dtype(self.dtype)), place)

        rooms = [jax.ShapeDtypeStruct((length,), scratch.WORD, sharding=place) for length in self.scratch]
        with own_settings():
            return jax.jit(self.entry(probe), donate_argnums=1).lower(weights, rooms, *avals)

    def entry(self, probe: Probe = no_probe) -> Callable[..., tuple[Any, ...]]:
        """What is compiled: (weights, memory that stays in place, *arrays) -> embeddings, finite, that memory again."""

        def bucket(weights: Sequence[Any], rooms: Sequence[Any], *arrays: Any) -> tuple[Any, ...]:
            # Everything comes after the rooms are there, or XLA would hold them full while it makes its first arrays.
            arrays, rooms = lax.optimization_barrier((arrays, rooms)) if rooms else (arrays, rooms)
            embeddings, finite = self.apply(weights, *arrays, probe=probe)
            if not rooms:
                return embeddings, finite
            with hopper.kernels_for(self.platform, self.dtype):
                return embeddings, finite, *hold.untouched(embeddings, rooms)

        return bucket

    def intermediates(self, device: jax.Device, weights: Sequence[jax.Array], piece: Piece) -> dict[str, np.ndarray]:
        """Runs one piece and hands out every named intermediate: float32 [rows, features]."""
        taps: dict[str, Any] = {}

        def traced(weights: Sequence[Any], *arrays: Any) -> dict[str, Any]:
            def probe(name: str, value: Any) -> Any:
                taps[name] = value.astype(jnp.float32)
                return value

            taps["output"] = self.apply(weights, *arrays, probe=probe)[0].astype(jnp.float32)
            return taps

        filled = self.fill([piece])
        absent = {buffer.name: np.zeros(buffer.shape, buffer.dtype) for buffer in self.buffers}
        arrays = [absent[name] if filled[name] is None else filled[name] for name in absent]
        with own_settings():
            out = jax.jit(traced)(weights, *jax.device_put(arrays, device))
        return {name: np.asarray(value) for name, value in out.items()}


_shared = threading.Lock()
"""What all buckets of an encoder have in common is made once, and by one of the threads that build them."""


def module_of(family: Family) -> nnx.Module:
    """The family's module without memory: shapes in the place of parameters. It is shared, so not to be changed."""
    with _shared:
        return _module(family)


def weights_of(family: Family, platform: str, dtype: str) -> Weights:
    """How the family's parameters lie in the arguments on a platform. A CPU gains nothing by padding."""
    kernels = hopper.why_not(platform, dtype) is None
    with _shared:
        return _weights(family, platform, dtype, kernels)


@lru_cache(maxsize=8)
def _module(family: Family) -> nnx.Module:
    return nnx.eval_shape(family.module)


@lru_cache(maxsize=8)
def _weights(family: Family, platform: str, dtype: str, kernels: bool) -> Weights:
    steps: tuple[Step, ...] = () if platform == "cpu" else family.widenings()
    pairings: tuple[Pairing, ...] = ()
    if kernels:
        steps, pairings = (*steps, *family.by_head()), family.pairings()
    biases = platform != "cpu" and dtype != "float32"
    return Weights.of(parameter_shapes(_module(family)), steps, pairings, biases=biases, apart=kernels)


def pad(buffer: Buffer, rows: Rows | None) -> np.ndarray | None:
    """An array as long as its buffer: the rows, the tail filled by the buffer's rule."""
    if rows is None:
        if buffer.optional:
            return None
        raise CapacityError(f"buffer {buffer.name} is missing from the layout")
    out, place = np.empty(buffer.shape, buffer.dtype), 0
    for part in rows if isinstance(rows, list) else [rows]:
        if part.dtype != buffer.dtype or part.shape[1:] != buffer.shape[1:] or place + len(part) > len(out):
            raise CapacityError(
                f"buffer {buffer.name}: got {part.dtype} {[place + len(part), *part.shape[1:]]}, "
                f"the bucket holds {buffer.dtype} {list(buffer.shape)}"
            )
        out[place : place + len(part)] = part
        place += len(part)
    out[place:] = out[place - 1] if buffer.pad == "repeat_last" and place else 0
    return out


class Executable:
    """A compiled bucket on one device.

    Attributes:
        program: what it computes.
        seconds: time to compile or load.
        source: "compiled" or "store".
    """

    def __init__(self, program: Program, compiled: Any, device: jax.Device, seconds: float, source: str):
        self.program = program
        self.device = device
        self.seconds = seconds
        self.source = source
        self.compiled = compiled
        self._launch = launcher(compiled)
        self._launched = False  # it worked once
        self._scratch = Scratch.of(device, program.scratch) if program.scratch else None
        absent = [np.zeros(buffer.shape, buffer.dtype) for buffer in program.buffers if buffer.optional]
        names = [buffer.name for buffer in program.buffers if buffer.optional]
        self._names = dict.fromkeys(buffer.name for buffer in program.buffers)
        self._absent = dict(zip(names, jax.device_put(absent, device), strict=True))

    def __call__(
        self, weights: Sequence[jax.Array], arrays: Mapping[str, np.ndarray | None]
    ) -> tuple[jax.Array, jax.Array]:
        """Runs one call: embeddings [tokens, width] and finite bool [tokens], on the device."""
        return self.run(weights, self.place(arrays))

    def place(self, arrays: Mapping[str, np.ndarray | None]) -> list[jax.Array]:
        """The bucket's arrays on the device, in the order of the arguments.

        Raises:
            CapacityError: an array is missing, of another shape or dtype, or of no buffer; the message names it.
        """
        for buffer in self.program.buffers:
            array = arrays.get(buffer.name)
            if array is None and not buffer.optional:
                raise CapacityError(
                    f"buffer {buffer.name} is missing: the executable takes {buffer.dtype} {list(buffer.shape)}"
                )
            if array is not None and (array.shape != buffer.shape or array.dtype != buffer.dtype):
                raise CapacityError(
                    f"buffer {buffer.name}: got {array.dtype} {list(array.shape)}, "
                    f"the executable takes {buffer.dtype} {list(buffer.shape)}"
                )
        if unknown := [name for name in arrays if name not in self._names]:
            raise CapacityError(
                f"the executable has no buffer {', '.join(map(repr, unknown))}; it takes {', '.join(self._names)}"
            )
        present = {name: array for name, array in arrays.items() if array is not None}
        placed = self._absent | dict(zip(present, jax.device_put(list(present.values()), self.device), strict=True))
        return [placed[buffer.name] for buffer in self.program.buffers]

    def run(self, weights: Sequence[jax.Array], placed: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Runs one call on arrays that are on the device."""
        if self._launch is not None:
            try:
                embeddings, finite = self._issue(self._launch, weights, placed)
                self._launched = True
                return embeddings, finite
            except Exception:
                if self._launched:
                    raise
                self._launch = None  # it never worked: JAX's own call works, or says what is wrong
        with own_settings():
            return self._issue(self._slowly, weights, placed)

    def _issue(
        self, launch: Launch, weights: Sequence[jax.Array], placed: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        if self._scratch is not None:
            return self._scratch.run(launch, weights, placed)
        embeddings, finite = launch([*weights, *placed])
        return embeddings, finite

    def _slowly(self, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """JAX's own call on flat arguments."""
        inputs = len(self.program.buffers)
        rest, placed = arguments[: len(arguments) - inputs], arguments[len(arguments) - inputs :]
        weights = len(rest) - len(self.program.scratch)
        return self.compiled(rest[:weights], rest[weights:], *placed)

    def memory(self) -> dict[str, int]:
        """Bytes of weights, inputs, temporaries, outputs and code, from the executable's own analysis."""
        analysis = self.compiled.memory_analysis()
        inputs = sum(buffer.nbytes for buffer in self.program.buffers)
        held = sum(self.program.scratch) * scratch.WORD.itemsize
        return {
            "weights": analysis.argument_size_in_bytes - inputs - held,
            "inputs": inputs,
            "temporaries": analysis.temp_size_in_bytes + held,
            "outputs": analysis.output_size_in_bytes - held,
            "code": analysis.generated_code_size_in_bytes,
        }


def compiler_options(program: Program) -> dict[str, Any]:
    """XLA options of a program, beside the process's XLA_FLAGS."""
    return GPU_OPTIONS if program.platform in ("gpu", "cuda") else {}


def check_weights(family: Family, dtype: str, device: jax.Device, weights: Sequence[jax.Array]) -> None:
    """Refuses weights that the programs of a family on a device do not take.

    A launch compares no more than sizes in bytes, and would read int32 as float32. So weights are looked at once, where
    they are handed over.

    Raises:
        OptionError: there are too many or too few, or one is of another shape or dtype; the message names it.
    """
    layout = weights_of(family, device.platform, dtype)
    wanted = layout.avals(np.dtype(jnp.dtype(dtype)), jax.sharding.SingleDeviceSharding(device))
    programs = f"{family.name}'s programs in {dtype} on {device.platform}"
    advice = "hand in what jaxvit.load makes for this checkpoint, dtype and kind of device"
    if len(weights) != len(wanted):
        raise OptionError(f"weights: got {len(weights)} arrays, {programs} take {len(wanted)}; {advice}")
    for number, (name, array, aval) in enumerate(zip(layout.names, weights, wanted, strict=True)):
        if array.shape != aval.shape or array.dtype != aval.dtype:
            raise OptionError(
                f"weights: array {number} ({name}) is {array.dtype} {list(array.shape)}, {programs} take "
                f"{aval.dtype} {list(aval.shape)}; {advice}"
            )


_lowering = threading.Lock()


def compile_program(program: Program, device: jax.Device) -> Executable:
    """Compiles for one device. Tracing, which holds Python's lock anyway, goes one by one, compiling in parallel."""
    start = time.perf_counter()
    with _lowering:
        lowered = program.lower(device)
    compiled = lowered.compile(compiler_options=compiler_options(program))
    return Executable(program, compiled, device, time.perf_counter() - start, "compiled")
