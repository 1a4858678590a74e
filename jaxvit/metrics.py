"""How far one array [rows, features] lies from another, in numpy and float64, a few rows at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxvit.errors import OptionError

ROWS = 1024
"""Rows that are taken to float64 at a time."""


class Metrics(NamedTuple):
    """How far one array [rows, features] lies from another.

    Attributes:
        relative_rms: RMS of the difference over RMS of theirs.
        max_abs: largest difference.
        cosine: between ours and theirs, of the row where it is lowest.
    """

    relative_rms: float
    max_abs: float
    cosine: float


class Tally:
    """Metrics of arrays that come one after the other."""

    def __init__(self) -> None:
        self.difference, self.reference, self.largest, self.lowest = 0.0, 0.0, 0.0, 1.0

    def add(self, ours: np.ndarray, theirs: np.ndarray) -> Tally:
        """Takes in two arrays [rows, features] of one shape. Raises OptionError where the shapes differ."""
        if ours.shape != theirs.shape:
            raise OptionError(f"shapes differ: ours {ours.shape}, theirs {theirs.shape}")
        for start in range(0, len(ours), ROWS):
            a, b = (each[start : start + ROWS].astype(np.float64) for each in (ours, theirs))
            gap = np.abs(a - b)
            self.difference += float((gap**2).sum())
            self.reference += float((b**2).sum())
            self.largest = float(np.maximum(self.largest, gap.max()))  # carries a NaN on, unlike max()
            self.lowest = float(np.minimum(self.lowest, cosines(a, b).min()))
        return self

    @property
    def metrics(self) -> Metrics:
        if self.reference == 0:
            return Metrics(0.0 if self.difference == 0 else np.inf, self.largest, self.lowest)
        return Metrics(float(np.sqrt(self.difference / self.reference)), self.largest, self.lowest)


def metrics(ours: np.ndarray, theirs: np.ndarray) -> Metrics:
    """Metrics of ours [rows, features] against theirs."""
    return Tally().add(np.asarray(ours), np.asarray(theirs)).metrics


def relative_rms(ours: np.ndarray, theirs: np.ndarray) -> float:
    """RMS of the difference over RMS of theirs."""
    return metrics(ours, theirs).relative_rms


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Cosine of each row of ours [rows, features] with theirs; 1 where both are zero."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    equal = np.all(ours == theirs, axis=1)
    return np.where(equal, 1.0, (ours * theirs).sum(axis=1) / np.where(lengths == 0, 1.0, lengths))


def token_errors(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """float32 [tokens]: each token's RMS difference over the RMS of theirs over all tokens."""
    scale = np.sqrt(np.mean(theirs.astype(np.float64) ** 2)) or 1.0
    return (np.sqrt(np.mean((ours.astype(np.float64) - theirs) ** 2, axis=1)) / scale).astype(np.float32)
