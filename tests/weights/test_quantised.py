import json

import ml_dtypes
import numpy as np
import pytest

from jaxvit.errors import CheckpointError
from jaxvit.weights.load import dtype_of, load_parameters

E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
QKV = "visual.blocks.0.attn.qkv.weight"
FC = "projector.fc.weight"


def refused(folder, toy) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_parameters(folder, toy.table, toy.shapes, np.float32)
    return caught.value


def load(folder, toy) -> dict[str, np.ndarray]:
    return dict(load_parameters(folder, toy.table, toy.shapes, np.float32))


@pytest.fixture
def plain(toy, text):
    return {**toy.tensors(), **text}


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "compressed-tensors"}},
                                    {"text_config": {"quantization_config": {"quant_method": "fp8"}}}])  # fmt: skip
def test_a_quantised_language_model_beside_a_plain_vision_part_loads(tmp_path, toy, plain, write, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain["model.layers.0.mlp.experts.weight"] = np.ones((4, 4), E4M3)
    write(tmp_path / "model.safetensors", plain)
    for path, value in load(tmp_path, toy).items():
        np.testing.assert_array_equal(value, toy.parameters()[path])


@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale_dtype", [np.float32, BF16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (24,), (24, 1), (6, 2), (3, 1)])
def test_float8_gets_its_scale(tmp_path, toy, plain, write, ending, dtype, scale_dtype, shape):
    """One value, one a row, one a block of 4 x 4 or of 9 x 9, which is cut short at the edges; both names multiply."""
    block = {(6, 2): [4, 4], (3, 1): [9, 9]}.get(shape)
    config = {"quantization_config": {"weight_block_size": block}} if block else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((24, 8)).astype(dtype)
    scale = rng.uniform(0.5, 2, shape).astype(scale_dtype)
    write(tmp_path / "model.safetensors", {**plain, QKV: weight, QKV + ending: np.asarray(scale)})
    factors = np.asarray(scale, np.float32)
    if block:
        factors = np.kron(factors, np.ones(block, np.float32))[:24, :8]
    elif shape == (24,):
        factors = factors[:, None]
    expected = weight.astype(np.float32) * factors
    np.testing.assert_array_equal(load(tmp_path, toy)["blocks.0.attn.qkv.kernel"], expected.T)


def test_blocks_are_128_by_128_unless_the_config_says_otherwise(tmp_path, toy, plain, write):
    weight = np.ones((24, 8), E4M3)
    write(tmp_path / "model.safetensors", {**plain, QKV: weight, QKV + "_scale_inv": np.full((1, 1), 3, np.float32)})
    assert set(load(tmp_path, toy)["blocks.0.attn.qkv.kernel"].ravel()) == {3.0}
    write(tmp_path / "model.safetensors", {**plain, QKV: weight, QKV + "_scale_inv": np.full((6, 2), 3, np.float32)})
    assert refused(tmp_path, toy).tensors == (QKV,)


def test_scales_of_activations_beside_a_scaled_weight_are_not_used(tmp_path, toy, plain, write):
    scales = {QKV + "_scale": np.float32([2]), QKV[:-6] + "input_scale": np.float32([7])}
    write(tmp_path / "model.safetensors", {**plain, QKV: np.ones((24, 8), E4M3), **scales})
    assert set(load(tmp_path, toy)["blocks.0.attn.qkv.kernel"].ravel()) == {2.0}


def test_float8_counts_as_bfloat16(tmp_path, toy, write):
    tensors = {name: array.astype(E4M3) for name, array in toy.tensors().items()}
    scales = {name + "_scale": np.ones(1, np.float32) for name in tensors}
    write(tmp_path / "model.safetensors", {**tensors, **scales})
    assert dtype_of(tmp_path, toy.table) == "bfloat16"
    assert len(load(tmp_path, toy)) == len(toy.shapes)


def test_float8_without_a_scale_is_refused_by_name(tmp_path, toy, plain, write):
    write(tmp_path / "model.safetensors", {**plain, QKV: np.ones((24, 8), E4M3)})
    error = refused(tmp_path, toy)
    assert error.tensors == (QKV,)
    assert "F8_E4M3 without a scale" in str(error)


@pytest.mark.parametrize("scale", [np.ones((2, 2), np.float32), np.ones(8, np.float32), np.ones((1, 8), np.float32),
                                   np.ones(1, np.int32), np.ones(1, ml_dtypes.float8_e8m0fnu)])  # fmt: skip
def test_a_scale_that_does_not_fit_is_refused_by_name(tmp_path, toy, plain, write, scale):
    write(tmp_path / "model.safetensors", {**plain, QKV: np.ones((24, 8), E4M3), QKV + "_scale": scale})
    error = refused(tmp_path, toy)
    assert error.tensors == (QKV,)
    assert "with a scale" in str(error)


@pytest.mark.parametrize(
    ("scheme", "held"),
    [
        ("AWQ or GPTQ", {"qweight": np.ones((8, 1), np.int32), "qzeros": np.ones((1, 1), np.int32),
                         "scales": np.ones((1, 6), np.float16)}),
        ("compressed-tensors", {"weight_packed": np.ones((6, 1), np.int32), "weight_scale": np.ones((6, 1), BF16),
                                "weight_shape": np.ones(2, np.int32)}),
        ("NVFP4", {"weight": np.ones((6, 4), np.uint8), "weight_scale": np.ones((6, 1), E4M3),
                   "weight_scale_2": np.ones((), np.float32)}),
        ("bitsandbytes", {"weight": np.ones((24, 1), np.uint8), "weight.absmax": np.ones(1, np.float32),
                          "weight.quant_map": np.ones(16, np.float32),
                          "weight.quant_state.bitsandbytes__nf4": np.ones(80, np.uint8)}),
        ("bitsandbytes", {"weight": np.ones((6, 8), np.int8), "SCB": np.ones(6, np.float32)}),
        ("I8", {"weight": np.ones((6, 8), np.int8), "weight_scale": np.ones((6, 1), np.float32)}),
        ("I32", {"weight": np.ones((6, 8), np.int32)}),
        ("F64", {"weight": np.ones((6, 8), np.float64)}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "awq"}}])
def test_a_quantised_projector_is_refused_by_name_and_scheme(tmp_path, toy, plain, write, scheme, held, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    del plain[FC]
    tensors = {FC[:-6] + leaf: array for leaf, array in held.items()}
    write(tmp_path / "model.safetensors", {**plain, **tensors})
    error = refused(tmp_path, toy)
    assert error.tensors == tuple(sorted(tensors))  # and nothing is called missing that is only packed
    assert scheme in str(error)
    assert ("quant_method 'awq'" in str(error)) == bool(config)


def test_a_scale_beside_a_plain_weight_is_not_passed_over(tmp_path, toy, plain, write):
    write(tmp_path / "model.safetensors", {**plain, QKV + "_scale": np.ones(1, np.float32)})
    error = refused(tmp_path, toy)
    assert error.tensors == (QKV + "_scale",)
