"""A model's folder: one on this machine as it is, or a snapshot from the Hugging Face hub with only what is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jaxvit.errors import CheckpointError
from jaxvit.weights.files import CONFIGS, INDEX, SINGLE, read_index
from jaxvit.weights.keys import KeyTable

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def snapshot(model: str | Path) -> Path:
    """The folder that holds a model's config files; from the hub nothing else is fetched yet.

    Raises:
        CheckpointError: neither a folder here nor a repository that the hub or its cache here has.
    """
    if model == "":  # of a variable that is not set; as a path it would be the folder in which one stands
        raise CheckpointError("the model's name is empty: give the folder of a snapshot, or a hub id (owner/name)")
    try:
        folder = Path(model).expanduser()
        found, other = folder.is_dir(), folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, the home of an unknown user
        raise CheckpointError(f"{str(model)[:80]!r} is no folder ({error.args[-1]}): check the path") from error
    if found:
        return folder
    if other:
        raise CheckpointError(f"{model} is a file; give the folder of the snapshot that it lies in")
    if not isinstance(model, str) or not _ID.fullmatch(model):
        raise CheckpointError(f"there is no folder {model}, and it is not a hub id (owner/name) either")
    return _fetch(model, [*CONFIGS[1:], "adapter_config.json"])


def fetch_weights(model: str | Path, folder: Path, table: KeyTable) -> Path:
    """Completes :func:`snapshot`'s folder by the weights: the index, then the shards that hold vision tensors.

    Args:
        model: as given to :func:`snapshot`; a folder on this machine is returned untouched.
        folder: what :func:`snapshot` returned.
        table: the family's keys, whose prefixes mark vision tensors.
    """
    if Path(model).expanduser().is_dir():
        return folder
    model = str(model)
    revision = folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else None  # both steps see one commit
    folder = _fetch(model, [INDEX], revision)
    if (folder / INDEX).is_file():
        places = read_index(folder / INDEX)
        shards = sorted({shard for name, shard in places.items() if table.prefix(name)})
        return _fetch(model, shards, revision) if shards else folder
    return _fetch(model, [SINGLE], revision)


def _fetch(model: str, names: Sequence[str], revision: str | None = None) -> Path:
    """The folder of a repository's snapshot, with those of the named files that the repository has."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        return Path(hub.snapshot_download(model, revision=revision, allow_patterns=["config.json", *names]))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model} is neither a folder on this machine nor a repository that the hub shows you; check the spelling "
            "(a private one needs `hf auth login`)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{model} is no folder on this machine, its files are not all in the hub's cache here, and the hub "
            "cannot be reached: connect, unset HF_HUB_OFFLINE, or give the folder of a snapshot"
        ) from error
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"{model}: {names[0]} could not be fetched from the hub: {error}") from error
