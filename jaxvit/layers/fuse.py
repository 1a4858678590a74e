"""Canonical parameters -> the flat list of arrays an executable takes, and back inside the traced program.

Canonical parameters carry the module's attribute paths ("blocks.0.attn.qkv.kernel").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array


def dotted(path: Sequence[Any]) -> str:
    return ".".join(str(part) for part in path)


def parameter_shapes(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Canonical path -> shape, from a module built under ``nnx.eval_shape``."""
    _, state = nnx.split(module)
    return {dotted(path): tuple(value.shape) for path, value in nnx.to_flat_state(state)}


def bind(module: nnx.Module, parameters: Mapping[str, Array]) -> nnx.Module:
    """The module with these parameters in place of its own."""
    graph, state = nnx.split(module)
    filled = [(path, value.replace(parameters[dotted(path)])) for path, value in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


@dataclass(frozen=True)
class Weights:
    """The order in which an executable takes the weights.

    Attributes:
        names: canonical paths, sorted.
        shapes: their shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, module: nnx.Module) -> Weights:
        shapes = parameter_shapes(module)
        names = tuple(sorted(shapes))
        return cls(names, tuple(shapes[name] for name in names))

    def avals(self, dtype: np.dtype, place: jax.sharding.Sharding) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in self.shapes]

    def unpack(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Inside the traced program: the flat list -> canonical path -> parameter."""
        return {name: jnp.asarray(array) for name, array in zip(self.names, arrays, strict=True)}
