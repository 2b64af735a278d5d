"""Ranks that send their shards to engines which commit as one; `test_fleet` has one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender import (
    RankError,
    Shard,
    ShardedSender,
    SyncError,
)
from delta_sender.publish.http_client import EngineClient
from tests.support.delta_bodies import VERSION
from tests.support.endpoint_rig import DELTA
from tests.support.fake_engine import Model, train
from tests.support.fleet_rig import FleetRig
from tests.support.gloo_ranks import run_ranks
from tests.support.sharded_trainers import served
from tests.unit.sender.sharded.test_one_rank import whole
from tests.unit.sender.test_fleet import fresh_model, hold, refuse, states, versions
from tests.unit.sender.test_fleet import one_rank as sender_of

pytestmark = pytest.mark.slow

RANKS = 2
REFUSE = "/refuse"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetRig]:
    made = FleetRig(tmp_path, 3)
    yield made
    made.close()


@pytest.fixture
def model() -> Model:
    return fresh_model()


def test_engine_that_hangs_delays_no_commit(fleet: FleetRig, model: Model) -> None:
    """The sync returns once its request has timed out, which is not sent again."""
    hangs, committed, posted = fleet.urls[0], threading.Semaphore(0), list[httpx.Request]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == DELTA and str(request.url).startswith(hangs):
            posted.append(request)
        if posted == [request]:
            assert committed.acquire(timeout=20)
            assert committed.acquire(timeout=20)
            time.sleep(0.2)
            raise httpx.ReadTimeout("late", request=request)
        given = fleet.answer(request)
        if b'"commit"' in request.read():
            committed.release()
        return given

    options: dict[str, Any] = {"quorum": 2, "lag_limit": 0.2, "posts_in_flight": 1}
    with sender_of(fleet, model, answer, **options) as sender:
        train(model)
        sender.sync(whole(model))
        assert (len(posted), versions(fleet)) == (1, [VERSION, VERSION + 1, VERSION + 1])
        assert states(sender) == ["left out", "committed", "committed"]
        train(model, 1)
        sender.sync(whole(model))
        assert states(sender) == ["committed"] * 3
        assert hold(fleet, model) == [True] * 3


def test_several_engines_of_ranks_commit_as_one(fleet: FleetRig, model: Model) -> None:
    with pytest.raises(ValueError, match="all_or_none"):
        sender_of(fleet, model, commit="each", commit_window=10.0)
    with pytest.raises(ValueError, match="each once"):
        ShardedSender([fleet.urls[0]] * 2, whole(model), commit="all_or_none")
    with pytest.raises(ValueError, match="quorum is 4, of 3 engines"):
        sender_of(fleet, model, quorum=4)


# Several ranks, in processes of their own -------------------------------------------------------


def rows(model: Model, rank: int) -> list[Shard]:
    """Half of the rows of every tensor, of this rank."""
    found = []
    for name, tensor in model.items():
        half = len(tensor) // RANKS
        where = (slice(rank * half, (rank + 1) * half), *[slice(None)] * (tensor.ndim - 1))
        found.append(Shard(name, tensor[where], tuple(tensor.shape), where))
    return found


def follow(rank: int, urls: list[str], encoding: str) -> Any:
    """Sync while an engine refuses, with and without a quorum, and once it takes all again."""
    model, said = fresh_model(), list[Any]()
    options: dict[str, Any] = {
        "commit": "all_or_none",
        "rank_timeout": 30.0,
        "bucket_bytes": 16,
        "encoding": encoding,
    }

    def sync(sender: ShardedSender, step: int) -> None:
        train(model, step)
        kind = "committed"
        try:
            sender.sync(rows(model, rank), step=step)
        except SyncError as error:
            kind = type(error).__name__
        said.append((kind, states(sender), [*sender.versions.values()]))

    def refuses(number: int, kind: str) -> None:
        if rank == 0:
            httpx.post(f"{urls[number]}{REFUSE}", content=kind)

    with ShardedSender(urls, rows(model, rank), **options) as sender:
        sync(sender, 1)
        refuses(1, "yes")
        sync(sender, 2)
        run = sender.run, sender.epoch
    base = fresh_model()
    train(base, 1)
    options |= {"quorum": 1, "continues": run}
    with ShardedSender(urls, rows(base, rank), **options) as sender:
        sync(sender, 3)
        refuses(1, "no")
        sync(sender, 4)
    return said


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die(rank: int, urls: list[str]) -> Any:
    """Let a rank die while it posts its share of the second sync; return the other's error."""
    model, options = fresh_model(), {"commit": "all_or_none", "rank_timeout": 20.0}
    with ShardedSender(urls, rows(model, rank), **options) as sender:  # type: ignore[arg-type]
        train(model, 1)
        sender.sync(rows(model, rank))
        if rank == 1:
            EngineClient.deliver = killed  # type: ignore[method-assign, assignment]
        train(model, 2)
        try:
            sender.sync(rows(model, rank))
        except RankError as error:
            return str(error)
    return "nothing"


@contextlib.contextmanager
def reached(folder: Path) -> Iterator[tuple[FleetRig, list[str]]]:
    """Two engines, and roots at which other processes reach them."""
    fleet = FleetRig(folder, 2)
    with contextlib.ExitStack() as opened:
        opened.callback(fleet.close)
        roots = [opened.enter_context(served(Reached(fleet, n))) for n in range(2)]  # type: ignore[arg-type]
        fleet.served = dict(zip(roots, fleet.urls, strict=True))
        yield fleet, roots


def test_rank_that_dies_keeps_all_engines_back(tmp_path: Path) -> None:
    with reached(tmp_path) as (fleet, roots):
        said, died = run_ranks(die, RANKS, tmp_path, roots)
        assert died is None
        assert said.startswith("engines might have committed, all or none; ")
        assert versions(fleet) == [VERSION + 1] * 2
        assert all(fleet.prepared(url) is None for url in fleet.urls)


@pytest.mark.parametrize("encoding", ["deltas", "gap8_ulp"])
def test_ranks_send_to_engines_that_commit_as_one(tmp_path: Path, encoding: str) -> None:
    with reached(tmp_path) as (fleet, roots):
        outcomes = run_ranks(follow, RANKS, tmp_path, roots, encoding)
        assert outcomes[0] == outcomes[1]
        first = VERSION + 1
        assert outcomes[0] == [
            ("committed", ["committed"] * 2, [first] * 2),
            ("GroupAborted", ["aborted", "refused"], [first] * 2),
            ("committed", ["committed", "left out"], [first + 1, first]),
            ("committed", ["committed"] * 2, [first + 2] * 2),
        ]
        final = fresh_model()
        for step in range(1, 5):
            train(final, step)
        assert hold(fleet, final) == [True] * 2


class Reached:
    """An engine of a fleet, for what reaches it from other processes."""

    def __init__(self, fleet: FleetRig, number: int) -> None:
        self._fleet, self._number = fleet, number

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == REFUSE:
            refuse(self._fleet, self._number, refuses=request.read() == b"yes")
            return httpx.Response(200)
        url = f"{self._fleet.urls[self._number]}{request.url.raw_path.decode()}"
        kind = "application/octet-stream" if request.url.path == DELTA else "application/json"
        return self._fleet.answer(
            httpx.Request(
                request.method, url, content=request.read(), headers={"content-type": kind}
            )
        )
