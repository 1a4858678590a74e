"""From the start of a process to its first embedding, with an empty and with a filled executable store.

``python -m jaxvit.bench.start FOLDER STORE DTYPE BUDGET...`` is the process that is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUNGS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
"""Budgets of the ladder that is started, in tokens."""
STARTED = "JAXVIT_BENCH_STARTED"


def starts(folder: Path, dtype: str, budgets: Sequence[int] = RUNGS, store: Path | None = None) -> dict[str, Any]:
    """Starts a process twice: on an empty store, then on the one that the first has filled.

    ``build_seconds`` is the time until every rung is compiled or loaded, in parallel threads; ``compile_seconds`` the
    sum over the rungs. The warm-up comes after both.

    Args:
        store: an empty folder; None for a temporary one.
    """
    with tempfile.TemporaryDirectory(prefix="jaxvit-store-") as temporary:
        runs = {name: _start(folder, store or Path(temporary), dtype, budgets) for name in ("empty", "filled")}
    compiled, loaded = runs["empty"]["build_seconds"], runs["filled"]["build_seconds"]
    return {"budgets": list(budgets), **runs, "compile_over_load": compiled / max(loaded, 1e-9)}


def _start(folder: Path, store: Path, dtype: str, budgets: Sequence[int]) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxvit.bench.start", str(folder), str(store), dtype, *map(str, budgets)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, STARTED: repr(time.time())}
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the started process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: str, store: str, dtype: str, *budgets: str) -> None:
    """Loads, warms every rung, encodes one picture; prints the seconds at which each was done."""
    started = float(os.environ[STARTED])
    import jax
    import numpy as np

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(event) if "backend_compile_duration" in event else None
    )
    import jaxvit
    from jaxvit.buckets.executable import Executable, Program

    marks = {"imported": time.time() - started}
    encoder = jaxvit.load(folder, dtype=dtype, budgets=[int(budget) for budget in budgets], store=store)
    jax.block_until_ready(encoder.dispatcher.weights)
    marks["loaded"] = time.time() - started
    build, ready = encoder.dispatcher.build, list[float]()

    def timed(program: Program, device: jax.Device) -> Executable:
        executable = build(program, device)
        ready.append(time.perf_counter())
        return executable

    encoder.dispatcher.build = timed
    start = time.perf_counter()
    encoder.warmup()
    built = max(ready) - start
    marks["warmed"] = time.time() - started
    picture = np.random.default_rng(0).integers(0, 256, (448, 448, 3), dtype=np.uint8)
    tokens, width = encoder.encode(picture)[0].shape
    marks["first_embedding"] = time.time() - started
    stats = encoder.stats()
    print(
        json.dumps(
            {
                **marks,
                "build_seconds": built,
                "compile_seconds": stats["compile_seconds"],
                "compilations": stats["compilations"],
                "backend_compilations": len(compiled),
                "store_hits": stats["store_hits"],
                "embedding": [tokens, width],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
