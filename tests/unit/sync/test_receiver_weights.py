"""Weights that change outside of syncs, or are released."""

from __future__ import annotations

import threading

import pytest

from tests.support.rank_engine import errors_of, part_id
from tests.unit.sync.recorded_ranks import Ranks, body


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
