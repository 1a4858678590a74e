"""Reading fields of a checkpoint's JSON with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxvit.errors import CheckpointError

_MISSING = object()

LAYERS = 1024
"""Layers of a tower at most: a file that says more is damaged, and would keep the loader busy."""


@dataclass(frozen=True)
class Options:
    """One JSON object and the words for it in messages."""

    raw: Mapping[str, Any]
    where: str

    @classmethod
    def vision(cls, config: Mapping[str, Any], family: str) -> Options:
        """``vision_config`` of a config.json. Values of the root or of ``text_config`` never stand in for it."""
        raw = config.get("vision_config")
        if not isinstance(raw, Mapping):
            raise CheckpointError(
                f"config.json has no vision_config: this is no {family} checkpoint with a vision tower "
                "(a text-only model?)"
            )
        return cls(raw, "vision_config of config.json")

    def section(self, name: str) -> Options:
        """A nested object; an absent one is empty."""
        return Options(section(self.raw, name, f"{self.where}: "), f"{name} of {self.where}")

    def integer(self, *names: str, default: Any = _MISSING, most: int = 2**31 - 1) -> int:
        """A positive integer of at most ``most`` under one of the spellings, or under several with one value."""
        found = {name: self.raw[name] for name in names if self.raw.get(name) is not None}
        if len({repr(value) for value in found.values()}) > 1:
            raise CheckpointError(
                f"{self.where}: {' and '.join(f'{name} is {value!r}' for name, value in found.items())}, two spellings "
                "of one field: remove the one that the weights do not have"
            )
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{self.where}: {name} must be a positive integer, got {value!r}")
            if value > most:
                raise CheckpointError(f"{self.where}: {name} is {value}, and at most {most} is implemented")
            return value
        if default is _MISSING:
            raise CheckpointError(f"{self.where}: {' or '.join(names)} is missing")
        return default

    def number(self, name: str, default: float) -> float:
        """A finite number above 0."""
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise CheckpointError(f"{self.where}: {name} must be a finite number above 0, got {value!r}")
        return float(value)

    def integers(self, name: str, default: Sequence[int]) -> tuple[int, ...]:
        """A list of integers, none of them negative."""
        value = self.raw.get(name)
        if value is None:
            return tuple(default)
        if not isinstance(value, (list, tuple)) or not all(type(one) is int and one >= 0 for one in value):
            raise CheckpointError(f"{self.where}: {name} must be a list of integers from 0, got {value!r}")
        return tuple(value)

    def require(self, name: str, allowed: Sequence[Any], value: Any = _MISSING) -> None:
        """Refuses a value that the family does not implement. An absent field is accepted."""
        value = self.raw.get(name, allowed[0]) if value is _MISSING else value
        if not any(type(value) is type(one) and value == one for one in allowed):  # 1 is not true
            known = " or ".join(repr(one) for one in allowed)
            raise CheckpointError(f"{self.where}: {name} is {value!r}, and only {known} is implemented")

    def divides(self, divisor_name: str, divisor: int, name: str, value: int) -> None:
        if value % divisor:
            raise CheckpointError(f"{self.where}: {divisor_name} ({divisor}) does not divide {name} ({value})")


def section(raw: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """A nested object of a file; an absent one is empty."""
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}{name} must be an object, got {value!r}")
    return value
