"""What a machine is and can run: versions, extras, devices, attention backends. What is missing is said, not raised."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from jaxvit.layers import attention

PACKAGES = ("jaxvit", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "safetensors", "huggingface_hub", "pillow")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "cuda12": ("jax-cuda12-plugin",),
    "cuda13": ("jax-cuda13-plugin",),
    "compare": ("torch", "torchvision", "transformers"),
    "tokamax": ("tokamax",),
    "video": ("av",),
    "plots": ("matplotlib",),
    "ray": ("ray",),
}
ISSUING = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
"""Whether XLA issues calls to a GPU in a thread of its own."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "JAXVIT_STORE",
    "JAX_PLATFORMS",
    "LD_LIBRARY_PATH",
    "NVIDIA_TF32_OVERRIDE",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    ISSUING,
)
"""Of the environment: those that change what runs. None of them holds a secret."""


def report(dtype: str = "bfloat16") -> dict[str, Any]:
    """Everything as JSON has it.

    Args:
        dtype: compute dtype, on which the attention backends depend.
    """
    found, fault = devices()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "host": f"{processor()}, {os.cpu_count()} cores, {_gib(_memory())}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "extras": {extra: installed(names) for extra, names in EXTRAS.items()},
        "cuda": _cuda(),
        "devices": [_device(one) for one in found],
        "devices_fault": fault,
        "attention": {
            name: "there is no device" if not found else backend.why_not(found[0].platform, dtype)
            for name, backend in attention.BACKENDS.items()
        },
        "dtype": dtype,
        "environment": {name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    }


def devices() -> tuple[list[jax.Device], str | None]:
    """This process's devices, or none and why JAX has none."""
    try:
        return jax.local_devices(), None
    except Exception as error:  # a backend that does not start can raise anything
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return [], f"JAX has no device for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: {said}"


@contextmanager
def modest() -> Iterator[None]:
    """A GPU that is first used within gives memory when it is asked, instead of most of it at once."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    given = os.environ.get(name)
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def issue_beside() -> None:
    """Has XLA issue calls to a GPU in a thread of its own, unless the environment already says whether it should.

    It is a setting of the whole process, read when JAX first looks for devices, so it is for programs, not for imports.
    """
    os.environ.setdefault(ISSUING, "1")


def version(package: str) -> str | None:
    """Of an installed package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(packages: Sequence[str]) -> str | None:
    """The packages with their versions, None unless all are there."""
    versions = [version(name) for name in packages]
    return None if None in versions else ", ".join(f"{n} {v}" for n, v in zip(packages, versions, strict=True))


def _cuda() -> dict[str, str]:
    """Versions of NVIDIA's libraries as packages, and of the driver."""
    found = {
        name: one.version
        for one in importlib.metadata.distributions()
        if (name := one.name or "").startswith(("nvidia-", "jax-cuda"))
    }
    with suppress(OSError, IndexError):
        found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("Module")[-1].strip()
    return dict(sorted(found.items()))


def _device(device: jax.Device) -> dict[str, Any]:
    try:
        memory = device.memory_stats() or {}
    except Exception:  # not every backend has them
        memory = {}
    return {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "bytes_limit": memory.get("bytes_limit"),
        "bytes_in_use": memory.get("bytes_in_use"),
        "platform_version": " ".join(device.client.platform_version.split()),
    }


def processor() -> str:
    """Name of the host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> int | None:
    """Bytes of the host's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _gib(size: int | None) -> str:
    return "memory unknown" if size is None else f"{size / 2**30:.1f} GiB"
