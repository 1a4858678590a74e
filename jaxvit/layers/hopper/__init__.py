"""The package's own kernels for NVIDIA Hopper (Pallas, Mosaic GPU), and where they run.

A program's platform and dtype decide whether its layers use them; the layers know neither. Those of attention stand
beside the other backends, in ``layers.attention``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from jaxvit.layers.hopper import packed

OLDEST_JAX = (0, 11)

_allowed: ContextVar[bool] = ContextVar("allowed", default=False)


def why_not(platform: str, dtype: str) -> str | None:
    """Why the kernels cannot run there, None if they can."""
    if platform not in ("cuda", "gpu"):
        return "needs an NVIDIA GPU"
    if dtype != "bfloat16":
        return f"the kernel takes bfloat16, not {dtype}"
    if not 9.0 <= capability(platform) < 10.0:
        return f"the kernel is written for compute capability 9.0 (Hopper), this GPU has {capability(platform)}"
    if tuple(map(int, jax.__version__.split(".")[:2])) < OLDEST_JAX:
        return f"needs jax 0.11 or newer, this is {jax.__version__}"
    if importlib.util.find_spec("jax.experimental.pallas.mosaic_gpu") is None:
        return "this jax has no Pallas for Mosaic GPU"
    return None


def capability(platform: str) -> float:
    """Compute capability of the platform's first device, 0 where it has none."""
    try:
        return float(getattr(jax.local_devices(backend=platform)[0], "compute_capability", 0) or 0)
    except (RuntimeError, ValueError):
        return 0.0


@contextmanager
def kernels_for(platform: str, dtype: str) -> Iterator[None]:
    """What is traced in here is for that platform and dtype. Outside, no layer uses a kernel."""
    token = _allowed.set(why_not(platform, dtype) is None)
    try:
        with packed.remembered():
            yield
    finally:
        _allowed.reset(token)


def allowed() -> bool:
    """Whether what is traced now may use the kernels."""
    return _allowed.get()
