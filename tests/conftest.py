"""What every test runs under: CPU unless asked otherwise, strict dtypes, and checked array shapes."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Four devices on the CPU, for the tests of data parallel encoding; every other test uses the first.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
# The width of the terminal that started the processes of a spread run: output that is read by a test has none.
os.environ.pop("COLUMNS", None)
# Nothing may be fetched while testing, and a test that tries fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Executables are stored for this run alone: what a run finds compiled depends on nothing before it.
os.environ["JAXVIT_STORE"] = tempfile.mkdtemp(prefix="jaxvit-store-")

import jax
import jaxtyping
import pytest

atexit.register(shutil.rmtree, os.environ["JAXVIT_STORE"], ignore_errors=True)

# Before any import of the package: its annotations are checked under pytest, and only there.
jaxtyping.install_import_hook("jaxvit", "beartype.beartype")

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ("torch", "torchvision", "transformers")


def pytest_configure(config: pytest.Config) -> None:
    missing = missing_reference()
    if os.environ.get("JAXVIT_FULL") == "1" and missing:
        raise pytest.UsageError(
            f"JAXVIT_FULL=1 promises the PyTorch reference, but {', '.join(missing)} cannot be imported: "
            "pip install -e '.[compare]' -c constraints.txt"
        )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run of which every test was skipped has shown nothing: -m gpu without an accelerator, say."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    counted = {kind for kind, reports in reporter.stats.items() if kind and reports} if reporter else set()
    if exitstatus == 0 and counted - {"deselected", "warnings"} == {"skipped"}:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("reference") and (missing := missing_reference()):
        pytest.skip(f"needs {', '.join(missing)}")
    if item.get_closest_marker("gpu") and jax.default_backend() == "cpu":
        pytest.skip("needs an accelerator (JAX_PLATFORMS=cuda)")


def missing_reference() -> list[str]:
    return [name for name in REFERENCE if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def photos() -> dict[str, Path]:
    """The demo's photographs, by name without suffix."""
    folder = ROOT / "weights" / "demo" / "photos"
    return {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in (".png", ".jpg")}


class Compilations:
    """Counts the programs that XLA's backend compiled: ``count`` since the fixture began or since ``reset()``."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration: float, **_: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


_compilations = Compilations()
jax.monitoring.register_event_duration_secs_listener(_compilations)


@pytest.fixture
def compilations() -> Compilations:
    _compilations.reset()
    return _compilations
