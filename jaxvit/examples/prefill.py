"""The prefill of a Qwen2.5-VL language model in JAX: prompt, embeddings, positions.

The language model itself is not here: a random table stands for its embeddings. The positions are those that
transformers' model computes. ``python -m jaxvit.examples.prefill MODEL PICTURE...`` runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxvit
from jaxvit import interop
from jaxvit.models.family import Item

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 151652, 151653, 151655, 151656
"""Of the tokenizer of Qwen2.5-VL."""


def prompt(items: Sequence[Item], text: Sequence[int]) -> np.ndarray:
    """Token ids [sequence]: each item's tokens between their marks, then the text."""
    ids: list[int] = []
    for item in items:
        ids += [VISION_START, *[IMAGE_PAD] * item.tokens, VISION_END]
    return np.array([*ids, *text])


def rotary_positions(ids: np.ndarray, items: Sequence[Item], tokens_per_second: float = 2.0) -> np.ndarray:
    """(t, y, x) of every token: [3, sequence]. Text counts on along all three; an item's tokens lie on its grid.

    Args:
        tokens_per_second: of the checkpoint's vision_config; it spaces out the frames of clips.
    """
    positions = np.zeros((3, len(ids)), np.int32)
    start, done = 0, 0
    for item, where in zip(items, interop.places(ids, IMAGE_PAD, items), strict=True):
        before = np.arange(done, where[0])
        positions[:, before] = start + np.arange(len(before))
        start += len(before)
        frames, height, width = item.layout["grid_thw"]
        rows, columns = height // item.layout["merge_size"], width // item.layout["merge_size"]
        seconds = item.layout.get("seconds_per_grid")
        step = 1 if seconds is None else tokens_per_second * seconds
        grid = np.meshgrid(np.arange(frames) * step, np.arange(rows), np.arange(columns), indexing="ij")
        positions[:, where] = start + np.stack(grid).reshape(3, -1)
        start += max(rows, columns)
        done = where[-1] + 1
    positions[:, done:] = start + np.arange(len(ids) - done)
    return positions


def inputs(encoder: jaxvit.Encoder, media: Sequence[object], text: Sequence[int], table: jax.Array) -> tuple:
    """What the first layer takes: embeddings [sequence, hidden], and positions [3, sequence].

    Args:
        text: token ids of the question.
        table: the language model's embeddings [vocabulary, hidden].
    """
    items = encoder.prepare(media)
    ids = prompt(items, text)
    encodings = encoder.encode(items)
    embeddings = jnp.take(table, ids, axis=0)
    where = interop.places(ids, IMAGE_PAD, items)
    for packed, rows in interop.destinations(encodings, items, where, len(ids)):
        embeddings = interop.insert(embeddings, packed, rows)
    return embeddings, rotary_positions(ids, items)


def main(model: str, *pictures: str) -> None:
    encoder = jaxvit.load(model)
    table = jax.random.normal(jax.random.key(0), (VIDEO_PAD + 1, encoder.family.width), jnp.bfloat16)
    embeddings, positions = inputs(encoder, pictures, [3838, 374, 419, 30], table)  # "What is this?"
    print(f"embeddings {embeddings.dtype} {embeddings.shape}, positions {positions.shape} up to {positions.max()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
