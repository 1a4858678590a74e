"""Configuration of Qwen2.5-VL: what is read, from where, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxvit.errors import CheckpointError
from jaxvit.models.qwen2_5_vl.config import Config
from jaxvit.weights import manifests

VISION = {
    "hidden_size": 64,
    "depth": 4,
    "num_heads": 4,
    "intermediate_size": 108,
    "out_hidden_size": 96,
    "fullatt_block_indexes": [1, 3],
    "hidden_act": "silu",
    "in_chans": 3,
}
TEXT = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008}
"""The language model's values, which old configurations hold in the root and new ones in text_config."""


def config_of(vision: Any, **root: Any) -> Config:
    return Config.from_files({"config.json": {"model_type": "qwen2_5_vl", **TEXT, "text_config": TEXT, **root}
                              | ({} if vision is None else {"vision_config": vision})})  # fmt: skip


def test_both_spellings_give_the_same_configuration():
    renamed = {"num_heads": "num_attention_heads", "in_chans": "in_channels"}
    other = {renamed.get(name, name): value for name, value in VISION.items()}
    assert config_of(VISION) == config_of(other) == config_of(VISION | other)


def test_values_of_the_root_and_of_the_text_never_stand_in_for_the_tower():
    with pytest.raises(CheckpointError, match=r"vision_config of config.json: hidden_size is missing"):
        config_of({})
    found = config_of({"hidden_size": 64})
    assert (found.depth, found.num_heads, found.intermediate_size, found.out_hidden_size) == (32, 16, 3420, 3584)


@pytest.mark.parametrize("name", [name for name in manifests.names() if "Qwen2.5" in name])
def test_the_published_configurations_are_read(name: str):
    found = Config.from_files(manifests.load(name).files)
    assert (found.hidden_size, found.depth, found.head_dim, found.window_cells) == (1280, 32, 80, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 17}, r"num_heads \(17\) does not divide hidden_size \(64\)"),
        ({"num_heads": 32}, r"4 \(4\) does not divide the head dim \(2\)"),
        ({"num_attention_heads": 8}, "num_heads is 4 and num_attention_heads is 8, two spellings of one field"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu' is implemented"),
        ({"in_chans": 1}, "in_channels is 1"),
        ({"temporal_patch_size": 4}, "temporal_patch_size is 4, and only 2 is implemented"),
        ({"window_size": 100}, r"a merged cell in pixels \(28\) does not divide window_size \(100\)"),
        ({"depth": 0}, "depth must be a positive integer, got 0"),
        ({"depth": 10**9}, "depth is 1000000000, and at most 1024 is implemented"),
        ({"fullatt_block_indexes": None, "tokens_per_second": "2"}, "tokens_per_second must be a finite number"),
        ({"fullatt_block_indexes": 7}, "fullatt_block_indexes must be a list of integers from 0, got 7"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a finite number above 0, got 0"),
    ],
    ids=str,
)
def test_what_the_tower_does_not_do_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        config_of(VISION | change)


@pytest.mark.parametrize("vision", [None, [], "none"])
def test_a_checkpoint_without_vision_config_is_refused(vision: Any):
    with pytest.raises(CheckpointError, match=r"no vision_config: this is no Qwen2.5-VL checkpoint .*text-only"):
        config_of(vision)
