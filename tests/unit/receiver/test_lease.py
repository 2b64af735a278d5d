"""The hold of the engine, which one HTTP process at a time has."""

from __future__ import annotations

from typing import Any

from engine_ext.receiver.lease import Lease


def take(hold: Lease, holder: str, resumes: bool = True, instead_of: str | None = None) -> Any:
    return hold.take(holder, resumes=resumes, instead_of=instead_of)


GRANTED = {"granted": True, "fresh": True}
STALE = {"granted": True, "fresh": False}


def test_one_at_a_time() -> None:
    hold = Lease()
    assert take(hold, "a") == GRANTED
    assert take(hold, "b") == {"granted": False, "holder": "a"}
    assert take(hold, "b", instead_of="c") == {"granted": False, "holder": "a"}
    assert take(hold, "a") == GRANTED
    hold.release("a", owed=False)
    assert take(hold, "b") == STALE
    assert take(hold, "b") == GRANTED


def test_what_was_seen_during_anothers_hold_does_not_count() -> None:
    hold = Lease()
    take(hold, "a", resumes=False)
    hold.release("a", owed=False)
    assert take(hold, "b", resumes=True) == STALE
    assert not hold.owed
    assert take(hold, "b", resumes=True) == GRANTED
    assert hold.owed


def test_what_is_owed_outlives_its_process() -> None:
    hold = Lease()
    take(hold, "a")
    assert take(hold, "b", resumes=False, instead_of="a") == STALE
    assert hold.owed
    hold.release("a", owed=False)  # it was thought dead
    assert hold.owed
    assert take(hold, "c")["granted"] is False
    hold.release("b", owed=True)
    assert take(hold, "c", resumes=False) == STALE
    assert hold.owed
    hold.release("c", owed=False)
    assert not hold.owed
