"""Checks of the arguments that callers pass: what is wrong, and what may be given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxvit.errors import OptionError


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuses a value that is none of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"{name} is {value!r:.80}; choose one of {', '.join(map(repr, allowed))}")


def kind(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuses a value of another type; ``wanted`` says in words what to give."""
    if not isinstance(value, kinds):
        raise OptionError(f"{name} is {value!r:.80}; give {wanted}")
