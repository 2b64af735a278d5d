"""Weights that change outside of syncs, or are released."""

from __future__ import annotations

import threading

import pytest

from tests.support.rank_engine import errors_of, part_id
from tests.unit.sync.recorded_ranks import Ranks, body

pytestmark = pytest.mark.slow


def test_weights_loaded_by_engine_take_only_full_sync(ranks: Ranks) -> None:
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
    """Staging that is under way ends first, also that of a sync that was dropped."""
    goes_on, began, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        goes_on.wait(10)
        ended.set()

    ranks.appliers[0].before_check = slow
    data = body()
    ranks.engine.begin(part_id(data), ranks.engine.spool(data))
    assert began.wait(10)
    receiver = ranks.engine.receivers[0]
    receiver.handle("abort", {})
    threading.Timer(0.2, goes_on.set).start()
    receiver.weights_released()
    assert ended.is_set()
    assert receiver.handle("status", {})["ok"]["status"]["asleep"]
    # One replica can sleep before the others, which would wait for it in the scan.
    for error in errors_of(ranks.engine.call("digest", scan=True)):
        assert error["type"] == "WeightsAsleep"


@pytest.mark.parametrize("staged", [True, False])
def test_rank_that_sleeps_during_staging_is_not_awaited(ranks: Ranks, staged: bool) -> None:
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
