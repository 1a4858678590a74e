"""One medium -> an item of patches: decoded, resized, cut; or the error that says why not."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxvit import media
from jaxvit.errors import DependencyError, JaxvitError, MediaError
from jaxvit.models.family import Family, Item

THREADS = 8
"""That prepare at the same time, at most: more of them wait for Python's lock, and each item is there later."""


def prepared(family: Family, index: int, medium: Any) -> Item | JaxvitError:
    """The item of a medium of any kind that :mod:`jaxvit.media` names, or of a prepared one.

    Args:
        index: its position, for the error.
    """
    try:
        decoded = media.decode(medium, index, family)
        if isinstance(decoded, Item):
            check_item(decoded, family)
            return decoded
        if isinstance(decoded, media.Video):
            return family.prepare_video(decoded.frames, decoded.fps, decoded.timestamps, decoded.prune)
        return family.prepare(decoded)
    except MediaError as error:
        return error.at(index)
    except DependencyError as error:
        return DependencyError(f"item {index}: {error}")


def check_item(item: Item, family: Family) -> None:
    """Refuses an item of another family, whose patches stand in another order, and a damaged one."""
    if not item.pieces:
        raise MediaError("an Item without pieces: leave it out")
    for piece in item.pieces:
        fits = (
            piece.patches.ndim == 2
            and piece.patches.dtype in (np.uint8, np.float32)
            and len(piece.patches) == piece.rows > 0
            and piece.patches.shape[1] % len(family.channels) == 0
            and not (piece.grid[1] % family.merge or piece.grid[2] % family.merge)
            and (piece.windows > 0) == ("window" in family.segment_sets)
        )
        if not fits:
            raise MediaError(
                f"an Item with a piece of {piece.patches.dtype} {list(piece.patches.shape)} for the grid {piece.grid} "
                f"is none of {family.name}: prepare it with this encoder"
            )
