"""Each benchmark runs with little to do, exits with 0 and ends with a line of JSON if asked."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Final
from unittest import mock

import pytest
import torch

REPEATS: Final = ["--repeats", "1", "--json"]
RUNS: Final = ["--runs", "1", "--json"]
THREADS: Final = ["--threads", str(torch.get_num_threads())]
IN_PROCESS: Final = {
    "apply": ["--without-engine", "--layers", "1", *THREADS, *RUNS],
    "codec": ["--elements", "2000000", "--threads", "1", "--real-steps", "0", *REPEATS],
    "device_digest": ["--device", "cpu", "--elements", "10000", *RUNS],
    "device_staging": ["--device", "cpu", "--elements", "100000", *RUNS],
    "log_size": ["--elements", "200000", "--json"],
    "pipeline": [
        "--elements",
        "700000",
        "--round-trip",
        "4",
        "--megabytes-per-second",
        "400",
        *REPEATS,
    ],
    "quantised_density": ["--rows", "256", "--columns", "1024", "--density", "0.02", "--json"],
    "receive": ["--part-mb", "1", "--parts", "2", *RUNS],
    "scaling": [],
    "sender": ["--elements", "2500001", "--threads", "2", *REPEATS],
    "tensor_sizes": ["--elements", "65536", "--most", "50", *REPEATS],
}
IN_A_PROCESS_OF_ITS_OWN: Final = {
    "staging": ["--layers", "1", "--ranks", "2", "--parts", "2", *RUNS],
    "startup": ["--layers", "1", "--turns", "1", "--threads", "1", *RUNS],
    "full_sync": ["--layers", "1", "--threads", "1", *RUNS],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PROCESS)
def test_benchmark_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ):
        program = importlib.import_module(f"scripts.bench.{name}")
        assert program.main(IN_PROCESS[name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) if "--json" in IN_PROCESS[name] else lines


@pytest.mark.full
@pytest.mark.parametrize("name", IN_A_PROCESS_OF_ITS_OWN)
def test_benchmark_runs_in_a_process(name: str) -> None:
    command = [sys.executable, "-m", f"scripts.bench.{name}", *IN_A_PROCESS_OF_ITS_OWN[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])
