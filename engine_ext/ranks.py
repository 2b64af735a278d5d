"""The ranks of one engine, as far as this package needs to know them."""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """This rank's place among the engine's ranks."""

    rank: int

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; all ranks must call it."""


class SingleRank:
    """The only rank of an engine."""

    rank = 0

    def all_gather(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]
