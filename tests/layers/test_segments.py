"""Metadata of packed attention on the device: what is shared by all layers has the values that were handed in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvit.layers.attention import BACKENDS, held, key_ranges
from jaxvit.layers.attention.segments import LINE, tile_ranges

LENGTHS = ([64], [256], [1, 2, 61, 100], [])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_held_metadata_equals_the_arguments(name: str, lengths: list[int]):
    backend = BACKENDS[name]
    metadata = backend.metadata(np.asarray(lengths, np.int64), 256, 8)
    found = jax.jit(lambda metadata: held(backend, metadata))(metadata)
    assert found.keys() == metadata.keys()
    for key, value in metadata.items():
        assert found[key].dtype == value.dtype
        assert np.array_equal(found[key], value)


@pytest.mark.parametrize(("name", "operations"), [("mosaic", ("minimum(", "maximum(")), ("cudnn", ("maximum(",))])
def test_xla_does_not_leave_the_copies_out(name: str, operations: tuple[str, ...]):
    backend = BACKENDS[name]
    metadata = backend.metadata(np.asarray([100, 28]), 256, 8)
    text = jax.jit(lambda metadata: held(backend, metadata)).lower(metadata).compile().as_text()
    assert all(operation in text for operation in operations)


@pytest.mark.parametrize("rows", [64, 128])
def test_ranges_of_tiles_bound_those_of_their_rows_and_outgrow_the_flags(rows: int):
    starts, ends = key_ranges(np.asarray([50, 100, 30]), 256)
    found = np.asarray(tile_ranges(jnp.asarray(starts), jnp.asarray(ends), rows))
    assert found.shape == (256 // rows, LINE)
    for tile, bounds in enumerate(found):
        mine = slice(tile * rows, tile * rows + rows)
        expected = [starts[mine].min(), starts[mine].max(), ends[mine].min(), ends[mine].max()]
        assert bounds[:4].tolist() == expected
    assert found.nbytes > 256 // 4, "a byte for each token, which has four patches"
