"""Where the data folders are: ``jaxvit/_data/`` in a wheel, beside the package in a clone."""

from __future__ import annotations

from pathlib import Path


def data(name: str) -> Path:
    """The folder ``buckets`` or ``weights``."""
    package = Path(__file__).parent
    packed = package / "_data" / name
    return packed if packed.is_dir() else package.parent / name
