"""The command: what it writes, what it says and how it exits."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import jaxvit
from jaxvit import cli, tiny
from jaxvit import demo as demonstration
from jaxvit.machine import ISSUING
from jaxvit.metrics import Metrics
from jaxvit.views import views
from tests.families import picture
from tests.test_media import movie


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process, its output in a pipe."""
    monkeypatch.setenv(ISSUING, "0")  # what the command sets stays in no other test's environment

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["jaxvit", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(exit.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


SMALL = ("--set", "max_pixels=50176", "--dtype", "float32")


def test_encode_writes_the_embeddings_of_every_picture_and_an_index(
    run: Run, model: Path, photos: dict[str, Path], tmp_path: Path
) -> None:
    paths = [photos["chelsea"], photos["coffee"], photos["chelsea"]]
    outcome = run("encode", model, *paths, "-o", tmp_path / "out.safetensors", *SMALL)
    assert outcome == Outcome(0, "", ""), outcome.err
    arrays = load_file(tmp_path / "out.safetensors")
    index = json.loads((tmp_path / "out.json").read_text())
    encoder = jaxvit.load(model, dtype="float32", processor={"max_pixels": 50176})
    items = encoder.prepare(paths)
    assert [entry["path"] for entry in index] == list(map(str, paths))
    assert [entry["tokens"] for entry in index] == [item.tokens for item in items]
    assert [entry["grids"] for entry in index] == [list(map(list, item.grids)) for item in items]
    for entry, expected in zip(index, encoder.encode(items), strict=True):
        np.testing.assert_array_equal(arrays[entry["name"]], expected)
        assert isinstance(entry["layout"], dict)


def test_a_folder_stands_for_the_pictures_in_it(run: Run, model: Path, photos: dict[str, Path], tmp_path: Path) -> None:
    folder = photos["chelsea"].parent
    assert run("encode", model, folder, "-o", tmp_path / "out.safetensors", *SMALL).code == 0
    index = json.loads((tmp_path / "out.json").read_text())
    assert [Path(entry["path"]).name for entry in index] == sorted(path.name for path in photos.values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{model}", "{photo}", "{missing}.png"], ["item 1", "{missing}.png"]),
        (["{model}", "{list}"], ["{list}, line 3: there is no file 'no/such.png' (one of 2 such lines): check"]),
        (["{model}", "{photo}", "{notes}"], ["{notes} names no file", "line 1: there is no file 'hello world'"]),
        (["{model}", "{notes}", "-o", "{missing}/"], ["a list of paths, one a line, relative to the current"]),
        (["{model}", "{missing}/"], ["there is no folder {missing}/"]),
        (["{model}", "{photo}", "{missing}/", "-o", "{missing}/"], ["there is no folder {missing}/"]),
        (["{model}", "{clip}"], ["`jaxvit encode` takes pictures", "`jaxvit show` draws clips", "jaxvit.Video.open"]),
        (["{missing}", "{photo}"], ["{missing}"]),
        (["{empty}", "{photo}"], ["config.json"]),
        (["{model}", "{empty}"], ["no pictures in"]),
        (["{model}", "{photo}", "-o", "{missing}/out.safetensors"], ["does not exist"]),
        (["{model}", "{photo}", "-o", "{empty}/out.npz"], [".safetensors"]),
        (["{model}", "{photo}", "--set", "max_pixels"], ["name=value"]),
        (["{model}", "{photo}", "--budgets", "0,64"], ["0"]),
        (["{model}", "{photo}", "--dtype", "float16"], ["float16"]),
        (["{model}", "{photo}", "--budgets", "--5"], ["no list of output tokens", "--budgets"]),
        (["{model}", "{photo}", "--budgets", "²"], ["the ladder file cannot be read"]),
        (["{model}", "{photo}", "--budgets", "9" * 5000], ["no list of output tokens", "--budgets"]),
        (["{model}", "{photo}", "--budgets", "999999999999"], ["999999999999 is more than"]),
        (["{model}", "{photo}", "--set", "max_pixels=" + "9" * 5000], ["max_pixels must be a positive integer"]),
        (["{model}", "{photo}", "--set", "max_pixels=" + "[" * 5000], ["max_pixels must be a positive integer"]),
        (["", "{photo}"], ["the model's name is empty"]),
        (["a" * 5000, "{photo}"], ["is no folder", "check the path"]),
        (["~nobody.of.this.name/x", "{photo}"], ["is no folder", "check the path"]),
        (["{model}", "{photo}", "-o", ""], ["give a .safetensors file or a folder"]),
        (["{model}", "{photo}", "-o", "{taken}/one.safetensors"], ["one.json is a folder"]),
    ],
)
def test_bad_input_is_named_without_a_traceback_and_exits_with_2(
    run: Run, model: Path, photos: dict[str, Path], tmp_path: Path, arguments: list[str], says: list[str]
) -> None:
    places = {"model": model, "photo": photos["chelsea"], "missing": tmp_path / "missing", "empty": tmp_path / "empty"}
    places["empty"].mkdir()
    places["taken"] = tmp_path / "taken"
    (places["taken"] / "one.json").mkdir(parents=True)
    for name, content in (
        ("list.txt", f"{photos['chelsea']} \t\n  \nno/such.png\nother.png\n"),
        ("notes.txt", "hello world\n\nsecond line\n"),
        ("clip.mp4", "frames"),
    ):
        places[name.partition(".")[0]] = tmp_path / name
        (tmp_path / name).write_text(content)
    output = [] if "-o" in arguments else ["-o", str(tmp_path / "out.safetensors")]
    outcome = run("encode", *(argument.format(**places) for argument in arguments), *output)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    # The command line's own errors come in a box, which breaks long lines.
    unboxed = "".join(outcome.err.replace("│", "").split())
    for text in says:
        assert "".join(text.format(**places).split()) in unboxed, outcome.err
    assert not (tmp_path / "out.safetensors").exists()
    assert not places["missing"].exists()


def test_a_list_is_read_without_empty_lines_and_blanks_at_the_end_of_a_line(
    run: Run, model: Path, photos: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text(f"{photos['chelsea']} \t\n \n\n{photos['coffee']}")
    assert run("encode", model, tmp_path / "list.txt", "-o", tmp_path / "out.safetensors", *SMALL).code == 0
    index = json.loads((tmp_path / "out.json").read_text())
    assert [entry["path"] for entry in index] == [str(photos["chelsea"]), str(photos["coffee"])]


def test_compare_refuses_a_clip_before_anything_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "clip.MP4").write_bytes(b"frames")
    outcome = run("compare", "no-such-model", tmp_path / "clip.MP4")
    assert outcome.code == 2
    assert "`jaxvitcompare`takespictures:`jaxvitshow`draws" in "".join(outcome.err.replace("│", "").split())


def test_the_version_is_said(run: Run) -> None:
    assert run("--version") == Outcome(0, f"jaxvit {jaxvit.__version__}\n", "")


def test_a_wrong_option_of_the_library_is_one_line_and_exits_with_2(run: Run, model: Path) -> None:
    outcome = run("bench", model, "--attention", "flash")
    assert outcome.code == 2
    assert outcome.err.startswith("error: attention is 'flash'; choose one of 'auto'")
    assert "Traceback" not in outcome.err


def _result(relative_rms: float) -> demonstration.Result:
    rows = (demonstration.Row("tiny", "cat", 4, Metrics(rms, 1e-7, 1.0)) for rms in (1e-7, relative_rms))
    return demonstration.Result(tuple(rows), False, "torch 0")


@pytest.mark.parametrize(("relative_rms", "code", "verdict"), [(9e-6, 0, "equal"), (2e-5, 1, "differs")])
def test_the_exit_code_of_the_demo_says_its_verdict(
    run: Run, monkeypatch: pytest.MonkeyPatch, relative_rms: float, code: int, verdict: str
) -> None:
    monkeypatch.setattr(demonstration, "run", lambda progress: _result(relative_rms))
    outcome = run("demo")
    assert outcome.code == code
    assert outcome.out.count(verdict) >= 1
    assert f"{relative_rms:.1e}" in outcome.out
    assert outcome.err == ""


@pytest.mark.parametrize(
    ("variables", "coloured"), [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)]
)
def test_no_color_is_respected(
    run: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demonstration, "run", lambda progress: _result(1e-7))
    assert ("\x1b[32m" in run("demo").out) is coloured


def test_the_installed_module_runs_and_lists_its_commands(tmp_path: Path, root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "jaxvit.cli", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for command in ("demo", "encode"):
        assert command in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("given", [None, "0"])
def test_a_gpu_is_issued_to_from_a_thread_of_its_own_unless_the_environment_says_otherwise(
    run: Run, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    if given is None:
        monkeypatch.delenv(ISSUING)
    run("--help")
    assert os.environ[ISSUING] == (given or "1")


@pytest.mark.reference
def test_compare_prints_a_line_a_picture_and_writes_everything_as_json(
    run: Run, model: Path, photos: dict[str, Path], tmp_path: Path
) -> None:
    paths = [photos["chelsea"], photos["coffee"]]
    outcome = run("compare", model, *paths, "--layers", "--json", tmp_path / "report.json", *SMALL)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "2 of 2 items equal the reference" in outcome.out
    for name in ("chelsea.png", "coffee.png", "blocks.0"):
        assert name in outcome.out
    assert outcome.err == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] is True
    assert [item["name"] for item in report["items"]] == ["chelsea.png", "coffee.png"]


@pytest.mark.reference
def test_compare_draws_where_the_two_differ(run: Run, model: Path, photos: dict[str, Path], tmp_path: Path) -> None:
    outcome = run("compare", model, photos["chelsea"], "--exact", "--picture", tmp_path / "off.png", *SMALL)
    assert outcome.code == 0, outcome.out + outcome.err
    with Image.open(tmp_path / "off.png") as drawn:
        assert drawn.width > 1000


@pytest.mark.reference
def test_compare_exits_with_1_when_an_item_differs(
    run: Run, model: Path, photos: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under this name the package itself holds the function.
    comparison = importlib.import_module("jaxvit.compare")
    monkeypatch.setattr(comparison, "FLOOR", 0.0)
    monkeypatch.setattr(comparison, "OWN", 0.0)
    outcome = run("compare", model, photos["chelsea"], "--exact", *SMALL)
    assert outcome.code == 1
    assert "0 of 1 items equal the reference" in outcome.out


def test_compile_fills_the_store_and_a_second_run_compiles_nothing(run: Run, model: Path, tmp_path: Path) -> None:
    arguments = ("compile", model, "--budgets", "16,32", "--store", tmp_path / "store", "--dtype", "float32")
    first, second = run(*arguments), run(*arguments)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "2 compiled, 0 from the store" in first.out
    assert "0 compiled, 2 from the store" in second.out
    rows = re.findall(r"(\d+) │ +(\d+) │ (\w+) +│ compiled +│ +([\d.]+) │ +([\d.]+ [KM]iB)", first.out)
    assert [row[:3] for row in rows] == [("16", "64", "dense"), ("32", "128", "dense")]
    assert len(list((tmp_path / "store").iterdir())) == 2
    assert run(*arguments, "--quiet") == Outcome(0, "", "")


def test_compile_takes_the_buckets_up_to_a_budget(run: Run, model: Path, tmp_path: Path) -> None:
    arguments = ("compile", model, "--budgets", "16,32", "--store", tmp_path / "store", "--dtype", "float32", "--up-to")
    assert "1 compiled" in run(*arguments, 16).out
    refused = run(*arguments, 15)
    assert refused.code == 2
    assert "the smallest bucket has 16 tokens" in refused.err


def test_compile_fills_the_store_for_every_device(run: Run, model: Path, tmp_path: Path) -> None:
    options = ("--budgets", "16", "--store", tmp_path / "store", "--dtype", "float32", "--all-devices")
    count = jax.local_device_count()
    assert f"{count} compiled, 0 from the store" in run("compile", model, *options).out
    assert f"0 compiled, {count} from the store" in run("compile", model, *options).out


def test_inspect_tells_checkpoint_buckets_and_machine(run: Run, model: Path) -> None:
    outcome = run("inspect", model, "--budgets", "16,32")
    assert outcome.code == 0, outcome.err
    for text in ("qwen2_5_vl", "54 tensors", "hidden_size 64", "16", "32", "attention dense", "jaxlib"):
        assert text in outcome.out
    assert outcome.err == ""


def test_inspect_as_json_is_json(run: Run, model: Path) -> None:
    found = json.loads(run("inspect", model, "--budgets", "16,32", "--json").out)
    assert [rung["bucket"]["tokens"] for rung in found["ladder"]["buckets"]] == [16, 32]
    assert found["machine"]["versions"]["jaxvit"] == "0.1.0"


def test_inspect_exits_with_1_when_the_checkpoint_cannot_be_used(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    outcome = run("inspect", tmp_path)
    assert outcome.code == 1
    assert "deepstack" in outcome.out
    assert run("inspect").code == 0


def test_show_draws_a_picture(run: Run, model: Path, photos: dict[str, Path], tmp_path: Path) -> None:
    assert run("show", model, photos["chelsea"], "-o", tmp_path / "map.png", *SMALL) == Outcome(0, "", "")
    with Image.open(tmp_path / "map.png") as drawn:
        assert drawn.width > 1000


@pytest.mark.parametrize("given", ["frames", "frames/*.png"])
def test_show_takes_the_frames_of_a_clip(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    from jaxvit import plots

    shown: list[tuple[int, int] | None] = []
    monkeypatch.setattr(
        plots, "show", lambda family, item, *_, **__: shown.extend(view.frames for view in views(family, item))
    )
    (tmp_path / "frames").mkdir()
    for number in range(3):
        Image.fromarray(picture(56, 84, number)).save(tmp_path / "frames" / f"{number}.png")
    assert run("show", model, tmp_path / given, "-o", tmp_path / "map.png", *SMALL) == Outcome(0, "", "")
    assert shown == [(1, 2), (3, 4)]


def test_show_takes_a_video_file_and_names_a_family_that_does_not(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = movie(tmp_path / "clip.mkv", frames=20, rate=10, size=(56, 84))
    assert run("show", model, path, "-o", tmp_path / "map.png", "--fps", 2, *SMALL) == Outcome(0, "", "")
    with Image.open(tmp_path / "map.png") as drawn:
        assert drawn.width > 1000
    outcome = run("show", tiny.tiny_checkpoint("lfm2_5_vl"), path, "-o", tmp_path / "none.png")
    assert outcome.code == 2
    assert outcome.err == "error: item 0: lfm2_vl has no video input; pass the frames as images\n"
    assert not (tmp_path / "none.png").exists()


def test_show_refuses_a_rate_for_a_picture(run: Run, model: Path, photos: dict[str, Path], tmp_path: Path) -> None:
    outcome = run("show", model, photos["chelsea"], "--fps", "2", "-o", tmp_path / "map.png")
    assert outcome.code == 2
    assert "--fps" in outcome.err
    assert "Traceback" not in outcome.err


def test_an_output_that_cannot_be_written_is_one_line(
    run: Run, model: Path, photos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "map.png").mkdir()
    outcome = run("show", model, photos["chelsea"], "-o", tmp_path / "map.png")
    assert outcome.code == 2
    assert "isafolder" in "".join(outcome.err.replace("│", "").split())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxvit.plots.show", full)
    outcome = run("show", model, photos["chelsea"], "-o", tmp_path / "other.png")
    assert outcome.code == 2
    assert outcome.err.startswith("error: [Errno 28] No space left on device: check the path, its permissions and")


@pytest.mark.parametrize("command", [("show", "{photo}", "-o"), ("compare", "{photo}", "--picture")])
def test_pictures_are_refused_before_anything_is_loaded(
    run: Run, photos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    name, *rest = (part.format(photo=photos["chelsea"]) for part in command)
    wrong = run(name, "no-such-model", *rest, tmp_path / "map.txt")
    assert wrong.code == 2
    assert ".png" in wrong.err
    assert "no-such-model" not in wrong.err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    missing = run(name, "no-such-model", *rest, tmp_path / "map.png")
    assert missing.code == 2
    assert "jaxvit[plots]" in missing.err
