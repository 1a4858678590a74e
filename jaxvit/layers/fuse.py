"""Canonical parameters -> the flat list of arrays an executable takes, and back inside the traced program.

Canonical parameters carry the module's attribute paths ("blocks.0.attn.qkv.kernel") and the checkpoint's sizes. What is
done to them for speed is exact and stands here alone: axes are padded with zeros to sizes that the device likes, the
values of heads are reordered and a kernel lies transposed where that suits the product, two layers that one kernel
computes lie in one array, and the vectors of the norms lie in one array, because every argument of an executable costs
time at each call.

A norm reads its vectors where they lie. XLA's products want a bias as an array of its own, and XLA for GPUs makes a
kernel for each bare slice. Of slices of one length that are also converted it makes a single kernel. So the biases lie
in another array, in float32, which holds bfloat16 exactly. The package's own kernels read theirs where they lie, and
take them in float32: were they converted, XLA would convert the whole array and then make a kernel for each slice.

Copies are temporaries, though, which move from call to call. A bucket whose temporaries are to stay in place
(``buckets.scratch``) takes each of XLA's biases as an argument all the same: they are there twice, packed and apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxvit.layers.hopper.packed import taken


@dataclass(frozen=True)
class Widening:
    """One size of a tower that may grow by zeros without changing a result, wherever it occurs.

    Attributes:
        size: as in the checkpoint.
        multiple: the size is padded up to a multiple of this.
        places: (pattern of a parameter's path, axis, groups): the axis is [*groups, size], and every group is padded.
    """

    size: int
    multiple: int
    places: tuple[tuple[str, int, tuple[int, ...]], ...]

    @property
    def padded(self) -> int:
        return -(-self.size // self.multiple) * self.multiple

    def by_kernel(self, name: str) -> bool:
        return False

    def at(self, name: str) -> tuple[int, tuple[int, ...]] | None:
        """(axis, groups) of this size in a parameter, None where it does not occur."""
        for pattern, axis, groups in self.places:
            if re.fullmatch(pattern, name):
                return axis, groups
        return None

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a parameter after padding."""
        place = self.at(name)
        if place is None:
            return shape
        axis, groups = place
        return (*shape[:axis], prod(groups) * self.padded, *shape[axis + 1 :])

    def apply(self, name: str, array: np.ndarray) -> np.ndarray:
        """The parameter, padded."""
        place = self.at(name)
        if place is None or self.padded == self.size:
            return array
        axis, groups = place
        split = array.reshape(*array.shape[:axis], *groups, self.size, *array.shape[axis + 1 :])
        widths = [(0, 0)] * split.ndim
        widths[axis + len(groups)] = (0, self.padded - self.size)
        return np.pad(split, widths).reshape(self.shape(name, array.shape))


def mlp_width(size: int, into: str, out_of: str) -> Widening:
    """The inner width of the MLPs: an odd width leaves rows of bfloat16 unaligned. The activation of 0 is 0.

    Args:
        into, out_of: patterns of the linear layers' paths.
    """
    return Widening(size, 64, ((rf"{into}\.kernel", 1, ()), (rf"{into}\.bias", 0, ()), (rf"{out_of}\.kernel", 0, ())))


def head_halves(head_dim: int, heads: int, qkv: str, out: str) -> Widening:
    """Half of a head dim, so that a half-split rotation still pairs the right values; kernels like multiples of 16.

    Args:
        qkv, out: patterns of the paths of the fused projection and of the attention's output projection.
    """
    groups = (3, heads, 2)
    places = ((rf"{qkv}\.kernel", 1, groups), (rf"{qkv}\.bias", 0, groups), (rf"{out}\.kernel", 0, (heads, 2)))
    return Widening(head_dim // 2, 8, places)


@dataclass(frozen=True)
class Interleaving:
    """The halves of each head in turn, (0, d/2), (1, d/2 + 1), ..: what ``layers.rope.Neighbours`` turns is then beside
    each other, and the zeros that the halves were padded with are behind a head's values. v and the output projection
    go along.

    Attributes:
        halves: which halves, after their padding.
    """

    halves: Widening

    def by_kernel(self, name: str) -> bool:
        return False

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def apply(self, name: str, array: np.ndarray) -> np.ndarray:
        place = self.halves.at(name)
        if place is None:
            return array
        axis, groups = place
        split = array.reshape(*array.shape[:axis], *groups, self.halves.padded, *array.shape[axis + 1 :])
        last = axis + len(groups)
        return np.ascontiguousarray(split.swapaxes(last - 1, last)).reshape(array.shape)


@dataclass(frozen=True)
class ByHead:
    """The kernel of a fused projection as ``layers.qkv`` multiplies it: transposed, [3 x heads, dim, inputs].

    Attributes:
        pattern: of the kernel's path.
        heads: of q, k and v together.
    """

    pattern: str
    heads: int

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a parameter afterwards."""
        if not self.by_kernel(name):
            return shape
        inputs, outputs = shape
        return self.heads, outputs // self.heads, inputs

    def by_kernel(self, name: str) -> bool:
        """Whether a kernel of the package multiplies it."""
        return re.fullmatch(self.pattern, name) is not None

    def apply(self, name: str, array: np.ndarray) -> np.ndarray:
        if not self.by_kernel(name):
            return array
        return np.ascontiguousarray(array.reshape(len(array), self.heads, -1).transpose(1, 2, 0))


@dataclass(frozen=True)
class Pairing:
    """Two linear layers of one shape as one array, tile of columns by tile: what ``layers.swiglu`` multiplies at once.

    Attributes:
        pattern: of the path of the module that holds both.
        first, second: their names in it.
        columns: of a tile.
    """

    pattern: str
    first: str
    second: str
    columns: int

    def of(self, name: str) -> tuple[str, str] | None:
        """The parameters (of the first layer, of the second) of which this is one, None if it is of neither."""
        module, layer, leaf = ["", "", *name.rsplit(".", 2)][-3:]
        if layer not in (self.first, self.second) or not re.fullmatch(self.pattern, module):
            return None
        return f"{module}.{self.first}.{leaf}", f"{module}.{self.second}.{leaf}"

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """[inputs, outputs] -> [tiles, 2, columns, inputs], [outputs] -> [tiles, 2, columns]; None for a part tile."""
        *inputs, outputs = shape
        return None if outputs % self.columns else (outputs // self.columns, 2, self.columns, *inputs)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The two, as one array of that shape."""
        *inputs, outputs = first.shape
        tiles = np.stack([first, second]).reshape(2, *inputs, outputs // self.columns, self.columns)
        return np.ascontiguousarray(tiles.transpose(tiles.ndim - 2, 0, tiles.ndim - 1, *range(1, tiles.ndim - 2)))


Step = Widening | Interleaving | ByHead
"""What may happen to a parameter on its way to the arguments."""


def beside(name: str) -> str:
    """The kernel that a bias belongs to."""
    return name.rpartition(".")[0] + ".kernel"


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


Place = tuple[str, tuple[int, ...]]
"""The path of a parameter, and the shape in which it lies."""

OFTEN = 4
"""Biases of one length that are worth a kernel of their own to take them out of the packed array."""


@dataclass(frozen=True)
class Weights:
    """How canonical parameters lie in an executable's arguments.

    Attributes:
        matrices: (path, padded shape) of every parameter that is an argument of its own, by path.
        vectors: (path, padded shape) of every parameter in the packed array in the compute dtype, behind the matrices.
        biases: (path, padded shape) of every parameter in the packed array in float32, behind the vectors.
        apart: the same are also arrays of their own in the compute dtype, the last arguments. A program takes one or
            the other; what it does not take is no argument of its executable.
        steps: the padding, reordering and transposing, one behind the other.
        joined: (path of the first, path of the second, how) of every two parameters in one array, which stands under
            the first.
    """

    matrices: tuple[Place, ...]
    vectors: tuple[Place, ...]
    biases: tuple[Place, ...]
    steps: tuple[Step, ...]
    joined: tuple[tuple[str, str, Pairing], ...] = ()
    apart: bool = False

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        steps: Sequence[Step] = (),
        pairings: Sequence[Pairing] = (),
        biases: bool = False,
        apart: bool = False,
    ) -> Weights:
        """The layout for parameters of these shapes. A pair whose padded outputs are no whole tiles stays two layers.

        Args:
            biases: pack the biases of products too, but for those of a length that is rare.
            apart: and keep each as an array of its own besides.
        """
        padded = {}
        for name in sorted(shapes):
            shape = shapes[name]
            for step in steps:
                shape = step.shape(name, shape)
            padded[name] = shape
        vectors = {name for name, shape in padded.items() if len(shape) == 1}
        added = {name for name in vectors if beside(name) in padded}
        joined = []
        for pairing in pairings:
            for first, second in sorted({pair for pair in map(pairing.of, padded) if pair}):
                if shape := pairing.shape(padded[first]):
                    padded[first] = shape
                    del padded[second]
                    joined.append((first, second, pairing))
        often = Counter(prod(shape) for name, shape in padded.items() if name in added)
        packed = {name for name in added & set(padded) if biases and often[prod(padded[name])] >= OFTEN}

        def places(of: set[str]) -> tuple[Place, ...]:
            return tuple((name, shape) for name, shape in padded.items() if name in of)

        loose = vectors - added
        matrices = places(set(padded) - loose - packed)
        return cls(matrices, places(loose), places(packed), tuple(steps), tuple(joined), apart)

    @property
    def names(self) -> list[str]:
        """What each argument holds: a parameter's path, or that it is a packed array."""
        packed = [f"packed {kind}" for kind, places in (("vectors", self.vectors), ("biases", self.biases)) if places]
        return [name for name, _ in self.matrices] + packed + [name for name, _ in self.biases if self.apart]

    def avals(self, dtype: np.dtype, place: jax.sharding.Sharding) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arguments."""
        avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for _, shape in self.matrices]
        for places, of in ((self.vectors, dtype), (self.biases, np.dtype(np.float32))):
            if places:
                total = sum(prod(shape) for _, shape in places)
                avals.append(jax.ShapeDtypeStruct((total,), of, sharding=place))
        apart = self.biases if self.apart else ()
        return avals + [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for _, shape in apart]

    def widened(self, name: str, array: np.ndarray) -> np.ndarray:
        """A canonical parameter as it lies in the arguments, but for what is joined and packed."""
        moved = array.view(f"u{array.dtype.itemsize}")  # which NumPy moves without holding Python's lock
        for step in self.steps:
            moved = step.apply(name, moved)
        return moved.view(array.dtype)

    def pack(
        self, parameters: Iterable[tuple[str, np.ndarray]], put: Callable[[np.ndarray], list[jax.Array]]
    ) -> list[list[jax.Array]]:
        """The arguments, one list a device, from a stream of canonical parameters.

        Only vectors, and the first that comes of a pair, are held here.

        Args:
            parameters: widened, see ``widened``.
            put: an array -> its copy on every device.
        """
        placed: dict[str, list[jax.Array]] = {}
        small: dict[str, np.ndarray] = {}
        packed = {name for name, _ in (*self.vectors, *self.biases)}
        pairs = {name: pair for pair in self.joined for name in pair[:2]}
        halves: dict[str, np.ndarray] = {}
        for name, array in parameters:
            if name in pairs:
                halves[name] = array
                name, second, pairing = pairs[name]
                if name not in halves or second not in halves:
                    continue
                array = pairing.join(halves.pop(name), halves.pop(second))
            if name in packed:
                small[name] = array.reshape(-1)
            else:
                placed[name] = put(array)
        columns = [placed[name] for name, _ in self.matrices]
        if self.vectors:
            columns.append(put(np.concatenate([small[name] for name, _ in self.vectors])))
        if self.biases:
            columns.append(put(np.concatenate([small[name] for name, _ in self.biases]).astype(np.float32)))
        if self.apart:
            columns += [put(small[name].reshape(shape)) for name, shape in self.biases]
        return [list(row) for row in zip(*columns, strict=True)]

    def unpack(self, arrays: Sequence[Array], apart: bool = False) -> dict[str, Array]:
        """Inside the traced program: the arguments -> canonical path -> parameter, padded or joined.

        Args:
            apart: XLA's products take their biases from the arrays of their own, if there are any. Else it copies them
                out of the packed array at each call.
        """
        parameters = {name: array for (name, _), array in zip(self.matrices, arrays, strict=False)}
        rest = list(arrays[len(self.matrices) :])
        own = {first for first, _, _ in self.joined}
        own |= {name for name, _ in self.biases for step in self.steps if step.by_kernel(beside(name))}
        packed_ones = [(rest.pop(0), places) for places in filter(None, (self.vectors, self.biases))]
        alone = {name: rest.pop(0) for name, _ in self.biases} if self.apart else {}
        for packed, places in packed_ones:
            start = 0
            for name, shape in places:
                single = alone.get(name) if apart else None
                vector = taken(packed, start, shape, single)
                if name not in own:
                    vector = vector.astype(arrays[0].dtype) if single is None else single
                parameters[name] = vector
                start += prod(shape)
        return parameters | {second: parameters[first] for first, second, _ in self.joined}
