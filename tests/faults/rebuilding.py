"""Faults and deaths while a module is rebuilt, for engines with modules that are."""

from __future__ import annotations

from functools import partial

from tests.faults.harness import Harness
from tests.faults.observed import RANKS
from tests.faults.process_deaths import Death, rank_while_it
from tests.faults.survivable import rows


def one_rank_cannot_rebuild(harness: Harness, rank: int) -> None:
    """The engine's own processing raises there."""
    harness.arm("fail_rebuild", rank)
    harness.expect(harness.parts()[0], "422 NotUpdatable")


def one_rank_rebuilds_otherwise(harness: Harness, rank: int) -> None:
    harness.arm("other_bits", rank)
    harness.expect(harness.parts()[0], "422 NotUpdatable")


REBUILD_FAULTS = [
    *rows(
        "one rank of two fails to rebuild a module",
        "422 `NotUpdatable`",
        "old",
        *(
            (f"rank {k} cannot rebuild", partial(one_rank_cannot_rebuild, rank=k))
            for k in range(RANKS)
        ),
    ),
    *rows(
        "a rebuild on one rank of two gives other bits than its proof",
        "422 `NotUpdatable`",
        "old",
        *(
            (f"rank {k} rebuilds otherwise", partial(one_rank_rebuilds_otherwise, rank=k))
            for k in range(RANKS)
        ),
    ),
]

REBUILD_DEATHS = [
    Death(
        f"rank {rank} killed while it rebuilds",
        "one rank killed while it rebuilds a module",
        "500, or nothing",
        "log",
        rank_while_it("stall_rebuild", rank),
    )
    for rank in range(RANKS)
]
