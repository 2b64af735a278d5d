"""The votes of a commit, and what they leave on every rank, with appliers that record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.errors import NotUpdatable
from engine_ext.model import TracingError
from engine_ext.sync.receiver import Receiver
from tests.support.rank_engine import Engine, RecordingApplier, errors_of, part_id
from tests.unit.sync.recorded_ranks import Ranks, body, lose_sync


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_rank_that_fails_makes_all_uncertain(ranks: Ranks, rank: int) -> None:
    ranks.appliers[rank].fail["commit"] = RuntimeError("out of luck")
    data = body()
    one = part_id(data)
    ranks.engine.stage(one, data)
    for error in errors_of(ranks.engine.commit(one)):
        assert error["type"] == "CommitFailed"
        assert error["engine_state"] == "uncertain"
        assert len(error["failed"]) == 1
        assert f"rank {rank}" in error["failed"][0]
        assert "out of luck" in error["message"]
    assert ranks.written == [1, 1, 1]
    assert ranks.states() == {(0, "uncertain")}


def test_every_rank_that_failed_is_named(ranks: Ranks) -> None:
    for rank in (0, 2):
        ranks.appliers[rank].fail["commit"] = RuntimeError("out of luck")
    data = body()
    ranks.engine.stage(part_id(data), data)
    for error in errors_of(ranks.engine.commit(part_id(data))):
        assert [text.split(":")[0] for text in error["failed"]] == ["rank 0", "rank 2"]


def test_only_a_full_sync_ends_uncertain(ranks: Ranks) -> None:
    ranks.appliers[0].fail["commit"] = RuntimeError("out of luck")
    data, all_of_it = body(), body(1, full=True)
    ranks.engine.stage(part_id(data), data)
    ranks.engine.commit(part_id(data))
    ranks.appliers[0].fail.clear()
    for again in (data, body(2, base_version=1)):
        answers = ranks.engine.stage(part_id(again), again)
        assert [e["type"] for e in errors_of(answers)] == ["EngineUncertain"] * 3
    assert ranks.written == [1, 1, 1]
    errors_of(ranks.engine.apply(part_id(all_of_it), all_of_it), none=True)
    assert ranks.states() == {(1, "certain")}
    errors_of(ranks.engine.apply(part_id(body(2)), body(2)), none=True)


def lose_part(receiver: Receiver) -> None:
    receiver._sync_state.settle(1, staged=False)
    receiver._staging.forget(1)


def hold_another(receiver: Receiver) -> None:
    receiver.handle("abort", {})
    other = part_id(body(), part=0, num_parts=2, sync_id="other", identity="another")
    receiver._sync_state.admit(other, now=0.0)
    receiver._sync_state.settle(0, staged=True)


@pytest.mark.parametrize("lose", [lose_sync, lose_part, hold_another])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_lacks_a_part_refuses_for_all(
    ranks: Ranks, lose: Callable[[Receiver], None], rank: int
) -> None:
    parts = [body(name=name, part=n, num_parts=2) for n, name in enumerate("ab")]
    for data in parts:
        ranks.engine.stage(part_id(data), data)
    lose(ranks.engine.receivers[rank])
    for error in errors_of(ranks.engine.commit(part_id(parts[0]))):
        assert error["type"] == "Conflict"
        assert error["engine_state"] == "unchanged"
    assert ranks.written == [0, 0, 0]
    assert ranks.states() == {(0, "certain")}


@pytest.mark.parametrize("error", [NotUpdatable("moved", tensors=["w"]), MemoryError("none left")])
def test_a_check_that_fails_at_the_last_moment_refuses_for_all(
    ranks: Ranks, error: Exception
) -> None:
    """Whatever it is, the rank must still vote, or the others wait for it for ever."""
    data = body()
    one = part_id(data)
    ranks.engine.stage(one, data)
    ranks.appliers[1].fail["check_sync"] = error
    refusals = errors_of(ranks.engine.commit(one))
    assert refusals == [refusals[0]] * 3
    assert str(error) in refusals[0]["message"]
    assert ranks.written == [0, 0, 0]
    assert ranks.states() == {(0, "certain")}
    ranks.appliers[1].fail.clear()
    errors_of(ranks.engine.commit(one), none=True)


@pytest.mark.parametrize(
    ("version", "sync_id"), [(2, "a"), (1, "b"), (1, None)], ids=["version", "id", "no id"]
)
def test_only_the_staged_sync_is_committed(ranks: Ranks, version: int, sync_id: str | None) -> None:
    data = body(sync_id="a")
    ranks.engine.stage(part_id(data), data)
    answers = ranks.engine.call("commit", version=version, sync_id=sync_id)
    assert [e["type"] for e in errors_of(answers)] == ["Conflict"] * 3
    assert ranks.written == [0, 0, 0]


def test_an_incomplete_sync_is_not_committed(ranks: Ranks) -> None:
    data = body(part=0, num_parts=2)
    ranks.engine.stage(part_id(data), data)
    assert [e["type"] for e in errors_of(ranks.engine.commit(part_id(data)))] == ["Conflict"] * 3
    assert ranks.written == [0, 0, 0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_weights_that_fell_asleep_after_staging_are_not_written(ranks: Ranks, rank: int) -> None:
    data = body()
    one = part_id(data)
    ranks.engine.stage(one, data)
    ranks.engine.receivers[rank].set_asleep(True)
    assert [e["type"] for e in errors_of(ranks.engine.commit(one))] == ["WeightsAsleep"] * 3
    assert ranks.written == [0, 0, 0]
    ranks.engine.receivers[rank].set_asleep(False)
    errors_of(ranks.engine.commit(one), none=True)


def test_weights_lost_after_staging_take_only_full_sync(ranks: Ranks) -> None:
    data, all_of_it = body(), body(full=True)
    ranks.engine.stage(part_id(data), data)
    for receiver in ranks.engine.receivers:
        receiver._sync_state.uncertain = True
    answers = ranks.engine.commit(part_id(data))
    assert [e["type"] for e in errors_of(answers)] == ["EngineUncertain"] * 3
    assert ranks.written == [0, 0, 0]
    ranks.engine.call("abort")
    errors_of(ranks.engine.apply(part_id(all_of_it), all_of_it), none=True)
    assert ranks.states() == {(1, "certain")}


class BrokenVote:
    """A rank alone in its group, whose n-th all-gather fails."""

    rank = 0

    def __init__(self, fails_at: int) -> None:
        self._left = fails_at

    def all_gather(self, value: Any) -> list[Any]:
        self._left -= 1
        if self._left == 0:
            raise ConnectionError("the other ranks are gone")
        return [value]


@pytest.mark.parametrize(
    ("fails_at", "kind", "state", "written"),
    [(1, "DeltaError", "unchanged", 0), (2, "CommitFailed", "uncertain", 1)],
    ids=["before the write", "after the write"],
)
def test_a_vote_that_fails(
    tmp_path: Path, fails_at: int, kind: str, state: str, written: int
) -> None:
    """After the write nobody knows what the others did, and that is not fine."""
    applier = RecordingApplier()
    engine = Engine([applier], tmp_path)
    data = body()
    engine.stage(part_id(data), data)
    engine.receivers[0]._transaction._ranks = BrokenVote(fails_at)
    [error] = errors_of(engine.commit(part_id(data)))
    assert (error["type"], error["engine_state"]) == (kind, state)
    assert len(applier.committed) == written
    [status] = engine.status()
    assert (status["version"], status["engine_state"] == "uncertain") == (0, state == "uncertain")


@pytest.mark.parametrize("at", ["prepare", "commit"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_check_that_changes_the_model_makes_all_uncertain(
    ranks: Ranks, rank: int, at: str
) -> None:
    """Though another rank merely refuses the sync, and nothing was written."""
    whole = body(2, full=True)
    data = body()
    if at == "commit":
        errors_of(ranks.engine.stage(part_id(data), data), none=True)
    ranks.appliers[rank].fail["check_sync"] = TracingError("tensors moved")
    ranks.appliers[1].fail["check_sync"] = NotUpdatable("no", tensor="w")
    one = part_id(data)
    answers = ranks.engine.commit(one) if at == "commit" else ranks.engine.stage(one, data)
    for error in errors_of(answers):
        assert (error["type"], error["engine_state"]) == ("CommitFailed", "uncertain")
        assert f"rank {rank}: tensors moved" in error["message"]
    assert ranks.written == [0, 0, 0]
    assert ranks.states() == {(0, "uncertain")}
    assert [s["staged"] for s in ranks.engine.status()] == [None] * 3
    for applier in ranks.appliers:
        applier.fail.clear()
    assert {e["type"] for e in errors_of(ranks.engine.stage(one, data))} == {"EngineUncertain"}
    errors_of(ranks.engine.apply(part_id(whole), whole), none=True)
    assert ranks.states() == {(2, "certain")}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("step", ["finish", "_keep_undo", "digest"])
def test_written_but_unrecorded_sync_is_uncertain(
    ranks: Ranks, rank: int, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("none left")

    receiver, applier = ranks.engine.receivers[rank], ranks.appliers[rank]
    data = body()
    errors_of(ranks.engine.stage(part_id(data), data), none=True)
    if step == "digest":
        broken = SimpleNamespace(hex=fail)
        monkeypatch.setattr(applier, step, broken)
    else:
        monkeypatch.setattr(applier if step == "finish" else receiver, step, fail)
    answers = ranks.engine.commit(part_id(data))
    monkeypatch.undo()
    error = answers[rank]["error"]
    assert (error["type"], error["engine_state"]) == ("CommitFailed", "uncertain")
    assert "none left" in error["message"]
    status = receiver.handle("status", {})["ok"]["status"]
    assert status["engine_state"] == "uncertain"
    assert (status["version"], status["can_roll_back"]) == (0, False)
    full = body(2, full=True)
    errors_of(ranks.engine.apply(part_id(full), full), none=True)
    assert ranks.states() == {(2, "certain")}


def test_a_check_that_changes_the_model_and_a_vote_that_fails(tmp_path: Path) -> None:
    applier = RecordingApplier()
    engine = Engine([applier], tmp_path)
    data = body()
    engine.stage(part_id(data), data)
    applier.fail["check_sync"] = TracingError("tensors moved")
    engine.receivers[0]._transaction._ranks = BrokenVote(1)
    [error] = errors_of(engine.commit(part_id(data)))
    assert (error["type"], error["engine_state"]) == ("CommitFailed", "uncertain")
    assert engine.status()[0]["engine_state"] == "uncertain"
