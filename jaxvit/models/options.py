"""Reading fields of a checkpoint's JSON with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxvit.errors import CheckpointError

_MISSING = object()


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

    def integer(self, *names: str, default: Any = _MISSING) -> int:
        """The first of the spellings that is present, a positive integer."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{self.where}: {name} must be a positive integer, got {value!r}")
            return value
        if default is _MISSING:
            raise CheckpointError(f"{self.where}: {' or '.join(names)} is missing")
        return default

    def require(self, name: str, allowed: Sequence[Any], value: Any = _MISSING) -> None:
        """Refuses a value that the family does not implement. An absent field is accepted."""
        value = self.raw.get(name, allowed[0]) if value is _MISSING else value
        if value not in allowed:
            known = " or ".join(repr(one) for one in allowed)
            raise CheckpointError(f"{self.where}: {name} is {value!r}, and only {known} is implemented")

    def divides(self, divisor_name: str, divisor: int, name: str, value: int) -> None:
        if value % divisor:
            raise CheckpointError(f"{self.where}: {divisor_name} ({divisor}) does not divide {name} ({value})")
