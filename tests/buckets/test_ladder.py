"""Ladders: the default rule, budgets, files, tuned ladders, and every way in which they are refused."""

from __future__ import annotations

import copy
import os
import re
import tomllib
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxvit
from jaxvit import paths
from jaxvit.buckets.ladder import (
    ATTENTION,
    AXES,
    BLOCK,
    Ladder,
    default_ladder,
    find,
    from_budgets,
    from_file,
    overflow_bucket,
    resolve,
    write,
)
from jaxvit.buckets.rule import ACCELERATOR, CPU, Rule, rule_of, rungs
from jaxvit.errors import LadderError
from jaxvit.models import family_of
from jaxvit.models.family import Bucket, Demand, Family
from jaxvit.models.qwen2_5_vl.layout import windows
from jaxvit.weights import manifests
from tests.buckets.photos import CHECKPOINTS, FAMILIES, family
from tests.families import checkpoint, picture

CPU_DEVICE = SimpleNamespace(platform="cpu", device_kind="cpu")
H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")


@pytest.fixture(params=FAMILIES)
def any_family(request: pytest.FixtureRequest) -> Family:
    return family(request.param)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of ``buckets/``."""
    monkeypatch.setattr(paths, "data", lambda name: tmp_path)
    return tmp_path


# Default ladders


@pytest.mark.parametrize("platform", ["gpu", "cpu", "tpu"])
def test_default_ladder_holds_every_piece_from_the_smallest_to_the_largest(any_family: Family, platform: str):
    ladder = default_ladder(any_family, platform)
    smallest, largest = any_family.budget_range()
    assert ladder.holds(any_family.largest())
    assert ladder.buckets[0].tokens >= smallest
    assert ladder.buckets[-1].tokens >= largest


def test_default_ladder_is_fine_on_an_accelerator_and_short_on_a_cpu(any_family: Family):
    fine, short = (default_ladder(any_family, platform) for platform in ("gpu", "cpu"))
    assert len(short) <= 9 < 20 <= len(fine) <= 36
    assert all(high.tokens <= 2 * low.tokens for low, high in pairwise(short))
    # Where padding costs more than the constant of a call, a rung is at most a quarter above the last; the exception is
    # a family whose photos are made of tiles of 256 tokens.
    steps = [high.tokens / low.tokens for low, high in pairwise(fine) if low.tokens >= 512]
    assert max(steps) <= (1.5 if any_family.name == "lfm2_vl" else 1.25)


def test_default_ladder_follows_the_settings_of_the_checkpoint():
    assert default_ladder(family("qwen2_5_vl"), "cpu").buckets[-1].tokens == 16384
    small = family("qwen2_5_vl", max_pixels=1_003_520, video_max_pixels=1_003_520)
    assert default_ladder(small, "cpu").buckets[-1].tokens == 1280
    # An accelerator keeps room to pack small pieces, and a rung at the limit that large pictures come close to.
    tokens = [bucket.tokens for bucket in default_ladder(small, "gpu")]
    assert tokens[-1] == 4096
    assert 1280 in tokens


def test_capacities_follow_from_the_budget(any_family: Family):
    smallest, _ = any_family.budget_range()
    for bucket in default_ladder(any_family, "gpu"):
        assert bucket.patches % BLOCK == 0
        assert bucket.tokens * any_family.merge**2 <= bucket.patches < bucket.tokens * any_family.merge**2 + BLOCK
        assert bucket.segments == max(1, min(bucket.tokens // smallest, 256))
        windowed = "window" in any_family.segment_sets
        assert bucket.windows == (bucket.tokens // 4 + bucket.segments if windowed else 0)


@cache
def windowed(pixels: int) -> Family:
    """Qwen2.5-VL with windows of so many pixels along a side."""
    files = copy.deepcopy(manifests.load(CHECKPOINTS["qwen2_5_vl"]).files)
    files["config.json"]["vision_config"]["window_size"] = pixels
    return family_of(files)


def piece_of(one: Family, rows: int, columns: int) -> Demand:
    """What a still of rows x columns tokens takes, its windows counted by the order of its patches."""
    lengths = windows(2 * rows, 2 * columns, 2, one.config.window_cells).lengths
    return Demand(4 * rows * columns, rows * columns, 1, len(lengths))


@given(
    pixels=st.sampled_from([28, 56, 84, 112, 140]),
    pieces=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30),
)
def test_window_capacity_never_binds_before_tokens_and_segments(pixels: int, pieces: list[tuple[int, int]]):
    total = [sum(axis) for axis in zip(*(piece_of(windowed(pixels), *sides) for sides in pieces), strict=True)]
    assert total[3] <= windowed(pixels).most_windows(total[1], len(pieces))


@given(
    pixels=st.sampled_from([28, 56, 112]),
    platform=st.sampled_from(["gpu", "cpu"]),
    rows=st.integers(1, 200),
    share=st.floats(0, 1),
)
def test_default_ladder_holds_pieces_of_any_shape_with_windows_of_any_size(
    pixels: int, platform: str, rows: int, share: float
):
    """Already the first bucket of as many tokens does: it is never too small in windows alone."""
    tower, ladder = windowed(pixels), default_ladder(windowed(pixels), platform)
    least, most = (max(1, limit // rows) for limit in tower.budget_range())
    piece = piece_of(tower, rows, round(least + share * (most - least)))
    assert ladder.holds(tower.largest())
    assert next(bucket for bucket in ladder if bucket.tokens >= piece.tokens).holds(piece)


def test_the_largest_piece_counts_its_windows():
    assert windowed(112).largest() == Demand(65536, 16384, 1, 4097)
    assert windowed(28).largest().windows == 16385
    assert default_ladder(windowed(28), "gpu").buckets[-1].windows == 16384 + 256
    assert family("kimi_k25").largest().windows == 0


def test_rungs_lie_closer_where_patches_outweigh_the_call():
    rule = Rule(per_doubling=4, step=1, reach=8192)
    few, many = (
        [b for b in rungs(replace(rule, call=call), Demand(4, 1, 1, 0), 4) if b <= 128] for call in (10.0, 0.0)
    )
    assert len(many) > len(few)
    with_call = rungs(rule, Demand(4, 1, 1, 0), 4)
    ratios = [high / low for low, high in pairwise(b for b in with_call if b >= 64)]
    assert max(ratios[:2]) > max(ratios[-4:])


@given(
    first=st.integers(1, 100),
    step=st.integers(1, 300),
    per_doubling=st.integers(1, 9),
    reach=st.integers(1, 5000),
    tokens=st.integers(1, 20000),
    frames=st.integers(1, 4),
)
def test_rungs_ascend_and_the_last_holds_the_largest_piece(
    first: int, step: int, per_doubling: int, reach: int, tokens: int, frames: int
):
    rule = Rule(first=first, step=step, per_doubling=per_doubling, reach=reach)
    budgets = rungs(rule, Demand(4 * frames * tokens, tokens, 1, 0), 4)
    assert budgets == sorted(set(budgets))
    assert budgets[-1] >= max(frames * tokens, reach)
    assert budgets[-1] < max(frames * tokens, reach) + max(step, 16)


def test_max_pieces_caps_the_default_ladder(any_family: Family):
    ladder = default_ladder(any_family, "cpu", 2)
    assert {bucket.segments for bucket in ladder} <= {1, 2}
    assert ladder.buckets[-1].segments == 2


def test_a_family_without_a_file_gets_the_rule_of_the_platform(data: Path):
    assert rule_of("new_family", "cpu") == CPU
    assert rule_of("new_family", "gpu") == ACCELERATOR


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gpu]\nfirst = 0", "first: 0 is not a positive integer"),
        ("[gpu]\nper_doubling = 2.5", "per_doubling: 2.5 is not a positive integer"),
        ("[gpu]\npatch = -1.0", "patch: -1.0 is not a number of milliseconds"),
        ("[gpu]\ngrowth = 2", "unknown key 'growth'"),
        ("[tpu]\nfirst = 1", "unknown key 'tpu'"),
        ("gpu = 3", "3 is not a table"),
    ],
)
def test_a_bad_rule_names_file_and_value(data: Path, text: str, said: str):
    (data / "some_family.toml").write_text(text)
    with pytest.raises(LadderError, match=re.escape(said)) as caught:
        rule_of("some_family", "gpu")
    assert "some_family.toml" in str(caught.value)


# Budgets


def test_listed_budgets_are_sorted_and_made_unique(any_family: Family):
    ladder = from_budgets(any_family, [128, 64, 64])
    assert [bucket.tokens for bucket in ladder] == [64, 128]


def test_patches_of_a_listed_budget_are_rounded_up_to_the_block(any_family: Family):
    ladder = from_budgets(any_family, [65, 80, 81])
    assert [bucket.patches for bucket in ladder] == [320, 320, 384]
    assert from_budgets(any_family, [65], block=128).buckets[0].patches == 384


def test_above_1024_patches_they_are_rounded_up_to_twice_the_block(any_family: Family):
    """Kernels take twice the rows at a time there."""
    ladder = from_budgets(any_family, [240, 256, 257, 300, 513])
    assert [bucket.patches for bucket in ladder] == [960, 1024, 1152, 1280, 2176]


def test_hundred_images_of_one_token_fit_no_budget_of_64_at_once_and_all_have_a_capacity():
    ladder = from_budgets(family("kimi_k25"), [64])
    assert ladder.buckets[0].segments == 64


@pytest.mark.parametrize(
    ("budgets", "max_pieces", "said"),
    [
        ([], None, "budgets is empty"),
        ([0], None, "budgets: 0 is not a positive integer"),
        ([64, -1], None, "budgets: -1 is not a positive integer"),
        ([64.0], None, "budgets: 64.0 is not a positive integer"),
        (["64"], None, "budgets: '64' is not a positive integer"),
        ([True], None, "budgets: True is not a positive integer"),
        ([64], 0, "max_pieces: 0 is not a positive integer"),
        ([64], -3, "max_pieces: -3 is not a positive integer"),
        ([128, 64], 100, "max_pieces = 100 is more than the smallest budget of 64 tokens"),
    ],
)
def test_bad_budgets_are_refused_by_value(budgets: list, max_pieces: int | None, said: str):
    with pytest.raises(LadderError, match=re.escape(said)):
        from_budgets(family("kimi_k25"), budgets, max_pieces)


def test_max_pieces_equal_to_the_smallest_budget_is_accepted():
    assert from_budgets(family("kimi_k25"), [64, 128], 64).buckets[1].segments == 64


@pytest.mark.parametrize("max_pieces", [0, -1, True])
def test_a_bad_max_pieces_is_refused_by_the_default_ladder_too(any_family: Family, max_pieces: int):
    with pytest.raises(LadderError, match="max_pieces"):
        default_ladder(any_family, "cpu", max_pieces)


def test_a_budget_below_the_smallest_piece_is_refused():
    assert from_budgets(family("lfm2_vl"), [64]).buckets[0].segments == 1
    with pytest.raises(
        LadderError, match=r"^budgets: tokens = 63: no piece can use it, the smallest of lfm2_vl has 64: give"
    ):
        from_budgets(family("lfm2_vl"), [63, 128])


# Files


def written(path: Path, text: str) -> Path:
    path = path / "ladder.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("measured", [False, True])
def test_a_written_ladder_reads_back_to_the_same_buckets(any_family: Family, tmp_path: Path, measured: bool):
    ladder = default_ladder(any_family, "gpu")
    if measured:
        buckets = tuple(replace(b, attention="tokamax", constant=b.patches / 700, slope=3.1e-7) for b in ladder)
        ladder = Ladder(buckets, "measured")
    path = tmp_path / "made" / "ladder.toml"
    write(ladder, path, {"family": any_family.name, "device": 'a "new"\nchip'}, {"jax": "0.11", "when": "today"})
    assert from_file(path, any_family).buckets == ladder.buckets


def test_a_file_may_name_every_capacity_and_leave_out_all_but_tokens(tmp_path: Path):
    text = """
        [[bucket]]
        tokens = 64
        [[bucket]]
        tokens = 64
        patches = 1024
        segments = 4
        attention = "cudnn"
    """
    ladder = from_file(written(tmp_path, text), family("kimi_k25"))
    assert ladder.buckets == (Bucket(64, 256, 64), Bucket(64, 1024, 4, 0, "cudnn"))


def test_every_attention_backend_may_be_named(tmp_path: Path):
    for name in ATTENTION:
        text = f'[[bucket]]\ntokens = 64\nattention = "{name}"'
        assert from_file(written(tmp_path, text), family("kimi_k25")).buckets[0].attention == name


def test_max_pieces_caps_a_file_and_is_refused_above_its_smallest_budget(tmp_path: Path):
    path = written(tmp_path, "[[bucket]]\ntokens = 64\nsegments = 20\n[[bucket]]\ntokens = 128\nsegments = 3")
    assert [bucket.segments for bucket in from_file(path, family("kimi_k25"), 10)] == [10, 3]
    with pytest.raises(LadderError, match="max_pieces = 65 is more than the smallest budget of 64"):
        from_file(path, family("kimi_k25"), 65)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("[[bucket]]\ntokens = ", 2, "not valid TOML"),
        ("[[bucket]]\ntokens = 64\npatches 3\n", 3, "not valid TOML"),
        ("[[bucket]]\ntokens = 64\n[[bucket]]\ntokens = 32", 3, "a bucket of 32 tokens after one of 64"),
        ("[[bucket]]\ntokens = 64\n\n[[bucket]]\ntokens = 64", 4, "a bucket of 64 tokens after one of 64"),
        ("[[bucket]]\npatches = 64", 1, "a bucket needs tokens"),
        ("[[bucket]]\ntokens = 0", 1, "tokens: 0 is not a positive integer"),
        ("[[bucket]]\ntokens = -64", 1, "tokens: -64 is not a positive integer"),
        ("[[bucket]]\ntokens = 64.5", 1, "tokens: 64.5 is not a positive integer"),
        ('[[bucket]]\ntokens = "64"', 1, "tokens: '64' is not a positive integer"),
        ("[[bucket]]\ntokens = 64\npatches = 250", 1, "patches = 250 is not a multiple of the kernel's block of 64"),
        ("[[bucket]]\ntokens = 64\npatches = 0", 1, "patches: 0 is not"),
        ("[[bucket]]\ntokens = 64\nsegments = 65", 1, "segments = 65: more pieces than the bucket's 64 tokens"),
        ("[[bucket]]\ntokens = 64\nsegments = 0", 1, "segments: 0 is not"),
        ("[[bucket]]\ntokens = 64\nwindows = 3", 1, "windows = 3: kimi_k25 has no attention windows"),
        ('[[bucket]]\ntokens = 64\nattention = "flash"', 1, "attention = 'flash' is not known; known: auto, dense"),
        ("[[bucket]]\ntokens = 64\nbudget = 3", 1, "unknown key 'budget'"),
        ("[[bucket]]\ntokens = 64\nconstant = 1.0", 1, "constant and slope belong together"),
        ("[[bucket]]\ntokens = 64\nconstant = -1.0\nslope = 1", 1, "constant: -1.0 is not"),
        ("[[bucket]]\ntokens = 64\nconstant = inf\nslope = 1", 1, "constant: inf is not"),
        ("[[bucket]]\ntokens = 64\nconstant = 1\nslope = 1\n[[bucket]]\ntokens = 65", 5, "in every bucket or in none"),
        (f"[[bucket]]\ntokens = {2**31}", 1, "tokens: 2147483648 is more than a device's indices reach"),
        (f"[[bucket]]\ntokens = {2**30}", 1, "patches: 4294967296 is more than a device's indices reach"),
        ("[[bucket]]\ntokens = nan", 1, "tokens: nan is not a positive integer"),
        ("[[bucket]]\ntokens = " + "9" * 5000, None, "not a ladder file"),
        ("[[bucket]]\ntokens = " + "[" * 100_000, None, "not a ladder file"),
        ("[[bucket]]\ntokens = 0x1" + "0" * 9000, 1, "tokens: a number of 36001 bits is more than"),
        ("buckets = 3", None, "unknown key 'buckets'"),
        ("", None, "at least one [[bucket]] table"),
        ("bucket = 3", None, "at least one [[bucket]] table"),
        ("bucket = [3]", 1, "3 is not a table"),
    ],
)
def test_a_bad_file_is_refused_with_file_line_and_value(tmp_path: Path, text: str, line: int | None, said: str):
    path = written(tmp_path, text)
    with pytest.raises(LadderError, match=re.escape(said)) as caught:
        from_file(path, family("kimi_k25"))
    assert str(caught.value).startswith(f"{path}:{line}: " if line else str(path))


def test_a_bucket_that_no_piece_can_use_is_refused_by_patches_and_by_windows_too(tmp_path: Path):
    with pytest.raises(LadderError, match=r"patches = 192: no piece can use it, the smallest of lfm2_vl has 256"):
        from_file(written(tmp_path, "[[bucket]]\ntokens = 64\npatches = 192"), family("lfm2_vl"))
    with pytest.raises(LadderError, match="windows: 0 is not a positive integer"):
        from_file(written(tmp_path, "[[bucket]]\ntokens = 64\nwindows = 0"), family("qwen2_5_vl"))


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_ladder_errors(tmp_path: Path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe.toml")
    for name in ("absent.toml", "", "bytes.toml", "pipe.toml", "zero\0.toml"):
        with pytest.raises(LadderError, match=r"cannot be read|is no file"):
            from_file(tmp_path / name, family("kimi_k25"))


def test_a_ladder_made_in_code_must_ascend_as_well():
    with pytest.raises(LadderError, match="at least one bucket"):
        Ladder((), "nothing")
    with pytest.raises(LadderError, match="a bucket of 64 tokens after one of 64"):
        Ladder((Bucket(64, 256, 1), Bucket(64, 256, 1)), "twice")


# Tuned ladders


def tune(folder: Path, name: str, tokens: int, **match) -> None:
    write(from_budgets(family("qwen2_5_vl"), [tokens]), folder / "chip" / name, match)


def test_a_tuned_ladder_is_taken_where_family_device_and_sizes_match(data: Path):
    tune(data, "a.toml", 70, family="qwen2_5_vl", device="NVIDIA H200", sizes={"depth": 32})
    tune(data, "b.toml", 71, family="qwen2_5_vl", device="NVIDIA H200", sizes={"depth": 32, "hidden_size": 1280})
    tune(data, "c.toml", 72, family="qwen2_5_vl", device="NVIDIA H200", sizes={"depth": 31, "hidden_size": 1280})
    tune(data, "d.toml", 73, family="qwen2_5_vl", device="NVIDIA B200", sizes={"depth": 32, "hidden_size": 1280})
    tune(data, "e.toml", 74, family="kimi_k25", device="NVIDIA H200", sizes={})
    tune(data, "f.toml", 75, family="qwen2_5_vl", device="NVIDIA H200", sizes={"no_such_size": 1})
    found = find(family("qwen2_5_vl"), "NVIDIA H200")
    assert found is not None
    assert found.buckets[0].tokens == 71  # the one that names most sizes
    assert found.source.endswith("b.toml")
    assert find(family("qwen2_5_vl"), "NVIDIA A100") is None
    assert find(family("lfm2_vl"), "NVIDIA H200") is None


def test_load_takes_the_tuned_ladder_else_the_default(data: Path):
    tune(data, "a.toml", 70, family="qwen2_5_vl", device="NVIDIA H200", sizes={"depth": 32})
    assert [bucket.tokens for bucket in resolve(family("qwen2_5_vl"), None, H200)] == [70]
    default = resolve(family("qwen2_5_vl"), None, CPU_DEVICE)
    assert default == default_ladder(family("qwen2_5_vl"), "cpu")
    # The ladder was not the user's choice, so max_pieces lowers its capacity and is no contradiction.
    assert resolve(family("qwen2_5_vl"), None, H200, 71).buckets[0].segments == 17
    assert resolve(family("qwen2_5_vl"), None, H200, 3).buckets[0].segments == 3


def test_load_takes_budgets_and_files(data: Path):
    assert [bucket.tokens for bucket in resolve(family("kimi_k25"), [100], CPU_DEVICE)] == [100]
    path = written(data, "[[bucket]]\ntokens = 90")
    for name in (path, str(path)):
        assert [bucket.tokens for bucket in resolve(family("kimi_k25"), name, CPU_DEVICE)] == [90]


def test_costs_are_measured_ones_else_those_of_the_platform():
    plain = from_budgets(family("kimi_k25"), [64], platform="cpu")
    rule = rule_of("kimi_k25", "cpu")
    assert plain.constant(plain.buckets[0]) == rule.call + 256 * rule.patch
    assert plain.slope(plain.buckets[0]) == rule.square
    measured = replace(plain.buckets[0], constant=0.0, slope=0.0)
    assert (plain.constant(measured), plain.slope(measured)) == (0.0, 0.0)


# Overflow


def test_overflow_buckets_are_the_top_times_powers_of_the_step(any_family: Family):
    ladder = from_budgets(any_family, [64, 100])
    top = ladder.buckets[-1]
    seen = set()
    for tokens in range(101, 400):
        demand = Demand(4 * tokens, tokens, 1, 1 if top.windows else 0)
        bucket = overflow_bucket(ladder, demand, 1.5)
        assert bucket.holds(demand)
        assert bucket.patches % BLOCK == 0
        assert bucket.tokens < 1.5 * tokens + 1
        seen.add(bucket.tokens)
    assert seen == {150, 225, 337, 506}


@pytest.mark.parametrize("axis", Demand._fields)
def test_overflow_rounds_up_on_every_axis(axis: str):
    ladder = from_budgets(family("qwen2_5_vl"), [64, 100])
    top = ladder.buckets[-1].capacity
    assert overflow_bucket(ladder, top).capacity == top
    demand = top._replace(**{axis: getattr(top, axis) + 1})
    bucket = overflow_bucket(ladder, demand)
    assert not ladder.holds(demand)
    assert bucket.holds(demand)
    assert bucket.capacity != top


def test_overflow_starts_from_the_largest_capacity_on_each_axis():
    ladder = Ladder((Bucket(64, 1024, 4), Bucket(128, 512, 9)), "crossed")
    assert overflow_bucket(ladder, Demand(1000, 100, 1, 0)) == Bucket(128, 1024, 9)


@pytest.mark.parametrize("axis", Demand._fields)
def test_the_axis_on_which_a_piece_does_not_fit_is_named(axis: str):
    bucket = Bucket(64, 256, 4, 20)
    ladder = Ladder((replace(bucket, tokens=32), bucket), "two")
    assert ladder.nearest(bucket.capacity) == (bucket, ())
    demand = bucket.capacity._replace(**{axis: getattr(bucket, axis) + 1})
    assert ladder.nearest(demand) == (bucket, (axis,))
    assert ladder.nearest(Demand(*(need + 1 for need in bucket.capacity))) == (bucket, AXES)


def test_the_nearest_bucket_lacks_fewest_axes_then_least():
    wide, long = Bucket(64, 1024, 4, 3), Bucket(128, 512, 4, 2)
    ladder = Ladder((wide, long), "crossed")
    assert ladder.nearest(Demand(1024, 65, 1, 0)) == (wide, ("tokens",))
    assert ladder.nearest(Demand(600, 128, 1, 0)) == (long, ("patches",))
    assert ladder.nearest(Demand(256, 64, 1, 4)) == (wide, ("windows",))
    assert ladder.nearest(Demand(256, 65, 1, 7)) == (long, ("windows",))


def test_buckets_of_equal_tokens_have_names_of_their_own_and_others_keep_theirs():
    ladder = Ladder((Bucket(64, 256, 1), Bucket(64, 256, 8), Bucket(128, 512, 8)), "alike")
    assert [ladder.name(bucket) for bucket in ladder] == [
        "64 tokens, 1 segments",
        "64 tokens, 8 segments",
        "128 tokens",
    ]
    larger, largest = Bucket(128, 576, 8), Bucket(128, 640, 8, 9)
    assert ladder.name(larger) == "128 tokens, 576 patches"
    names = [ladder.name(bucket, (larger, largest)) for bucket in (larger, largest)]
    assert names == ["128 tokens, 576 patches, 0 windows", "128 tokens, 640 patches, 9 windows"]


# What ships

SHIPPED = {
    "kimi_k2_5": "moonshotai--Kimi-K2.5",
    "qwen2_5_vl_7b": "Qwen--Qwen2.5-VL-7B-Instruct",
    "lfm2_5_vl_450m": "LiquidAI--LFM2.5-VL-450M",
    "lfm2_5_vl_1_6b": "LiquidAI--LFM2.5-VL-1.6B",
}
"""Tuned ladder of ``buckets/h200`` -> the checkpoint that it was measured for."""


@pytest.mark.parametrize("name", SHIPPED)
def test_on_its_device_a_checkpoint_takes_the_ladder_that_ships_for_its_tower(name: str, root: Path):
    tower = family_of(manifests.load(SHIPPED[name]).files)
    path = root / "buckets" / "h200" / f"{name}.toml"
    ladder = resolve(tower, None, H200)
    assert Path(ladder.source) == path
    assert ladder == find(tower, "NVIDIA H200")
    assert ladder.buckets == from_file(path, tower).buckets
    assert all(bucket.constant and bucket.attention != "auto" for bucket in ladder)
    for device in (CPU_DEVICE, SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")):
        assert "default" in resolve(tower, None, device).source
    for size in tomllib.loads(path.read_text())["match"]["sizes"]:
        other = replace(tower, config=replace(tower.config, **{size: getattr(tower.config, size) + 1}))
        assert find(other, "NVIDIA H200") is None, size


def test_every_tuned_ladder_that_ships_is_taken_by_a_checkpoint(root: Path):
    assert {path.stem for path in (root / "buckets").glob("*/*.toml")} == set(SHIPPED)


def test_loading_with_the_default_ladder_compiles_nothing_and_a_picture_its_bucket_alone():
    lazy = jaxvit.load(checkpoint("lfm2_5_vl"), dtype="float32", store=False)
    assert lazy.ladder.source == "default of lfm2_vl for cpu"
    assert len(lazy.ladder) > 1
    assert lazy.stats()["compilations"] == 0
    assert not lazy.dispatcher._ready
    for seed in range(2):
        lazy.encode(picture(64, 64, seed))
        assert lazy.stats()["compilations"] == 1
        assert [key[0] for key in lazy.dispatcher._ready] == list(lazy.ladder)[:1]


def test_shipped_ladders_and_the_readme_s_example_are_valid(root: Path, tmp_path: Path):
    for path in sorted((root / "buckets").glob("*/*.toml")):
        name = path.read_text().split('family = "')[1].split('"')[0]
        assert len(from_file(path, family(name))) > 0
    examples = re.findall(r"```toml\n(.*?)```", (root / "buckets" / "README.md").read_text(), re.DOTALL)
    assert examples
    for text in examples:
        assert len(from_file(written(tmp_path, text), family("kimi_k25"))) > 0


def test_the_readme_s_table_of_default_ladders_is_fresh(any_family: Family, root: Path):
    fine, short = (default_ladder(any_family, platform) for platform in ("gpu", "cpu"))
    first, last = fine.buckets[0].tokens, fine.buckets[-1].tokens
    cells = f"| {len(fine)} buckets, {first} to {last:,} tokens | {len(short)} |"
    assert cells in (root / "buckets" / "README.md").read_text(), cells


def test_no_code_of_the_buckets_names_a_family(root: Path):
    paths = sorted((root / "jaxvit" / "buckets").glob("*.py"))
    assert {"ladder", "planner", "rule", "executable", "dispatcher"} <= {path.stem for path in paths}
    for path in paths:
        code = path.read_text().lower()
        assert not [word for word in ("qwen", "kimi", "lfm2", "siglip", "moonvit") if word in code], path.name
