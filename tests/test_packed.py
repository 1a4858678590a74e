"""The packed PyTorch peer computes what we compute, and its work is counted right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxvit.bench.subject import Subject
from jaxvit.models.family import Piece
from tests.families import FAMILIES, encoder, media, picture, relative

pytestmark = pytest.mark.reference


def pieces_of(name: str) -> list[Piece]:
    """Stills of several sizes; frame pairs and chunks where the family takes videos."""
    return [piece for item in encoder(name).prepare(media(name)) for piece in item.pieces]


def ours(name: str, pieces: list[Piece]) -> np.ndarray:
    from jaxvit.models.family import Item

    return np.concatenate(list(encoder(name).encode([Item((p,), (p.grid,), p.tokens) for p in pieces])))


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_packed_peer_computes_the_same_embeddings(name: str) -> None:
    packed, pieces = Subject(encoder(name)).packed, pieces_of(name)
    assert relative(packed(packed.inputs(pieces)).numpy(), ours(name, pieces)) <= 1e-5


def test_varlen_is_given_the_same_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from jaxvit.reference import packed as module

    def varlen(q, k, v, ends, ends_of_keys, longest, longest_key):
        """Attention by cumulative lengths, one segment at a time."""
        lengths = ends.diff().tolist()
        assert ends.dtype == torch.int32
        assert torch.equal(ends, ends_of_keys)
        assert longest == longest_key == max(lengths)
        assert all(each.is_contiguous() for each in (q, k, v))
        return module.attend(q, k, v, (lengths, None))

    monkeypatch.setattr(module, "varlen_attn", varlen)
    packed, pieces = Subject(encoder(name)).packed, pieces_of(name)
    expected = packed(packed.inputs(pieces))
    packed.varlen = True
    assert torch.equal(packed(packed.inputs(pieces)), expected)


def test_the_packed_peer_is_one_graph_for_torch_compile(name: str) -> None:
    import torch

    packed, pieces = Subject(encoder(name)).packed, pieces_of(name)
    inputs = packed.inputs(pieces)
    assert torch.equal(packed._compiled(inputs, fullgraph=True, backend="eager")(), packed(inputs))


def test_on_a_cpu_there_is_no_graph_to_capture() -> None:
    packed = Subject(encoder("lfm2_5_vl")).packed
    variants = list(packed.variants(packed.inputs(pieces_of("lfm2_5_vl"))))
    assert [name for name, _ in variants] == ["eager"]


def test_an_unaligned_mlp_is_padded_and_an_aligned_one_is_not() -> None:
    packed = Subject(encoder("qwen2_5_vl")).packed
    kernels = {path: tuple(packed.weights[f"blocks.0.mlp.{path}.kernel"].shape) for path in ("gate_proj", "down_proj")}
    assert encoder("qwen2_5_vl").config.intermediate_size == 108
    assert kernels == {"gate_proj": (128, 64), "down_proj": (64, 128)}
    assert tuple(packed.weights["merger.fc0.kernel"].shape) == (256, 256)


def test_operations_are_those_that_pytorch_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from jaxvit.reference import packed as module

    monkeypatch.setattr(module, "ALIGNED", 1)
    subject, pieces = Subject(encoder(name)), pieces_of(name)
    inputs = subject.packed.inputs(pieces)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        subject.packed(inputs)
    assert counted.get_total_flops() == subject.flops(pieces)


def test_transformers_takes_packed_stills_and_single_pictures(name: str) -> None:
    subject = Subject(encoder(name))
    pictures = [picture(140, 140, 1), picture(84, 300, 2)]
    items = encoder(name).prepare(pictures)
    eager, expected = subject.eager, list(encoder(name).encode(items))
    out = eager.host(eager(eager.inputs([piece for item in items for piece in item.pieces])))
    assert relative(out, np.concatenate(expected)) <= 1e-5
    for each, array in zip(pictures, expected, strict=True):
        assert relative(eager.host(eager(eager.process(each))), array) <= 1e-5


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    yield
    import torch

    torch._dynamo.reset()
