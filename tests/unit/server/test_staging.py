"""What precedes a commit on every rank is done between two steps of the engine, or drops it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine_ext.errors import NotUpdatable
from engine_ext.wire.operations import Operation
from tests.support.in_process_engine import (
    STEP,
    Rig,
    after,
    assert_error,
    delta_part,
    fresh_weights,
)

NEXT = after(fresh_weights(), STEP)


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
            self.calls.append(request.name)
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
        assert steps.calls.index("settle") < steps.calls.index("prepare")
        assert steps.calls.index("prepare") < steps.calls.index("commit")


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
    assert "drop" in steps.calls
    assert "commit" not in steps.calls
    assert rig.status()["staged"] is None
    steps.fails = None
    rig.assert_untouched()


def test_a_part_that_one_rank_refuses_to_begin_is_forgotten_by_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of replicas one may be in another state; what the others have begun would stay."""
    receiver = rig.engine.receivers[1]
    begin = receiver.begin

    def refuse(request: Any) -> Any:
        raise NotUpdatable("not here")

    monkeypatch.setattr(receiver, "begin", refuse)
    assert_error(rig.send(delta_part()), 422, "NotUpdatable")
    assert rig.engine.receivers[0]._staging.get(0) is None
    monkeypatch.setattr(receiver, "begin", begin)
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)
