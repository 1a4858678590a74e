"""What packing must never change, for every family and medium: pieces share a bucket and nothing else.

What neighbours and padding hold is tested on the CPU and, with the marker ``gpu``, on an accelerator in bfloat16 for
every attention backend.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxvit
from jaxvit.bench.subject import random_checkpoint
from jaxvit.buckets.executable import Executable, Program, compiler_options
from jaxvit.layers import attention
from jaxvit.models.family import Bucket, Item, Piece, joined
from tests.families import BUDGETS, FAMILIES, encoder, media, picture, relative, repainted

BACKENDS = ("dense", "xla")
SETUPS = [
    *(pytest.param(name, "float32", id=name) for name in BACKENDS),
    *(pytest.param(name, "bfloat16", id=f"{name}-bfloat16") for name in BACKENDS),
]
EVERYWHERE = [
    *SETUPS,
    *(pytest.param(name, "bfloat16", id=f"gpu-{name}", marks=pytest.mark.gpu) for name in attention.BACKENDS),
]
BOUND = {"float32": 1e-6, "bfloat16": 2e-2}
"""Relative RMS of one computation in two programs, which the compiler orders and rounds differently."""
WIDE = {
    "qwen2_5_vl": ("Qwen/Qwen2.5-VL-7B-Instruct", 8),
    "kimi_k25": ("moonshotai/Kimi-K2.5", 2),
    "lfm2_vl": ("LiquidAI/LFM2-VL-3B", 2),
    "lfm2_5_vl": ("LiquidAI/LFM2.5-VL-450M", 2),
}
"""Checkpoint and layers, of which Qwen's eighth is the first to attend beyond windows."""


@cache
def known(name: str, dtype: str = "float32") -> jaxvit.Encoder:
    """The tiny encoder; on an accelerator one of real widths, so that its kernels are those that users run."""
    if jax.default_backend() == "cpu":
        return encoder(name, dtype)
    with random_checkpoint(*WIDE[name]) as folder:
        return jaxvit.load(folder, dtype=dtype, budgets=BUDGETS, store=False)


def skip_unless_it_runs(backend: str, dtype: str) -> None:
    if reason := attention.BACKENDS[backend].why_not(jax.devices()[0].platform, dtype):
        pytest.skip(reason)


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def bucket(backend: str) -> Bucket:
    return Bucket(tokens=448, patches=1792, segments=32, windows=200, attention=backend)


def some_pieces(name: str, rows: int = 1400) -> list[Piece]:
    """Pieces of every kind that fit one bucket together, with room to spare."""
    found: list[Piece] = []
    for item in known(name).prepare(media(name)):
        for piece in item.pieces:
            if sum(one.rows for one in found) + piece.rows <= rows:
                found.append(piece)
    return found


def piece_of(name: str, height: int, width: int, seed: int) -> Piece:
    family = known(name).family
    patches = np.random.default_rng(seed).integers(0, 256, (height * width, len(family.channels)), dtype=np.uint8)
    piece = Piece((1, height, width), patches, height * width // family.merge**2)
    return replace(piece, windows=len(family.lengths([piece]).get("window", ())))


def run(name: str, pieces: list[Piece], backend: str, dtype: str = "float32") -> list[np.ndarray]:
    """The pieces in one call of one bucket, in this order: their embeddings, piece by piece."""
    dispatcher = known(name, dtype).dispatcher
    executable = dispatcher.executable(bucket(backend))
    assert executable.program.backend.name == backend
    return split(executable(dispatcher.weights[0], executable.program.fill(pieces)), pieces)


def split(outputs: tuple[jax.Array, jax.Array], pieces: list[Piece]) -> list[np.ndarray]:
    ends = np.cumsum([piece.tokens for piece in pieces])
    assert np.asarray(outputs[1])[: ends[-1]].all()
    return np.split(np.asarray(outputs[0]), ends)[:-1]


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("backend", "dtype"), EVERYWHERE)
def test_a_piece_keeps_its_bits_when_its_neighbours_change(name: str, backend: str, dtype: str):
    skip_unless_it_runs(backend, dtype)
    pieces = some_pieces(name)
    before = run(name, pieces, backend, dtype)
    others = repainted(Item(tuple(pieces), (), 0), 1).pieces
    for kept in range(len(pieces)):
        mixed = [pieces[i] if i == kept else others[i] for i in range(len(pieces))]
        after = run(name, mixed, backend, dtype)
        assert same_bits(after[kept], before[kept])
        assert not any(same_bits(after[i], before[i]) for i in range(len(pieces)) if i != kept)


@pytest.mark.parametrize(("backend", "dtype"), SETUPS)
def test_a_piece_keeps_its_bits_when_neighbours_come_and_go_behind_it(name: str, backend: str, dtype: str):
    pieces = some_pieces(name)
    alone = run(name, pieces[:1], backend, dtype)[0]
    for count in range(2, len(pieces) + 1):
        assert same_bits(run(name, pieces[:count], backend, dtype)[0], alone)


@pytest.mark.parametrize(("backend", "dtype"), SETUPS)
def test_a_piece_keeps_its_bits_when_boundaries_before_it_move(name: str, backend: str, dtype: str):
    squares, strip = [piece_of(name, 16, 16, 1), piece_of(name, 16, 16, 2)], [piece_of(name, 8, 64, 3)]
    last = piece_of(name, 10, 12, 4)
    with_squares = run(name, [*squares, last], backend, dtype)
    assert same_bits(run(name, [*strip, last], backend, dtype)[-1], with_squares[-1])
    again = run(name, [*squares, last], backend, dtype)
    assert same_bits(again[0], with_squares[0]), "an earlier layout leaves no trace"


@pytest.mark.parametrize(("backend", "dtype"), EVERYWHERE)
def test_poison_in_the_padding_changes_no_bit(name: str, backend: str, dtype: str):
    skip_unless_it_runs(backend, dtype)
    pieces = some_pieces(name)
    before = run(name, pieces, backend, dtype)
    dispatcher = known(name, dtype).dispatcher
    program = dispatcher.executable(bucket(backend)).program
    arrays = poisoned(program, pieces)
    clean = split(dispatcher.executable(bucket(backend))(dispatcher.weights[0], arrays), pieces)
    assert all(map(same_bits, clean, before))
    # The probe makes another program, so the poisoned run is held against the same program with a harmless filling.
    used = sum(piece.rows for piece in pieces)
    harmless, after = (
        split(probed(program, used, filling)(dispatcher.weights[0], arrays), pieces) for filling in (0.5, jnp.nan)
    )
    assert all(map(same_bits, after, harmless))
    assert max(map(relative, after, before)) <= BOUND[dtype]


def probed(program: Program, used: int, filling: float) -> Executable:
    """The program with its pad rows overwritten after the patch embedding."""
    device = jax.devices()[0]

    def probe(tap: str, value: jax.Array) -> jax.Array:
        padding = jnp.arange(value.shape[0]) >= used
        return jnp.where(padding[:, None], jnp.asarray(filling, value.dtype), value) if tap == "patch_embed" else value

    # Two programs of other fillings would be tuned apart, and might multiply in another order.
    tuned = {} if device.platform == "cpu" else {"xla_gpu_autotune_level": 0}
    compiled = program.lower(device, probe).compile(compiler_options=compiler_options(program) | tuned)
    return Executable(program, compiled, device, 0.0, "compiled")


def poisoned(program: Program, pieces: list[Piece]) -> dict[str, np.ndarray | None]:
    """The bucket's arrays with random bytes in uint8 padding and NaN in float padding."""
    arrays = program.fill(pieces)
    layout = {key: joined(rows) for key, rows in program.family.layout(pieces, program.bucket).items()}
    generator = np.random.default_rng(0)
    touched = 0
    for key, real in layout.items():
        array = arrays[key]
        assert array is not None
        tail = array[len(real) :]
        if array.dtype == np.uint8 and key.startswith("pixels"):
            tail[...] = generator.integers(200, 256, tail.shape)
            touched += 1
        elif array.dtype == np.float32:
            tail[...] = np.nan
            touched += 1
    assert touched
    return arrays


def test_items_come_back_in_order_and_duplicates_each_get_their_own(name: str):
    one, other = picture(84, 112, 1), picture(150, 90, 2)
    alone = [encoder(name).encode(medium)[0] for medium in (one, other)]
    for order in ([0, 1], [1, 0], [0, 0], [1, 0, 1]):
        found = encoder(name).encode([(one, other)[index] for index in order])
        assert [len(rows) for rows in found] == [len(alone[index]) for index in order]
        assert all(relative(rows, alone[index]) <= 1e-5 for rows, index in zip(found, order, strict=True))


def test_every_permutation_of_mixed_sizes_gives_each_item_its_own(name: str):
    pictures = [picture(64, 64, 1), picture(160, 120, 2), picture(64, 64, 1), picture(90, 200, 3)]
    alone = [encoder(name).encode(medium)[0] for medium in pictures]
    for order in itertools.permutations(range(4)):
        found = encoder(name).encode([pictures[index] for index in order])
        assert all(relative(rows, alone[index]) <= 1e-5 for rows, index in zip(found, order, strict=True))


def test_the_same_piece_differs_little_across_offsets_buckets_and_the_exact_path(name: str):
    pieces = some_pieces(name)
    first = run(name, pieces, "xla")
    moved = run(name, pieces[::-1], "xla")[::-1]
    dense = run(name, pieces, "dense")
    exact = [output.embeddings for output in encoder(name).dispatcher.run_exact([Item(tuple(pieces), (), 0)])]
    assert max(map(relative, moved, first)) <= 1e-6
    assert max(map(relative, dense, first)) <= 1e-5
    assert max(relative(np.asarray(rows), ours) for rows, ours in zip(exact, first, strict=True)) <= 1e-5


def test_a_non_finite_piece_is_reported_and_leaves_its_neighbours_alone(name: str):
    pieces = some_pieces(name)
    dispatcher = encoder(name).dispatcher
    program = dispatcher.executable(bucket("xla")).program
    start, stop = pieces[0].rows, pieces[0].rows + pieces[1].rows

    def probe(tap: str, value: jax.Array) -> jax.Array:
        row = jnp.arange(value.shape[0]) == (start + stop) // 2
        return jnp.where(row[:, None], jnp.nan, value) if tap == "patch_embed" else value

    for backend in BACKENDS:
        program = replace_attention(program, backend)
        compiled = program.lower(dispatcher.devices[0], probe).compile()
        executable = Executable(program, compiled, dispatcher.devices[0], 0.0, "compiled")
        rows, finite = executable(dispatcher.weights[0], program.fill(pieces))
        ends = np.cumsum([piece.tokens for piece in pieces])
        flags = np.split(np.asarray(finite), ends)[:-1]
        assert not flags[1].all(), "a bad patch shows in its own piece"
        assert all(flag.all() for index, flag in enumerate(flags) if index != 1)
        clean = run(name, pieces, backend)
        after = np.split(np.asarray(rows), ends)[:-1]
        assert all(relative(after[i], clean[i]) <= 1e-6 for i in range(len(pieces)) if i != 1)


def replace_attention(program: Program, backend: str) -> Program:
    return replace(program, bucket=replace(program.bucket, attention=backend))
