"""Attention alone, from the fused projection: what a backend takes for all of a tower's blocks, with the rotation where
the projection does not rotate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxvit.bench.clock import timed
from jaxvit.buckets.executable import compiler_options, own_settings
from jaxvit.encoder import Encoder
from jaxvit.layers import attention, qkv
from jaxvit.layers.hopper import kernels_for
from jaxvit.layers.rope import Neighbours
from jaxvit.models.family import Bucket, Piece
from jaxvit.reference.tower import tower_of

REPEATS = ((1024, 32), (4096, 16), (16384, 8))
"""(patches, times): so often attention runs inside one program of at most so many patches, twice in larger ones. Alone,
that of short segments is shorter than issuing a call."""
SOME = 1024
"""Random rows, repeated."""
PATIENCE = 0.2
"""Seconds of a measurement."""


@dataclass(frozen=True)
class Prepared:
    """A backend's attention over one segment set, compiled, and what it takes for each load.

    Attributes:
        blocks: blocks of the tower that attend over this set.
        metadata: the backend's arrays, on the device.
    """

    blocks: int
    compiled: Any
    metadata: Sequence[Any]


class Alone:
    """A random projection of a bucket, on the encoder's first device, and the segments of some loads.

    Args:
        loads: the pieces of each.
    """

    def __init__(self, encoder: Encoder, bucket: Bucket, loads: Sequence[Sequence[Piece]]):
        self.encoder, self.bucket, self.loads = encoder, bucket, loads
        self.device, self.tower = encoder.dispatcher.devices[0], tower_of(encoder.family)
        self.repeat = next((times for patches, times in REPEATS if bucket.patches <= patches), 2)
        if self.device.platform == "cpu":
            self.repeat = 1
        program = encoder.dispatcher.program(bucket, "uint8")
        kernel = dict(program.weights.matrices)[f"blocks.0.{self.tower.qkv}.kernel"]
        heads, rows = 3 * self.tower.heads, bucket.patches
        dim = kernel[1] if len(kernel) == 3 else kernel[1] // heads  # as it is padded
        pairs, by_head = encoder.family.config.head_dim // 2, len(kernel) == 3
        with kernels_for(self.device.platform, encoder.dtype):
            rotated = by_head and qkv.rotates(rows, kernel, pairs) is not None
        generator = np.random.default_rng(0)
        some = generator.standard_normal((min(rows, SOME), 3, self.tower.heads, dim), np.float32)
        random = np.resize(some.astype(jnp.dtype(encoder.dtype)), (rows, *some.shape[1:]))
        angles = generator.uniform(0, 6, (rows, pairs)).astype(np.float32)
        rotation = (np.cos(angles), np.sin(angles)) if self.tower.angles and not rotated else None
        projection, rotation = jax.device_put((random, rotation), self.device)
        self.inputs = [projection] * self.repeat, Neighbours(*rotation) if rotation and by_head else rotation

    def prepare(self, name: str) -> list[Prepared]:
        """Compiles a backend for each segment set. Several may be prepared at once, in threads."""
        family = self.encoder.family
        program = self.encoder.dispatcher.program(replace(self.bucket, attention=name), "uint8")
        backend, scale = program.backend, family.config.head_dim**-0.5
        found = []
        for reach, blocks in Counter(self.tower.reaches).items():
            longest, room = family.longest(reach), program._segments(reach)

            def repeated(projections: Any, rotation: Any, metadata: Any, longest: int | None = longest) -> Any:
                # The compiler does not know that they are one array, else all repetitions were one. What follows from
                # the metadata alone is computed once, as for all blocks of an encoder. One behind the other.
                total, out = 0.0, metadata
                for each in projections:
                    each, _ = lax.optimization_barrier((each, out))
                    out = attention.attend(backend, each, rotation, metadata, scale, longest)
                    total += lax.optimization_barrier(out)[0, 0, 0]
                return total

            arrays = [backend.metadata(family.lengths(load)[reach], self.bucket.patches, room) for load in self.loads]
            metadata = [jax.device_put(dict(each), self.device) for each in arrays]
            with own_settings():
                lowered = jax.jit(repeated).lower(*self.inputs, metadata[0])
            found.append(Prepared(blocks, lowered.compile(compiler_options=compiler_options(program)), metadata))
        return found

    def milliseconds(self, prepared: Sequence[Prepared]) -> float:
        """Of all blocks together, the mean over the loads."""
        total = 0.0
        for one in prepared:
            for metadata in one.metadata:
                times = timed(
                    lambda one=one, metadata=metadata: one.compiled(*self.inputs, metadata),
                    jax.block_until_ready,
                    PATIENCE,
                )
                total += one.blocks * times.back_to_back / self.repeat / len(one.metadata)
        return total
