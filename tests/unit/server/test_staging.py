"""Parts are staged side by side, and what must precede a commit is done between two steps."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from delta_server import staging
from engine_ext.errors import BaseMismatch, DeltaError, NotUpdatable
from engine_ext.format import DecodedPart
from engine_ext.ranks.operations import BeginPart, Operation, PartBegun, PollPart, PrepareSync
from tests.support.cases import case
from tests.support.delta_bodies import NEXT, Changes, after, delta_part, fresh_weights
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.in_process_engine import RANKS
from tests.support.present import present


def named(request: Operation[Any]) -> str:
    """The name of a request to the ranks; ``keep`` for the first half of ``prepare``."""
    return "keep" if isinstance(request, PrepareSync) and request.keep else request.name


class Steps:
    """How often each rank must be asked until it is prepared."""

    def __init__(self, rig: Rig, left: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = list(left)
        self.calls: list[str] = []
        self.fails: Exception | None = None
        for rank, shard in enumerate(rig.engine.shards):
            monkeypatch.setattr(shard, "is_prepared", self._is_prepared(rank))
            monkeypatch.setattr(shard, "prepare", self._prepare(rank))
        call = rig.engine.call

        async def recorded(request: Operation[Any]) -> Any:
            self.calls.append(named(request))
            return await call(request)

        monkeypatch.setattr(rig.engine, "call", recorded)

    def _is_prepared(self, rank: int) -> Callable[..., bool]:
        return lambda staged: self.left[rank] <= 0

    def _prepare(self, rank: int) -> Callable[..., bool]:
        def prepare(staged: Any, *, full: bool) -> bool:
            self.left[rank] -= 1
            if self.fails is not None and rank == 1:
                raise self.fails
            return self.left[rank] <= 0

        return prepare


@pytest.mark.parametrize(("left", "calls"), [((0, 0), 0), ((1, 0), 1), ((0, 3), 3), ((2, 2), 2)])
def test_all_ranks_prepare_until_none_is_left(
    rig: Rig, left: tuple[int, int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(rig, left, monkeypatch)
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)
    assert steps.calls.count("prepare") == calls
    assert [before - now for before, now in zip(left, steps.left, strict=True)] == [calls, calls]
    if calls:
        assert steps.calls.index("keep") < steps.calls.index("prepare")
        assert steps.calls.index("prepare") < steps.calls.index("commit")


def test_the_ranks_are_called_seven_times_for_a_sync(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one, which adds to the history, comes after the answer."""
    steps = Steps(rig, (0, 0), monkeypatch)
    rig.assert_committed(rig.send(delta_part(sync_id="s")), NEXT, 8)
    rig.run(rig.service.reporter.flush())
    polls = steps.calls.count("poll")
    staged, committed = ["begin", *["poll"] * polls, "keep"], ["lease", "commit", "lease"]
    assert (steps.calls, polls > 0) == ([*staged, *committed, "put"], True)


def test_an_incomplete_sync_is_not_prepared(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(rig, (1, 1), monkeypatch)
    response = rig.send(delta_part(part=0, num_parts=2, sync_id="s"))
    assert response.json()["status"] == "staged"
    assert "prepare" not in steps.calls


def test_a_rank_that_cannot_prepare_drops_the_sync(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(rig, (2, 2), monkeypatch)
    steps.fails = NotUpdatable("lin cannot be rebuilt", module="lin")
    assert_error(rig.send(delta_part()), 422, "NotUpdatable", module="lin")
    assert steps.calls.count("prepare") == 1
    assert "abort" in steps.calls
    assert "commit" not in steps.calls
    assert rig.status().staged is None
    steps.fails = None
    rig.assert_untouched()


def test_ranks_with_different_parts_drop_the_sync(rig: Rig) -> None:
    """A replica that has slept lacks the part before: no rank waits for its vote."""
    parts = [delta_part(part=number, num_parts=2, sync_id="s") for number in (0, 1)]
    assert rig.send(parts[0]).json()["status"] == "staged"
    rig.engine.receivers[1].weights_released()
    rig.engine.receivers[1].set_asleep(False)
    assert_error(rig.send(parts[1]), 409, "Conflict")
    assert rig.status().staged is None


def test_no_rank_waits_for_one_that_hangs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank begins a part in its engine's main loop: other replicas continue to generate."""
    first, second, begun, hangs = *rig.engine.receivers, threading.Event(), threading.Event()
    begin_first, begin_second = first.begin, second.begin

    def begins(request: BeginPart) -> PartBegun:
        answer = begin_first(request)
        begun.set()
        return answer

    def hangs_first(request: BeginPart) -> PartBegun:
        hangs.wait(30)
        return begin_second(request)

    monkeypatch.setattr(first, "begin", begins)
    monkeypatch.setattr(second, "begin", hangs_first)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(rig.send, delta_part())
        try:
            assert begun.wait(20)
            assert not sent.done()
        finally:
            hangs.set()
        rig.assert_committed(sent.result(), NEXT, 8)


def test_all_ranks_forget_part_that_one_refuses_to_begin(rig: Rig) -> None:
    """One replica can be asleep; the part that the others have begun would stay."""
    rig.engine.receivers[1].weights_released()
    assert_error(rig.send(delta_part()), 409, "WeightsAsleep")
    assert rig.status().staged is None
    rig.engine.receivers[1].set_asleep(False)
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


# Several parts of one request, side by side ----------------------------------------------------

THREE: list[Changes] = [
    {"embed.weight": {0: 0x1111}},
    {"layer.weight": {3: 0x2222}},
    {"norm.weight": {7: 0x3333}},
]


def write_files(folder: Path, **metadata: Any) -> None:
    """One file for each of three changes; numbered parts of one sync if there is metadata."""
    for number, changes in enumerate(THREE):
        numbered = {**metadata, "part": number} if metadata else {}
        (folder / f"{number}.safetensors").write_bytes(delta_part(changes, **numbered))


def recorded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the requests to the ranks about parts, with the parts' numbers."""
    calls: list[tuple[str, int]] = []
    call = rig.engine.call

    async def record(request: Operation[Any]) -> Any:
        if isinstance(request, BeginPart | PollPart | PrepareSync):
            calls.append((named(request), request.part.part))
        return await call(request)

    monkeypatch.setattr(rig.engine, "call", record)
    return calls


def staged_by(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, before: Callable[[DecodedPart], object]
) -> None:
    """Let every rank call `before` with a part that it is about to stage."""
    for shard in rig.engine.shards:

        def stage(part: DecodedPart, original: Any = shard.stage) -> Any:
            before(part)
            return original(part)

        monkeypatch.setattr(shard, "stage", stage)


def test_files_are_staged_side_by_side(
    disk_rig: Rig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(root)
    all_at_once = threading.Barrier(len(THREE) * RANKS)
    staged_by(disk_rig, monkeypatch, lambda part: all_at_once.wait(8))
    disk_rig.assert_committed(disk_rig.disk(root), after(fresh_weights(), *THREE), 8)


def test_as_many_files_are_staged_at_once_as_a_rank_has_threads(
    make_rig: Callable[..., Rig], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(roots=(str(root),), read_workers=2)
    write_files(root)
    calls = recorded(rig, monkeypatch)
    rig.assert_committed(rig.disk(root), after(fresh_weights(), *THREE), 8)
    order = [call for call in calls if call[0] != "poll"]
    assert order == [
        *(("begin", 0), ("begin", 1), ("keep", 0)),
        *(("begin", 2), ("keep", 1), ("keep", 2)),
    ]


@pytest.mark.slow
def test_the_ranks_are_asked_once_when_they_have_staged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_ALIVE_S", 60.0)
    calls = recorded(rig, monkeypatch)
    staged_by(rig, monkeypatch, lambda part: time.sleep(0.2))
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)
    assert calls == [("begin", 0), ("poll", 0), ("keep", 0)]
    assert rig.spooled() == []


def test_ranks_that_cannot_signal_are_asked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise PermissionError("no pipes here")

    monkeypatch.setattr(os, "mkfifo", unsupported)
    staged_by(rig, monkeypatch, lambda part: time.sleep(0.05))
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


def test_no_rank_hears_of_a_damaged_part(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(rig, monkeypatch)
    for encoding in ("deltas", "gap8_exp"):
        body = delta_part(encoding=encoding)
        answer = rig.send(body[:-1] + bytes([body[-1] ^ 1]))
        assert_error(answer, 400, "ChecksumMismatch")
        assert (calls, rig.spooled()) == ([], []), encoding


def test_a_dead_rank_is_noticed_while_others_stage(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_ALIVE_S", 0.01)
    go_on = threading.Event()
    staged_by(rig, monkeypatch, lambda part: go_on.wait(60))
    rig.engine.fails["poll"] = DeltaError("a rank is dead")
    assert_error(rig.send(delta_part()), 500, "DeltaError")
    assert rig.spooled() == []
    go_on.set()
    for receiver in rig.engine.receivers:
        receiver._staging.wait()
    assert rig.spooled() == []


def test_one_bad_file_and_nothing_is_staged(disk_rig: Rig, root: Path) -> None:
    write_files(root)
    refuses = disk_rig.engine.shards[1].refuses
    errors = (NotUpdatable("no"), BaseMismatch("no"), ValueError("no"))
    for [name], error in itertools.product(THREE, errors):
        with case((name, error)):
            refuses[name] = error
            answer = disk_rig.disk(root)
            kind = type(error).__name__ if isinstance(error, DeltaError) else "DeltaError"
            assert answer.json()["error"]["type"] == kind
            assert disk_rig.status().staged is None
            assert all(
                r._staging.get(n) is None for r in disk_rig.engine.receivers for n in range(3)
            )
            assert (disk_rig.engine.writes, disk_rig.spooled()) == ([0, 0], [])
            refuses.clear()
    disk_rig.assert_committed(disk_rig.disk(root), after(fresh_weights(), *THREE), 8)


def test_of_numbered_files_those_before_the_bad_one_stay(disk_rig: Rig, root: Path) -> None:
    """They are parts of a sync; other requests can send the rest of it."""
    write_files(root, sync_id="s", num_parts=3)
    disk_rig.engine.shards[1].refuses["layer.weight"] = BaseMismatch("no")
    assert_error(disk_rig.disk(root), 409, "BaseMismatch")
    assert present(disk_rig.status().staged).parts == [0]
    assert [disk_rig.engine.receivers[0]._staging.get(n) is None for n in range(3)] == [
        *(False, True, True)
    ]
    disk_rig.engine.shards[1].refuses.clear()
    disk_rig.assert_committed(disk_rig.disk(root), after(fresh_weights(), *THREE), 8)


def test_a_file_that_is_not_begun_and_the_others_are_forgotten(
    disk_rig: Rig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(root)
    receiver, call = disk_rig.engine.receivers[1], disk_rig.engine.call

    async def asleep_from_the_last(request: Operation[Any]) -> Any:
        if isinstance(request, BeginPart) and request.part.part == 2:
            receiver.set_asleep(True)
        return await call(request)

    with monkeypatch.context() as patch:
        patch.setattr(disk_rig.engine, "call", asleep_from_the_last)
        assert_error(disk_rig.disk(root), 409, "WeightsAsleep")
    assert disk_rig.status().staged is None
    receiver.set_asleep(False)
    disk_rig.assert_committed(disk_rig.disk(root), after(fresh_weights(), *THREE), 8)
