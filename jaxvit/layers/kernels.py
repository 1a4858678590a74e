"""Whether layers may use the package's own kernels: a program's platform and dtype decide it; layers know neither."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxvit.layers.attention.mosaic import Mosaic

_allowed: ContextVar[bool] = ContextVar("kernels", default=False)


def why_not(platform: str, dtype: str) -> str | None:
    """Why the kernels cannot run there, None if they can."""
    return Mosaic().why_not(platform, dtype)


@contextmanager
def kernels_for(platform: str, dtype: str) -> Iterator[None]:
    """What is traced in here is for that platform and dtype. Outside, no layer uses a kernel."""
    token = _allowed.set(why_not(platform, dtype) is None)
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed() -> bool:
    return _allowed.get()
