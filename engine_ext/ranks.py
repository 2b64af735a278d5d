"""The ranks of one engine, for votes among them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Protocol, TypeVar

import torch

from engine_ext.errors import as_delta_error, from_wire

_T = TypeVar("_T")


class Ranks(Protocol):
    """This rank among the ranks of its engine; `rank` is its number, from 0."""

    rank: int

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; all ranks must call it."""


class SingleRank:
    """The only rank of an engine."""

    rank = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value alone."""
        return [value]


class GroupRanks:
    """The ranks of a process group on the CPU."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = int(torch.distributed.get_rank(group))

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; all ranks must call it."""
        size = torch.distributed.get_world_size(self._group)
        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: Any, to: int) -> list[Any] | None:
        """Return every rank's value on the rank `to`, None on the others; all must call it."""
        size = torch.distributed.get_world_size(self._group)
        if size == 1:
            return [value]
        values: list[Any] | None = [None] * size if self.rank == to else None
        destination = torch.distributed.get_global_rank(self._group, to)
        torch.distributed.gather_object(value, values, dst=destination, group=self._group)
        return values


def gather(ranks: Ranks, value: Any, to: int) -> list[Any] | None:
    """Return every rank's value at least on the rank `to`, None elsewhere; all must call it."""
    return ranks.gather(value, to) if isinstance(ranks, GroupRanks) else ranks.all_gather(value)


def cores_per_rank(ranks: Ranks) -> int:
    """Return this rank's share of the cores that it may run on, at least 1. All ranks must call it.

    All ranks run on one host. Those that an engine binds to cores of their own share none.
    """
    own = sorted(os.sched_getaffinity(0))
    users = Counter(core for cores in ranks.all_gather(own) for core in cores)
    return max(1, int(sum(Fraction(1, users[core]) for core in own)))


def together(ranks: Ranks, work: Callable[[], _T]) -> _T:
    """Do some work that does not communicate; if it fails on one rank, it fails on all.

    So what follows may communicate. All ranks must call it.

    Raises:
        DeltaError: what the work raised on another rank.
        Exception: what it raised on this rank.
    """
    try:
        result = work()
    except Exception as error:
        ranks.all_gather(as_delta_error(error, log=False).to_wire())
        raise
    errors = [error for error in ranks.all_gather(None) if error is not None]
    if errors:
        raise from_wire(errors[0])
    return result
