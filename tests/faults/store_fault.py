"""A fault of a store, or of what an engine reads it with, while the engine follows a log in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tests.faults.following import FollowHarness

Lasts: TypeAlias = Callable[[FollowHarness], Iterator[None]]
Meanwhile: TypeAlias = Literal["old", "new"]


@dataclass(frozen=True)
class StoreFault:
    """One row of the matrix.

    Attributes:
        what: text in the table; rows with the same text are merged.
        answer: the report of the sender or the status, as text in the table.
        error: type of the follower's error while the fault lasts; None if it has none.
        meanwhile: the engine's version while the fault lasts.
        until: text in the table, if that is the old one: when the engine continues.
        about: what the error's message has.
        heard: whether the engine's heartbeat gets through.
        do: causes the fault, with a new version in the log if there can be one; yields; and ends
            it.
    """

    name: str
    what: str
    answer: str
    error: str | None
    meanwhile: Meanwhile
    until: str
    about: str
    heard: bool
    do: Lasts

    def lasts(self, harness: FollowHarness) -> contextlib.AbstractContextManager[None]:
        """Cause the fault, and end it."""
        return contextlib.contextmanager(self.do)(harness)


def lasting(
    what: str,
    error: str | None,
    until: str | None,
    *cases: tuple[str, Lasts],
    answer: str | None = None,
    about: str = "",
    heard: bool = True,
) -> list[StoreFault]:
    """Return rows; without `until`, the engine reaches the new version while the fault lasts."""
    meanwhile: Meanwhile = "new" if until is None else "old"
    answer = answer or ("nothing" if error is None else f"`{error}`")
    return [
        StoreFault(name, what, answer, error, meanwhile, until or "", about, heard, do)
        for name, do in cases
    ]
