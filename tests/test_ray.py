"""Ray Data over two local workers, and the class alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxvit
from jaxvit.ray import Encode
from tests.families import checkpoint, picture, relative

OPTIONS: dict[str, Any] = {"dtype": "float32", "budgets": [64, 256], "processor": {"max_pixels": 50176}}


@pytest.mark.parametrize("column", ["path", "bytes", "image"])
def test_a_batch_keeps_its_rows_and_gains_embeddings_and_errors(photos: dict[str, Path], tmp_path: Path, column: str):
    encode = Encode(str(checkpoint("qwen2_5_vl")), column=column, store=False, **OPTIONS)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"nothing")
    paths = [photos["chelsea"], broken, photos["rocket"]]
    media = {
        "path": list(map(str, paths)),
        "bytes": [path.read_bytes() for path in paths],
        "image": [picture(84, 84), picture(84, 84).astype(np.float32), picture(56, 112)],
    }[column]
    values = np.empty(3, object)
    values[:] = media
    found = encode({"id": np.arange(3), column: values})
    assert list(found["id"]) == [0, 1, 2]
    assert (column in found) == (column == "path")
    assert [bool(error) for error in found["error"]] == [False, True, False]
    assert "item" not in found["error"][1]
    assert found["embeddings"][1].shape == (0, encode.encoder.family.width)
    assert found["grids"][1].shape == (0, 3)
    expected = encode.encoder.encode([media[0], media[2]])
    for row, theirs in zip((0, 2), expected, strict=True):
        assert relative(found["embeddings"][row], theirs) <= 1e-5
        assert found["grids"][row].prod() // 4 == len(theirs)
        assert json.loads(found["layout"][row])["merge_size"] == 2


class Together(Encode):
    """Notes which process a row ran in, and starts only when both workers have loaded."""

    def __init__(self, model: str, folder: str, **options: Any):
        super().__init__(model, **options)
        self.folder = Path(folder)
        (self.folder / f"loaded-{os.getpid()}").touch(exist_ok=False)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while len(list(self.folder.glob("loaded-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return super().__call__(batch) | {"worker": [os.getpid()] * len(batch["path"])}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_workers_embed_photographs_as_one_process_does(
    photos: dict[str, Path], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    workers = {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "HF_HUB_OFFLINE": "1"}
    paths = [str(path) for path in photos.values()]
    missing = str(tmp_path / "missing.png")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": workers})
    try:
        found = (
            ray.data.from_items([{"path": path} for path in [*paths, missing] * 3])
            .map_batches(
                Together,
                fn_constructor_args=(str(checkpoint("qwen2_5_vl")), str(tmp_path)),
                fn_constructor_kwargs=OPTIONS,
                compute=ray.data.ActorPoolStrategy(size=2),
                batch_size=2,
            )
            .materialize()
        )
        found.drop_columns(["layout"]).write_parquet(str(tmp_path / "parquet"))
        rows = found.take_all()
        stored = ray.data.read_parquet(str(tmp_path / "parquet")).take_all()
    finally:
        ray.shutdown()
    assert len(list(tmp_path.glob("loaded-*"))) == 2
    assert len({row["worker"] for row in rows}) == 2
    assert sorted(row["path"] for row in rows) == sorted([*paths, missing] * 3)
    local = jaxvit.load(checkpoint("qwen2_5_vl"), **OPTIONS)
    expected = dict(zip(paths, local.encode(paths), strict=True))
    for row in (*rows, *stored):
        if row["path"] == missing:
            assert "cannot be read" in row["error"]
            assert len(row["embeddings"]) == 0
        else:
            assert row["error"] == ""
            assert relative(row["embeddings"], expected[row["path"]]) <= 1e-5
