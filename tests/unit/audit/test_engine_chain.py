"""The chain of an audit file: whatever is done to a record is found."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.audit import AuditFile, AuditRecord, EngineTrail, read_engine_trail
from tests.support.served_models import PROPERTY
from tests.unit.audit.test_audit_file import KEY, digest, record

pytestmark = pytest.mark.slow


@st.composite
def histories(draw: st.DrawFn) -> list[AuditRecord]:
    """The records of an engine that takes versions, goes back, and fails."""
    found, version, known = [record(0, "loaded")], 0, True
    highest = 0
    for step in draw(st.lists(st.sampled_from(["delta", "full", "back", "fail"]), max_size=8)):
        known_digest = digest(version) if known else None
        before: dict[str, Any] = {"base_version": version, "digest_before": known_digest}
        if step == "fail":
            found.append(record(version, "uncertain", digest=None, **before))
            known = False
        elif step == "full" or (step == "delta" and known):
            highest += 1
            version, known = highest, True
            found.append(record(version, full=step == "full", run="r", **before))
        elif step == "back" and known and found[-1].kind == "committed" and not found[-1].full:
            version = found[-1].base_version or 0
            found.append(record(version, "rolled_back", run="r", **before))
    return found


def written(records: list[AuditRecord], key: str | None = KEY) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "audit.jsonl")
        AuditFile(path, key).append(records)
        return path.read_bytes()


def verified(content: bytes, key: str | None = KEY) -> EngineTrail:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "audit.jsonl")
        path.write_bytes(content)
        return read_engine_trail(path, key)


@PROPERTY
@given(histories())
def test_what_an_engine_writes_is_sound(records: list[AuditRecord]) -> None:
    trail = verified(written(records))
    assert trail.problems == []
    assert trail.signed == len(records)
    last = records[-1]
    if last.digest is not None:
        chain = trail.reached(last.version)[-1].chain
        assert chain.start == (0, digest(0))


@PROPERTY
@given(histories(), st.data())
def test_a_changed_byte_is_found(records: list[AuditRecord], data: st.DataObject) -> None:
    content = bytearray(written(records))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    assert verified(bytes(content)).problems


@PROPERTY
@given(histories(), st.data())
def test_without_key_all_but_the_last_line_are_safe(
    records: list[AuditRecord], data: st.DataObject
) -> None:
    content = bytearray(written(records, None))
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    if last == 0:
        return
    place = data.draw(st.integers(0, last - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    assert verified(bytes(content), None).problems


@PROPERTY
@given(histories(), st.data())
def test_a_rewritten_record_is_found(records: list[AuditRecord], data: st.DataObject) -> None:
    """Whoever has no key writes a whole file anew with one fact changed."""
    number = data.draw(st.integers(0, len(records) - 1))
    fact = data.draw(st.sampled_from(["version", "digest", "run", "at", "host", "bytes"]))
    value = {"version": 99, "digest": "f" * 32, "at": 9.0, "bytes": 7}.get(fact, "other")
    changed = {name: getattr(records[number], name) for name in AuditRecord.__struct_fields__}
    forged = [*records]
    forged[number] = AuditRecord(**{**changed, fact: value})
    assert verified(written(forged, "another key")).problems
    assert verified(written(forged, None)).problems


@PROPERTY
@given(histories(), st.data())
def test_moved_and_missing_lines_are_found(records: list[AuditRecord], data: st.DataObject) -> None:
    lines = written(records).splitlines(keepends=True)
    if len(lines) < 3:
        return
    one = data.draw(st.integers(0, len(lines) - 2))
    other = data.draw(st.integers(one + 1, len(lines) - 1))
    swapped = [*lines]
    swapped[one], swapped[other] = lines[other], lines[one]
    assert verified(b"".join(swapped)).problems
    assert verified(b"".join([*lines[:one], *lines[one + 1 :]])).problems
    assert verified(b"".join([*lines[: one + 1], *lines[one:]])).problems


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([record(0, "loaded"), record(2)], "starts from version 1, the record before it ends at 0"),
        (
            [record(0, "loaded"), record(1, digest_before="e" * 32)],
            f"starts from the weights {'e' * 32}, the record before it ends at {digest(0)}",
        ),
        (
            [record(0, "loaded"), record(1, digest=None), record(2, digest_before=None)],
            "is no full version, and starts from unknown weights",
        ),
        (
            [record(0, "loaded"), record(1, "found")],
            "the engine was found at version 1",
        ),
        (
            [
                record(0, "loaded"),
                record(1),
                record(0, "rolled_back", base_version=1, digest_before=digest(1), digest="e" * 32),
            ],
            "goes back to version 0",
        ),
        (
            [
                *(record(0, "loaded"), record(1, run="r")),
                *(record(0, "loaded", "c"), record(1, boot="c", run="r", digest="e" * 32)),
            ],
            "fork: version 1 has the digest",
        ),
    ],
    ids=["gap", "other weights", "unknown weights", "found", "rollback", "fork"],
)
def test_what_does_not_connect_is_named(records: list[AuditRecord], problem: str) -> None:
    trail = verified(written(records))
    assert any(problem in one for one in trail.problems), trail.problems


@pytest.mark.parametrize(
    "again",
    [record(1, late=True), record(1, "found")],
    ids=["committed", "rolled back"],
)
def test_a_record_written_twice_is_a_note(again: AuditRecord) -> None:
    """The process that wrote it first died before the engine knew."""
    trail = verified(written([record(0, "loaded"), record(1), again, record(2)]))
    assert trail.problems == []
    assert trail.notes == ["audit.jsonl:3 says again what the record before it says"]
    chain = trail.reached(2)[-1].chain
    assert [link.version for link in chain.links] == [1, 2]


def changed(version: int, changed_by: str | None = "/load_weights") -> AuditRecord:
    """What an engine writes after something else has changed its weights."""
    return record(
        version,
        "found",
        base_version=version,
        digest_before=digest(version),
        digest=None,
        changed_by=changed_by,
    )


def problems(records: list[AuditRecord], version: int) -> list[str]:
    trail = verified(written(records))
    chain = trail.reached(version)[-1].chain
    return [*trail.problems, *chain.problems]


def test_weights_that_something_else_changed_are_a_gap() -> None:
    first, *_ = problems([record(0, "loaded"), record(1), changed(1)], 1)
    assert first == "gap: audit.jsonl:3: /load_weights changed the weights, by no version"


def test_a_full_version_ends_the_gap() -> None:
    after = record(2, full=True, digest_before=None)
    assert problems([record(0, "loaded"), record(1), changed(1), after], 2) == []
    assert problems([record(0, "loaded"), record(1), record(2), changed(2)], 1) == []


def test_unknown_weights_at_the_end_are_a_gap() -> None:
    assert problems([record(0, "loaded", digest=None)], 0) == [
        "gap: audit.jsonl:1 has no digest of the weights at version 0"
    ]


def test_a_failed_write_at_the_end_is_a_note() -> None:
    """The version before it was reached all the same."""
    failed = record(1, "uncertain", base_version=1, digest_before=digest(1), digest=None)
    records = [record(0, "loaded"), record(1), failed]
    assert problems(records, 1) == []
    [note] = verified(written(records)).notes
    assert note.startswith("audit.jsonl:3: a write failed half-way")
    records.append(record(2, full=True, base_version=1, digest_before=None))
    assert verified(written(records)).notes == []


@pytest.mark.parametrize("at_once", [True, False])
def test_starts_of_engines_are_told_apart(at_once: bool) -> None:
    one = [record(0, "loaded"), record(1)]
    other = [record(0, "loaded", "c"), record(1, boot="c", digest="e" * 32)]
    order = [one[0], *other, one[1]] if at_once else [*one, *other]
    reached = verified(written(order)).reached(1)
    assert [found.digest for found in reached] == [digest(1), "e" * 32]
    assert [found.is_past for found in reached] == [not at_once, False]


def test_unsigned_records_are_named_with_a_key() -> None:
    records = [record(0, "loaded"), record(1)]
    assert verified(written(records, None), None).problems == []
    assert "signature: audit.jsonl:1" in verified(written(records, None), KEY).problems[0]
