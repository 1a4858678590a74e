"""The rules of the loader on the tables of the real families, with their tiny checkpoints."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxvit import tiny
from jaxvit.errors import CheckpointError
from jaxvit.layers.fuse import parameter_shapes
from jaxvit.models import family_of
from jaxvit.weights.files import Stored, read_config_files
from jaxvit.weights.load import load_parameters, plan


class Checkpoint:
    """A tiny checkpoint whose tensors can be written again under other names."""

    def __init__(self, name: str, folder: Path):
        tiny.tiny_checkpoint(name, folder)
        self.family = family_of(read_config_files(folder))
        self.shapes = parameter_shapes(nnx.eval_shape(self.family.module))
        tensors = {n: array for path in folder.glob("*.safetensors") for n, array in load_file(path).items()}
        self.spellings = self.family.keys.spellings
        self.text = {n: array for n, array in tensors.items() if not self.family.keys.prefix(n)}
        self.canonical = {self._swap(n, self.spellings[0]): tensors[n] for n in tensors if n not in self.text}

    @staticmethod
    def _swap(name: str, prefixes: Mapping[str, str]) -> str | None:
        fits = [prefix for prefix in prefixes if name.startswith(prefix)]
        return prefixes[max(fits, key=len)] + name[len(max(fits, key=len)) :] if fits else None

    def spelt(self, spelling: Mapping[str, str]) -> dict[str, np.ndarray] | None:
        """The vision tensors in another spelling; None when that one names the modules differently too."""
        back = {canonical: prefix for prefix, canonical in spelling.items()}
        names = {name: self._swap(name, back) for name in self.canonical}
        return None if None in names.values() else {names[name]: array for name, array in self.canonical.items()}

    def load(self, folder: Path) -> dict[str, np.ndarray]:
        return dict(load_parameters(folder, self.family.keys, self.shapes, np.float32))


@pytest.fixture(params=tiny.TINY, scope="module")
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def test_all_spellings_load_to_equal_arrays(tmp_path, checkpoint, write):
    found = []
    for spelling in checkpoint.spellings:
        if tensors := checkpoint.spelt(spelling):
            write(tmp_path / "model.safetensors", {**tensors, **checkpoint.text})
            found.append(checkpoint.load(tmp_path))
    assert len(found) >= 2
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(np.array_equal(other[path], found[0][path]) for path in other)


def _refused(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The tensors that planning names, given only names and shapes."""
    stored = {name: Stored(Path("x.safetensors"), "BF16", shape, 0, 0) for name, shape in shapes.items()}
    with pytest.raises(CheckpointError) as caught:
        plan(stored, checkpoint.family.keys, checkpoint.shapes)
    return caught.value.tensors


def test_each_tensor_is_missed_by_its_name(checkpoint):
    shapes = {name: array.shape for name, array in checkpoint.spelt(checkpoint.spellings[0]).items()}
    for name in shapes:
        assert _refused(checkpoint, {n: shape for n, shape in shapes.items() if n != name}) == (name,)


def test_each_tensor_is_refused_in_another_shape(checkpoint):
    shapes = {name: array.shape for name, array in checkpoint.spelt(checkpoint.spellings[0]).items()}
    for name, shape in shapes.items():
        for wrong in ((shape[0] + 1, *shape[1:]), (1, *shape), (*shape, 1), ()):
            assert _refused(checkpoint, {**shapes, name: wrong}) == (name,), wrong


def test_a_misspelt_tensor_is_refused(tmp_path, checkpoint, write):
    tensors = checkpoint.spelt(checkpoint.spellings[0])
    name = next(name for name in tensors if ".1." in name)
    tensors[name + "s"] = tensors.pop(name)
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path)
    assert caught.value.tensors == (name, name + "s")


def test_two_spellings_at_once_are_refused(tmp_path, checkpoint, write):
    first, *others = (tensors for spelling in checkpoint.spellings if (tensors := checkpoint.spelt(spelling)))
    for other in others:
        write(tmp_path / "model.safetensors", {**first, **other})
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(tmp_path)
        assert caught.value.tensors
