"""Ranks that fail, die or disagree: the engine is unchanged, and the others get a clear error."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from delta_sender import Shard, ShardedSender, SyncError
from delta_sender.publish.http_client import EngineClient
from delta_sender.sharded import owned
from tests.support.fake_engine import Engine, Model, model_of, train
from tests.support.gloo_ranks import run_ranks
from tests.support.sharded_trainers import served

pytestmark = pytest.mark.slow

RANKS = 3
LIMIT_S = 20.0


def rows(model: Model, rank: int) -> list[Shard]:
    """Return a rank's rows of every tensor: 2, 1 and 1 of 4; the last tensor is on all ranks."""
    start, stop = ((0, 2), (2, 3), (3, 4))[rank]
    *divided, last = model
    shards = [
        Shard(n, model[n][start:stop], tuple(model[n].shape), (slice(start, stop), slice(None)))
        for n in divided
    ]
    return [*shards, Shard(last, model[last], tuple(model[last].shape), (slice(None),) * 2)]


def run(rank: int, url: str, fault: str) -> Any:
    """Sync, sync with a fault, and sync again; return what the fault led to."""
    model = model_of()
    encoding = "gap8_ulp" if fault == "differences" else "deltas"
    full = "allow" if fault == "other values" else "own"
    options: dict[str, Any] = {"bucket_bytes": 40, "encoding": encoding, "full": full}
    with ShardedSender(url, rows(model, rank), rank_timeout=LIMIT_S, **options) as sender:
        train(model, 1)
        first = sender.sync(rows(model, rank), step=1)
        train(model, 2)
        start, step, given = time.monotonic(), 2, rows(model, rank)
        deliver = EngineClient.deliver
        if rank == 1:
            if fault == "step":
                step = 5
            elif fault == "fails":
                given = given[1:]
            elif fault == "copy":
                *others, last = given
                given = [*others, last._replace(tensor=-last.tensor)]
            elif fault == "version":
                sender._session.state.version = 7
            elif fault == "dies":
                EngineClient.deliver = dies_after_one(deliver)  # type: ignore[method-assign]
            elif fault == "encoding":
                EngineClient.deliver = raises  # type: ignore[method-assign, assignment]
        said = "nothing"
        try:
            sender.sync(given, step=step)
        except SyncError as failed:
            said = f"{type(failed).__name__}: {failed}"
        seconds = time.monotonic() - start
        EngineClient.deliver = deliver  # type: ignore[method-assign]
        if fault == "version":
            sender._session.state.version = 1
        if fault == "dies":
            with pytest.raises(SyncError, match="make a new one"):
                sender.sync(rows(model, rank))
            return said, seconds
        report = sender.sync(rows(model, rank), step=3)
        return said, seconds, first.full, report.version, report.full


def dies_after_one(deliver: Any) -> Any:
    calls: list[object] = []

    def replacement(self: Any, *arguments: Any) -> Any:
        if calls:
            os._exit(1)
        calls.append(arguments)
        return deliver(self, *arguments)

    return replacement


def raises(*arguments: Any) -> Any:
    raise MemoryError("no")


def after(steps: int) -> Model:
    model = model_of()
    for step in range(1, steps + 1):
        train(model, step)
    return model


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("step", "ranks disagree about the step: 2 on rank 0, 5 on rank 1"),
        ("copy", "copies of a shard differ: layers.5.weight[0:4, 0:"),
        pytest.param(
            "version",
            "ranks disagree about the version: 1 on rank 0, 7 on rank 1",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "fails",
            "rank 1: ValueError: missing, but given before: layers.0.weight",
            marks=pytest.mark.full,
        ),
        pytest.param("encoding", "rank 1: MemoryError: no", marks=pytest.mark.full),
    ],
)
def test_all_ranks_get_the_error_of_one(fault: str, said: str, tmp_path: Path) -> None:
    engine = Engine.of(model_of())
    with served(engine) as url:
        outcomes = run_ranks(run, RANKS, tmp_path, url, fault)
    assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
    errors = {outcome[0] for outcome in outcomes}
    assert len(errors) == 1
    assert said in errors.pop()
    assert {outcome[2:] for outcome in outcomes} == {(False, 2, False)}
    assert engine.holds(after(2))


@pytest.mark.full
def test_a_refusal_ends_in_one_full_sync_of_all_ranks(tmp_path: Path) -> None:
    engine = Engine.of(model_of())
    engine.weights["layers.3.weight"][-1] ^= 1  # what rank 2 holds
    with served(engine) as url:
        outcomes = run_ranks(run, RANKS, tmp_path, url, "other values")
    assert [outcome[2:] for outcome in outcomes] == [(True, 3, False)] * RANKS
    assert engine.holds(after(2))


def test_full_sync_is_refused_on_all_ranks(tmp_path: Path) -> None:
    engine = Engine.of(model_of())
    engine.weights["layers.3.weight"][-1] ^= 1
    with served(engine) as url:
        outcomes = run_ranks(run, RANKS, tmp_path, url, "nothing")
    assert all("FullSyncRefused" in outcome for outcome in outcomes)
    assert (engine.version, engine.requests) == (0, [])


def first_digest_fails(rank: int, urls: list[str], commit: str) -> tuple[str, float, str]:
    """Let rank 1 fail where it computes the first digest; return what follows, and when."""
    model = model_of()
    options: dict[str, Any] = {"commit": commit, "rank_timeout": LIMIT_S}
    with ShardedSender(urls, rows(model, rank), **options) as sender:
        if rank == 1:
            pytest.MonkeyPatch().setattr(owned, "box_digest", raises)
        start = time.monotonic()
        with pytest.raises((SyncError, MemoryError)) as failed:
            sender.sync(rows(model, rank))
        seconds = time.monotonic() - start
        with pytest.raises(SyncError) as again:
            sender.sync(rows(model, rank))
    return type(failed.value).__name__, seconds, str(again.value)


@pytest.mark.parametrize("commit", ["each", "all_or_none"])
def test_rank_that_fails_alone_keeps_none_waiting(tmp_path: Path, commit: str) -> None:
    with served(Engine.of(model_of())) as url:
        outcomes = run_ranks(first_digest_fails, RANKS, tmp_path, [url], commit)
    kind = "MemoryError" if commit == "each" else "RankError"
    assert [outcome[0] for outcome in outcomes] == ["RankError", kind, "RankError"], outcomes
    assert max(outcome[1] for outcome in outcomes) < LIMIT_S / 2
    assert all("make a new " in outcome[2] for outcome in outcomes)


def start_alike_but_for(rank: int, url: str) -> list[str]:
    """Give a rank another copy, and another one other options; return what each sender says."""
    said, model = [], model_of()
    *others, last = rows(model, rank)
    copy = [*others, last._replace(tensor=last.tensor + (rank == 2))]
    wrong: list[dict[str, Any]] = [{"digest": False}, {"full": "allow"}, {"commit": "all_or_none"}]
    for given, options in ((copy, {}), *((rows(model, rank), options) for options in wrong)):
        with pytest.raises(SyncError) as failed:
            ShardedSender(url, given, rank_timeout=LIMIT_S, **(options if rank == 1 else {}))
        said.append(str(failed.value))
    return said


def test_ranks_that_start_differently(tmp_path: Path) -> None:
    outcomes = run_ranks(start_alike_but_for, RANKS, tmp_path, "http://engine")
    assert len({copies for copies, *_ in outcomes}) == 1
    for copies, *options in outcomes:
        assert "copies of a shard differ: layers.5.weight[0:4, 0:" in copies
        assert copies.endswith("on ranks 0 and 2")
        assert [text.partition(": ")[0] for text in options] == [
            f"not sent, as ranks disagree about the {name}" for name in ("digest", "full", "commit")
        ]


def train_what_is_ignored(rank: int, url: str) -> list[str]:
    """Change what rank 1 has of a tensor that the engine ignores; return what is logged."""
    model, said = model_of(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("delta_sender").addHandler(handler)
    with ShardedSender(url, rows(model, rank), rank_timeout=LIMIT_S) as sender:
        for _ in range(2):
            model["layers.2.weight"][2] += 1
            sender.sync(rows(model, rank))
    return [text for text in said if "have changed" in text]


def test_leader_names_what_is_ignored_on_any_rank(tmp_path: Path) -> None:
    with served(Engine.of(model_of(), ignored={"layers.2.weight"})) as url:
        first, *others = run_ranks(train_what_is_ignored, RANKS, tmp_path, url)
    assert others == [[]] * (RANKS - 1)
    [said] = first
    assert said.endswith("as a fresh load of them would: layers.2.weight")


@pytest.mark.full
def test_differences_that_one_tensor_does_not_take(tmp_path: Path) -> None:
    engine = Engine.of(model_of(), cast={"layers.0.weight"})
    with served(engine) as url:
        outcomes = run_ranks(run, RANKS, tmp_path, url, "differences")
    assert [outcome[2:] for outcome in outcomes] == [(False, 3, False)] * RANKS
    assert engine.holds(after(2))


def test_a_rank_dies_between_parts(tmp_path: Path) -> None:
    engine = Engine.of(model_of())
    with served(engine) as url:
        outcomes = run_ranks(run, RANKS, tmp_path, url, "dies")
    assert outcomes[1] is None
    for said, seconds in (outcomes[0], outcomes[2]):
        assert said.startswith("RankError: a rank has died, or has not answered for 20 s")
        assert seconds < LIMIT_S + 10
    assert (engine.version, engine.staged, engine.owner) == (1, {}, None)
    assert engine.holds(after(1))
