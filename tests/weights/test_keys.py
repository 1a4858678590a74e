import numpy as np
import pytest

from jaxvit.weights.keys import Key, KeyTable, convolution, transpose


def test_a_key_turns_a_name_into_a_parameter_path_and_back():
    key = Key(r"blocks\.(\d+)\.(norm1|norm2)\.weight", r"blocks.\1.\2.scale")
    assert key.parameter("blocks.31.norm2.weight") == "blocks.31.norm2.scale"
    assert key.name("blocks.31.norm2.scale") == "blocks.31.norm2.weight"


def test_a_key_matches_whole_names_only():
    key = Key(r"blocks\.(\d+)\.norm\.weight", r"blocks.\1.norm.scale")
    assert key.parameter("blocks.0.norm.weight_scale") is None
    assert key.parameter("x.blocks.0.norm.weight") is None
    assert key.name("blocks.0.norm.bias") is None


def test_a_key_does_not_invent_a_name_that_it_would_not_match():
    assert Key(r"blocks\.(\d+)\.norm(?:a|b)\.weight", r"blocks.\1.norm.scale").name("blocks.0.norm.scale") is None
    assert Key(r"rotary\.inv_freq", None).name("rotary.inv_freq") is None


def test_groups_may_change_places():
    key = Key(r"(\d+)\.(fc1|fc2)\.weight", r"\2.\1.kernel")
    assert key.parameter("7.fc1.weight") == "fc1.7.kernel"
    assert key.name("fc1.7.kernel") == "7.fc1.weight"


def test_the_longest_prefix_of_all_spellings_counts():
    table = KeyTable(({"tower.": ""}, {"tower.inner.": ""}), ())
    assert table.prefix("tower.inner.blocks.0") == "tower.inner."
    assert table.prefix("tower.blocks.0") == "tower."
    assert table.prefix("model.tower.blocks.0") is None


def test_transpose_gives_a_kernel_of_inputs_by_outputs_and_takes_matrices_only():
    weight = np.arange(24).reshape(6, 4)
    np.testing.assert_array_equal(np.arange(4) @ transpose(weight), weight @ np.arange(4))
    for shape in ((24,), (6, 4, 1), (6, 2, 2)):
        with pytest.raises(ValueError, match="matrix"):
            transpose(weight.reshape(shape))


def test_convolution_flattens_channels_then_rows_then_columns():
    weight = np.arange(6 * 3 * 2 * 2).reshape(6, 3, 2, 2)
    patch = np.arange(12).reshape(3, 2, 2)
    np.testing.assert_array_equal(patch.reshape(-1) @ convolution(weight), (weight * patch).sum((1, 2, 3)))
    for shape in ((6, 12), (6, 2, 2, 3), (6, 3, 1, 2, 2)):
        with pytest.raises(ValueError, match="convolution"):
            convolution(weight.reshape(shape))
