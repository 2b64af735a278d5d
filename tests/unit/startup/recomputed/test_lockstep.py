"""What runs on all ranks in step ends on all of them, or fails on all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.errors import NotUpdatable
from engine_ext.ranks import SingleRank
from engine_ext.startup import LockstepRunner, RebuildError
from tests.support.toy_collective import all_ranks, all_reduce_max_

RANKS = 3

Outcome = tuple[str, Any]


def run(
    work: Callable[[int], Any], what: Callable[[int], str] = lambda rank: "it"
) -> list[Outcome]:
    """What comes of some work on every rank: its result, or the class and text of its error."""
    group = Group(RANKS)

    def of_rank(rank: int) -> Outcome:
        lockstep = LockstepRunner(ThreadRanks(group, rank))
        try:
            return "result", lockstep.run(what(rank), lambda: work(rank))
        except Exception as error:
            return type(error).__name__, str(error)

    with all_ranks(RANKS), ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(of_rank, range(RANKS)))


def meet(rank: int) -> float:
    top = torch.tensor([float(rank)])
    all_reduce_max_(top, rank)
    return float(top)


def test_the_ranks_meet() -> None:
    assert run(lambda rank: [meet(rank), meet(rank)]) == [("result", [2.0, 2.0])] * RANKS


@pytest.mark.parametrize("meetings", [0, 1, 2])
def test_one_that_fails_makes_all_fail(meetings: int) -> None:
    """Wherever the others are by then."""

    def work(rank: int) -> None:
        for _ in range(meetings if rank == 1 else 2):
            meet(rank)
        if rank == 1:
            raise NotUpdatable("no memory left", module="lin")

    assert run(work) == [("NotUpdatable", "no memory left")] * RANKS


def test_an_error_that_is_none_of_the_tree() -> None:
    def work(rank: int) -> None:
        if rank == 2:
            raise ValueError("no memory left")
        meet(rank)

    other = ("DeltaError", "ValueError: no memory left")
    assert run(work) == [other, other, ("ValueError", "no memory left")]


def test_all_that_fail() -> None:
    def work(rank: int) -> None:
        raise ValueError(f"rank {rank}")

    assert run(work) == [("ValueError", f"rank {rank}") for rank in range(RANKS)]


def test_ranks_at_other_operations() -> None:
    found = run(meet, lambda rank: f"module {min(rank, 1)}")
    assert {kind for kind, _ in found} == {"RebuildError"}
    assert "all_reduce_max_.default of module 0, others at" in found[0][1]
    found = run(lambda rank: [meet(rank) for _ in range(1 + (rank == 2))])
    assert {kind for kind, _ in found} == {"RebuildError"}
    assert "the end of it" in found[2][1]


def test_work_that_goes_on_after_a_failed_vote_meets_nobody() -> None:
    """The others have left; it fails all the same."""

    def work(rank: int) -> str:
        if rank == 1:
            raise ValueError("no memory left")
        for _ in range(3):
            try:
                meet(rank)
            except Exception:
                continue
        return "done without the others"

    kinds = [kind for kind, _ in run(work)]
    assert kinds == ["DeltaError", "ValueError", "DeltaError"]


def test_a_rank_that_does_not_answer() -> None:
    group = Group(2)
    group._barrier.abort()

    class Gone(ThreadRanks):
        def all_gather(self, value: Any) -> list[Any]:
            return [value, value] if value is None else super().all_gather(value)

    lockstep = LockstepRunner(Gone(group, 0))
    with pytest.raises(BrokenBarrierError):
        lockstep.run("it", lambda: None)


def stage(
    work: Callable[[int], Any], without: int, model: nn.Module | None = None
) -> list[Outcome]:
    """What comes of some work that one rank only follows, whose model does not have the module."""
    model = model or nn.ModuleDict({"it": nn.Identity()})  # as a pipeline stage has in its place
    group = Group(RANKS)

    def of_rank(rank: int) -> Outcome:
        lockstep = LockstepRunner(ThreadRanks(group, rank))
        try:
            if rank == without:
                lockstep.follow("it", model)
                return "followed", None
            return "result", lockstep.run("it", lambda: work(rank))
        except Exception as error:
            return type(error).__name__, str(error)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(of_rank, range(RANKS)))


@pytest.mark.parametrize("meetings", [0, 1, 3])
def test_a_rank_without_the_module_follows(meetings: int) -> None:
    """Nor does it meet the others in what they do."""
    alone = torch.tensor([1.0])  # no group is made: the operator is called, and meets nobody

    def work(rank: int) -> int:
        for _ in range(meetings):
            all_reduce_max_(alone, rank)
        return rank

    assert stage(work, 1) == [("result", 0), ("followed", None), ("result", 2)]


def test_a_rank_that_follows_fails_with_the_others() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            all_reduce_max_(torch.zeros(1), rank)
            raise NotUpdatable("no memory left", module="lin")
        all_reduce_max_(torch.zeros(1), rank)

    assert stage(work, 2) == [("NotUpdatable", "no memory left")] * RANKS


def test_a_rank_that_follows_hears_of_ranks_at_other_operations() -> None:
    def work(rank: int) -> None:
        for _ in range(rank):
            all_reduce_max_(torch.zeros(1), rank)

    assert {kind for kind, _ in stage(work, 2)} == {"RebuildError"}


def test_a_rank_that_has_the_module_may_not_be_waited_for() -> None:
    """It might belong to the group that the others would communicate in."""
    model = nn.ModuleDict({"it": nn.Linear(2, 2)})
    found = stage(lambda rank: all_reduce_max_(torch.zeros(1), rank), 1, model)
    assert {kind for kind, _ in found} == {"RebuildError"}
    assert stage(lambda rank: rank, 1, model) == [("result", 0), ("followed", None), ("result", 2)]


def test_all_ranks_may_follow() -> None:
    group = Group(2)
    with ThreadPoolExecutor(2) as threads:
        found = list(
            threads.map(
                lambda r: LockstepRunner(ThreadRanks(group, r)).follow("it", nn.Module()), range(2)
            )
        )
    assert found == [None, None]


def test_one_rank_alone_does_not_vote() -> None:
    lockstep = LockstepRunner(SingleRank())
    assert lockstep.run("it", lambda: meet(0)) == 0.0
    with pytest.raises(RebuildError, match="as it is"):
        lockstep.run("it", raise_as_it_is)


def raise_as_it_is() -> None:
    raise RebuildError("as it is")


def test_the_order_of_all_ranks() -> None:
    group = Group(2)

    def of_rank(rank: int) -> list[str]:
        return LockstepRunner(ThreadRanks(group, rank)).agree(["ac", "bc"][rank])

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(of_rank, range(2))) == [["a", "c", "b"]] * 2
