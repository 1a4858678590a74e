"""Attention over packed segments: one signature, several backends, all fed from the same segment lengths.

A segment is a run of rows that attend to each other and to nothing else. Segments lie one behind the other from row 0;
the rows behind the last one are padding and attend to nothing, or within aligned tiles of their own, so that they stay
finite and cost no more than their number.

A backend has three faces: ``buffers`` declares its metadata, ``metadata`` fills it from segment lengths on the host
(numpy), and calling it runs on the device.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from jaxvit.errors import LadderError
from jaxvit.layers.attention.cudnn import Cudnn
from jaxvit.layers.attention.mosaic import Mosaic
from jaxvit.layers.attention.portable import Blockwise, Dense
from jaxvit.layers.attention.segments import TILE, Attend, Backend, Metadata, key_ranges
from jaxvit.layers.attention.tokamax import Tokamax
from jaxvit.layers.rope import Rotation, rotate

__all__ = ["BACKENDS", "TILE", "Attend", "Backend", "Metadata", "attend", "choose", "held", "key_ranges", "why_not"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Dense(), Blockwise(), Cudnn(), Tokamax(), Mosaic())
}
DENSE_AT_MOST = 512
"""Patches of a bucket up to which scores of every row against every row are cheaper than skipping blocks of keys, where
there is no kernel of the package's own."""
BEST = ("mosaic", "cudnn", "xla")
"""In order of preference."""


def attend(
    backend: Backend,
    qkv: Array,
    rotation: Rotation | None,
    metadata: Metadata,
    scale: float,
    longest: int | None = None,
) -> Array:
    """Attention from the fused projection, [patches, 3, heads, dim], by a backend that may rotate by itself.

    Args:
        longest: patches that no segment exceeds, None where there is no such bound.
    """
    fused = getattr(backend, "fused", None)
    if fused is not None:
        return fused(qkv, rotation, metadata, scale, longest)
    q, k, v = jnp.unstack(qkv, axis=1)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return backend(q, k, v, metadata, scale)


def held(backend: Backend, metadata: Metadata) -> Metadata:
    """The metadata as all layers share it: copies, where the backend's kernel reads them at every layer.

    A recorded graph is updated at each node whose buffers moved. The inputs of a call move, temporaries do not.
    """
    copied = getattr(backend, "copied", None)
    return metadata if copied is None else copied(metadata)


def why_not(name: str, platform: str, dtype: str) -> str | None:
    """Why the backend of that name cannot run there, None if it can."""
    return BACKENDS[name].why_not(platform, dtype) if name in BACKENDS else f"there are {', '.join(BACKENDS)}"


def choose(name: str, platform: str, dtype: str, patches: int) -> Backend:
    """The backend a bucket runs on: the one its ladder or the user names, else the best available.

    Raises:
        LadderError: the named one cannot run here; the message says why.
    """
    if name == "auto":
        name = next(one for one in BEST if BACKENDS[one].why_not(platform, dtype) is None)
        if name != "mosaic" and patches <= DENSE_AT_MOST:
            name = "dense"
    if name not in BACKENDS:
        raise LadderError(f"there is no attention backend {name!r}; there are {', '.join(BACKENDS)}")
    if reason := BACKENDS[name].why_not(platform, dtype):
        raise LadderError(f"attention {name!r} cannot run here: {reason}")
    return BACKENDS[name]
