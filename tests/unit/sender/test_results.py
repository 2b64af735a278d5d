"""Errors of a sync cross processes, as those of a Ray actor do."""

from __future__ import annotations

import pickle

import pytest

from delta_sender import (
    FullSyncRefused,
    PartialSyncError,
    RankError,
    RunConflict,
    RunFenced,
    SyncError,
)

OWNER = {"owner": {"run": "a", "epoch": 1, "host": "h", "pid": 1, "since": 1.0}}
CONFLICT = RunConflict("it is another's", 409, OWNER)


@pytest.mark.parametrize(
    "error",
    [
        SyncError("no answer"),
        CONFLICT,
        RunFenced("fenced", 409, OWNER),
        FullSyncRefused("other weights", 409, {"version": 3}),
        PartialSyncError({"http://a": CONFLICT}, {}),
        RankError("rank 1 has died", [1]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_crosses_processes(error: SyncError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found)) == (type(error), str(error))
    assert (found.status, found.error) == (error.status, error.error)
    assert getattr(found, "ranks", None) == getattr(error, "ranks", None)
    for url, failed in getattr(found, "failures", {}).items():
        assert (url, type(failed), failed.error) == ("http://a", RunConflict, OWNER)
