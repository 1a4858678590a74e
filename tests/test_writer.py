"""Folders of embeddings: what they hold, runs that continue, kills at every moment, and the command on top."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from rich.console import Console
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import jaxvit
from jaxvit import cli, writer
from jaxvit.commands import console
from jaxvit.errors import OutputError
from jaxvit.writer import Summary, write
from tests.families import checkpoint, picture, relative

SHARD = 40_000
"""Bytes of a shard here: a few pictures."""


@cache
def encoder() -> jaxvit.Encoder:
    return jaxvit.load(checkpoint("qwen2_5_vl"), dtype="float32", budgets=[64], store=False)


@pytest.fixture
def collection(tmp_path: Path) -> list[Path]:
    return collect(tmp_path / "pictures", 24)


def collect(folder: Path, count: int) -> list[Path]:
    """Pictures of several sizes; numbers 5 and 17 are broken."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(count):
        height, width = (int(side) for side in generator.integers(56, 200, 2))
        path = folder / f"{number:03d}.png"
        if number in (5, 17):
            path.write_bytes(b"\x89PNG\r\n\x1a\n cut off")
        else:
            PIL.Image.fromarray(picture(height, width, number)).save(path)
    return sorted(folder.iterdir())


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def test_every_file_is_in_the_index_with_its_embeddings_and_every_bad_one_in_the_errors(
    collection: list[Path], tmp_path: Path
):
    out = tmp_path / "new" / "out"
    seen: list[int] = []
    done = write(
        encoder(),
        collection,
        out,
        shard_bytes=SHARD,
        progress=lambda so_far: seen.append(so_far.encoded + so_far.failed),
    )
    assert (done.files, done.skipped, done.encoded, done.failed) == (24, 0, 22, 2)
    assert seen == list(range(1, 25))
    good = [path for number, path in enumerate(collection) if number not in (5, 17)]
    items = encoder().prepare(good)
    index = lines(out / "index.jsonl")
    assert [entry["path"] for entry in index] == list(map(str, good))
    for entry, item, expected in zip(index, items, encoder().encode(items), strict=True):
        assert entry["tokens"] == item.tokens
        assert entry["grids"] == [list(grid) for grid in item.grids]
        assert entry["layout"]["grid_thw"] == list(item.grids[0])
        array = load_file(out / entry["shard"])[entry["key"]]
        assert array.dtype == np.float32
        assert relative(array, expected) <= 1e-5
    assert done.tokens == sum(item.tokens for item in items)
    shards = sorted(out.glob("shard-*"))
    assert len(shards) == done.shards >= 3
    for shard in shards[:-1]:
        assert SHARD <= sum(array.nbytes for array in load_file(shard).values()) <= 2 * SHARD
    errors = lines(out / "errors.jsonl")
    assert [entry["path"] for entry in errors] == [str(collection[5]), str(collection[17])]
    assert all("not an image" in entry["error"] and "item" not in entry["error"] for entry in errors)
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in shards} == {(tmp_path / "plain").stat().st_mode}


def test_a_second_run_encodes_only_what_is_new(collection: list[Path], tmp_path: Path):
    out = tmp_path / "out"
    write(encoder(), collection[:20], out, shard_bytes=SHARD)
    before, calls = contents(out), encoder().stats()["buckets"]["64 tokens"]["calls"]
    done = write(encoder(), collection[:20] * 2, out, shard_bytes=SHARD)
    assert done == Summary(20, 18, 0, 2, seconds=done.seconds)
    assert contents(out) == before
    assert encoder().stats()["buckets"]["64 tokens"]["calls"] == calls
    done = write(encoder(), [collection[0], *collection[18:]], out, shard_bytes=SHARD)
    assert (done.files, done.skipped, done.encoded, done.failed) == (7, 3, 4, 0)
    after = contents(out)
    assert {name: data for name, data in after.items() if name in before and name.startswith("shard")} == {
        name: data for name, data in before.items() if name.startswith("shard")
    }
    assert len(lines(out / "index.jsonl")) == 22


def test_a_bad_file_is_tried_again_and_leaves_the_errors_once_it_is_good(collection: list[Path], tmp_path: Path):
    out = tmp_path / "out"
    write(encoder(), collection, out, shard_bytes=SHARD)
    PIL.Image.fromarray(picture(84, 84)).save(collection[5])
    done = write(encoder(), collection, out, shard_bytes=SHARD)
    assert (done.skipped, done.encoded, done.failed, done.shards) == (22, 1, 1, 1)
    write(encoder(), collection, out, shard_bytes=SHARD)
    assert [entry["path"] for entry in lines(out / "errors.jsonl")] == [str(collection[17])]
    assert lines(out / "index.jsonl")[-1]["path"] == str(collection[5])


KILLED = """
import os, signal, sys
import jaxvit
from jaxvit import writer

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(so_far):
    if sys.argv[3] == "between files" and so_far.encoded == 14:
        die()
    if sys.argv[3] == "before a shard has its name" and so_far.shards == 1:
        writer.os.replace = die
    if sys.argv[3] == "before a shard is in the index" and so_far.shards == 1:
        writer._line = die

encoder = jaxvit.load(sys.argv[1], dtype="float32", budgets=[64])
paths = sorted(os.path.join("pictures", name) for name in os.listdir("pictures"))
writer.write(encoder, paths, sys.argv[2], shard_bytes=int(sys.argv[4]), progress=progress)
"""


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("between files", marks=pytest.mark.slow),
        "before a shard has its name",
        pytest.param("before a shard is in the index", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_and_run_again_leaves_what_an_undisturbed_one_leaves(
    collection: list[Path], tmp_path: Path, root: Path, moment: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    paths = [path.relative_to(tmp_path) for path in collection]
    undisturbed = write(encoder(), paths, "whole", shard_bytes=SHARD)
    environment = {**os.environ, "PYTHONPATH": str(root), "XLA_FLAGS": ""}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, checkpoint("qwen2_5_vl"), "out", moment, str(SHARD)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    there = len(list(Path("out").glob("shard-*")))
    assert 0 < there < undisturbed.shards
    assert len(list(Path("out").glob(".writing-*"))) == (moment == "before a shard has its name")
    again = write(encoder(), paths, "out", shard_bytes=SHARD)
    assert again.shards == undisturbed.shards - there
    assert again.skipped + again.encoded == undisturbed.encoded
    assert contents(Path("out")) == contents(Path("whole"))


def test_an_interrupted_run_leaves_no_half_written_file(collection: list[Path], tmp_path: Path):
    def interrupt(so_far: Summary) -> None:
        if so_far.encoded == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(encoder(), collection, tmp_path / "out", shard_bytes=SHARD, progress=interrupt)
    assert not list((tmp_path / "out").glob(".writing-*"))
    assert len(lines(tmp_path / "out" / "index.jsonl")) < 9
    assert write(encoder(), collection, tmp_path / "out", shard_bytes=SHARD).failed == 2


def test_a_folder_of_another_kind_is_refused_and_left_alone(collection: list[Path], tmp_path: Path):
    out = tmp_path / "out"
    write(encoder(), collection[:2], out)
    before = contents(out)
    other = jaxvit.load(
        checkpoint("qwen2_5_vl"), dtype="float32", budgets=[64], store=False, processor={"max_pixels": 9999}
    )
    for one, options, says in (
        (encoder(), {"out_dtype": "bfloat16"}, "out_dtype float32, not bfloat16"),
        (other, {}, "processor"),
        (jaxvit.load(checkpoint("lfm2_5_vl"), dtype="float32", budgets=[64]), {}, "another checkpoint"),
    ):
        with pytest.raises(OutputError, match=says):
            write(one, collection[:4], out, **options)
        assert contents(out) == before
    shard = out / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(OutputError, match=r"shard-00000.safetensors is damaged"):
        write(encoder(), collection[:4], out)
    with pytest.raises(OutputError, match="cannot be written"):
        write(encoder(), collection[:4], collection[0])


STRANGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a folder as shard": ("shard-00000.safetensors", Path.mkdir, "no shard of jaxvit .*: remove it and run again"),
    "a pipe as shard": ("shard-00000.safetensors", os.mkfifo, "no shard of jaxvit .it is no file.: remove it"),
    "a shard without a number": ("shard-last.safetensors", Path.touch, "no shard of jaxvit, whose names are numbers"),
    "a shard of others": (
        "shard-00000.safetensors",
        lambda path: save_file({"0": np.zeros(3)}, path, {"jaxvit": '{"made": {}, "index": [], "errors": []}'}),
        "its lists and its tensors disagree.: remove it",
    ),
    "a shard that lists numbers": (
        "shard-00000.safetensors",
        lambda path: save_file({}, path, {"jaxvit": '{"made": {}, "index": [3], "errors": []}'}),
        "no shard of jaxvit .*: remove it",
    ),
    "a shard made of a number": (
        "shard-00000.safetensors",
        lambda path: save_file({}, path, {"jaxvit": '{"made": 3, "index": [], "errors": []}'}),
        "does not say how it was made.: remove it",
    ),
    "a shard of brackets": (
        "shard-00000.safetensors",
        lambda path: save_file({}, path, {"jaxvit": "[" * 100_000}),
        "no shard of jaxvit .*: remove it",
    ),
    "a folder as index": ("index.jsonl", Path.mkdir, "index.jsonl cannot be written .*: make room or choose"),
    "a folder as lock": (".lock", Path.mkdir, "cannot be written .*: choose another folder"),
    "a pipe as lock": (".lock", os.mkfifo, "cannot be written .*: choose another folder"),
    "a folder as leftover": (".writing-index.jsonl", Path.mkdir, "cannot be removed .*: remove it and run again"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_jaxvit_did_not_write_there_is_refused_by_name(kind: str, collection: list[Path], tmp_path: Path):
    name, make, says = STRANGE[kind]
    out = tmp_path / "out"
    out.mkdir()
    make(out / name)
    with pytest.raises(OutputError, match=says):
        write(encoder(), collection[:2], out)
    assert write(encoder(), collection[:2], tmp_path / "another").encoded == 2


def test_a_full_disk_is_named_leaves_nothing_half_written_and_the_run_goes_on_once_there_is_room(
    collection: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(encoder(), collection, tmp_path / "whole", shard_bytes=SHARD)
    with monkeypatch.context() as full:
        calls = iter([None, None])

        def failing(*arguments: object, **options: object) -> None:
            if next(calls, "full") == "full":
                Path(arguments[1]).write_bytes(b"half")  # type: ignore[arg-type]
                raise SafetensorError("I/O error: No space left on device (os error 28)")
            save_file(*arguments, **options)  # type: ignore[arg-type]

        full.setattr(writer, "save_file", failing)
        with pytest.raises(OutputError, match=r"shard-00002.safetensors cannot be written .*No space.*make room"):
            write(encoder(), collection, tmp_path / "out", shard_bytes=SHARD)
    assert not list((tmp_path / "out").glob(".writing-*"))
    assert len(list((tmp_path / "out").glob("shard-*"))) == 2
    write(encoder(), collection, tmp_path / "out", shard_bytes=SHARD)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_two_runs_in_one_folder_are_refused(collection: list[Path], tmp_path: Path):
    def second(so_far: Summary) -> None:
        with pytest.raises(OutputError, match="another run is writing"):
            write(encoder(), collection[:2], tmp_path / "out")

    assert write(encoder(), collection[:2], tmp_path / "out", progress=second).encoded == 2


# the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``jaxvit encode`` of the tiny checkpoint in this process, its output in a pipe."""

    def run(*arguments: object) -> tuple[int, str, str]:
        fixed = ["jaxvit", "encode", checkpoint("qwen2_5_vl"), "--dtype", "float32", "--budgets", "64"]
        monkeypatch.setattr(sys, "argv", [str(one) for one in (*fixed, *arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err

    return run


def test_the_command_takes_folders_patterns_and_lists_and_says_how_many(run, collection: list[Path], tmp_path: Path):
    folder, out = collection[0].parent, tmp_path / "out"
    (folder / "below").mkdir()
    collection[3].rename(folder / "below" / "deep.png")
    (folder / ".hidden.png").write_bytes(collection[0].read_bytes())
    (tmp_path / "list.txt").write_text(f"{collection[0]}\n\n{collection[5]}\n{tmp_path / 'missing.png'}\n")
    code, said, err = run(folder / "00[0-4].png", "-o", out)
    assert (code, err) == (0, "")
    assert re.match(
        r"4 of 4 pictures encoded, 0 already there, 0 failed; \d+ tokens, 96 values each, .* images/s, fill 0", said
    )
    code, said, _ = run(tmp_path / "list.txt", "-o", f"{out}/")
    assert code == 1
    assert said == f"0 of 3 pictures encoded, 1 already there, 2 failed; see {out / 'errors.jsonl'}\n"
    code, said, _ = run(folder, "-o", out, "-q", "--shard", 1)
    assert (code, said) == (1, "")
    assert {Path(entry["path"]).name for entry in lines(out / "index.jsonl")} == {
        path.name for path in folder.rglob("*.png") if path.name not in (".hidden.png", "005.png", "017.png")
    }
    assert len(lines(out / "errors.jsonl")) == 3
    code, said, _ = run(folder / "00[1-2].png", "-o", out)
    assert (code, said) == (0, "0 of 2 pictures encoded, 2 already there, 0 failed\n")


def test_the_command_says_where_videos_go_that_it_cannot_encode(run, collection: list[Path], tmp_path: Path):
    (tmp_path / "clip.mp4").write_bytes(b"frames")
    code, said, _ = run(collection[0], tmp_path / "clip.mp4", "-o", tmp_path / "out")
    assert code == 1
    assert said.startswith("1 of 2 pictures encoded")
    assert "`jaxvit encode` takes pictures, not videos: `jaxvit show` draws clips" in said


ODD = [b"new\nline.png", b" spaces .png", b"[x]*.png", b"quote'\".png", b"\xe2\x80\xa8separator.png", b"-dash.png"]


def test_a_folder_with_files_of_every_kind_and_name_is_encoded_as_far_as_it_can_be(run, tmp_path: Path):
    folder, out = tmp_path / "pictures", tmp_path / "out"
    (folder / "album.png").mkdir(parents=True)
    names = [*ODD, b"album.png/inside.png"]
    try:
        (folder / os.fsdecode(b"not\xff\xfetext.png")).touch()
        names.append(b"not\xff\xfetext.png")
    except (OSError, UnicodeError):  # the file system wants names that are text
        pass
    for name in names:
        PIL.Image.fromarray(picture(56, 56)).save(os.path.join(os.fsencode(folder), name), "png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "folders").symlink_to(".")
    os.mkfifo(folder / "pipe.png")
    (folder / "endless.png").symlink_to("/dev/zero")
    code, said, _ = run(folder, "-o", out)
    assert code == 1
    assert said.startswith(f"{len(names)} of {len(names) + 3} pictures encoded")
    assert {os.fsencode(entry["path"]) for entry in lines(out / "index.jsonl")} == {
        os.path.join(os.fsencode(folder), name) for name in names
    }
    assert {Path(entry["path"]).name for entry in lines(out / "errors.jsonl")} == {
        "loop.png",
        "pipe.png",
        "endless.png",
    }
    before = contents(out)
    code, said, _ = run(folder, "-o", out)
    assert code == 1
    assert said.startswith(f"0 of {len(names) + 3} pictures encoded, {len(names)} already there")
    assert contents(out) == before


def test_a_list_may_name_any_file_and_begin_with_a_mark(run, tmp_path: Path):
    paths = [tmp_path / os.fsdecode(name) for name in ODD[1:]]
    for path in paths:
        PIL.Image.fromarray(picture(56, 56)).save(path)
    text = "\r\n".join(map(str, paths))
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    code, _, err = run(tmp_path / "list.txt", "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    assert [entry["path"] for entry in lines(tmp_path / "out" / "index.jsonl")] == [str(path) for path in paths]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("none*.png",), "no pictures match"),
        (("empty.txt",), "a path a line"),
        (("wide.txt",), "no list of paths in UTF-8"),
    ],
)
def test_a_pattern_or_list_without_pictures_is_refused(run, tmp_path: Path, monkeypatch, arguments, says: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "wide.txt").write_text("cat.png", encoding="utf-16")
    code, said, err = run(*arguments, "-o", "out")
    assert (code, said) == (2, "")
    assert says in err
    assert not (tmp_path / "out").exists()


def test_a_terminal_sees_a_bar_with_rate_and_fill(run, collection: list[Path], tmp_path: Path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "stderr", lambda: Console(file=screen, force_terminal=True, width=160))
    assert run(*collection[:4], "-o", tmp_path / "out")[0] == 0
    assert re.search(r"\d+\.\d images/s, fill \d\.\d\d.*4/4", screen.getvalue())


@pytest.mark.slow
def test_the_command_killed_at_any_time_and_run_again_equals_an_undisturbed_run(tmp_path: Path, root: Path):
    paths = collect(tmp_path / "pictures", 260)
    environment = {**os.environ, "PYTHONPATH": str(root), "XLA_FLAGS": ""}
    model = [checkpoint("qwen2_5_vl"), "--dtype", "float32", "--budgets", "64", "--shard", "1"]

    def start(out: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "jaxvit.cli", "encode", *map(str, model), "pictures", "-o", out]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    whole = start("whole")
    said = whole.communicate(timeout=200)[0]
    assert (whole.returncode, said.split(",")[0]) == (1, f"{len(paths) - 2} of {len(paths)} pictures encoded")
    shards = len(list((tmp_path / "whole").glob("shard-*")))
    assert shards >= 3
    for wanted in range(1, shards):
        killed = start("out")
        while len(list((tmp_path / "out").glob("shard-*"))) < wanted and killed.poll() is None:
            time.sleep(0.005)
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=60)
        if wanted == 1:
            assert killed.returncode == -signal.SIGKILL
            assert len(list((tmp_path / "out").glob("shard-*"))) < shards
    last = start("out")
    last.communicate(timeout=200)
    assert last.returncode == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert writer.WRITING not in "".join(contents(tmp_path / "out"))
