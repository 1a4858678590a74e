"""Compiled executables on disk, so that a second start compiles nothing.

An entry is one file: a JSON header line (key, digest of the rest, facts about the executable), then the serialised
executable. Its name is the digest of its key. The key holds everything that can change the result or the fit.

Loading an entry executes code. So a folder or an entry that anyone but its owner can write, or that belongs to neither
the user nor root, is refused, and the digest is checked before anything is deserialised. The digest finds damage;
against a person who can write the folder only the permissions help.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import pickle
import platform
import stat
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxvit.buckets.executable import Executable, Program, compile_program, compiler_options
from jaxvit.errors import StoreError
from jaxvit.machine import ISSUING

log = logging.getLogger("jaxvit")

FORMAT = 1
SUFFIX = ".executable"
MAX_HEADER = 2**20
WRITING = ".writing-"
"""Prefix of a file that is being written."""
ABANDONED = 3600.0
"""Seconds after its last change from which such a file is taken for what a killed process left behind."""


def default_folder() -> Path:
    """``JAXVIT_STORE``, else ``jaxvit`` in the user's cache folder."""
    if os.environ.get("JAXVIT_STORE"):
        return Path(os.environ["JAXVIT_STORE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxvit"


class Store:
    """A folder of executables.

    Args:
        folder: made if it is missing, for the user alone.
    Raises:
        StoreError: others could write the folder, or it belongs to someone else.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self.folder = default_folder() if folder is None else Path(folder)
        self.writable = True
        if folder == "" or "\0" in str(folder):
            raise StoreError(f"the executable store {folder!r} is no folder's path; pass another, or store=False")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._unwritable(error)
        if os.path.exists(self.folder):  # and not Path.exists, which raises for names that are too long
            if not self.folder.is_dir():
                raise StoreError(
                    f"the executable store {self.folder} is not a folder; pass store=False or another path"
                )
            if reason := _insecure(self.folder):
                raise StoreError(
                    f"the executable store {self.folder} is refused, because loading from it executes code: {reason}"
                )

    def path(self, program: Program, device: jax.Device) -> Path:
        """Where the entry of a program on a device lies."""
        return self.folder / (_digest(_canonical(key_of(program, device))) + SUFFIX)

    def build(self, program: Program, device: jax.Device) -> Executable:
        """The executable of a program: loaded if there is a good entry, else compiled and kept."""
        path = self.path(program, device)
        executable = self._load(path, program, device)
        if executable is None:
            executable = compile_program(program, device)
            self._save(path, program, device, executable)
        return executable

    def _load(self, path: Path, program: Program, device: jax.Device) -> Executable | None:
        start = time.perf_counter()
        try:
            payload = read_entry(path, key_of(program, device))
            if payload is None:
                return None
            compiled = serialize_executable.deserialize_and_load(
                *pickle.loads(payload), backend=device.client, execution_devices=[device]
            )
            return Executable(program, compiled, device, time.perf_counter() - start, "store")
        except Exception as error:  # whatever a bad entry does, the answer is to compile again
            log.warning("executable store: %s is not used and will be compiled again: %s", path, error)
            return None

    def _save(self, path: Path, program: Program, device: jax.Device, executable: Executable) -> None:
        if not self.writable:
            return
        try:
            payload = pickle.dumps(serialize_executable.serialize(executable.compiled))
            facts = {"seconds": round(executable.seconds, 3), "bytes": len(payload), "memory": executable.memory()}
            write_entry(path, key_of(program, device), payload, facts)
        except IsADirectoryError:  # this entry's fault alone: others are kept
            log.warning("executable store: %s is a folder, so its executable is not kept: remove it", path)
        except FileNotFoundError as error:
            if self.folder.is_dir():
                log.warning("executable store: %s was removed while it was written, and is not kept", path)
            else:
                self._unwritable(error)
        except OSError as error:
            self._unwritable(error)
        except Exception as error:
            log.warning("executable store: the bucket of %d tokens cannot be kept: %s", program.bucket.tokens, error)

    def _unwritable(self, error: OSError) -> None:
        self.writable = False
        log.warning("executable store: %s cannot be written, executables are not kept: %s", self.folder, error)

    def entries(self) -> list[dict[str, Any]]:
        """The headers of all readable entries, for ``jaxvit inspect``; nothing is deserialised."""
        found = []
        for path in sorted(self.folder.glob("*" + SUFFIX)) if self.folder.is_dir() else []:
            try:
                if path.is_file():
                    with path.open("rb") as file:
                        found.append(json.loads(file.readline(MAX_HEADER)) | {"file": path.name})
            except (OSError, ValueError, TypeError, RecursionError):
                continue
        return found


def write_entry(path: Path, key: dict[str, Any], payload: bytes, facts: dict[str, Any]) -> None:
    """Atomically: a reader sees the whole entry or none, and the last of several writers wins."""
    header = {"format": FORMAT, "key": key, "sha256": hashlib.sha256(payload).hexdigest(), **facts}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=WRITING)  # mkstemp makes it 0o600
    try:
        with os.fdopen(handle, "wb") as file:
            _sweep(path.parent, os.fstat(file.fileno()).st_mtime)
            file.write(_canonical(header) + b"\n" + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sweep(folder: Path, now: float) -> None:
    """Removes files that nobody writes any more; what cannot be removed stays.

    Args:
        now: by the clock of the folder's file system, which need not be this machine's.
    """
    for path in folder.glob(WRITING + "*"):
        with suppress(OSError):
            if now - path.lstat().st_mtime > ABANDONED:
                path.unlink()


def read_entry(path: Path, key: dict[str, Any]) -> bytes | None:
    """The payload of an entry that may be deserialised; None if there is no entry.

    Raises:
        StoreError: the entry is insecure, damaged, or of another key.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise StoreError("it is no file")
        with path.open("rb") as file:
            if reason := _insecure(path, os.fstat(file.fileno())):
                raise StoreError(f"refused, because loading it executes code: {reason}")
            line = file.readline(MAX_HEADER)
            payload = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"it cannot be read: {error}") from error
    try:
        header = json.loads(line)
        wanted, stored, layout = header["sha256"], header["key"], header["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError("its header cannot be read: it is damaged or no entry of this store") from error
    if layout != FORMAT or stored != json.loads(_canonical(key)):
        raise StoreError("it was made for something else")
    if hashlib.sha256(payload).hexdigest() != wanted:
        raise StoreError("its digest does not match: it is cut off or damaged")
    return payload


def _insecure(path: Path, status: os.stat_result | None = None) -> str | None:
    """Why code from this path must not be run, None if it may."""
    status = path.stat() if status is None else status
    if not hasattr(os, "getuid"):
        return None
    if status.st_uid not in (0, os.getuid()):
        return f"it belongs to user {status.st_uid}, neither you nor root; use a folder of your own"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"group or others may write it; run: chmod go-w {path}"
    return None


def key_of(program: Program, device: jax.Device) -> dict[str, Any]:
    """Everything that can change the result or the fit of an executable.

    The lowered program is a function of what is here: the sources of this package and the versions of jax and flax, the
    configuration, the bucket and the dtypes. Lowering it only to name it would cost most of what the store saves.
    """
    with _facts:
        sources, versions = _sources(), _versions()
        host = _host() if device.platform == "cpu" else [_driver(), _cudnn()]
    return {
        "sources": sources,
        "versions": versions,
        "platform_version": device.client.platform_version,
        "host": host,
        "device": [device.platform, device.device_kind, str(getattr(device, "compute_capability", ""))],
        "ordinal": device.id,
        "flags": [os.environ.get(name, "") for name in FLAGS],
        "settings": [_setting(name) for name in SETTINGS],
        "options": compiler_options(program),
        "family": program.family.name,
        "config": repr(program.family.config),
        "table": _digest(program.family.table.tobytes()),
        "dtype": program.dtype,
        "pixels": program.pixels,
        "bucket": list(program.bucket.capacity),
        "attention": [program.backend.name, program.backend.version],
    }  # fmt: skip


FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", ISSUING)
"""Of the environment: what changes the result or the executable."""

SETTINGS = (
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_disable_most_optimizations",
    "jax_compiler_enable_remat_pass",
    "jax_use_shardy_partitioner",
    "jax_xla_profile_version",
)
"""Of JAX's configuration: what it hands on to XLA with every program."""

_facts = threading.Lock()
"""Many threads ask for keys at once, and the first answers take long: one thread finds them."""


@cache
def _sources() -> str:
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _versions() -> dict[str, str]:
    """Of every installed package whose code ends up in an executable."""
    found = {}
    for folder in reversed(sys.path):  # by the folders' names: every package would read its own from a file
        for path in Path(folder or ".").glob("nvidia_*.dist-info"):
            name, _, version = path.stem.rpartition("-")
            found[name.replace("_", "-")] = version
    for name in ("jaxvit", "jax", "jaxlib", "flax", "numpy", "tokamax", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def _host() -> str:
    """CPU executables are native code: the processor's features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    except OSError:
        features = [platform.processor()]
    return _digest("\n".join([platform.machine(), platform.system(), *features]).encode())


@cache
def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""


@cache
def _cudnn() -> str:
    """The version that is loaded, which may be the system's and of no package; "" where JAX's plugin does not say."""
    for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        try:
            return str(importlib.import_module(f"{plugin}._versions").cudnn_get_version())
        except Exception:  # no such plugin, or one that does not say
            continue
    return ""


def _setting(name: str) -> str:
    """A value of JAX's configuration, "" where this JAX has no such thing."""
    for read in (partial(getattr, jax.config), jax.config.read):  # one gives what the other does not
        try:
            return str(read(name))
        except AttributeError:
            continue
    return ""


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
