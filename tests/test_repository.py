"""The repository keeps its own promises: layout, packaging, licences, and no address of a registry or a machine."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from math import prod
from pathlib import Path

import pytest
from PIL import Image

from jaxvit.models import family_of
from jaxvit.weights import manifests


@pytest.fixture(scope="module")
def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def tracked(root: Path) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [root / name for name in listing.stdout.split("\0") if name and (root / name).is_file()]


def test_every_extra_of_the_guide_exists(project: dict) -> None:
    extras = set(project["project"]["optional-dependencies"])
    assert {"cuda12", "cuda13", "compare", "tokamax", "video", "plots", "ray", "test"} <= extras


def test_the_default_install_holds_no_torch(project: dict) -> None:
    names = {re.split(r"[\[<>=;]", line)[0] for line in project["project"]["dependencies"]}
    assert not names & {"torch", "torchvision", "transformers"}


def test_every_constraint_pins_one_version_and_names_no_address(root: Path) -> None:
    for line in (root / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r'[\w-]+==[\w.]+(; python_version (<|>=) "3\.12")?', line), line


def test_no_file_names_a_registry_or_a_folder_of_a_machine(tracked: list[Path]) -> None:
    # The hosts are written in pieces, so that this file does not find itself.
    forbidden = re.compile(
        "|".join(
            ["pypi" + r"\.org", "pythonhosted" + r"\.org", "--(extra-)?index" + "-url", "/" + "work/", "/" + "root/"]
        )
    )
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in tracked
        if path.suffix in {".py", ".md", ".toml", ".txt", ".cfg", ""}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_layout_is_the_fixed_one(root: Path) -> None:
    for name in ("pyproject.toml", "Makefile", ".ci/run", "LICENSE", "README.md", "constraints.txt"):
        assert (root / name).is_file(), name
    for name in ("jaxvit", "buckets", "weights", "tests"):
        assert (root / name).is_dir(), name


def test_no_code_of_the_buckets_names_a_family(root: Path) -> None:
    folders = [path.parent.name for path in (root / "jaxvit" / "models").glob("*/config.py")]
    words = {re.split(r"[\d_]", name)[0] for name in folders}
    assert words == {"kimi", "qwen", "lfm"}
    sources = list((root / "jaxvit" / "buckets").glob("*.py"))
    assert len(sources) > 5
    named = re.compile("|".join(words), re.IGNORECASE)
    assert not [path.name for path in sources if named.search(path.read_text(encoding="utf-8"))]


def test_every_photo_is_licensed_and_is_the_file_that_was_licensed(photos: dict[str, Path]) -> None:
    assert len(photos) >= 2
    licences = (next(iter(photos.values())).parent / "LICENSES.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| (\d+ x \d+) \|", licences, re.M))
    for path in photos.values():
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" in licences, path.name
        with Image.open(path) as picture:
            assert rows[path.name] == f"{picture.width} x {picture.height}"


def test_the_photos_stay_under_a_megabyte(photos: dict[str, Path]) -> None:
    assert sum(path.stat().st_size for path in photos.values()) < 1_000_000


def test_the_makefile_uses_pip_alone(root: Path) -> None:
    text = (root / "Makefile").read_text() + (root / ".ci" / "run").read_text()
    assert not re.search(r"\b(uv|poetry|conda|pipx)\b", text)


@pytest.mark.parametrize("name", manifests.names())
def test_the_readme_lists_every_checkpoint_with_its_numbers(root: Path, name: str) -> None:
    manifest = manifests.load(name)
    family = family_of(manifest.files)
    millions = round(sum(prod(shape) for shape, _ in manifest.tensors.values()) / 1e6)
    row = f"| `{manifest.repo_id}` | `{family.name}` | {millions} M | {family.width} |"
    assert row in (root / "README.md").read_text().splitlines()


def test_every_link_of_the_guides_leads_to_a_file(tracked: list[Path]) -> None:
    code = re.compile(r"```.*?```|`[^`\n]*`", re.S)
    broken = [
        f"{path}: {link}"
        for path in tracked
        if path.suffix == ".md"
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", code.sub("`", path.read_text()))
        if not link.startswith("http") and not (path.parent / link).exists()
    ]
    assert not broken, "\n".join(broken)


def test_a_run_of_which_every_test_is_skipped_is_no_success(root: Path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "tests/layers/test_swiglu.py",
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "needs an accelerator (JAX_PLATFORMS=cuda)" in done.stdout
