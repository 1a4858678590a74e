"""Images and chunks of frames packed into a bucket: the fixed-shape arrays of the Kimi-K2.5 executable.

| buffer      | vLLM's name      | holds                                                               | pad           |
|-------------|------------------|---------------------------------------------------------------------|---------------|
| pixels      | pixel_values     | the patches, (C, py, px) each, uint8                                | zeros         |
| coordinates | rope_freqs_cis   | (y, x) of each patch in its frame                                   | zeros         |
| tap_index   | pos_embeds       | rows and columns of the position table that each patch reads        | zeros         |
| tap_weight  | pos_embeds       | their weights                                                       | zeros         |
| frame       | pos_embeds       | row of the time table: 0 in a piece of one frame, else frame + 1    | zeros         |
| mean_index  | merge_gather_idx | for each token, its cell of four patches in each frame              | zeros         |
| mean_weight | -                | 1 / t for each of the t frames, 0 beyond                            | zeros         |
| full/*      | cu_seqlens       | attention segments: images and chunks, all their frames in one      | the backend's |

vLLM has no buffers for chunks of several frames and runs them outside its graphs; here their mean over time is a
weighted gather, and pieces of any number of frames share a bucket. A slot of weight 0 names the token's own first cell,
so that nothing of another piece can reach it, not even a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from jaxvit.buffer import Buffer
from jaxvit.layers.position import bicubic, cell_coordinates
from jaxvit.models.family import Bucket, Piece, Rows
from jaxvit.models.kimi_k25.config import Config


class Places(NamedTuple):
    """Where the patches of one frame stand, cell by cell.

    Attributes:
        coordinates: int32 [patches, 2]: (y, x).
        index: int32 [patches, 2, 4]: entries of the position table that a patch reads, along y and along x.
        weight: float32 [patches, 2, 4].
    """

    coordinates: np.ndarray
    index: np.ndarray
    weight: np.ndarray


@lru_cache(maxsize=64)
def places(height: int, width: int, config: Config) -> Places:
    """The places of a frame of height x width patches."""
    coordinates = cell_coordinates(height, width, config.merge_kernel_size)
    rows, columns = bicubic(config.pos_emb_height, height), bicubic(config.pos_emb_width, width)
    entries = coordinates.astype(np.intp)
    entries[:, 1] += height  # the columns' taps lie behind the rows', so that one take finds both
    result = Places(
        coordinates,
        np.concatenate([rows.index, columns.index]).take(entries, axis=0),
        np.concatenate([rows.weight, columns.weight]).take(entries, axis=0),
    )
    for array in result:
        array.flags.writeable = False
    return result


def buffers(config: Config, bucket: Bucket, pixels: Literal["uint8", "float32"]) -> tuple[Buffer, ...]:
    """The buffers of the table above but the attention backends' own."""
    integers, floats = np.dtype(np.int32), np.dtype(np.float32)
    return (
        Buffer("pixels", (bucket.patches, config.patch_values), np.dtype(pixels)),
        Buffer("coordinates", (bucket.patches, 2), integers),
        Buffer("tap_index", (bucket.patches, 2, 4), integers),
        Buffer("tap_weight", (bucket.patches, 2, 4), floats),
        Buffer("frame", (bucket.patches,), integers),
        Buffer("mean_index", (bucket.tokens, config.pos_emb_time), integers),
        Buffer("mean_weight", (bucket.tokens, config.pos_emb_time), floats),
    )


def layout(config: Config, pieces: Sequence[Piece]) -> dict[str, Rows]:
    """Rows for those buffers, as long as the pieces are."""
    plans = [places(*piece.grid[1:], config) for piece in pieces]
    frames = [piece.grid[0] for piece in pieces]
    index, weight = means(config, pieces)

    def of_frames(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:  # the same in every frame of a piece
        return [array for array, count in zip(arrays, frames, strict=True) for _ in range(count)]

    return {
        "pixels": [piece.patches for piece in pieces],
        "coordinates": of_frames([plan.coordinates for plan in plans]),
        "tap_index": of_frames([plan.index for plan in plans]),
        "tap_weight": of_frames([plan.weight for plan in plans]),
        "frame": frame_rows(pieces),
        "mean_index": index,
        "mean_weight": weight,
    }


def frame_rows(pieces: Sequence[Piece]) -> np.ndarray:
    """Row of the time table for each patch: int32 [rows]. One frame alone has no term of time, not that of frame 0."""
    rows, place = np.zeros(sum(piece.rows for piece in pieces), np.int32), 0
    for piece in pieces:
        frames, behind = piece.grid[0], place + piece.rows
        if frames > 1:
            rows[place:behind].reshape(frames, -1)[...] = np.arange(1, frames + 1)[:, None]
        place = behind
    return rows


def means(config: Config, pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Cells and weights of each token's mean over its piece's frames: [tokens, pos_emb_time] each."""
    slots, tokens = range(config.pos_emb_time), [piece.tokens for piece in pieces]
    index = np.arange(sum(tokens), dtype=np.int32).repeat(len(slots)).reshape(-1, len(slots))
    if all(piece.grid[0] == 1 for piece in pieces):  # a token is its one cell
        weight = np.zeros(index.shape, np.float32)
        weight[:, 0] = 1
        return index, weight
    steps: list[list[int]] = []
    shares: list[list[float]] = []
    skipped = 0  # cells of later frames so far
    for piece in pieces:
        frames = piece.grid[0]
        steps.append([skipped + (slot * piece.tokens if slot < frames else 0) for slot in slots])
        shares.append([1 / frames if slot < frames else 0.0 for slot in slots])
        skipped += (frames - 1) * piece.tokens
    index += np.array(steps, np.int32).repeat(tokens, axis=0)
    return index, np.array(shares, np.float32).repeat(tokens, axis=0)


def lengths(pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
    """Segments: int32 patches each, of all frames of a piece."""
    return {"full": np.array([piece.rows for piece in pieces], np.int32)}
