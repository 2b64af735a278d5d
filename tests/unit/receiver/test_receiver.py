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
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.apply.staged import UndoLog
from engine_ext.errors import NotUpdatable
from engine_ext.receiver.receiver import Receiver
from engine_ext.wire import Limits
from tests.support.receiver_harness import (
    PROPERTY,
    Engine,
    RecordingApplier,
    dense_delta,
    errors_of,
    one_part,
    part_id,
)

ONES = torch.ones(6, dtype=torch.bfloat16)


def body(version: int = 1, *, value: float = 1, name: str = "w", **metadata: Any) -> bytes:
    """A part of one dense param."""
    return one_part([dense_delta(name, ONES * value)], current_version=version, **metadata)


class Ranks:
    """Several ranks with appliers that write nothing."""

    def __init__(self, folder: Path, size: int = 3, **options: Any) -> None:
        self.appliers = [RecordingApplier() for _ in range(size)]
        self.engine = Engine(self.appliers, folder, **options)

    @property
    def written(self) -> list[int]:
        """How many syncs each rank was told to write."""
        return [len(applier.committed) for applier in self.appliers]

    def states(self) -> set[tuple[int, str]]:
        return {(s["version"], s["engine_state"]) for s in self.engine.status()}


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


# --- the ordinary way ---


def test_a_sync_is_staged_and_committed_on_every_rank(ranks: Ranks) -> None:
    data = body(sync_id="a")
    one = part_id(data)
    base = {"complete": True, "folder": None, "files": []}
    staged = [a["ok"] for a in ranks.engine.stage(one, data)]
    assert staged == [{"complete": True, "prepared": True, "base": base}] * 3
    assert ranks.written == [0, 0, 0]
    answers = [a["ok"] for a in ranks.engine.commit(one)]
    assert ranks.written == [1, 1, 1]
    assert ranks.states() == {(1, "certain")}
    for answer in answers:
        assert answer["commit_ms"] >= 0
        facts = {k: v for k, v in answer.items() if k != "commit_ms"}
        assert facts == {
            "version": 1,
            "base_version": 0,
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
    for data in (parts[2], parts[0], parts[1]):
        answers = ranks.engine.stage(part_id(data), data)
    assert answers[0]["ok"]["complete"]
    [answer, *_] = ranks.engine.commit(part_id(parts[0]))
    assert (answer["ok"]["parts"], answer["ok"]["nnz"], answer["ok"]["tensors"]) == (3, 18, 3)
    assert [applier.committed for applier in ranks.appliers] == [[["a", "b", "c"]]] * 3


def test_a_repeat_writes_nothing(ranks: Ranks) -> None:
    data = body()
    one = part_id(data)
    ranks.engine.apply(one, data)
    for answer in ranks.engine.stage(one, data):
        assert answer["ok"] == {"admission": "already_applied"}
    assert ranks.written == [1, 1, 1]
    seen = ranks.engine.call("unseen", version=1, identities=[one.identity, "other"])
    assert seen == [{"ok": {"unseen": ["other"]}}] * 3


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
    assert answer["ok"] == {"admission": "new"}
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
    errors_of(ranks.engine.call("drop"), none=True)
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


def replace_weights(ranks: Ranks) -> None:
    for receiver in ranks.engine.receivers:
        receiver.weights_replaced("the engine's own update")


def release_weights(ranks: Ranks) -> None:
    for receiver in ranks.engine.receivers:
        receiver.weights_released()


def begin_another(ranks: Ranks) -> None:
    """A sync whose part of the same number is staged; that of ours is stale."""
    ranks.engine.now += 60
    other = body(value=3, part=0, num_parts=2, sync_id="other")
    errors_of(ranks.engine.stage(part_id(other), other), none=True)


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


# --- handle never raises ---


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("explode", {}),
        ("__init__", {}),
        ("begin", {}),
        ("begin", {"part": {}, "path": "x", "now": 0.0}),
        ("begin", {"part": None, "path": None, "now": None}),
        ("begin", {"part": {"version": "1"}, "path": "x", "now": 0.0}),
        ("poll", {"part": 0}),
        ("poll", {"part": []}),
        ("settle", {}),
        ("commit", {}),
        ("commit", {"version": 1, "sync_id": None}),
        ("unseen", {"version": 1, "identities": None}),
        ("status", {"extra": 1}),
        ("status", None),
        ("status", []),
        (None, {}),
        ([], {}),
    ],
)
def test_handle_never_raises(tmp_path: Path, operation: Any, arguments: Any) -> None:
    ranks = Ranks(tmp_path, 1)
    answer = ranks.engine.receivers[0].handle(operation, arguments)
    assert set(answer) == {"error"}
    assert answer["error"]["engine_state"] == "unchanged"
    assert answer["error"]["message"]
    json.dumps(answer)
    ranks.engine.apply(part_id(body()), body())  # and it still works


@PROPERTY
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "poll", "settle", "commit", "drop", "unseen", "status"]),
            st.dictionaries(
                st.sampled_from(
                    ["part", "path", "now", "staged", "version", "sync_id", "identities"]
                ),
                st.none()
                | st.booleans()
                | st.integers(-1, 2)
                | st.just("/dev/null")
                | st.just(msgspec.to_builtins(part_id(body()))),
            ),
        ),
        max_size=8,
    )
)
def test_handle_never_raises_whatever_it_is_told(calls: list[tuple[str, dict[str, Any]]]) -> None:
    applier = RecordingApplier()
    alone = type("Alone", (), {"rank": 0, "all_gather": lambda self, value: [value]})()
    receiver = Receiver(
        applier, alone, base_version=0, stage_timeout=60, read_workers=1, limits=Limits()
    )
    for operation, arguments in calls:
        answer = receiver.handle(operation, arguments)
        assert set(answer) in ({"ok"}, {"error"})
        json.dumps(answer)
    assert applier.committed == []


def test_continuations_keep_no_more_old_values_than_they_may(tmp_path: Path) -> None:
    """A version may be continued without end; what takes it back must not grow with that."""
    ranks = Ranks(tmp_path, undo_bytes=250)
    for applier in ranks.appliers:
        place: Any = SimpleNamespace(nbytes=60)
        applier.log = UndoLog([(place, np.zeros(40, np.uint8))], {})
    for number, expected in enumerate([True, True, False, False]):
        data = body(value=number, sync_id=str(number))
        errors_of(ranks.engine.apply(part_id(data, continues=True), data), none=True)
        assert {status["can_roll_back"] for status in ranks.engine.status()} == {expected}
    data = body(2, sync_id="next")
    errors_of(ranks.engine.apply(part_id(data), data), none=True)
    assert {status["can_roll_back"] for status in ranks.engine.status()} == {True}


def test_a_full_sync_gives_up_the_undo_log_before(ranks: Ranks) -> None:
    """It takes its memory; a sync that goes on with the version, or a delta, leaves it."""

    def given_up() -> list[int]:
        return [len(applier.given_up) for applier in ranks.appliers]

    for number, (version, metadata, expected) in enumerate(
        [(1, {}, 0), (2, {}, 0), (2, {"continues": True}, 0), (3, {}, 2), (4, {}, 3)]
    ):
        data = body(version, value=number, full=number > 1, sync_id=str(number))
        errors_of(ranks.engine.apply(part_id(data, **metadata), data), none=True)
        assert given_up() == [expected] * 3
        assert {status["can_roll_back"] for status in ranks.engine.status()} == {True}


def test_after_a_full_sync_that_was_undone_there_is_no_going_back(ranks: Ranks) -> None:
    first, second = body(1), body(2, full=True)
    errors_of(ranks.engine.apply(part_id(first), first), none=True)
    for applier in ranks.appliers:
        applier.undoes = True
    ranks.appliers[1].fail["commit"] = OSError("a cable is loose")
    errors = errors_of(ranks.engine.apply(part_id(second), second))
    assert {error["type"] for error in errors} == {"WriteUndone"}
    assert ranks.states() == {(1, "certain")}
    assert {status["can_roll_back"] for status in ranks.engine.status()} == {False}


# --- what staging refuses ---


def truncate(path: Path, data: bytes) -> None:
    path.write_bytes(data[:-3])


def empty(path: Path, data: bytes) -> None:
    path.write_bytes(b"")


def remove(path: Path, data: bytes) -> None:
    path.unlink()


def flip(path: Path, data: bytes) -> None:
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def exchange(path: Path, data: bytes) -> None:
    """For another part, whose own checksum is right."""
    path.write_bytes(body(value=2))


@pytest.mark.parametrize("change", [truncate, empty, remove, flip, exchange])
def test_a_spool_file_that_changed_is_refused(
    ranks: Ranks, change: Callable[[Path, bytes], None]
) -> None:
    """Between its arrival, when its identity was taken, and its staging."""
    data = body()
    one = part_id(data)
    path = ranks.engine.spool(data)
    change(path, data)
    errors_of(ranks.engine.begin(one, path), none=True)
    for error in errors_of(ranks.engine.poll(one)):
        assert error["engine_state"] == "unchanged"
    forgotten = {"complete": False, "prepared": False, "base": None}
    assert [a["ok"] for a in ranks.engine.settle(one, staged=False)] == [forgotten] * 3
    assert [e["type"] for e in errors_of(ranks.engine.commit(one))] == ["Conflict"] * 3
    assert ranks.written == [0, 0, 0]
    ranks.engine.apply(one, data)


def test_a_spool_file_that_changes_between_two_ranks_is_refused(ranks: Ranks) -> None:
    data = body()
    one = part_id(data)
    path = ranks.engine.spool(data)
    arguments = {"part": msgspec.to_builtins(one), "path": str(path), "now": 0.0}
    first, *others = ranks.engine.receivers
    assert "ok" in first.handle("begin", arguments)
    while not first.handle("poll", {"part": arguments["part"]})["ok"]["done"]:
        pass
    exchange(path.with_suffix(".other"), data)
    path.with_suffix(".other").rename(path)
    for other in others:
        assert "ok" in other.handle("begin", arguments)
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


def test_a_sync_that_is_refused_as_a_whole_is_known_before_the_commit(ranks: Ranks) -> None:
    ranks.appliers[2].fail["check_sync"] = NotUpdatable("missing", tensors=["x"])
    data = body()
    answers = ranks.engine.stage(part_id(data), data)
    assert [a["error"]["tensors"] for a in answers] == [["x"]] * 3


# --- weights that change outside of syncs ---


def test_weights_that_the_engine_has_loaded_itself_take_only_a_full_sync(ranks: Ranks) -> None:
    """Nobody knows what a delta would be added to, or what a rollback would restore."""
    data = body()
    errors_of(ranks.engine.apply(part_id(data), data), none=True)
    later = body(2)
    errors_of(ranks.engine.stage(part_id(later), later), none=True)
    for receiver in ranks.engine.receivers:
        receiver.weights_replaced("the engine's own update")
    assert [s["staged"] for s in ranks.engine.status()] == [None] * 3
    for answers in (
        ranks.engine.stage(part_id(data), data),
        ranks.engine.stage(part_id(later), later),
        ranks.engine.call("rollback"),
    ):
        assert {e["type"] for e in errors_of(answers)} == {"BaseMismatch"}
    assert ranks.written == [1, 1, 1]
    assert ranks.states() == {(1, "certain")}
    whole = body(3, full=True)
    errors_of(ranks.engine.apply(part_id(whole), whole), none=True)
    assert [s["can_roll_back"] for s in ranks.engine.status()] == [False] * 3
    after = body(4)
    errors_of(ranks.engine.apply(part_id(after), after), none=True)
    assert ranks.states() == {(4, "certain")}


def test_memory_is_released_when_nothing_reads_it_any_more(ranks: Ranks) -> None:
    """What is being staged, also of a sync that was dropped, ends first."""
    goes_on, began, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        goes_on.wait(10)
        ended.set()

    ranks.appliers[0].before_check = slow  # type: ignore[method-assign]
    data = body()
    ranks.engine.begin(part_id(data), ranks.engine.spool(data))
    assert began.wait(10)
    receiver = ranks.engine.receivers[0]
    receiver.handle("drop", {})
    threading.Timer(0.2, goes_on.set).start()
    receiver.weights_released()
    assert ended.is_set()
    assert receiver.handle("status", {})["ok"]["asleep"]
    # Of replicas one may sleep before the others, which would wait for it in the scan.
    for error in errors_of(ranks.engine.call("digest", scan=True)):
        assert error["type"] == "WeightsAsleep"


@pytest.mark.parametrize("staged", [True, False])
def test_a_rank_that_fell_asleep_while_a_part_was_staged_is_not_waited_for(
    ranks: Ranks, staged: bool
) -> None:
    data = body()
    one = part_id(data)
    errors_of(ranks.engine.begin(one, ranks.engine.spool(data)), none=True)
    errors_of(ranks.engine.poll(one), none=True)
    ranks.engine.receivers[1].weights_released()
    answers = ranks.engine.settle(one, staged=staged)
    if staged:
        assert {error["type"] for error in errors_of(answers)} == {"Conflict"}
    else:
        errors_of(answers, none=True)
    assert ranks.written == [0, 0, 0]


# --- what precedes a commit ---


def staged_but_not_prepared(ranks: Ranks, left: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A complete sync that each rank must be asked about so often."""

    def is_prepared(rank: int) -> Callable[..., bool]:
        return lambda staged: left[rank] <= 0

    def prepare(rank: int) -> Callable[..., bool]:
        def once(staged: Any, *, full: bool) -> bool:
            left[rank] -= 1
            return left[rank] <= 0

        return once

    for rank, applier in enumerate(ranks.appliers):
        monkeypatch.setattr(applier, "is_prepared", is_prepared(rank))
        monkeypatch.setattr(applier, "prepare", prepare(rank))
    data = body()
    one = part_id(data)
    errors_of(ranks.engine.begin(one, ranks.engine.spool(data)), none=True)
    errors_of(ranks.engine.poll(one), none=True)
    answers = ranks.engine.settle(one, staged=True)
    assert [a["ok"]["prepared"] for a in answers] == [count <= 0 for count in left]
    return one


def test_a_sync_is_committed_once_every_rank_is_prepared(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = staged_but_not_prepared(ranks, [1, 0, 2], monkeypatch)
    for expected in ([True, True, False], [True, True, True]):
        errors = errors_of(ranks.engine.commit(one))
        assert {(e["type"], e["engine_state"]) for e in errors} == {("Conflict", "unchanged")}
        assert [a["ok"]["done"] for a in ranks.engine.prepare(one)] == expected
    errors_of(ranks.engine.commit(one), none=True)
    assert ranks.written == [1, 1, 1]


@pytest.mark.parametrize("drop", [replace_weights, release_weights, begin_another])
def test_a_sync_that_was_dropped_is_not_prepared(
    ranks: Ranks, drop: Callable[[Ranks], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [1, 1, 1]
    one = staged_but_not_prepared(ranks, left, monkeypatch)
    drop(ranks)
    assert {e["type"] for e in errors_of(ranks.engine.prepare(one))} == {"Conflict"}
    assert left == [1, 1, 1]


def test_a_rank_that_has_lost_the_sync_is_not_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank begins to rebuild, in which they communicate."""
    left = [1, 1, 1]
    one = staged_but_not_prepared(ranks, left, monkeypatch)
    assert "ok" in ranks.engine.receivers[1].handle("drop", {})
    errors = errors_of(ranks.engine.prepare(one))
    assert {e["type"] for e in errors} == {"Conflict"}
    assert len(errors) == 3
    assert left == [1, 1, 1]


def test_an_incomplete_sync_is_not_prepared(ranks: Ranks) -> None:
    data = body(part=0, num_parts=2, sync_id="a")
    errors_of(ranks.engine.stage(part_id(data), data), none=True)
    assert {e["type"] for e in errors_of(ranks.engine.prepare(part_id(data)))} == {"Conflict"}


def test_a_rank_that_cannot_prepare_leaves_the_sync_staged(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = staged_but_not_prepared(ranks, [1, 1, 1], monkeypatch)

    def fail(staged: Any, *, full: bool) -> bool:
        raise NotUpdatable("lin cannot be rebuilt", module="lin")

    monkeypatch.setattr(ranks.appliers[1], "prepare", fail)
    answers = ranks.engine.prepare(one)
    assert ["error" in answer for answer in answers] == [False, True, False]
    assert answers[1]["error"]["module"] == "lin"
    assert ranks.written == [0, 0, 0]
    errors_of(ranks.engine.call("drop"), none=True)
    assert [status["staged"] for status in ranks.engine.status()] == [None] * 3
