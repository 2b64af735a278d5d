"""Agreement of SGLang's ranks before an operation, with ranks in threads and without SGLang."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.adapters.sglang import scheduler
from engine_ext.adapters.sglang.rpc import Call
from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.errors import DeltaError
from engine_ext.ranks import operations

COMMIT = Call(call="c", operation="commit", arguments={"version": 1, "sync_id": None})


class Tower(nn.Module):
    """A vision tower that keeps what it has interpolated."""

    def __init__(self) -> None:
        super().__init__()
        self._interpolated_pos_emb_cache = {(2, 2): torch.ones(4)}


class EmbeddingCache:
    """SGLang's cache of embeddings, here of two ranks in one process."""

    def __init__(self) -> None:
        self.cleared = 0

    def clear(self) -> None:
        self.cleared += 1


@pytest.fixture(autouse=True)
def mm_schedule(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's module that holds the cache."""
    module = SimpleNamespace(embedding_cache=EmbeddingCache())
    managers = SimpleNamespace(mm_schedule=module)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", managers)
    return module


class Updater(SimpleNamespace):
    """SGLang's weight updater on one rank; its receiver votes before it writes."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self.written: list[Any] = []

        def execute(request: Any) -> operations.Reply:
            ranks.all_gather("vote")
            self.written.append(request)
            return operations.Reply()

        def set_asleep(asleep: bool, *, other: bool) -> None:
            self.released = (asleep, other)

        receiver = SimpleNamespace(execute=execute, set_asleep=set_asleep)
        runner = SimpleNamespace(delta_receiver=receiver, delta_ranks=ranks, model=Tower())
        runner.delta_runners = [runner]
        super().__init__(
            tp_worker=SimpleNamespace(model_runner=runner),
            scheduler=SimpleNamespace(_engine_paused=True),
            offload_tags=(),
            _session=None,
        )


def test_a_part_is_refused_without_asking_other_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them might hang, and must not keep this one from generating."""
    group = Group(2)
    updaters = [Updater(ThreadRanks(group, rank)) for rank in range(2)]
    this = threading.local()
    monkeypatch.setattr(scheduler, "_ranks_of_replica", lambda: this.ranks)
    monkeypatch.setattr(scheduler, "in_place_refusal", lambda runner: None)
    updaters[1]._session = "its own update"

    def begin(updater: Updater) -> None:
        this.ranks = updater.tp_worker.model_runner.delta_ranks
        updater.tp_worker.model_runner.delta_ranks = None
        with pytest.raises(DeltaError, match="has begun and not ended"):
            scheduler._refuse_together(updater, writes=False)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(begin, updaters)) == [None, None]


@pytest.mark.parametrize(
    ("tags", "released"),
    [((), (False, False)), (("kv_cache",), (False, True)), (("weights",), (True, True))],
)
def test_the_receiver_knows_what_memory_is_released(
    tags: tuple[str, ...], released: tuple[bool, bool]
) -> None:
    updater = Updater(ThreadRanks(Group(1), 0))
    updater.offload_tags = tags
    scheduler._carry_out(updater, Call(call="c", operation="abort", arguments={}))
    assert updater.released == released


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_pass_that_fails_on_one_rank_is_refused_by_all(
    failing: int | None, monkeypatch: pytest.MonkeyPatch, mm_schedule: SimpleNamespace
) -> None:
    """Its error surfaces when the rank waits for its device; the others would wait in the vote."""
    group = Group(2)
    updaters = [Updater(ThreadRanks(group, rank)) for rank in range(2)]
    monkeypatch.setattr(scheduler, "in_place_refusal", lambda runner: None)
    this = threading.local()

    def synchronize() -> None:
        if this.rank == failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(torch, "get_device_module", lambda: device)

    def commit(rank: int) -> Exception | None:
        this.rank = rank
        try:
            scheduler._carry_out(updaters[rank], COMMIT)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(commit, range(2)))
    if failing is None:
        assert errors == [None, None]
        assert [updater.written for updater in updaters] == [[COMMIT.request()]] * 2
        # No embedding is of older weights.
        assert mm_schedule.embedding_cache.cleared == 2
        for updater in updaters:
            assert not updater.tp_worker.model_runner.model._interpolated_pos_emb_cache
        return
    for error, updater in zip(errors, updaters, strict=True):
        assert isinstance(error, DeltaError)
        assert "illegal memory access" in str(error)
        assert updater.written == []


@pytest.mark.parametrize("operation", ["commit", "rollback"])
def test_embeddings_are_dropped_before_the_write(
    operation: str, monkeypatch: pytest.MonkeyPatch, mm_schedule: SimpleNamespace
) -> None:
    """If that failed afterwards, weights would be new and embeddings old."""
    updater = Updater(ThreadRanks(Group(1), 0))
    monkeypatch.setattr(scheduler, "in_place_refusal", lambda runner: None)

    def clear() -> None:
        raise RuntimeError("no such cache")

    mm_schedule.embedding_cache.clear = clear
    arguments = COMMIT.arguments if operation == "commit" else {}
    with pytest.raises(DeltaError, match="no such cache"):
        scheduler._carry_out(updater, Call(call="c", operation=operation, arguments=arguments))
    assert updater.written == []
    mm_schedule.embedding_cache = None  # a text model's
    scheduler._carry_out(updater, Call(call="c", operation=operation, arguments=arguments))
    assert len(updater.written) == 1
