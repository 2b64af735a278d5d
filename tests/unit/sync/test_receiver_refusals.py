"""No rank stages a part that staging refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_ext.conformance.verified_file import verified_file
from engine_ext.errors import Conflict, NotUpdatable
from engine_ext.ranks.operations import FileStamp
from tests.support.rank_engine import errors_of, part_id
from tests.unit.sync.recorded_ranks import Ranks, body


def truncate(path: Path, data: bytes) -> None:
    path.write_bytes(data[:-3])


def empty(path: Path, data: bytes) -> None:
    path.write_bytes(b"")


def remove(path: Path, data: bytes) -> None:
    path.unlink()


def flip(path: Path, data: bytes) -> None:
    """One bit of the first value; the container is at the beginning, as it was sent."""
    at = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def exchange(path: Path, data: bytes) -> None:
    """For the file of another part."""
    path.write_bytes(verified_file(body(value=2))[1])


@pytest.mark.parametrize("change", [truncate, empty, remove, flip, exchange])
def test_a_spool_file_that_changed_is_refused(
    ranks: Ranks, change: Callable[[Path, bytes], None]
) -> None:
    """Between its arrival and its staging."""
    data = body()
    one = part_id(data)
    path = ranks.engine.spool(data)
    stamp = FileStamp.of(path.stat())
    time.sleep(0.02)  # file systems note the time of writing in steps of some milliseconds
    change(path, path.read_bytes())
    errors_of(ranks.engine.begin(one, path, stamp), none=True)
    for error in errors_of(ranks.engine.poll(one)):
        assert error["engine_state"] == "unchanged"
    errors_of(ranks.engine.settle(one, staged=False), none=True)
    assert [e["type"] for e in errors_of(ranks.engine.commit(one))] == ["Conflict"] * 3
    assert ranks.written == [0, 0, 0]
    ranks.engine.apply(one, data)


def test_a_spool_file_that_changes_between_two_ranks_is_refused(ranks: Ranks) -> None:
    data = body()
    one = part_id(data)
    path = ranks.engine.spool(data)
    other = path.with_suffix(".other")  # what the path leads to once the first rank has opened it
    exchange(other, data)
    receivers, part = ranks.engine.receivers, msgspec.to_builtins(one)
    requests = [{"part": part, "path": str(p), "now": 0.0} for p in (path, other, other)]
    with ThreadPoolExecutor(len(receivers)) as threads:
        began = threads.map(
            lambda rank, request: rank.handle("begin", request), receivers, requests
        )
        assert all("ok" in answer for answer in began)
    answers = ranks.engine.poll(one)
    assert ["error" in answer for answer in answers] == [False, True, True]
    ranks.engine.settle(one, staged=False)
    errors_of(ranks.engine.commit(one))
    assert ranks.written == [0, 0, 0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(NotUpdatable("no", tensor="w"), "NotUpdatable"), (KeyError("w"), "DeltaError")],
)
def test_what_one_rank_refuses_is_staged_on_none(ranks: Ranks, error: Exception, kind: str) -> None:
    ranks.appliers[1].fail["check"] = error
    data = body()
    one = part_id(data)
    answers = ranks.engine.stage(one, data)
    assert [a.get("error", {}).get("type") for a in answers] == [None, kind, None]
    errors_of(ranks.engine.commit(one))
    assert ranks.written == [0, 0, 0]
    assert ranks.states() == {(0, "certain")}


def test_refusal_of_whole_sync_is_known_before_commit(ranks: Ranks) -> None:
    ranks.appliers[2].fail["check_sync"] = NotUpdatable("missing", tensors=["x"])
    data = body()
    answers = ranks.engine.stage(part_id(data), data)
    assert [a["error"]["tensors"] for a in answers] == [["x"]] * 3


@pytest.mark.parametrize("stuck", range(3))
@pytest.mark.parametrize("operation", ["commit", "rollback", "status"])
def test_engine_that_has_not_stopped_is_not_written(
    ranks: Ranks, stuck: int, operation: str
) -> None:
    """The other ranks learn of it in their vote; without it they would wait for this one."""
    data = body()
    errors_of(ranks.engine.apply(part_id(data), data), none=True)
    following = body(2)
    errors_of(ranks.engine.stage(part_id(following), following), none=True)
    arguments = {"version": 2, "sync_id": None} if operation == "commit" else {}
    refusal = Conflict("a request holds KV").to_wire()

    def handle(rank: int) -> dict[str, Any]:
        refused = {"refusal": refusal} if rank == stuck else {}
        return ranks.engine.receivers[rank].handle(operation, {**arguments, **refused})

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(handle, range(3)))
    if operation == "status":
        assert ["error" in answer for answer in answers] == [rank == stuck for rank in range(3)]
    else:
        assert errors_of(answers) == [refusal] * 3
    assert ranks.states() == {(1, "certain")}
    assert ranks.written == [1, 1, 1]
    errors_of(ranks.engine.commit(part_id(following)), none=True)
