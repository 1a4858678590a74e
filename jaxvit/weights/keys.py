"""The key table of a family: which tensor of a checkpoint becomes which parameter, and how.

A tensor's name in the file is a prefix, which differs between spellings of the same checkpoint, and a rest. The table
first replaces the prefix by its canonical form, then looks for the one :class:`Key` that matches the whole result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np


def as_is(array: np.ndarray) -> np.ndarray:
    """The tensor as it is stored: biases, norm weights, position tables."""
    return array


def transpose(array: np.ndarray) -> np.ndarray:
    """The weight [out, in] of a Linear as a kernel [in, out]."""
    if array.ndim != 2:
        raise ValueError("a matrix is wanted")
    return array.T


def convolution(array: np.ndarray) -> np.ndarray:
    """The weight [out, C, side, side] of a convolution that cuts patches as a kernel [C * side * side, out]."""
    if array.ndim != 4 or array.shape[2] != array.shape[3]:
        raise ValueError("a square convolution, [out, channels, side, side], is wanted")
    return array.reshape(array.shape[0], -1).T


@dataclass(frozen=True)
class Key:
    r"""One kind of tensor.

    Attributes:
        pattern: regular expression that matches the whole canonical name; its groups are plain, ``(\d+)`` or ``(a|b)``.
        target: the parameter's path, with ``\1`` for the groups; None for a tensor that is known and not used.
        transform: stored array -> parameter, moving elements but never computing with them; a ValueError says that
            the stored shape cannot be meant (reshape with care: it would let other shapes of the same size through).
        part: (i, n): the transformed tensor is slice i of n equal slices along the last axis of the parameter.
    """

    pattern: str
    target: str | None
    transform: Callable[[np.ndarray], np.ndarray] = as_is
    part: tuple[int, int] | None = None

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    @cached_property
    def reverse(self) -> re.Pattern[str] | None:
        """Matches the parameter paths that ``target`` can give; group gN is the N-th of ``pattern``."""
        if self.target is None:
            return None
        seen: set[str] = set()
        source = ""
        for index, piece in enumerate(re.split(r"\\(\d)", self.target)):
            if index % 2 == 0:
                source += re.escape(piece)
            else:
                source += f"(?P=g{piece})" if piece in seen else f"(?P<g{piece}>.+?)"
                seen.add(piece)
        return re.compile(source)

    def parameter(self, name: str) -> str | None:
        """The parameter's path for a canonical name that this key matches."""
        match = self.regex.fullmatch(name)
        return match.expand(self.target) if match and self.target is not None else None

    def name(self, parameter: str) -> str | None:
        """The canonical tensor name that this key would turn into ``parameter``, so that a missing one can be named."""
        match = self.reverse.fullmatch(parameter) if self.reverse else None
        if match is None:
            return None
        held, groups = match.groupdict(), iter(range(1, self.regex.groups + 1))
        name = re.sub(r"\([^()]*\)", lambda _: held.get(f"g{next(groups, 0)}", ""), self.pattern)
        name = re.sub(r"\\(.)", r"\1", name)
        return name if self.parameter(name) == parameter else None


@dataclass(frozen=True)
class KeyTable:
    """All tensors of a family's vision tower and projector.

    Attributes:
        spellings: each maps prefixes as they stand in a file to canonical prefixes. A checkpoint uses exactly one
            spelling; of several prefixes that fit a name the longest counts.
        keys: no two may match the same name.
    """

    spellings: tuple[Mapping[str, str], ...]
    keys: tuple[Key, ...]

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """Every prefix of every spelling, the longest first."""
        return tuple(sorted({prefix for spelling in self.spellings for prefix in spelling}, key=lambda p: (-len(p), p)))

    def prefix(self, name: str) -> str | None:
        """The longest prefix that fits a tensor's name in a file; None for a tensor of the language model."""
        return next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)

    def find(self, name: str) -> Key | None:
        """The key of a canonical name."""
        return next((key for key in self.keys if key.regex.fullmatch(name)), None)
