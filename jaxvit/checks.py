"""Checks of the arguments that callers pass: what is wrong, and what may be given."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from jaxvit.errors import OptionError


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuses a value that is none of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"{name} is {value!r:.80}; choose one of {', '.join(map(repr, allowed))}")


def positive(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuses anything but None and a number of that type above 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < inf):
        raise OptionError(f"{name} is {value!r:.80}; give {wanted}, or None")


def kind(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuses a value of another type; ``wanted`` says in words what to give."""
    if not isinstance(value, kinds):
        raise OptionError(f"{name} is {value!r:.80}; give {wanted}")
