"""What one process knows of following a log, and the leases that the ranks give."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from delta_server import board
from delta_server.follow_state import FollowState, LogLook
from engine_ext.log import Entry, Listing
from tests.support.endpoint_rig import Rig


def listing(*versions: int) -> Listing:
    folder = Path("log")
    return Listing([Entry(folder / str(v), v, v - 1, {}, 1) for v in versions])


def test_the_last_version(rig: Rig) -> None:
    unpinned = [(0, None, None), (1, None, 8), (2, None, 7), (3, None, -1)]
    for hold, pin, last in [*unpinned, (0, 8, 8), (2, 8, 7), (1, 7, 7)]:
        state = FollowState(rig.engine, hold)
        rig.run(state.record(pin=pin))
        assert (hold, pin, state.last_version(listing(7, 8, 9))) == (hold, pin, last)


def test_two_processes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = FollowState(rig.engine, 0), FollowState(rig.engine, 0)
    assert one.name != other.name
    assert (one.pid, one.leads) == (None, False)
    assert rig.run(one.lead())
    assert rig.run(one.lead())
    assert not rig.run(other.lead())
    rig.run(one.record(pin=9))
    assert rig.run(other.read()).pin == 9
    assert (one.leads, other.leads) == (True, False)
    assert (other.name, other.pid) == (one.name, one.pid)
    dead = one._item.name
    monkeypatch.setattr(board, "is_alive", lambda process: process != dead)
    assert rig.run(other.lead())
    assert rig.run(other.read()).pin == 9
    assert other.leads


def test_ranks_that_do_not_answer(rig: Rig) -> None:
    state = FollowState(rig.engine, 0)
    rig.engine.fails["lease"] = ConnectionError("lost")
    with pytest.raises(ConnectionError):
        rig.run(state.lead())
    assert rig.run(state.lead())


def look(error: dict[str, str] | None = None) -> LogLook:
    return LogLook(at=0.0, newest=9, behind=0, problem=None, error=error, asleep=False)


def test_looks_of_all_processes_count(rig: Rig) -> None:
    one, other = FollowState(rig.engine, 0), FollowState(rig.engine, 0)
    rig.run(other.record(pin=5))
    for count, state in ((1, one), (2, other), (3, one)):
        known = rig.run(state.record_look(look({"type": "LogDamaged"})))
        assert (known.failures, known.in_a_row, known.pin) == (count, count, 5)
    known = rig.run(other.record_look(look()))
    assert (known.failures, known.in_a_row) == (3, 0)


def test_a_look_keeps_what_another_process_has_prepared(rig: Rig) -> None:
    """It ends with what this process has known before."""
    one, other = FollowState(rig.engine, 0), FollowState(rig.engine, 0)
    rig.run(one.read())
    rig.run(other.record_prepared("of the other"))
    known = rig.run(one.record_look(look(), lambda known: replace(known, complete=9)))
    assert (known.group.prepared, known.group.complete) == ("of the other", 9)
    rig.run(one.record(pin=5))
    known = rig.run(other.record_prepared(None))
    assert (known.group.prepared, known.group.complete, known.pin) == (None, 9, 5)
    rig.run(other.record_group(lambda known: replace(known, complete=10)))
    known = rig.run(one.record_prepared("of this one"))
    assert (known.group.prepared, known.group.complete) == ("of this one", 10)
