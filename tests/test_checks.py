"""Wrong arguments: each is an OptionError (a LadderError for budgets), which names it and what may be given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import jaxvit
from jaxvit import checks
from jaxvit.bench import bench
from jaxvit.errors import JaxvitError, OptionError
from jaxvit.tune import tune
from tests.families import checkpoint, encoder, picture


def load(**options: Any) -> jaxvit.Encoder:
    return jaxvit.load(checkpoint("lfm2_5_vl"), **{"budgets": [64], "store": False} | options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: load(dtype="float16"), "use bfloat16 or float32"),
        (lambda: load(dtype="int8"), "dtype is 'int8'; choose one of 'float32', 'bfloat16'"),
        (lambda: load(devices="some"), "devices is 'some'; give None, \"all\" or a list of distinct jax devices"),
        (lambda: load(devices=[]), "a list of distinct jax devices"),
        (lambda: load(attention="flash"), "attention is 'flash'; choose one of 'auto', 'dense'"),
        (lambda: encoder("lfm2_5_vl").encode(picture(64, 64), out_dtype="float16"), "use bfloat16 or float32"),
        (lambda: encoder("lfm2_5_vl").encode(picture(64, 64), out_dtype="f4"), "out_dtype is 'f4'; choose one of"),
        (lambda: encoder("lfm2_5_vl").encode_iter([], lookahead=0), "lookahead is 0; give a number of items"),
        (lambda: encoder("lfm2_5_vl").warmup(-1), "up_to is -1; give a number of tokens, or None"),
        (lambda: encoder("lfm2_5_vl").warmup(True), "up_to is True; give a number of tokens, or None"),
        (lambda: encoder("lfm2_5_vl").warmup(63), "the smallest bucket has 64 tokens, and up_to is 63"),
        (
            lambda: bench(encoder("lfm2_5_vl"), up_to=63, host=False),
            "the smallest bucket has 64 tokens, and up_to is 63",
        ),
        (lambda: bench(encoder("lfm2_5_vl"), up_to=0), "up_to is 0; give a number of tokens, or None"),
        (lambda: tune(encoder("lfm2_5_vl"), seconds=float("nan")), "seconds is nan; give a number of seconds, or None"),
        (lambda: bench(encoder("lfm2_5_vl"), "1x256,4x64"), r"give a list, such as \['1x256', '4x64'\]"),
    ],
)
def test_a_wrong_option_is_an_error_of_ours_and_a_value_error(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(JaxvitError, match=says) as caught:
        call()
    assert type(caught.value) is OptionError
    assert isinstance(caught.value, ValueError)


def test_a_value_is_shown_shortened_and_with_what_to_give() -> None:
    with pytest.raises(OptionError, match=r"^size is \[0, 1, .{65,80}; give a number$"):
        checks.kind("size", list(range(1000)), int, "a number")
    checks.kind("size", 3, (int, str), "a number")
    with pytest.raises(OptionError, match=r"^mode is 'c'; choose one of 'a', 'b'$"):
        checks.choice("mode", "c", ("a", "b"))


# Under pytest the annotations are checked, and refuse these before the package does.
TYPES = """
import sys
import jax
import jaxvit
import numpy

MODEL, CLIPS = sys.argv[1:]
GRAY = numpy.zeros((64, 64), numpy.uint8)
def load(**options):
    return jaxvit.load(MODEL, **{"budgets": [64], "store": False, "dtype": "float32"} | options)

encoder = load()
calls = {
    "model": lambda: jaxvit.load(None),
    "dtype": lambda: load(dtype=jax.numpy.float32),
    "devices": lambda: load(devices=5),
    "devices ": lambda: load(devices=jax.local_devices()[0]),
    "devices  ": lambda: load(devices=["cpu"]),
    "devices   ": lambda: load(devices=[[]]),
    "dtype ": lambda: load(dtype=numpy.array(["float32", "bfloat16"])),
    "attention": lambda: load(attention=numpy.array(["auto", "xla"])),
    "CheckpointError settings": lambda: load(processor={5: 1, "x": 2}),
    "items ": lambda: encoder.plan(5),
    "MediaError layout": lambda: encoder.prepare(jaxvit.Image(GRAY, layout=numpy.array(["hwc", "chw"]))),
    "MediaError fps": lambda: jaxvit.load(CLIPS, store=False).prepare(jaxvit.Video([GRAY], fps=numpy.complex64(2))),
    "MediaError numbers": lambda: encoder.items({"pixel_values": "x", "spatial_shapes": "x"}),
    "processor": lambda: load(processor="min_pixels"),
    "store": lambda: load(store=True),
    "on_overflow": lambda: load(on_overflow=None),
    "on_error": lambda: encoder.encode([], on_error="ignore"),
    "up_to": lambda: encoder.warmup(up_to="64"),
    "items": lambda: encoder.plan(["cat.jpg"]),
    "item": lambda: encoder.intermediates("cat.jpg"),
    "LadderError budgets": lambda: load(budgets=64),
    "LadderError budgets ": lambda: load(budgets=b"ladder.toml"),
    "MediaError mapping": lambda: encoder.items([1]),
}
for name, call in calls.items():
    try:
        call()
    except jaxvit.errors.JaxvitError as error:
        *kind, word = name.split()
        assert type(error).__name__ == (kind or ["OptionError"])[0], (name, error)
        assert word in str(error), (name, error)
        print("refused")
assert encoder.encode([]) is not None
"""


def test_arguments_of_another_type_are_refused_in_words() -> None:
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, "-c", TYPES, str(checkpoint("lfm2_5_vl")), str(checkpoint("kimi_k25"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * TYPES.count(": lambda: ")
