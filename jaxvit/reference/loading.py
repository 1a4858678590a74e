"""Filling transformers' modules from a checkpoint's safetensors files, and running them in float64 throughout."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxvit.errors import CheckpointError, DependencyError


def need_torch() -> Any:
    """The torch module.

    Raises:
        DependencyError: torch, torchvision or transformers is missing.
    """
    try:
        import torch
        import torchvision  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise DependencyError(f"the PyTorch reference needs {error.name}: pip install 'jaxvit[compare]'") from error
    return torch


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars, load reports and deprecation warnings."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def tensors(folder: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Name -> torch tensor of every tensor whose name holds one of the parts; other shards are not opened."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text())["weight_map"]
        shards = sorted({shard for name, shard in places.items() if any(part in name for part in parts)})
    else:
        shards = ["model.safetensors"]
    found = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder} lacks {shard}")
        with safe_open(folder / shard, "pt") as file:
            names = [name for name in file.keys() if any(part in name for part in parts)]  # noqa: SIM118
            found |= {name: file.get_tensor(name) for name in names}
    return found


def filled(cls: Any, config: Any, weights: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The model by transformers' own loading, which renames, splits and permutes as for a whole checkpoint.

    The dtype goes into the construction: a model made in float32 and cast rounds rotary frequencies to bfloat16.
    """
    model, info = cls.from_pretrained(
        None, config=config, state_dict=dict(weights), output_loading_info=True, **options
    )
    wrong = {
        name: kind.removesuffix("_keys")
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for name in (key if isinstance(key, str) else key[0] for key in info[kind])
        if not name.startswith("language_model.")
    }
    if wrong:
        lines = "".join(f"\n  {name}: {kind}" for name, kind in sorted(wrong.items()))
        raise CheckpointError(f"transformers cannot fill {cls.__name__} from these tensors:{lines}", sorted(wrong))
    rounded = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.itemsize < 4]
    if rounded or {p.dtype for p in model.parameters()} != {options["dtype"]}:
        raise CheckpointError(f"transformers built {cls.__name__} in another dtype than {options['dtype']}: {rounded}")
    return model.requires_grad_(False).eval()


@contextmanager
def float64_throughout(torch: Any) -> Iterator[None]:
    """Every step that asks for float32 (rotation, softmax, position weights, the mean over time) runs in float64."""

    class Float64(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            function = torch.Tensor.double if function is torch.Tensor.float else function
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
            return function(*args, **named)

    with Float64():
        yield


def as_numpy(value: Any) -> Any:
    """A tensor's values: float64 stays, everything else becomes float32."""
    torch = need_torch()
    return value.to(torch.float64 if value.dtype == torch.float64 else torch.float32).numpy()


def known(raw: Mapping[str, Any], config: type) -> dict[str, Any]:
    """The fields of a raw configuration that a configuration class has, but dtypes, which come from the caller."""
    names = {name for base in config.__mro__ for name in getattr(base, "__annotations__", {})}
    return {name: value for name, value in raw.items() if name in names - {"dtype", "model_type", "torch_dtype"}}


def from_folder(
    cls: Any, folder: Path, files: Mapping[str, Any], overrides: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Any:
    """A processor as transformers reads it from the folder, or with these defaults where no file speaks of it."""
    video = "VideoProcessor" in cls.__name__
    said = "preprocessor_config.json" in files or (video and "video_preprocessor_config.json" in files)
    nested = files.get("processor_config.json", {})
    if said or nested.get("video_processor" if video else "image_processor"):
        return cls.from_pretrained(folder, **overrides)
    return cls(**{**defaults, **overrides})
