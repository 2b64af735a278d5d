"""What several processes of one engine count, as Prometheus gets it from any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, multiprocess

COUNTS = """
import sys
from delta_server import metrics
from engine_ext.wire.operations import SyncRecord
sync = SyncRecord(
    at=0.0, outcome="committed", version=int(sys.argv[1]), bytes=10, nnz=2, elements=100,
    timings_ms={"pause_ms": 3.0},
)
metrics.count(sync, None)
"""


def test_processes_are_added_up_and_the_last_version_counts(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
    }
    for version in ("9", "5"):
        command = [sys.executable, "-c", COUNTS, version]
        subprocess.run(command, env=environment, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    labels = {"outcome": "committed", "error": ""}
    assert registry.get_sample_value("delta_updates_syncs_total", labels) == 2
    assert registry.get_sample_value("delta_updates_bytes_total") == 20
    phase = {"phase": "pause"}
    assert registry.get_sample_value("delta_updates_phase_seconds_count", phase) == 2
    assert registry.get_sample_value("delta_updates_version") == 5
