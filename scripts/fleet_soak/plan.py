"""The faults of the soak: who dies, in which phase of a commit, and what must become of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from scripts.fleet_soak.coordinator import Kill


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: who dies.
        phase: of the commit.
        kill: when; None: before the commit, in order.
        leaves_out: whether engines can be left out of the commit.
        commits: whether the engines that live must commit.
    """

    what: Literal["engine killed", "engine replaced", "trainer killed"]
    phase: str
    kill: Kill | None
    commits: bool
    leaves_out: bool = True

    @property
    def hits_engine(self) -> bool:
        return self.what != "trainer killed"


FAULTS: Final = (
    Fault(
        "engine killed", "staging, all must commit", Kill(action="stage"), False, leaves_out=False
    ),
    # A quorum of one would decide with the first engine's record.
    Fault(
        *("trainer killed", "before the decision", Kill(action="record", number=2), False),
        leaves_out=False,
    ),
    Fault("engine killed", "staging", Kill(action="stage"), True),
    Fault("trainer killed", "after the decision", Kill(action="commit"), True),
    Fault("engine killed", "prepared", Kill(action="prepare", when="after"), False),
    Fault("trainer killed", "after the first commit", Kill(action="commit", number=2), True),
    Fault("engine killed", "recorded", Kill(action="record", when="after"), True),
    Fault("engine killed", "committing", Kill(action="commit", when="during"), True),
    Fault("engine killed", "after its commit", Kill(action="commit", when="after"), True),
    Fault("engine replaced", "between commits", None, True),
)


_BETWEEN: Final = 5  # an engine takes minutes to start, and the next one is hit after that


@dataclass(frozen=True)
class Due:
    """A fault, after how many commits it comes at the earliest, and the number of its engine.

    Attributes:
        ready: how many engines must be ready then, that one too.
    """

    fault: Fault
    commits: int
    victim: int
    ready: int


def quorum(engines: int) -> int:
    """Return how many engines must prepare if some can be left out: half of them."""
    return (engines + 1) // 2


def schedule(commits: int, engines: int, faults: Sequence[Fault] = FAULTS) -> list[Due]:
    """Put commits between the faults, five if there are so many; each engine is hit in turn.

    Args:
        commits: number of commits.
        engines: number of engines, 2 or more.
        faults: in their order.
    """
    due, victim = [], 0
    between = min(_BETWEEN, commits // (len(faults) + 1))
    for number, fault in enumerate(faults, 1):
        ready = max(2, quorum(engines) + fault.hits_engine) if fault.leaves_out else engines
        due.append(Due(fault, number * between, victim % engines, ready))
        victim += fault.hits_engine
    return due


def by_turns(kinds: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    """Return (kind, name) of so many engines of each kind, the kinds in turn."""
    most = max(count for _, count in kinds)
    return [(k, f"{k} {number}") for number in range(most) for k, count in kinds if number < count]
