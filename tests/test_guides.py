"""The guides' pictures are those that the code makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from jaxvit import guides

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("name", guides.PICTURES)
def test_the_picture_was_drawn_from_what_the_code_says_now(name: str) -> None:
    _, data = guides.PICTURES[name]
    found = guides.data_of(guides.place(name))
    assert found == json.loads(json.dumps(data())), "draw it again: python -m jaxvit.guides"


@pytest.mark.parametrize("name", guides.PICTURES)
def test_the_picture_is_small_enough_for_a_repository(name: str) -> None:
    assert guides.place(name).stat().st_size < 500_000


def test_a_picture_is_drawn_with_its_data(tmp_path: Path) -> None:
    guides.write("buckets/ladders.png", tmp_path / "ladders.png")
    assert guides.data_of(tmp_path / "ladders.png") == guides.data_of(guides.place("buckets/ladders.png"))
    with Image.open(tmp_path / "ladders.png") as ours, Image.open(guides.place("buckets/ladders.png")) as shipped:
        assert ours.size == shipped.size


def test_the_tables_of_the_tuned_ladders_are_those_of_the_files() -> None:
    _, between, _ = guides.marked(guides.place("buckets/README.md").read_text(encoding="utf-8"))
    assert between == guides.tuned_tables(), "write them again: python -m jaxvit.guides"


def test_the_call_of_the_picture_fits_its_bucket() -> None:
    data = guides.ladders_data()
    call = data["call"]
    assert call["bucket"] in data["ladders"][call["family"]]["gpu"]
    assert 0.8 * call["bucket"] < sum(call["tokens"]) <= call["bucket"]
