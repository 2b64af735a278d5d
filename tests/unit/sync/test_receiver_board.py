"""The board of several ranks, and its item that belongs to the version of their weights."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_ext.ranks import ENGINE, LOG_RECORDS
from engine_ext.ranks.operations import CallerPause, EngineUse
from tests.support.rank_engine import errors_of, part_id
from tests.unit.sync.recorded_ranks import Ranks, body


def answer(ranks: Ranks, operation: str, **arguments: Any) -> dict[str, Any]:
    """The answer that all ranks give."""
    first, *others = ranks.engine.call(operation, **arguments)
    assert others == [first] * len(others)
    return first["ok"]


def apply(ranks: Ranks, version: int, **log_records: str) -> None:
    full = log_records.pop("full", None) is not None
    data = body(version, full=full)
    errors_of(ranks.engine.apply(part_id(data, log_records=log_records), data), none=True)


def records(ranks: Ranks) -> tuple[int, dict[str, str], int]:
    """The version, its records and the revision of both."""
    found = answer(ranks, "get", key=LOG_RECORDS)
    return found["value"]["version"], found["value"]["records"], found["revision"]


def put_records(ranks: Ranks, expected: int, **found: str) -> bool:
    value = {"version": 0, "records": found}
    return bool(answer(ranks, "put", key=LOG_RECORDS, value=value, expected=expected)["written"])


def test_all_ranks_answer_alike(ranks: Ranks) -> None:
    put = {"key": "k", "value": {"a": [1]}, "append": "e", "most": 2}
    assert answer(ranks, "put", expected=0, **put)["written"]
    assert not answer(ranks, "put", expected=0, **put)["written"]
    assert answer(ranks, "lease", key="k", holder="a")["granted"]
    assert not answer(ranks, "lease", key="k", holder="b")["granted"]
    assert not answer(ranks, "lease", key="k", holder="a", release=True)["granted"]
    found = answer(ranks, "get", key="k")
    assert (found["value"], found["entries"], found["holder"]) == ({"a": [1]}, ["e"], None)


def test_status_shows_who_has_paused_the_engine(ranks: Ranks) -> None:
    pause = CallerPause(since=1.5, began=0.5, by="10.0.0.3")
    assert answer(ranks, "status", details=False)["state"]["paused"] is None
    value = msgspec.to_builtins(EngineUse(resume_owed=True, pause=pause))
    leased = answer(ranks, "lease", key=ENGINE, holder="a", value=value, expected=0)
    assert leased["state"]["resume_owed"]
    report = answer(ranks, "status")
    for part in (report["state"], report["status"]):
        assert (part["resume_owed"], part["paused"]) == (True, msgspec.to_builtins(pause))


def test_log_records_are_those_of_the_version(ranks: Ranks) -> None:
    apply(ranks, 1, v1="one")
    apply(ranks, 2)
    assert records(ranks)[:2] == (2, {"v1": "one"})
    apply(ranks, 3, v3="three")
    assert records(ranks)[:2] == (3, {"v1": "one", "v3": "three"})
    errors_of(ranks.engine.call("rollback"), none=True)
    assert records(ranks)[:2] == (2, {"v1": "one"})
    apply(ranks, 4, full="", v4="four")
    assert records(ranks)[:2] == (4, {"v4": "four"})


def test_log_records_are_put_for_the_version_they_were_read_of(ranks: Ranks) -> None:
    apply(ranks, 1)
    before = records(ranks)[2]
    assert put_records(ranks, before, v1="one")
    assert not put_records(ranks, before, v1="other")
    known = records(ranks)[2]
    apply(ranks, 2)
    assert not put_records(ranks, known, v1="one", v2="two")
    assert records(ranks)[:2] == (2, {"v1": "one"})
    known = records(ranks)[2]
    errors_of(ranks.engine.call("rollback"), none=True)
    assert not put_records(ranks, known, v1="one", v2="two")
    assert records(ranks)[:2] == (1, {"v1": "one"})


def test_only_the_last_log_records_are_kept(ranks: Ranks) -> None:
    many = {f"v{number:03}": "x" for number in range(300)}
    assert put_records(ranks, records(ranks)[2], **many)
    assert [*records(ranks)[1]] == [*many][-256:]
