"""Every real checkpoint maps completely: its config is read, and no name is left over on either side."""

from __future__ import annotations

from pathlib import Path

import pytest
from flax import nnx

from jaxvit.layers.fuse import parameter_shapes
from jaxvit.models import REGISTRY, family_of
from jaxvit.models.family import Family
from jaxvit.weights import manifests
from jaxvit.weights.files import Stored
from jaxvit.weights.load import plan


@pytest.fixture(params=manifests.names(), scope="module")
def manifest(request: pytest.FixtureRequest) -> manifests.Manifest:
    return manifests.load(request.param)


@pytest.fixture(scope="module")
def family(manifest: manifests.Manifest) -> Family:
    return family_of(manifest.files)


def test_every_tensor_fills_a_parameter_and_every_parameter_is_filled(manifest: manifests.Manifest, family: Family):
    shapes = parameter_shapes(nnx.eval_shape(family.module))
    stored = {name: Stored(Path("x"), dtype, shape, 0, 0) for name, (shape, dtype) in manifest.tensors.items()}
    assert all(family.keys.prefix(name) for name in stored)
    parameters = plan(stored, family.keys, shapes, manifest.files["config.json"])
    assert {parameter.path for parameter in parameters} == set(shapes)
    assert sorted(source.name for parameter in parameters for source in parameter.sources) == sorted(stored)


def test_no_two_keys_match_a_name(manifest: manifests.Manifest, family: Family):
    for name in manifest.tensors:
        prefix = family.keys.prefix(name)
        canonical = {spelling[prefix] + name[len(prefix) :] for spelling in family.keys.spellings if prefix in spelling}
        assert len(canonical) == 1
        assert sum(key.regex.fullmatch(*canonical) is not None for key in family.keys.keys) == 1


def test_the_settings_give_a_budget_range(family: Family):
    smallest, largest = family.budget_range()
    assert 1 <= smallest <= largest
    assert family.largest().tokens == largest


def test_every_family_has_a_manifest():
    found = {type(family_of(manifests.load(name).files)) for name in manifests.names()}
    assert found == set(REGISTRY.values())
