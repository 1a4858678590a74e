"""Video pruning on the host, after the buckets: which tokens of a clip say something new (EVS)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def retained(embeddings: Float[np.ndarray, "tokens width"], pairs: int, keep: int) -> Int[np.ndarray, " kept"]:
    """Positions to keep, ascending: all of the first frame pair, then the least similar to one pair before.

    Similarity is the cosine between a token and the token at the same place one frame pair before. Ties keep the
    earlier token.

    Args:
        pairs: frame pairs of the clip; they divide the tokens.
        keep: tokens to keep, at least those of one frame pair.
    """
    tokens = embeddings.shape[0] // pairs
    wide = embeddings.astype(np.float32).reshape(pairs, tokens, -1)
    norms = np.maximum(np.linalg.norm(wide, axis=-1), np.finfo(np.float32).tiny)
    cosine = np.einsum("ptd,ptd->pt", wide[1:], wide[:-1]) / (norms[1:] * norms[:-1])
    order = np.argsort(cosine.reshape(-1), kind="stable")[: keep - tokens]
    return np.sort(np.concatenate([np.arange(tokens), order + tokens]))
