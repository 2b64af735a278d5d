"""The ranks of one engine, for votes among them."""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """This rank among the ranks of its engine.

    Attributes:
        rank: this rank's number, from 0.
    """

    rank: int

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; all ranks must call it."""


class SingleRank:
    """The only rank of an engine."""

    rank = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value alone."""
        return [value]
