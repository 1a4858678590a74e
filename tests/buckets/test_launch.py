"""The short way to launch a program gives what JAX's own call gives, and gives way to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvit.buckets.executable import Executable
from jaxvit.buckets.launch import launcher
from jaxvit.buckets.store import Store
from tests.families import FAMILIES, encoder


def call(name: str, executable: Executable) -> tuple[list[jax.Array], list[jax.Array]]:
    """(weights, inputs) of a call of a bucket."""
    example = encoder(name).family.example(executable.program.bucket)
    return encoder(name).dispatcher.weights[0], executable.place(executable.program.fill(example))


def fresh(executable: Executable) -> Executable:
    return Executable(executable.program, executable.compiled, executable.device, 0.0, "compiled")


def broken(arguments: object) -> list[jax.Array]:
    raise RuntimeError("no such thing")


def assert_same(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs)
        assert (ours.aval, ours.sharding, ours.format, ours.committed) == (
            theirs.aval,
            theirs.sharding,
            theirs.format,
            theirs.committed,
        )
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_launch_gives_the_arrays_of_jaxs_own_call(name: str):
    dispatcher = encoder(name).dispatcher
    executable = fresh(dispatcher.executable(dispatcher.ladder.buckets[0]))
    weights, placed = call(name, executable)
    found = executable.run(weights, placed)
    assert executable._launched, "this JAX offers the short way"
    assert_same(found, executable._slowly([*weights, *placed]))
    with ThreadPoolExecutor(4) as pool:
        for each in pool.map(lambda _: executable.run(weights, placed), range(16)):
            assert_same(each, found)


def test_an_executable_from_the_store_is_launched_too(tmp_path):
    dispatcher, store = encoder("lfm2_vl").dispatcher, Store(tmp_path)
    program, device = dispatcher.program(dispatcher.ladder.buckets[0], "uint8"), jax.devices()[0]
    store.build(program, device)
    loaded = store.build(program, device)
    assert loaded.source == "store"
    weights, placed = call("lfm2_vl", loaded)
    found = loaded.run(weights, placed)
    assert loaded._launched
    assert_same(found, dispatcher.executable(program.bucket).run(weights, placed))


def test_arguments_that_the_program_does_not_use_are_left_out():
    compiled = (
        jax.jit(lambda w, x, y: (w[1] + y, w[1] - y)).lower([jnp.ones(3)] * 3, jnp.ones(2), jnp.ones(3)).compile()
    )
    launch = launcher(compiled)
    assert launch is not None
    weights = [jnp.full(3, value) for value in (1.0, 2.0, 3.0)]
    plus, minus = launch([*weights, jnp.ones(2), jnp.full(3, 10.0)])
    assert (plus.tolist(), minus.tolist()) == ([12.0] * 3, [-8.0] * 3)


def test_a_program_that_calls_the_host_or_spans_devices_is_not_launched():
    def loud(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0])
        return x

    assert launcher(jax.jit(loud).lower(jnp.ones(3)).compile()) is None
    assert launcher(SimpleNamespace()) is None, "a JAX without these names"


def test_a_launch_that_never_worked_gives_way_to_jaxs_own_call():
    dispatcher = encoder("kimi_k25").dispatcher
    executable = fresh(dispatcher.executable(dispatcher.ladder.buckets[0]))
    weights, placed = call("kimi_k25", executable)
    expected = executable.run(weights, placed)
    executable._launched, executable._launch = False, broken
    assert_same(executable.run(weights, placed), expected)
    assert executable._launch is None


def test_a_launch_that_worked_before_raises_its_error():
    dispatcher = encoder("kimi_k25").dispatcher
    executable = fresh(dispatcher.executable(dispatcher.ladder.buckets[0]))
    weights, placed = call("kimi_k25", executable)
    executable.run(weights, placed)
    executable._launch = broken
    with pytest.raises(RuntimeError, match="no such thing"):
        executable.run(weights, placed)
