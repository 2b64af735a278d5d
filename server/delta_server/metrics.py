"""What Prometheus is told of the syncs; it stands in the engine's own ``/metrics``.

The metrics go to the process's default registry, which is the one that the engines serve. An engine
that has several processes has set ``PROMETHEUS_MULTIPROC_DIR`` before this module is imported (as
prometheus_client wants it), and adds up what all of them have counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram

from engine_ext.errors import BaseMismatch, DeltaError

_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300,
)  # fmt: skip
_SHARES: Final = (1e-5, 1e-4, 1e-3, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)

_SYNCS: Final = Counter(
    "delta_updates_syncs",
    "Update requests by outcome: committed, staged (parts are missing), already_applied, "
    "rolled_back, refused, undone, uncertain, unpublished, failed. 'error' is the answer's type.",
    ["outcome", "error"],
)
_DENIED: Final = Counter(
    "delta_updates_denied",
    "Requests refused for a missing or wrong token, or from another host.",
    ["error"],
)
_BYTES: Final = Counter("delta_updates_bytes", "Bytes of completely received parts.")
_ELEMENTS: Final = Counter("delta_updates_elements", "Elements sent by committed syncs.")
_DENSITY: Final = Histogram(
    "delta_updates_density",
    "Elements sent by a committed sync over all elements of the tensors it names.",
    buckets=_SHARES,
)
_PHASES: Final = Histogram(
    "delta_updates_phase_seconds",
    "Seconds of a request by phase: receive, stage, pause (of generation), commit (the writes, "
    "within the pause).",
    ["phase"],
    buckets=_SECONDS,
)
_MISMATCHES: Final = Counter(
    "delta_updates_digest_mismatches",
    "Syncs and scans that found other bits in the engine than expected.",
)
_VERSION: Final = Gauge(
    "delta_updates_version",
    "Version of the live weights.",
    multiprocess_mode="mostrecent",
)


# What leaves the weights at the version that a request names.
_AT_ITS_VERSION: Final = ("committed", "rolled_back", "already_applied", "unpublished")


def count(record: Mapping[str, Any], error: Exception | None) -> None:
    """Count what became of one request.

    Args:
        record: as `delta_server.request_record.Outcome.record` makes it.
        error: what it was refused with, or None.
    """
    _SYNCS.labels(record["outcome"], record.get("error") or "").inc()
    _BYTES.inc(record["bytes"])
    for phase, milliseconds in record["timings_ms"].items():
        _PHASES.labels(phase.removesuffix("_ms")).observe(milliseconds / 1e3)
    if record["outcome"] == "committed":
        _ELEMENTS.inc(record["nnz"])
        if record["elements"]:
            _DENSITY.observe(record["nnz"] / record["elements"])
    if record["outcome"] in _AT_ITS_VERSION and record["version"] is not None:
        set_version(record["version"])
    if isinstance(error, BaseMismatch) and "actual" in error.operands:
        count_mismatch()


def count_denied(error: DeltaError) -> None:
    """Count a request that may not use the endpoints."""
    _DENIED.labels(type(error).__name__).inc()


def count_mismatch() -> None:
    """Count bits that were not the expected ones."""
    _MISMATCHES.inc()


def set_version(version: int) -> None:
    """Tell the version of the live weights."""
    _VERSION.set(version)
