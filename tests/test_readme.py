"""The guides' code runs, and the commands they name exist with the options they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from PIL import Image

from jaxvit import cli, tiny
from jaxvit.weights import manifests

ROOT = Path(__file__).resolve().parent.parent
GUIDES = [path for path in sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/**/README.md")) if ".venv" not in path.parts]
TINY = {manifests.load(one.manifest).files["config.json"]["model_type"]: name for name, one in tiny.TINY.items()}
"""model_type -> the tiny checkpoint that stands for a real one of the family."""


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a guide in a language ("" for those without one)."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.S | re.M)


def programs() -> list:
    found = []
    for path in GUIDES:
        text = "\n".join(blocks(path, "python"))
        if text:
            needs_torch = re.search(r"\bcompare\(|\btorch\b", text)
            marks = [pytest.mark.reference] if needs_torch else []
            found.append(pytest.param(text, id=str(path.relative_to(ROOT)), marks=marks))
    return found


@pytest.mark.parametrize("program", programs())
def test_the_python_of_a_guide_runs_from_top_to_bottom(
    program: str, photos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in set(re.findall(r'"((?:[\w.-]+/)+([\w.-]+))"', program)):
        for manifest in manifests.names():
            if manifest.endswith(f"--{name}"):
                model_type = manifests.load(manifest).files["config.json"]["model_type"]
                tiny.tiny_checkpoint(TINY[model_type], tmp_path / place)
    for name in set(re.findall(r'"([\w.]+\.(?:jpg|png))"', program)):
        with Image.open(photos["chelsea"]) as picture:
            picture.resize((224, 168)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    # Large buckets take long to compile on a CPU.
    exec(compile(re.sub(r"up_to=\d+", "up_to=64", program), "guide", "exec"), {"__name__": "guide"})


def commands() -> list[tuple[str, str]]:
    """(guide, line) of every call of the command in a fenced block."""
    found = []
    for path in GUIDES:
        for block in blocks(path, "(?:|bash|sh|console|text)"):
            for line in block.splitlines():
                if match := re.match(r"(?:\$ )?(jaxvit [a-z-].*)", line):
                    found.append((str(path.relative_to(ROOT)), match[1]))
    return found


def test_the_guides_call_the_command() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize(("guide", "line"), commands())
def test_a_command_of_a_guide_exists_with_its_options(guide: str, line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    known = typer.main.get_command(cli.app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert name in known, f"{guide}: {line}"
    options = {option for parameter in known[name].params for option in parameter.opts} | {"--help", "-h"}
    for argument in arguments:
        if argument.startswith("-"):
            assert argument.split("=")[0] in options, f"{guide}: {line}"


def test_every_command_stands_in_the_readme() -> None:
    known = typer.main.get_command(cli.app).commands  # pyright: ignore[reportAttributeAccessIssue]
    named = {line.split()[1] for guide, line in commands() if guide == "README.md"}
    assert named >= set(known)
