"""What commands say in a terminal, in a pipe, and when they are told to be quiet."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxvit import cli
from jaxvit.commands import console
from tests.families import checkpoint

pty = pytest.importorskip("pty")

SMALL = ("--set", "max_pixels=50176", "--dtype", "float32", "--budgets", "64")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plain terminal; what a command sets for its process is put back."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    root, ours = logging.getLogger(), logging.getLogger("jaxvit")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:], root.level = before[:2]
    ours.setLevel(before[2])
    console.Talk.quiet = console.Talk.verbose = False


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command whose stderr is a terminal, and returns what the terminal got."""

    def run(*arguments: object) -> str:
        ours, theirs = pty.openpty()
        received = bytearray()

        def read() -> None:
            try:
                while part := os.read(ours, 4096):
                    received.extend(part)
            except OSError:  # how Linux says that the other end was closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        with open(theirs, "w", encoding="utf-8") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            patch.setattr(sys, "argv", ["jaxvit", *map(str, arguments)])
            with pytest.raises(SystemExit) as exit:
                cli.main()
        reader.join(10)
        os.close(ours)
        assert not exit.value.code
        return received.decode()

    return run


@pytest.fixture
def encode(photos: dict[str, Path], tmp_path: Path) -> tuple[object, ...]:
    output = tmp_path / "out.safetensors"
    return ("encode", checkpoint("qwen2_5_vl"), photos["chelsea"], photos["coffee"], "-o", output, *SMALL)


def test_a_terminal_shows_loading_and_encoding(terminal: Run, encode: tuple[object, ...]) -> None:
    said = terminal(*encode)
    for part in ("loading", "encoding", "0/2", "tokens, 96 values each", "out.safetensors", "out.json"):
        assert part in said
    assert COLOUR.search(said)


def test_show_says_how_many_tokens_it_drew_and_so_does_the_picture(
    terminal: Run, photos: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "map.svg"
    said = terminal("show", checkpoint("qwen2_5_vl"), photos["chelsea"], "-o", output, *SMALL)
    assert re.search(r"\d+ tokens, 96 values each: .*map\.svg", said)
    assert re.search(r"pixels, \d+ tokens, 96 values each", output.read_text())


def test_no_color_keeps_the_progress_and_drops_the_colours(
    terminal: Run, encode: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    said = terminal(*encode)
    assert "encoding" in said
    assert not COLOUR.search(said)


def test_quiet_says_nothing_in_a_terminal(terminal: Run, encode: tuple[object, ...]) -> None:
    assert terminal(*encode, "--quiet") == ""


def test_a_pipe_gets_nothing(
    encode: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jaxvit", *map(str, encode)])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert not exit.value.code
    assert tuple(capsys.readouterr()) == ("", "")


def test_verbose_logs_what_was_loaded_even_into_a_pipe(
    encode: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger().handlers.clear()
    monkeypatch.setattr(sys, "argv", ["jaxvit", *map(str, encode), "--verbose"])
    with pytest.raises(SystemExit):
        cli.main()
    said = " ".join(capsys.readouterr().err.split())
    assert "float32 on cpu, 1 buckets of 64 to 64 tokens" in said


def test_compiling_shows_bucket_seconds_and_size(terminal: Run, tmp_path: Path) -> None:
    said = terminal("compile", checkpoint("lfm2_vl"), "--budgets", "64", "--store", tmp_path / "store")
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", said)
    assert "compiling" in shown
    assert re.search(r"bucket of 64 tokens: compiled, \d+\.\d s, \d+\.\d [KM]iB", shown), shown


@pytest.mark.parametrize(
    ("count", "said"), [(None, "?"), (0, "0.0 KiB"), (5 * 2**20, "5.0 MiB"), (20 * 2**30, "20.0 GiB")]
)
def test_sizes_are_said_in_units_of_1024(count: int | None, said: str) -> None:
    assert console.size(count) == said
