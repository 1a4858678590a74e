import pytest

from jaxvit.weights import manifests
from jaxvit.weights.files import BITS


def test_manifests_are_found_by_name_and_by_repository():
    assert len(manifests.names()) >= 10
    for name in manifests.names():
        manifest = manifests.load(name)
        assert manifest.repo_id.replace("/", "--") == name
        assert manifests.load(manifest.repo_id) == manifest


@pytest.mark.parametrize("name", manifests.names())
def test_a_manifest_is_a_checkpoint_on_paper(name):
    manifest = manifests.load(name)
    assert {"model_type", "vision_config"} <= set(manifest.files["config.json"])
    assert {"preprocessor_config.json", "processor_config.json"} & set(manifest.files)
    assert all(dtype in BITS and all(extent > 0 for extent in shape) for shape, dtype in manifest.tensors.values())
    assert len(manifest.tensors) > 200


def test_an_unknown_manifest_lists_those_there_are():
    with pytest.raises(KeyError, match=r"there are .*, Qwen/Qwen2\.5-VL-7B-Instruct"):
        manifests.load("Qwen/Qwen9")
