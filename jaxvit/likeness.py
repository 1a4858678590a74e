"""Which real checkpoint a file's vision tensors resemble most, whatever spelling each of the two has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from jaxvit.models import family_of
from jaxvit.models.family import Family
from jaxvit.weights import manifests
from jaxvit.weights.keys import KeyTable

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Likeness:
    """The vision tensors beside those of the real checkpoint that is closest.

    Attributes:
        repo_id: of that checkpoint; "" when the family has none.
        missing, unexpected: names that only it, or only these files have.
        shapes: name -> (shape here, shape there), where they differ.
    """

    repo_id: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)

    @property
    def distance(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.shapes)


def likeness(shapes: Mapping[str, Shape], family: Family) -> Likeness:
    """The closest manifest of the family, whatever spelling each of the two has."""
    ours = _parameters(shapes, family.keys)
    best = Likeness("", unexpected=tuple(shapes))
    for name in manifests.names():
        manifest = manifests.load(name)
        other = family_of(manifest.files)
        if other.name != family.name:
            continue
        theirs = _parameters({tensor: shape for tensor, (shape, _) in manifest.tensors.items()}, other.keys)
        found = Likeness(
            manifest.repo_id,
            tuple(theirs[path][0] for path in theirs if path not in ours),
            tuple(ours[path][0] for path in ours if path not in theirs),
            {
                tensor: (shape, theirs[path][1])
                for path, (tensor, shape) in ours.items()
                if path in theirs and theirs[path][1] != shape
            },
        )
        if not best.repo_id or found.distance < best.distance:
            best = found
    return best


def _parameters(shapes: Mapping[str, Shape], table: KeyTable) -> dict[str, tuple[str, Shape]]:
    """Parameter -> (tensor, the parameter's shape); what the table does not know stands under the tensor's name."""
    found: dict[str, tuple[str, Shape]] = {}
    for name, shape in shapes.items():
        prefix = table.prefix(name) or ""
        spelled = (spelling[prefix] + name[len(prefix) :] for spelling in table.spellings if prefix in spelling)
        keys = [(key, canonical) for canonical in spelled if (key := table.find(canonical))]
        if not keys:
            found[name] = name, tuple(shape)
            continue
        key, canonical = keys[0]
        path = key.parameter(canonical)
        if path is None:  # known and not used
            continue
        with suppress(ValueError, IndexError, OverflowError):  # as it is stored, it then differs from what is wanted
            shape = key.transform(np.broadcast_to(np.zeros((), np.int8), shape)).shape
        if key.part and shape:
            shape = (*shape[:-1], shape[-1] * key.part[1])
        found.setdefault(path, (name, tuple(shape)))
    return found
