"""An encoder beside its peers: the same weights in the packed PyTorch tower and in transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvit.bench.clock import timed
from jaxvit.buckets.executable import compiler_options
from jaxvit.encoder import Encoder
from jaxvit.errors import CheckpointError
from jaxvit.layers.fuse import parameter_shapes
from jaxvit.layers.linear import dot
from jaxvit.models.family import Piece
from jaxvit.reference.tower import flops, tower_of
from jaxvit.tiny import random_full_size
from jaxvit.weights import manifests
from jaxvit.weights.load import load_parameters

if TYPE_CHECKING:
    from jaxvit.reference.eager import Eager
    from jaxvit.reference.packed import Packed


def share_memory() -> None:
    """Leaves half of a GPU to PyTorch. Takes effect before JAX first touches a device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")


@contextmanager
def random_checkpoint(name: str, layers: int | None = None) -> Iterator[Path]:
    """A temporary folder with random weights in the shapes of a real checkpoint, and its config files.

    Args:
        name: of a manifest in ``weights/manifests/``, or the repository's id.
        layers: keep only the first ones; None for all.
    Raises:
        CheckpointError: there is no such manifest.
        OptionError: the tower has not so many layers.
    """
    try:
        manifest = manifests.load(name)
    except KeyError as error:
        raise CheckpointError(str(error.args[0])) from None
    # Kimi's two shards are where the hub has them; the others are cut for as many threads.
    options = {} if manifest.files["config.json"]["model_type"] == "kimi_k25" else {"shards": 16}
    with TemporaryDirectory(prefix="jaxvit-") as temporary:
        yield random_full_size(name, Path(temporary) / Path(manifest.repo_id).name, layers, **options)


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        encoder: made by ``jaxvit.load`` from a folder.
    """

    encoder: Encoder

    @property
    def device(self) -> jax.Device:
        return self.encoder.dispatcher.devices[0]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the canonical parameters, by path."""
        return parameter_shapes(nnx.eval_shape(self.encoder.family.module))

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """The canonical parameters in the compute dtype, read from the checkpoint again."""
        encoder = self.encoder
        if encoder.folder is None:
            raise CheckpointError("this encoder was not loaded from a folder, so there are no weights for its peers")
        return load_parameters(encoder.folder, encoder.family.keys, self.shapes, jnp.dtype(encoder.dtype))

    def flops(self, pieces: Sequence[Piece]) -> float:
        """Operations of the matrix products of a call of these pieces."""
        family = self.encoder.family
        return flops(tower_of(family), self.shapes, family.lengths(pieces), pieces)

    # peers, on the same device

    @cached_property
    def torch_device(self) -> str:
        import torch

        if self.device.platform == "cpu":
            return "cpu"
        if not torch.cuda.is_available():
            raise RuntimeError(f"the encoder runs on {self.device.device_kind}, and PyTorch finds no such device")
        return "cuda"

    @cached_property
    def packed(self) -> Packed:
        from jaxvit.reference.packed import Packed

        return Packed(self.encoder.family, self.parameters(), self.encoder.dtype, self.torch_device)

    @cached_property
    def eager(self) -> Eager:
        from jaxvit.reference.eager import Eager

        assert self.encoder.folder is not None
        return Eager(self.encoder.folder, self.encoder.dtype, self.torch_device, self.encoder.overrides)

    def synchronise(self, _: Any = None) -> None:
        """Waits for PyTorch."""
        if self.torch_device == "cuda":
            import torch

            torch.cuda.synchronize()


SHAPES = {"cpu": ((1024, 1024, 1024), (2048, 1024, 2048))}
"""(rows, inner, columns) of products by whose best the floor is reckoned, by platform."""
LARGE_SHAPES = ((8192, 8192, 8192), (16384, 4096, 8192), (16384, 4608, 4608))


def product_rates(subject: Subject) -> dict[str, float]:
    """FLOP/s of large matrix products of random numbers in the compute dtype, back to back, by shape."""
    encoder, device = subject.encoder, subject.device
    program = encoder.dispatcher.program(encoder.ladder.buckets[0], "uint8")
    rates: dict[str, float] = {}
    for rows, inner, columns in SHAPES.get(device.platform, LARGE_SHAPES):
        generator = np.random.default_rng(0)
        dtype = jnp.dtype(encoder.dtype)
        arrays = [
            jax.device_put(generator.standard_normal(shape, np.float32).astype(dtype), device)
            for shape in ((rows, inner), (inner, columns))
        ]
        compiled = jax.jit(dot).lower(*arrays).compile(compiler_options=compiler_options(program))
        times = timed(lambda compiled=compiled, arrays=arrays: compiled(*arrays), jax.block_until_ready)
        rates[f"{rows}x{inner}x{columns}"] = 2.0 * rows * inner * columns / times.back_to_back * 1e3
    return rates
