"""Every rank is prepared before a commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine_ext.errors import NotUpdatable
from tests.support.rank_engine import errors_of, part_id
from tests.unit.sync.recorded_ranks import (
    Ranks,
    begin_another,
    body,
    release_weights,
    replace_weights,
)


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
    assert [a["ok"]["done"] for a in answers] == [count <= 0 for count in left]
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
    assert "ok" in ranks.engine.receivers[1].handle("abort", {})
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
    errors_of(ranks.engine.call("abort"), none=True)
    assert [status["staged"] for status in ranks.engine.status()] == [None] * 3
