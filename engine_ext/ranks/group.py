"""The ranks of one engine, for votes among them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine_ext.errors import as_delta_error, from_wire

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_T = TypeVar("_T")
Bytes = NDArray[np.uint8]


class RankGroup(Protocol):
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
        import torch  # not by who only reads replies

        self._group = group
        self.rank = int(torch.distributed.get_rank(group))

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; all ranks must call it."""
        import torch

        size = torch.distributed.get_world_size(self._group)
        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def gather_bytes(self, data: Bytes, to: int) -> list[Bytes] | None:
        """Return every rank's bytes on the rank `to`, None on the others; all must call it."""
        import torch

        sizes: list[int] = self.all_gather(data.size)
        if len(sizes) == 1 or not max(sizes):
            return [data for _ in sizes]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.size] = torch.from_numpy(data)
        found = [torch.empty_like(padded) for _ in sizes] if self.rank == to else None
        torch.distributed.gather(padded, found, group=self._group, group_dst=to)
        if found is None:
            return None
        return [one[:size].numpy() for one, size in zip(found, sizes, strict=True)]


def gather_bytes(ranks: RankGroup, data: Bytes, to: int) -> list[Bytes] | None:
    """Return every rank's bytes, uint8 [bytes], at least on the rank `to`; None elsewhere.

    All ranks must call it.
    """
    if isinstance(ranks, GroupRanks):
        return ranks.gather_bytes(data, to)
    return ranks.all_gather(data)


def cores_per_rank(ranks: RankGroup) -> int:
    """Return this rank's share of the cores that it can run on, at least 1. All ranks must call it.

    Ranks that an engine binds to cores of their own share none.
    """
    host, own = _host(), sorted(os.sched_getaffinity(0))
    found = ranks.all_gather([host, own])
    users = Counter(core for other, cores in found if other == host for core in cores)
    return max(1, int(sum(Fraction(1, users[core]) for core in own)))


def _host() -> str:
    """Return an identity of this host, until it is started again."""
    return _BOOT_ID.read_text().strip()


def run_on_all_or_none(ranks: RankGroup, work: Callable[[], _T]) -> _T:
    """Do some work that does not communicate; if it fails on one rank, it fails on all.

    So the code after it can communicate. All ranks must call it.

    Raises:
        DeltaError: the error of another rank.
        Exception: the error of this rank.
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
