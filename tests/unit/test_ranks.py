"""How many cores a rank may keep busy."""

from __future__ import annotations

import os

import pytest

from engine_ext.ranks import cores_per_rank


class Sets:
    """Ranks that may run on these cores, seen by the first of them."""

    rank = 0

    def __init__(self, *cores: set[int]) -> None:
        self.cores = cores

    def all_gather(self, value: object) -> list[list[int]]:
        assert value == sorted(self.cores[0])
        return [sorted(cores) for cores in self.cores]


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
