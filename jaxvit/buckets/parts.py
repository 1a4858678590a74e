"""A small bucket's program in two parts, launched one behind the other.

Every argument costs the runtime a microsecond or two before the device begins, and a tower has hundreds. Cut behind the
first blocks, the program hands the device those blocks' work, and the rest of the arguments are gone through meanwhile.
What both parts need of the inputs (key ranges, rotations) both compute: one array alone goes from part to part, and
its address is the only one in the second part that the first one's result could move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

AT_MOST = 1024
"""Patches of a bucket up to which cutting pays. Beyond, going through the arguments is a hundredth of the call."""
SHARE = 8
"""The first part is one block of so many: long enough on the device to hide the second part's arguments (49 us a block
and 1.4 us an argument for Kimi-K2.5, 256 patches, H200), and no longer, for its own are waited for."""


def place(platform: str, patches: int, blocks: int) -> str | None:
    """Name of the probed value behind which a bucket's program is cut; None leaves it whole."""
    if platform not in ("gpu", "cuda") or patches > AT_MOST or blocks < 2:
        return None
    return f"blocks.{-(-blocks // SHARE) - 1}"


def split(
    apply: Callable[..., Any], cut: str, result: jax.ShapeDtypeStruct
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions to trace. What a part traces for nothing is dropped when it is lowered, unused arguments too.

    Args:
        apply: ``apply(weights, *arrays, probe=...) -> (embeddings, finite)``, as of the whole program.
        result: of the embeddings.
    Returns:
        ``first(weights, *arrays) -> (value,)``, and ``second(weights, *arrays, value)`` -> the program's results.
    """

    def first(weights: Any, *arrays: Any) -> tuple[Any, ...]:
        found: list[Any] = []

        def probe(name: str, value: Any) -> Any:
            if name == cut:
                found.append(value)
            return value

        apply(weights, *arrays, probe=probe)
        [value] = found
        return (value,)

    def second(weights: Any, *arrays: Any) -> Any:
        *inputs, carried = arrays
        # XLA lays temporaries where a result will be, and with a result that a caller keeps all of them move, which
        # costs some microseconds a kernel. So the result's memory is taken from the start: it holds NaN, and takes the
        # embeddings' place where they are NaN themselves.
        carried, room = lax.optimization_barrier((carried, jnp.full(result.shape, jnp.nan, result.dtype)))
        embeddings, finite = apply(weights, *inputs, probe=lambda name, value: carried if name == cut else value)
        return jnp.where(embeddings == embeddings, embeddings, room), finite

    return first, second
