from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_ext.format import Unproven
from engine_ext.sync.staged import UndoLog
from tests.support.rank_engine import errors_of, part_id
from tests.unit.sync.recorded_ranks import (
    Ranks,
    begin_another,
    body,
    release_weights,
    replace_weights,
)


def test_a_search_says_how_long_it_took(ranks: Ranks) -> None:
    """It comes before every sync whose number is a power of two."""
    searched = []
    for version in range(1, 6):
        data = body(version)
        one = part_id(data)
        begun = ranks.engine.begin(one, ranks.engine.spool(data))
        searched.append([answer["ok"]["search_ms"] is not None for answer in begun])
        errors_of(ranks.engine.poll(one), none=True)
        errors_of(ranks.engine.settle(one, staged=True), none=True)
        errors_of(ranks.engine.commit(one), none=True)
    assert searched == [[True] * 3, [True] * 3, [False] * 3, [True] * 3, [False] * 3]


def test_a_sync_is_staged_and_committed_on_every_rank(ranks: Ranks) -> None:
    data = body(sync_id="a")
    one = part_id(data)
    base: dict[str, Any] = {"complete": True, "folder": None, "files": []}
    staged = [a["ok"] for a in ranks.engine.stage(one, data)]
    assert staged == [{"complete": True, "done": True, "rebuilt": 0, "base": base}] * 3
    assert ranks.written == [0, 0, 0]
    answers = [a["ok"] for a in ranks.engine.commit(one)]
    assert ranks.written == [1, 1, 1]
    assert ranks.states() == {(1, "certain")}
    for answer in answers:
        assert min(answer["vote_ms"], answer["commit_ms"]) >= 0
        facts = {k: v for k, v in answer.items() if k not in ("vote_ms", "commit_ms")}
        assert facts == {
            "version": 1,
            "base_version": 0,
            "run": "anonymous-1",
            "base_run": None,
            "sync_id": "a",
            "full": False,
            "apply": "recording",
            "parts": 1,
            "nnz": 6,
            "tensors": 1,
            "elements": 6,
            "skipped": {},
            "rollback": True,
            "digest": "0" * 32,
        }


def test_several_parts_are_written_as_one(ranks: Ranks) -> None:
    parts = [body(name=name, part=n, num_parts=3) for n, name in enumerate("abc")]
    answers = [ranks.engine.stage(part_id(parts[n]), parts[n]) for n in (2, 0, 1)]
    assert answers[-1][0]["ok"]["complete"]
    [answer, *_] = ranks.engine.commit(part_id(parts[0]))
    assert (answer["ok"]["parts"], answer["ok"]["nnz"], answer["ok"]["tensors"]) == (3, 18, 3)
    assert [applier.committed for applier in ranks.appliers] == [[["a", "b", "c"]]] * 3


def test_a_repeat_writes_nothing(ranks: Ranks) -> None:
    data = body()
    one = part_id(data)
    ranks.engine.apply(one, data)
    for answer in ranks.engine.stage(one, data):
        assert answer["ok"]["admission"] == "already_applied"
    assert ranks.written == [1, 1, 1]
    asked = {"version": 1, "identities": [one.identity, "other"]}
    reports = ranks.engine.call("status", details=False, parts=asked)
    assert [report["ok"]["unseen"] for report in reports] == [["other"]] * 3
    assert [report["ok"]["status"] for report in reports] == [None] * 3


def test_status_is_json(ranks: Ranks) -> None:
    [before, *_] = ranks.engine.status()
    assert (before["version"], before["staged"], before["last_sync"]) == (0, None, None)
    data = body()
    one = part_id(data)
    ranks.engine.stage(one, data)
    staging = json.loads(json.dumps(ranks.engine.status()[0]))
    assert staging["staged"]["parts"] == [0]
    ranks.engine.commit(one)
    after = json.loads(json.dumps(ranks.engine.status()[0]))
    assert (after["version"], after["staged"], after["asleep"]) == (1, None, False)
    assert after["last_sync"]["version"] == 1


def test_a_base_version_is_where_the_engine_starts(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, version=7)
    data = body(8)
    ranks.engine.apply(part_id(data), data)
    assert ranks.states() == {(8, "certain")}


def test_staging_runs_beside_the_engine(tmp_path: Path) -> None:
    """``begin`` and ``poll`` return at once, however long a part takes to check."""
    ranks = Ranks(tmp_path, 1)
    go_on = threading.Event()
    ranks.appliers[0].before_check = lambda: go_on.wait(5)
    data = body()
    one = part_id(data)
    [answer] = ranks.engine.begin(one, ranks.engine.spool(data))
    assert answer["ok"]["admission"] == "new"
    asked = ranks.engine.call("poll", part=msgspec.to_builtins(one))
    assert asked == [{"ok": {"done": False}}]
    go_on.set()
    assert ranks.engine.poll(one) == [{"ok": {"done": True}}]


def test_a_staged_part_does_not_need_its_spool_file_any_more(ranks: Ranks) -> None:
    data = body()
    one = part_id(data)
    path = ranks.engine.spool(data)
    ranks.engine.begin(one, path)
    ranks.engine.poll(one)
    path.unlink()
    ranks.engine.settle(one, staged=True)
    errors_of(ranks.engine.commit(one), none=True)


def test_a_dropped_sync_is_forgotten(ranks: Ranks) -> None:
    data = body()
    one = part_id(data)
    ranks.engine.stage(one, data)
    errors_of(ranks.engine.call("abort"), none=True)
    assert [e["type"] for e in errors_of(ranks.engine.poll(one))] == ["Conflict"] * 3
    assert [e["type"] for e in errors_of(ranks.engine.commit(one))] == ["Conflict"] * 3
    ranks.engine.apply(one, data)


def test_a_stale_sync_loses_what_it_staged(ranks: Ranks) -> None:
    old = body(part=1, num_parts=2, sync_id="old")
    ranks.engine.stage(part_id(old), old)
    new = body(part=0, num_parts=2, sync_id="new")
    ranks.engine.now = 60.0
    ranks.engine.stage(part_id(new), new)
    assert [e["type"] for e in errors_of(ranks.engine.poll(part_id(old)))] == ["Conflict"] * 3
    assert [e["type"] for e in errors_of(ranks.engine.commit(part_id(old)))] == ["Conflict"] * 3
    assert ranks.written == [0, 0, 0]


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("drop", [replace_weights, release_weights, begin_another])
def test_a_part_that_was_dropped_is_not_settled(
    ranks: Ranks, drop: Callable[[Ranks], None], num_parts: int
) -> None:
    """Between a poll and the next operation; what is staged since then stays."""
    data = body(part=0, num_parts=num_parts, sync_id="ours")
    one = part_id(data)
    errors_of(ranks.engine.begin(one, ranks.engine.spool(data)), none=True)
    errors_of(ranks.engine.poll(one), none=True)
    drop(ranks)
    before = [status["staged"] for status in ranks.engine.status()]
    for answers in (ranks.engine.poll(one), ranks.engine.settle(one, staged=True)):
        assert [e["type"] for e in errors_of(answers)] == ["Conflict"] * 3
    errors_of(ranks.engine.settle(one, staged=False), none=True)
    assert [status["staged"] for status in ranks.engine.status()] == before


def test_a_stale_sync_leaves_no_part_even_if_the_next_is_refused(ranks: Ranks) -> None:
    old = body(part=0, num_parts=2, sync_id="old")
    ranks.engine.stage(part_id(old), old)
    ranks.engine.now = 60.0
    refused = body(5, base_version=4, sync_id="new")
    answers = ranks.engine.begin(part_id(refused), ranks.engine.spool(refused))
    assert [e["type"] for e in errors_of(answers)] == ["VersionConflict"] * 3
    assert [r._staging.get(0) for r in ranks.engine.receivers] == [None] * 3


def test_continuations_keep_no_more_old_values_than_they_may(tmp_path: Path) -> None:
    """A version can be continued without end; what takes it back must not grow with that."""
    ranks = Ranks(tmp_path, undo_bytes=250)
    for applier in ranks.appliers:
        place: Any = SimpleNamespace(nbytes=60)
        applier.log = UndoLog([(place, np.zeros(40, np.uint8))], nbytes=100)
    for number, expected in enumerate([True, True, False, False]):
        data = body(value=number, sync_id=str(number))
        errors_of(ranks.engine.apply(part_id(data, unproven=Unproven()), data), none=True)
        assert {status["can_roll_back"] for status in ranks.engine.status()} == {expected}
    data = body(2, sync_id="next")
    errors_of(ranks.engine.apply(part_id(data), data), none=True)
    assert {status["can_roll_back"] for status in ranks.engine.status()} == {True}


def test_a_full_sync_gives_up_the_undo_log_before(ranks: Ranks) -> None:
    """It takes its memory; a sync that continues the version, or a delta, leaves it."""

    def given_up() -> list[int]:
        return [len(applier.given_up) for applier in ranks.appliers]

    for number, (version, metadata, expected) in enumerate(
        [(1, {}, 0), (2, {}, 0), (2, {"unproven": Unproven()}, 0), (3, {}, 2), (4, {}, 3)]
    ):
        full = number > 1 and not metadata
        data = body(version, value=number, full=full, sync_id=str(number))
        errors_of(ranks.engine.apply(part_id(data, **metadata), data), none=True)
        assert given_up() == [expected] * 3
        assert {status["can_roll_back"] for status in ranks.engine.status()} == {True}


def test_undone_full_sync_cannot_roll_back(ranks: Ranks) -> None:
    first, second = body(1), body(2, full=True)
    errors_of(ranks.engine.apply(part_id(first), first), none=True)
    for applier in ranks.appliers:
        applier.undoes = True
    ranks.appliers[1].fail["commit"] = OSError("a cable is loose")
    errors = errors_of(ranks.engine.apply(part_id(second), second))
    assert {error["type"] for error in errors} == {"WriteUndone"}
    assert ranks.states() == {(1, "certain")}
    assert {status["can_roll_back"] for status in ranks.engine.status()} == {False}
