"""More machines: a class for Ray Data, whose workers load the encoder once and encode batches of rows.

::

    import ray
    from jaxvit.ray import Encode

    pictures = ray.data.read_binary_files("/shared/pictures", include_paths=True)      # columns path and bytes
    embedded = pictures.map_batches(
        Encode,
        fn_constructor_args=("/shared/Qwen2.5-VL-7B-Instruct",),
        fn_constructor_kwargs={"column": "bytes"},
        compute=ray.data.ActorPoolStrategy(size=8),                                    # one worker a device
        num_gpus=1,
        batch_size=256,
    )
    embedded.write_parquet("/shared/embeddings")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

import jaxvit
from jaxvit.errors import JaxvitError
from jaxvit.stream import Stream
from jaxvit.writer import plain


class Encode:
    """Rows of media -> the same rows with embeddings, for ``ray.data.Dataset.map_batches``.

    The column of media goes, unless it holds paths; every other column stays. These are added:

    - ``embeddings``: [tokens, hidden], no rows where the medium cannot be encoded;
    - ``grids``: int64 [grids, 3], (t, h, w) in patches;
    - ``layout``: JSON of what a language model needs beside the embeddings;
    - ``error``: why there are no embeddings, else empty.

    Buckets run full over the rows of a batch: take a ``batch_size`` of some hundred pictures.

    Args:
        model: a folder that every worker sees, or a hub id.
        column: holds paths (of files that every worker sees), bytes of image files, or uint8 arrays [h, w, 3].
        out_dtype: of the embeddings. Arrow, and so Parquet, has no bfloat16.
        options: of ``jaxvit.load``.
    """

    def __init__(self, model: str, *, column: str = "path", out_dtype: str = "float32", **options: Any):
        self.column, self.out_dtype = column, out_dtype
        self.encoder = jaxvit.load(model, **options)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        media = list(batch[self.column])
        embeddings, grids = (np.empty(len(media), object) for _ in range(2))
        layouts, errors = [""] * len(media), [""] * len(media)
        for entry in Stream(self.encoder.dispatcher, media, dtype=self.out_dtype):
            if entry.error is not None and not isinstance(entry.error, JaxvitError):
                raise entry.error
            array, item = entry.array, entry.item
            if array is None or item is None:
                # The item's number is of this batch alone.
                errors[entry.index] = str(entry.error).removeprefix(f"item {entry.index}: ")
                array = np.zeros((0, self.encoder.family.width), self.out_dtype)
            else:
                layouts[entry.index] = json.dumps(plain(item.layout))
            embeddings[entry.index] = array
            grids[entry.index] = np.array(item.grids if item else (), np.int64).reshape(-1, 3)
        paths = all(isinstance(one, str) for one in media)
        kept = {name: value for name, value in batch.items() if name != self.column or paths}
        return {**kept, "embeddings": embeddings, "grids": grids, "layout": layouts, "error": errors}
