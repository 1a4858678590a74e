"""Vectors of a packed array: a kernel is given the array and where each begins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxvit.layers.hopper import kernels_for, packed


def test_a_kernel_gets_the_whole_array_and_where_its_vector_begins():
    whole = np.arange(40, dtype=np.float32)

    @jax.jit
    def run(whole: jax.Array, other: jax.Array) -> tuple[jax.Array, ...]:
        with kernels_for("cpu", "bfloat16"):
            first, second = packed.taken(whole, 4, (6,)), packed.taken(whole, 10, (2, 3))
            assert second.shape == (2, 3)
            arrays, starts = packed.places(second, first, other)
            assert [array.shape for array in arrays] == [(40,), (40,), (6,)]
            again = [lax.dynamic_slice(array, (start,), (6,)) for array, start in zip(arrays, starts, strict=True)]
        return first, second, starts, *again

    first, second, starts, *again = run(whole, jnp.full((3, 2), 7.0))
    assert first.tolist() == whole[4:10].tolist()
    assert second.reshape(-1).tolist() == whole[10:16].tolist()
    assert starts.tolist() == [10, 4, 0]
    assert [each.tolist() for each in again] == [second.reshape(-1).tolist(), first.tolist(), [7.0] * 6]


def test_a_vector_is_known_only_inside_of_what_is_traced_with_it():
    whole = jnp.arange(8.0)
    with kernels_for("cpu", "bfloat16"):
        inside = packed.taken(whole, 2, (4,))
        with kernels_for("cpu", "bfloat16"):
            [array], starts = packed.places(inside)
            assert (array.shape, starts.tolist()) == ((4,), [0])
        [array], starts = packed.places(inside)
        assert (array.shape, starts.tolist()) == ((8,), [2])
    outside = packed.taken(whole, 2, (4,))
    for vector in (inside, outside):
        [array], starts = packed.places(vector)
        assert (array.tolist(), starts.tolist()) == ([2.0, 3.0, 4.0, 5.0], [0])
