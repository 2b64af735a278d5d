"""The benchmark of staging on a few ranks: complete, and nothing of it stays."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.full
def test_staging_benchmark_measures_all_ways() -> None:
    command = [sys.executable, "-m", "scripts.bench.staging", "--layers", "1", "--runs", "1"]
    command += ["--ranks", "2", "--parts", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parts"] == 2
    for way in ("one part", "one after another", "side by side"):
        assert found[way].keys() == {"intake_ms", "cpu_s", "wall_ms", "peak_mb"}
        assert found[way]["cpu_s"] > 0
        assert way in done.stdout
