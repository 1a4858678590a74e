"""Every error that jaxvit raises on purpose. A message says what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class JaxvitError(Exception):
    """Base class: ``except jaxvit.errors.JaxvitError`` catches every error below."""


class OptionError(JaxvitError, ValueError):
    """An argument of a call cannot be used; the message names it and what it may be."""


class MediaError(JaxvitError, ValueError):
    """An item of the input cannot be encoded.

    Attributes:
        index: position of the item in the caller's sequence (0 for a single item), None before it is known.
        errors: every bad position and its error, when one call had several.
    """

    def __init__(self, message: str, index: int | None = None, errors: Mapping[int, Exception] | None = None):
        super().__init__(message)
        self.index = index
        self.errors = dict(errors or {})

    def at(self, index: int) -> MediaError:
        """The same error, naming the item's position."""
        if self.index is not None:
            return self
        error = MediaError(f"item {index}: {self}", index)
        error.__cause__ = self.__cause__
        return error

    @classmethod
    def collect(cls, errors: Mapping[int, Exception]) -> MediaError:
        """One error for all bad items of a call."""
        first = min(errors)
        error = errors[first]
        if len(errors) == 1 and isinstance(error, MediaError):
            return error
        lines = "\n  ".join(str(errors[index]) for index in sorted(errors))
        return cls(f"{len(errors)} items cannot be encoded, nothing ran:\n  {lines}", first, errors)


class CheckpointError(JaxvitError, ValueError):
    """A checkpoint's files cannot be used.

    Attributes:
        tensors: names of the tensors concerned, empty when the fault is not in a tensor.
    """

    def __init__(self, message: str, tensors: Sequence[str] = ()):
        super().__init__(message)
        self.tensors = tuple(tensors)


class LadderError(JaxvitError, ValueError):
    """A ladder of buckets is not valid; the message names the value."""


class CapacityError(JaxvitError, RuntimeError):
    """A piece fits no bucket, or something would have compiled where that was forbidden."""


class DeviceError(JaxvitError, RuntimeError):
    """A device failed while it built or ran a bucket.

    Attributes:
        device: its id in ``jax.devices()``.
    """

    def __init__(self, message: str, device: int):
        super().__init__(message)
        self.device = device


class StoreError(JaxvitError, RuntimeError):
    """The executable store refuses an entry or a folder."""


class OutputError(JaxvitError, ValueError):
    """The folder that embeddings are written to cannot be used."""


class NumericsError(JaxvitError, ArithmeticError):
    """An item's embeddings are not finite.

    Attributes:
        index: position of the item in the caller's sequence.
    """

    def __init__(self, message: str, index: int | None = None):
        super().__init__(message)
        self.index = index


class DependencyError(JaxvitError, ImportError):
    """An optional extra is needed; the message names it."""
