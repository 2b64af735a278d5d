from __future__ import annotations

import json

import pytest

from engine_ext import errors
from engine_ext.errors import (
    CommitFailed,
    CommittedNotResumed,
    DeltaError,
    EngineUncertain,
    from_wire,
)
from tests.support.cases import in_one_test

# The table of errors in docs/http-api.md, one row per class.
STATUS = {
    "MalformedPart": 400,
    "ChecksumMismatch": 400,
    "Unauthorized": 401,
    "AccessDenied": 403,
    "PathForbidden": 403,
    "UploadTooSlow": 408,
    "Conflict": 409,
    "VersionConflict": 409,
    "BaseMismatch": 409,
    "SyncInProgress": 409,
    "GroupAborted": 409,
    "RunConflict": 409,
    "RunFenced": 409,
    "WeightsAsleep": 409,
    "VersionNotServed": 409,
    "LogDamaged": 409,
    "LogDiverged": 409,
    "TooLarge": 413,
    "UnsupportedMedia": 415,
    "NotUpdatable": 422,
    "AdapterNotLoaded": 422,
    "TooManyUploads": 429,
    "WriteUndone": 500,
    "CommittedNotResumed": 500,
    "CommitFailed": 500,
    "EngineUncertain": 503,
    "PartUnavailable": 502,
    "SaltUnavailable": 422,
    "SpoolFull": 507,
    "AuditUnavailable": 507,
}


def tree(cls: type[DeltaError] = DeltaError) -> list[type[DeltaError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in tree(child))]


def test_the_table_is_complete() -> None:
    assert {cls.__name__: cls.status for cls in tree()} == {"DeltaError": 500, **STATUS}


@in_one_test("cls", tree())
def test_the_state_that_each_leaves_the_engine_in(cls: type[DeltaError]) -> None:
    expected = "uncertain" if issubclass(cls, CommitFailed) else "unchanged"
    if cls is CommittedNotResumed:
        expected = "committed"
    assert cls("x").to_wire()["engine_state"] == expected


@in_one_test("cls", tree())
def test_over_the_wire_and_back(cls: type[DeltaError]) -> None:
    sent = cls("what is wrong", tensor="a.b", expected=3, retry_after=7, tensors=["x"])
    assert sent.to_wire() == {
        "type": cls.__name__,
        "message": "what is wrong",
        "engine_state": cls.engine_state,
        "tensor": "a.b",
        "expected": 3,
        "retry_after": 7,
        "tensors": ["x"],
    }
    received = from_wire(json.loads(json.dumps(sent.to_wire())))
    assert type(received) is cls
    assert str(received) == received.message == "what is wrong"
    assert received.operands == sent.operands


@in_one_test(
    ("state", "cls"),
    [
        ("unchanged", DeltaError),
        ("uncertain", CommitFailed),
        ("committed", CommittedNotResumed),
        (None, DeltaError),
    ],
)
def test_an_unknown_type_keeps_its_engine_state(state: str | None, cls: type[DeltaError]) -> None:
    """What a newer worker calls by another name must not be taken for harmless."""
    received = from_wire({"type": "Newer", "message": "m", "engine_state": state, "rank": 1})
    assert type(received) is cls
    assert received.operands == {"rank": 1}


@in_one_test("wire", [{}, {"type": None}, {"type": []}, {"message": 3}])
def test_a_poor_error_is_still_an_error(wire: dict[str, object]) -> None:
    assert type(from_wire(wire)) is DeltaError


def test_uncertain_is_caught_as_a_failed_commit() -> None:
    with pytest.raises(CommitFailed):
        raise EngineUncertain("still")


def test_every_error_is_named_in_the_module() -> None:
    assert all(getattr(errors, name) for name in STATUS)
