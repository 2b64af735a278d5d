"""How many cores a rank can keep busy, and what ranks gather."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from engine_ext.ranks import GroupRanks, SingleRank, cores_per_rank, gather_bytes
from tests.support.gloo_ranks import run_ranks


class Sets:
    """Ranks that can run on these cores, seen by the first of them."""

    rank = 0

    def __init__(self, *cores: set[int]) -> None:
        self.cores = cores

    def all_gather(self, value: list[Any]) -> list[list[Any]]:
        host, own = value
        assert own == sorted(self.cores[0])
        # Another host has as many cores of the same numbers.
        elsewhere = [["another host", own]] * 2
        return [[host, sorted(cores)] for cores in self.cores] + elsewhere


@pytest.mark.parametrize(
    ("cores", "share"),
    [
        ([{0, 1, 2, 3}], 4),
        ([{0, 1, 2, 3}] * 2, 2),
        ([set(range(64))] * 8, 8),
        ([set(range(10))] * 3, 3),
        ([{0, 1}] * 8, 1),
        ([{0, 1}, {2, 3}], 2),  # bound to cores of their own
        ([{0, 1, 2}, {2, 3}], 2),
        ([{0, 1, 2}, {0, 1, 2}, {0}], 1),
        ([set(range(6)), set(range(6)), set(range(6))], 2),
    ],
)
def test_the_share_of_a_rank(
    cores: list[set[int]], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[0])
    assert cores_per_rank(Sets(*cores)) == share


def test_one_rank_gathers_alone() -> None:
    data = np.array([1, 2], np.uint8)
    assert gather_bytes(SingleRank(), data, 0) == [data]


def gathered(rank: int) -> dict[str, Any]:
    """This rank's share, in a group of all three and in one of the last two."""
    pair = dist.new_group([1, 2], backend="gloo")

    def get(group: Any, data: list[int], to: int) -> list[list[int]] | None:
        found = gather_bytes(GroupRanks(group), np.array(data, np.uint8), to)
        return None if found is None else [one.tolist() for one in found]

    everyone = [get(dist.group.WORLD, [rank] * rank, to) for to in range(3)]
    if rank == 0:
        return {"all": everyone}
    return {
        "all": everyone,
        "pair": [get(pair, [rank], to) for to in range(2)],
        "nothing": get(pair, [], 0),
    }


@pytest.mark.slow
def test_only_the_rank_that_is_named_gathers(tmp_path: Path) -> None:
    """As many bytes of each as it has."""
    whole = [[], [1], [2, 2]]
    none: list[list[int]] = [[], []]
    assert run_ranks(gathered, 3, tmp_path) == [
        {"all": [whole, None, None]},
        {"all": [None, whole, None], "pair": [[[1], [2]], None], "nothing": none},
        {"all": [None, None, whole], "pair": [None, [[1], [2]]], "nothing": none},
    ]
