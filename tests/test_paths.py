import shutil
import subprocess
import sys

import pytest

from jaxvit.paths import data


@pytest.mark.parametrize("name", ["buckets", "weights"])
def test_a_clone_finds_the_folders_beside_the_package(root, name):
    assert data(name) == root / name


def test_a_wheel_finds_the_folders_inside_the_package(root, tmp_path):
    package = tmp_path / "jaxvit"
    (package / "_data" / "weights").mkdir(parents=True)
    shutil.copy(root / "jaxvit" / "paths.py", package)
    (package / "__init__.py").write_text("")
    code = "from jaxvit.paths import data; print(data('weights')); print(data('buckets'))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(package / "_data" / "weights"), str(tmp_path / "buckets")]
