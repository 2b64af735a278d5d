"""``delta-conformance --model`` on an installed vLLM: random weights of a configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

KINDS = ("sparse 40 %", "alone")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_kinds_of_syncs_are_exact(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    given = json.loads((checkpoint("qwen3") / "config.json").read_text())
    config.write_text(json.dumps({**given, "max_position_embeddings": 64}))
    flags = ["--delta-keep-plain", "--kv-cache-memory-bytes", "64M"]
    only = [word for kind in KINDS for word in ("--only", kind)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "engine_ext.cli.conformance"),
            *("--model", str(config), "--json", *only, *flags),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert {row["status"] for row in found["plan"]} == {"exact"}
    assert found["unsteady"] == []
    assert {sync["outcome"] for sync in found["syncs"]} == {"exact"}
    names = [sync["sync"] for sync in found["syncs"]]
    assert names[:2] == ["start with delta updates", "sparse 40 %"]
    assert "only model.layers.0.mlp.down_proj.weight" in names
