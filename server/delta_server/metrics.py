"""Prometheus metrics of the syncs, served by the engine's own ``/metrics``.

The metrics are in the process's default registry, which both engines serve. An engine with several
processes sets ``PROMETHEUS_MULTIPROC_DIR`` before this module is imported, as prometheus_client
requires, and adds up the counts of all processes.
"""

from __future__ import annotations

import os
import re
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from engine_ext.errors import (
    AccessDenied,
    BaseMismatch,
    CommitFailed,
    CommittedNotResumed,
    DeltaError,
    Unauthorized,
    WriteUndone,
)
from engine_ext.ranks.operations import SyncRecord

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
DENIED: Final = Counter(
    "delta_updates_denied",
    "Requests refused for a missing or wrong token, or from another host.",
    ["error"],
)
_BYTES: Final = Counter("delta_updates_bytes", "Bytes of completely received parts.")
_ELEMENTS: Final = Counter("delta_updates_elements", "Elements sent by committed syncs.")
_REBUILT: Final = Counter(
    "delta_updates_rebuilt_modules",
    "Modules that committed syncs had the engine's own post-load processing compute anew.",
)
_DENSITY: Final = Histogram(
    "delta_updates_density",
    "Elements sent by a committed sync over all elements of the tensors it names.",
    buckets=_SHARES,
)
_PHASES: Final = Histogram(
    "delta_updates_phase_seconds",
    "Seconds of a request by phase: receive, stage, prove (whole new tensors, within stage), "
    "rebuild (of quantised or packed modules, within stage), pause (of generation), commit (the "
    "writes, within the pause).",
    ["phase"],
    buckets=_SECONDS,
)
MISMATCHES: Final = Counter(
    "delta_updates_digest_mismatches",
    "Syncs and scans that found other bits in the engine than expected.",
)
SCRUB_MISMATCHES: Final = Counter(
    "delta_updates_scrub_mismatches",
    "Tensors that scrubbing found to hold other bits than the syncs have written, once per rank.",
)
VERSION: Final = Gauge(
    "delta_updates_version", "Version of the live weights.", multiprocess_mode="mostrecent"
)
_ADAPTER_VERSION: Final = Gauge(
    "delta_updates_adapter_version",
    "Version of the own tensors of a LoRA adapter that was synced.",
    ["adapter"],
    multiprocess_mode="mostrecent",
)

UNCERTAIN: Final = Gauge(
    "delta_updates_uncertain",
    "1 after a write that failed half-way, until a full sync has healed the weights; else 0.",
    multiprocess_mode="mostrecent",
)

PAUSED_SINCE: Final = Gauge(
    "delta_updates_paused_since",
    "Unix time since which a caller, not a commit, has paused generation; 0 if it is not paused.",
    multiprocess_mode="mostrecent",
)
BEHIND_LOG: Final = Gauge(
    "delta_updates_log_behind",
    "With --delta-follow: versions in the delta log after that of the weights.",
    multiprocess_mode="mostrecent",
)
LOG_DIVERGED: Final = Gauge(
    "delta_updates_log_diverged",
    "1 while the delta log does not continue the history of the weights' version; else 0.",
    multiprocess_mode="mostrecent",
)
FOLLOW_FAILURES: Final = Counter(
    "delta_updates_follow_failures",
    "With --delta-follow: looks at the delta log that could not bring the engine up to date.",
)

# Zero from the start: for Prometheus a counter that appears with its first event has no increase.
_PHASE_NAMES: Final = ("receive", "stage", "prove", "rebuild", "pause", "commit")
_FAILURES: Final = {
    "undone": WriteUndone,
    "uncertain": CommitFailed,
    "unpublished": CommittedNotResumed,
    "failed": DeltaError,
}
for _refusal in (Unauthorized, AccessDenied):
    DENIED.labels(_refusal.__name__)
for _phase in _PHASE_NAMES:
    _PHASES.labels(_phase)
_SYNCS.labels("committed", "")
for _outcome, _error in _FAILURES.items():
    _SYNCS.labels(_outcome, _error.__name__)

_FULL: Final = Counter(
    "delta_updates_full_syncs",
    "Committed full syncs by the first word of the reason that their sender gives: requested, "
    "first, restarted, uncertain, changed, behind, lost_track, other.",
    ["reason"],
)
_REASONS: Final = (
    "requested", "first", "restarted", "uncertain", "changed", "behind", "lost_track", "other",
)  # fmt: skip
for _reason in _REASONS:
    _FULL.labels(_reason)
_RUN: Final = Gauge(
    "delta_updates_run_info",
    "1 for the run that the weights are of; nothing while they are as loaded with the engine.",
    ["run"],
    multiprocess_mode="mostrecent",
)
_shown_runs: set[str] = set()


def show_run(run: str | None) -> None:
    """Show a run as that of the model's weights."""
    for other in _shown_runs - {run}:
        _RUN.labels(other).set(0)  # for other processes, which cannot be removed from
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            _RUN.remove(other)
    _shown_runs.clear()
    if run is not None:
        _shown_runs.add(run)
        _RUN.labels(run).set(1)


# Outcomes after which the weights are at the version that the request names.
_AT_ITS_VERSION: Final = ("committed", "rolled_back", "already_applied", "unpublished")


def count(sync: SyncRecord, error: Exception | None) -> None:
    """Count one request by its result, and by the error that it is answered with, if any."""
    _SYNCS.labels(sync.outcome, sync.error or "").inc()
    _BYTES.inc(sync.bytes)
    for phase, milliseconds in sync.timings_ms.items():
        if (name := phase.removesuffix("_ms")) in _PHASE_NAMES:  # not the parts of the pause
            _PHASES.labels(name).observe(milliseconds / 1e3)
    if sync.outcome == "committed":
        _ELEMENTS.inc(sync.nnz or 0)
        _REBUILT.inc(sync.rebuilt or 0)
        if sync.full:
            kind = re.match(r"\w*", sync.reason or "")[0]  # type: ignore[index]
            _FULL.labels(kind if kind in _REASONS else "other").inc()
        if sync.elements:
            _DENSITY.observe((sync.nnz or 0) / sync.elements)
    if sync.outcome in _AT_ITS_VERSION and sync.version is not None:
        version = VERSION if sync.adapter is None else _ADAPTER_VERSION.labels(sync.adapter)
        version.set(sync.version)
        if sync.adapter is None:
            show_run(sync.run)
    if isinstance(error, BaseMismatch) and "actual" in error.operands:
        MISMATCHES.inc()
