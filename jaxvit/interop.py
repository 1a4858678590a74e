"""Embeddings into a JAX language model's prefill, without leaving the device: scattered to where the image tokens are.

Shapes are fixed by the bucket and by the caller's sequence, so each pair of them compiles once. The whole way is in
``jaxvit/examples/prefill.py``. PyTorch takes the arrays of ``Encodings.packed`` by DLPack, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxvit.encodings import Encodings
from jaxvit.errors import MediaError
from jaxvit.models.family import Item


def places(ids: np.ndarray, image_token: int, items: Sequence[Item]) -> list[np.ndarray]:
    """For each item, the positions of its tokens in a prompt: integer [tokens].

    Args:
        ids: token ids, any shape; positions count through it row by row.
        image_token: the id that stands once for every embedding, the items one behind the other.
    Raises:
        MediaError: the prompt has more or fewer of them than the items have tokens.
    """
    found = np.flatnonzero(np.asarray(ids).reshape(-1) == image_token)
    tokens = [item.tokens for item in items]
    if len(found) != sum(tokens):
        raise MediaError(
            f"the prompt has {len(found)} image tokens (id {image_token}), the items have {sum(tokens)} "
            f"({', '.join(map(str, tokens))}): write one for every token of every item, in their order"
        )
    return np.split(found, np.cumsum(tokens)[:-1])


def destinations(
    encodings: Encodings, items: Sequence[Item], where: Sequence[np.ndarray], size: int
) -> list[tuple[jax.Array, np.ndarray]]:
    """Packed embeddings [rows, hidden] on the device, and the position of each row: int32 [rows].

    Rows of nobody, padding and tokens that pruning drops, get the position ``size``, which is outside the sequence.

    Args:
        items: what was encoded.
        where: each item's positions, see :func:`places`.
        size: positions of the sequence.
    """
    arrays: dict[int, tuple[jax.Array, np.ndarray]] = {}
    passed = [0] * len(items)
    targets = []
    for index, item in enumerate(items):
        target = np.full(sum(piece.tokens for piece in item.pieces), size, np.int32)
        kept = encodings.kept(index) if item.prune else None
        target[slice(None) if kept is None else kept] = where[index]
        targets.append(target)
    for packed, index, offset, length in encodings.packed:
        _, rows = arrays.setdefault(id(packed), (packed, np.full(len(packed), size, np.int32)))
        rows[offset : offset + length] = targets[index][passed[index] : passed[index] + length]
        passed[index] += length
    return list(arrays.values())


@jax.jit
def insert(embeddings: jax.Array, packed: jax.Array, rows: jax.Array) -> jax.Array:
    """A prompt's embeddings [sequence, hidden] with packed ones at their positions; those outside are dropped."""
    return embeddings.at[rows].set(packed.astype(embeddings.dtype), mode="drop")
