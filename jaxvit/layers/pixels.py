"""uint8 pixels to normalised values on the device, bit-equal to the reference's processor."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8


def normalise(
    pixels: UInt8[Array, "patches values"], table: np.ndarray, channels: np.ndarray, dtype: jnp.dtype
) -> Float[Array, "patches values"]:
    """table[pixel, channel] for every value.

    A table and not (pixel - mean) / std: XLA turns the division into a product, which differs in the last bit.

    Args:
        table: float32 [256, 3].
        channels: int32 [values]: the colour channel of each value of a patch.
    """
    flat = jnp.asarray(table.T.reshape(-1), dtype)
    return flat[pixels.astype(jnp.int32) + channels.astype(np.int32) * 256]
