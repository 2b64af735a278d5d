"""What several processes of one engine count, as Prometheus gets it from any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

from tests.support.delta_bodies import VERSION, delta_part, fresh_weights, full_part
from tests.support.endpoint_rig import Rig

SHOWS = """
from prometheus_client import generate_latest
from delta_server import metrics
print(generate_latest().decode())
"""
# Each version is counted by a process of its own.
COUNTS = """
import os, sys
from delta_server import metrics
from engine_ext.ranks.operations import SyncRecord
for version in sys.argv[1:]:
    process = os.fork()
    if process == 0:
        sync = SyncRecord(
            at=0.0, outcome="committed", version=int(version), bytes=10, nnz=2, elements=100,
            timings_ms={"pause_ms": 3.0, "resume_ms": 1.0},
        )
        metrics.count(sync, None)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.mark.slow
def test_processes_are_added_up_and_the_last_version_counts(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", COUNTS, "9", "5"]
    subprocess.run(command, env=environment, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    labels = {"outcome": "committed", "error": ""}
    assert registry.get_sample_value("delta_updates_syncs_total", labels) == 2
    assert registry.get_sample_value("delta_updates_bytes_total") == 20
    phase = {"phase": "pause"}
    assert registry.get_sample_value("delta_updates_phase_seconds_count", phase) == 2
    # The parts of the pause are in the answer and the log alone.
    part = {"phase": "resume"}
    assert registry.get_sample_value("delta_updates_phase_seconds_count", part) is None
    assert registry.get_sample_value("delta_updates_version") == 5


@pytest.mark.slow
def test_failures_are_zero_before_the_first() -> None:
    """For Prometheus there is no increase from nothing to one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SHOWS]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    failures = {
        "undone": "WriteUndone",
        "uncertain": "CommitFailed",
        "unpublished": "CommittedNotResumed",
        "failed": "DeltaError",
    }
    for outcome, error in (failures | {"committed": ""}).items():
        series = f'delta_updates_syncs_total{{error="{error}",outcome="{outcome}"}}'
        assert f"{series} 0.0" in lines
    assert 'delta_updates_phase_seconds_count{phase="pause"} 0.0' in lines
    assert "delta_updates_uncertain 0.0" in lines


def test_uncertain_weights_are_shown_until_a_full_sync(rig: Rig) -> None:
    name = "delta_updates_uncertain"
    rig.send(delta_part())
    assert REGISTRY.get_sample_value(name) == 0
    assert rig.fail_commit(VERSION + 2).status_code == 500
    assert REGISTRY.get_sample_value(name) == 1
    assert rig.send(full_part(fresh_weights(), VERSION + 3)).status_code == 200
    assert REGISTRY.get_sample_value(name) == 0
