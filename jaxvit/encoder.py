"""Loading a checkpoint, and the one path from media to embeddings: prepare -> plan -> run -> split."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxvit import checks
from jaxvit import media as _media
from jaxvit.buckets import ladder as _ladder
from jaxvit.buckets.dispatcher import Dispatcher, Plan
from jaxvit.buckets.executable import compile_program, module_of, weights_of
from jaxvit.buckets.store import Store
from jaxvit.encodings import Encodings, OnError
from jaxvit.errors import CapacityError, JaxvitError, MediaError, OptionError
from jaxvit.layers import attention as _attention
from jaxvit.layers.fuse import parameter_shapes
from jaxvit.models import family_of
from jaxvit.models.family import Family, Item
from jaxvit.preparation import THREADS, prepared
from jaxvit.stream import Stream, encode_iter
from jaxvit.threads import submitted
from jaxvit.weights import hub
from jaxvit.weights.files import read_config_files
from jaxvit.weights.load import dtype_of, load_parameters

log = logging.getLogger("jaxvit")


def load(
    model: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    budgets: Sequence[int] | str | os.PathLike[str] | None = None,
    max_pieces: int | None = None,
    attention: str = "auto",
    devices: str | Sequence[jax.Device] | None = None,
    processor: Mapping[str, Any] | None = None,
    on_overflow: Literal["compile", "error"] = "compile",
    store: str | os.PathLike[str] | Literal[False] | None = None,
) -> Encoder:
    """Loads the vision encoder of a checkpoint.

    Args:
        model: folder of a Hugging Face snapshot, or a hub id.
        dtype: "float32" or "bfloat16"; None takes the checkpoint's (float16 files load as bfloat16, with a warning).
        budgets: output tokens of each bucket (patches = tokens x merge^2), or a ladder file; None takes the family's
            ladder for this device.
        max_pieces: most pieces (images, tiles, chunks, frame pairs) in one call.
        attention: "auto" or a backend's name for every bucket.
        devices: None for the first local device, "all", or a sequence of devices.
        processor: processing settings that beat the checkpoint's files, such as ``{"max_pixels": 1_003_520}``.
        on_overflow: what happens to a piece larger than every bucket: "compile" one for it, or "error".
        store: folder of compiled executables; None for the user's cache folder, False for none.
    Raises:
        OptionError: an argument cannot be used. CheckpointError: the files cannot. LadderError: the budgets cannot, or
            the attention cannot run here.
        CapacityError: weights, inputs and outputs of a bucket exceed the device's memory.
    """
    checks.kind("model", model, (str, os.PathLike), "a folder's path or a hub id")
    checks.kind("processor", processor, (Mapping, type(None)), "a mapping of processing settings, or None")
    if store is not False:
        checks.kind("store", store, (str, os.PathLike, type(None)), "a folder's path, None or False")
    placed = _devices(devices)
    checks.choice("on_overflow", on_overflow, ("compile", "error"))
    checks.choice("attention", attention, ("auto", *_attention.BACKENDS))
    model = model if isinstance(model, str) else Path(model)
    folder = hub.snapshot(model)
    files = read_config_files(folder)
    family = family_of(files, processor)
    folder = hub.fetch_weights(model, folder, family.keys)
    compute = _dtype(dtype, dtype_of(folder, family.keys))
    ladder = _ladder.resolve(family, budgets, placed[0], max_pieces)
    if attention != "auto":
        _attention.choose(attention, placed[0].platform, compute, ladder.buckets[0].patches)
    elif isinstance(budgets, str | os.PathLike):  # of a ladder that was found, whoever loads knows nothing
        _ladder.say_replaced(ladder, placed[0].platform, compute)
    shapes, layout = parameter_shapes(module_of(family)), weights_of(family, placed[0].platform, compute)
    stream = load_parameters(folder, family.keys, shapes, jnp.dtype(compute), layout.widened)
    weights = layout.pack(stream, lambda array: [jax.device_put(array, device) for device in placed])
    build = compile_program if store is False else Store(store).build
    encoder = Encoder(
        family, ladder, compute, placed, weights, attention=attention, on_overflow=on_overflow, build=build
    )
    encoder.folder, encoder.overrides = folder, dict(processor or {})
    log.info(
        "jaxvit: %s (%s), %s on %s, %d buckets of %d to %d tokens (%s)",
        model, family.name, compute, placed[0].device_kind, len(ladder.buckets), ladder.buckets[0].tokens,
        ladder.buckets[-1].tokens, ladder.source,
    )  # fmt: skip
    return encoder


class Encoder:
    """A loaded vision encoder. Made by :func:`jaxvit.load`; safe to share between threads."""

    folder: Path | None = None
    overrides: Mapping[str, Any] | None = None

    def __init__(
        self,
        family: Family,
        ladder: _ladder.Ladder,
        dtype: str,
        devices: Sequence[jax.Device],
        weights: Sequence[Sequence[jax.Array]],
        **options: Any,
    ):
        self.family, self.ladder, self.dtype = family, ladder, dtype
        self.dispatcher = Dispatcher(family, ladder, dtype, devices, weights, **options)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    def __repr__(self) -> str:
        devices, buckets = self.dispatcher.devices, self.ladder.buckets
        return (
            f"<Encoder of {self.family.name}: {self.dtype} on {len(devices)} x {devices[0].device_kind}, "
            f"{len(buckets)} buckets of {buckets[0].tokens} to {buckets[-1].tokens} tokens>"
        )

    @property
    def config(self) -> Any:
        """Configuration of the vision tower: a frozen dataclass."""
        return self.family.config

    # media -> items

    @overload
    def prepare(self, media: Any, *, on_error: Literal["raise"] = "raise") -> list[Item]: ...
    @overload
    def prepare(self, media: Any, *, on_error: Literal["return"]) -> list[Item | JaxvitError]: ...
    def prepare(self, media: Any, *, on_error: OnError = "raise") -> Any:
        """Decodes, resizes and cuts media into items; token counts are known from here on.

        Args:
            media: one item or a sequence: see :mod:`jaxvit.media` for what is accepted.
            on_error: "raise" lists every bad index in one MediaError; "return" puts the error in the item's place.
        Raises:
            MediaError: items cannot be used. DependencyError: one needs an optional extra. OptionError: ``on_error``.
        """
        checks.choice("on_error", on_error, ("raise", "return"))
        sequence = _media.as_sequence(media)
        if len(sequence) > 1 and (os.cpu_count() or 1) > 1:
            pool = self._threads()
            futures = [submitted(pool, prepared, self.family, *one) for one in enumerate(sequence)]
            try:
                results = [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()
        else:
            results = [prepared(self.family, index, medium) for index, medium in enumerate(sequence)]
        errors = {index: result for index, result in enumerate(results) if isinstance(result, Exception)}
        if errors and on_error == "raise":
            others = [error for error in errors.values() if not isinstance(error, MediaError)]
            raise others[0] if others else MediaError.collect(errors)
        return results

    def _threads(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, THREADS), "jaxvit-prepare")
            return self._pool

    def items(self, inputs: Mapping[str, Any], *, pieces_per_item: Sequence[int] | None = None) -> list[Item]:
        """Items from the output of the family's Hugging Face processor.

        Args:
            inputs: its mapping: pixel_values or pixel_values_videos with the grids or shapes beside them.
            pieces_per_item: LFM2 without image_rows and image_cols: how many tiles each image has.
        """
        if not isinstance(inputs, Mapping):
            raise MediaError(f"{type(inputs).__name__} is no output of a processor: hand in its mapping, whole")
        return self.family.items(inputs, pieces_per_item)

    # items -> embeddings

    def plan(self, items: Sequence[Item]) -> Plan:
        """Which piece would run in which bucket, at which offset. Nothing runs."""
        checks.kind("items", items, Iterable, "a list of what encoder.prepare(...) returns")
        for item in items:
            checks.kind("one of the items", item, Item, "what encoder.prepare(...) returns")
        return self.dispatcher.plan(items)

    def encode(
        self, media: Any, *, on_error: OnError = "raise", out_dtype: str | None = "float32", bucketed: bool = True
    ) -> Encodings:
        """Embeds media.

        Args:
            media: one item or a sequence of paths, bytes, file objects, PIL images, uint8 arrays, jaxvit.Image,
                jaxvit.Video, or prepared items.
            on_error: "raise": nothing runs if any item is bad; "return": its position holds the error, be it of the
                medium, of a piece that no bucket holds, or of embeddings that are not finite.
            out_dtype: dtype of the arrays that come back, "float32" or "bfloat16"; None keeps the compute dtype.
            bucketed: False runs every piece alone in its exact shape.
        Returns:
            One array [tokens, hidden] an item, in order.
        Raises:
            MediaError: items cannot be used. CapacityError: a piece fits no bucket. DeviceError: a device failed.
            NumericsError: an item's embeddings are not finite; raised when that item is read.
            OptionError: an argument cannot be used.
        """
        dtype = self._out_dtype(out_dtype)
        results: list[Any] = list(self.prepare(media, on_error=on_error))
        if bucketed and on_error == "return":
            results = [self._refused(index, result) or result for index, result in enumerate(results)]
        good = {index: item for index, item in enumerate(results) if isinstance(item, Item)}
        order, items = list(good), list(good.values())
        plan = self.dispatcher.plan(items) if bucketed else None
        outputs = self.dispatcher.run(items, plan) if plan is not None else self.dispatcher.run_exact(items)
        return Encodings(self.family, results, order, outputs, plan, dtype, on_error)

    def _refused(self, index: int, result: Any) -> CapacityError | None:
        return self.dispatcher.refusal(index, result) if isinstance(result, Item) else None

    def _out_dtype(self, asked: str | None) -> str:
        if asked is None:
            return self.dtype
        if str(asked) == "float16":
            raise OptionError(
                "out_dtype float16 is refused: embeddings may overflow its range; use bfloat16 or float32"
            )
        checks.choice("out_dtype", asked, ("float32", "bfloat16"))
        return asked

    def encode_iter(
        self, media: Any, *, on_error: OnError = "raise", out_dtype: str | None = "float32", lookahead: int = 1024
    ) -> Iterator[np.ndarray | Exception]:
        """Embeds a stream of media: reads ahead, prepares in threads, packs items together, yields in order.

        Nothing of the iterable is read before the first array is asked for, and only the caller's thread reads it.

        Args:
            media: any iterable of what :meth:`encode` takes, such as a generator; it may have no end.
            on_error: "raise": a bad item's error is raised in its place, after the arrays of all items before it, and
                ends the stream; "return": the error is yielded in its place. What the iterable itself raises is raised.
            out_dtype: dtype of the arrays, "float32" or "bfloat16"; None keeps the compute dtype.
            lookahead: most items read and not yet yielded. It bounds how long an array waits for others to fill its
                bucket: give a small number for a slow source. Memory is bounded beside it, by four of the largest
                buckets on every device, or one item where that is larger.
        Yields:
            One array [tokens, hidden] an item, in order.
        """
        checks.choice("on_error", on_error, ("raise", "return"))
        if isinstance(lookahead, bool) or not isinstance(lookahead, int) or lookahead < 1:
            raise OptionError(f"lookahead is {lookahead!r}; give a number of items, at least 1")
        return encode_iter(
            Stream(self.dispatcher, media, dtype=self._out_dtype(out_dtype), lookahead=lookahead), on_error
        )

    def intermediates(self, item: Item) -> list[dict[str, np.ndarray]]:
        """For each piece, the named intermediates of the exact path: name -> float32 [rows, features]."""
        checks.kind("item", item, Item, "one of what encoder.prepare(...) returns")
        return [self.dispatcher.intermediates(piece) for piece in item.pieces]

    # buckets

    def warmup(self, up_to: int | None = None, strict: bool = False) -> None:
        """Builds every bucket's executable, then runs each, so that no later call compiles.

        The executables take uint8 pixels. Those for float32 pixels are built by the first call that has some.

        Args:
            up_to: the largest budget to build, in tokens.
            strict: from here on, a bucket that was not built raises CapacityError instead of compiling
                (``bucketed=False`` compiles its exact shapes all the same).
        Raises:
            CapacityError: a bucket does not fit on the device; none ran.
            OptionError: no bucket is as small as ``up_to``.
        """
        checks.positive("up_to", up_to, int, "a number of tokens")
        self.dispatcher.warmup(up_to)
        self.dispatcher.strict = strict

    def stats(self) -> dict[str, Any]:
        """Counters since loading.

        Returns:
            ``buckets``: by name ("64 tokens", with further axes where buckets have as many tokens): ``calls``,
                ``pieces``, ``fill`` (real patches over patches run) and ``milliseconds`` that the host spent on padding
                the arrays and issuing the calls; the device's time is not in them, but where its calls wait for it.
            ``overflows``: pieces by the bucket that they needed and the capacities that they were past.
            ``compilations``, ``compile_seconds`` and ``store_hits``: executables compiled and loaded from the store.
        """
        return self.dispatcher.stats()


def _devices(devices: str | Sequence[jax.Device] | None) -> list[jax.Device]:
    if devices is None:
        return jax.local_devices()[:1]
    if isinstance(devices, str) and devices == "all":
        return jax.local_devices()
    placed = list(devices) if isinstance(devices, Iterable) else []
    if not placed or not all(isinstance(one, jax.Device) for one in placed) or len(set(placed)) != len(placed):
        raise OptionError(f'devices is {devices!r:.80}; give None, "all" or a list of distinct jax devices')
    return placed


def _dtype(asked: str | None, stored: str) -> str:
    if asked is None:
        if stored == "float16":
            warnings.warn(
                "the checkpoint is float16, whose range these towers overflow: loading as bfloat16", stacklevel=3
            )
        return "float32" if stored == "float32" else "bfloat16"
    if str(asked) == "float16":
        raise OptionError("dtype float16 is refused: these towers overflow its range; use bfloat16 or float32")
    checks.choice("dtype", asked, ("float32", "bfloat16"))
    return asked
