"""Ranks that send their shards to engines which commit as one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender import (
    GroupAborted,
    PartialSyncError,
    RankError,
    Shard,
    ShardedSender,
    SyncError,
)
from delta_sender.publish.http_client import EngineClient
from tests.support.delta_bodies import VERSION
from tests.support.endpoint_rig import DELTA
from tests.support.fake_engine import Model, train
from tests.support.fleet_rig import COMMIT, FleetRig
from tests.support.gloo_ranks import run_ranks
from tests.support.sharded_trainers import served
from tests.unit.sender.sharded.test_one_rank import whole
from tests.unit.sender.test_fleet import Dead, copied, fresh_model, hold, refuse, versions

pytestmark = pytest.mark.slow

Answer = Callable[[httpx.Request], httpx.Response]
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


def sender_of(fleet: FleetRig, base: Model, answer: Answer | None = None, **options: Any) -> Any:
    client = httpx.Client(transport=httpx.MockTransport(answer or fleet.answer))
    given = {"commit": "all_or_none", "commit_window": 5.0, "timeout": 5.0, **options}
    return ShardedSender(fleet.urls, whole(base), client=client, **given)


def states(sender: ShardedSender) -> list[str]:
    return [one.state for one in sender.outcomes.values()]


def test_all_engines_commit_what_a_rank_sends(fleet: FleetRig, model: Model) -> None:
    with sender_of(fleet, model) as sender:
        for step in range(3):
            train(model, step)
            report = sender.sync(whole(model))
            assert [*sender.reports] == fleet.urls
            assert {r.version for r in sender.reports.values()} == {report.version}
            assert not any(r.full for r in sender.reports.values())
            assert report.version == VERSION + step + 1
            assert states(sender) == ["committed"] * 3
            assert hold(fleet, model) == [True] * 3


def test_engine_that_refuses_a_rank_keeps_all_back(fleet: FleetRig, model: Model) -> None:
    before = copied(model)
    with sender_of(fleet, model) as sender:
        refuse(fleet, 1)
        train(model)
        with pytest.raises(GroupAborted) as raised:
            sender.sync(whole(model))
        assert {*raised.value.failures} == {*fleet.urls}
        assert states(sender) == ["aborted", "refused", "aborted"]
        assert (versions(fleet), sender.reports) == ([VERSION] * 3, {})
        assert hold(fleet, before) == [True] * 3
        assert all(fleet.prepared(url) is None for url in fleet.urls)
        refuse(fleet, 1, refuses=False)
        assert sender.sync(whole(model)).version == VERSION + 2
        assert hold(fleet, model) == [True] * 3


def test_quorum_leaves_an_engine_of_ranks_out(fleet: FleetRig, model: Model) -> None:
    """It gets what it missed in the next sync."""
    evicted: list[tuple[str, list[int]]] = []

    def evict(url: str, error: SyncError) -> None:
        evicted.append((url, versions(fleet)))

    with sender_of(fleet, model, quorum=2, evict=evict) as sender:
        refuse(fleet, 0)
        train(model)
        assert sender.sync(whole(model)).version == VERSION + 1
        assert [*sender.reports] == fleet.urls[1:]
        assert states(sender) == ["left out", "committed", "committed"]
        assert evicted == [(fleet.urls[0], [VERSION] * 3)]
        refuse(fleet, 0, refuses=False)
        train(model, 1)
        sender.sync(whole(model))
        assert {*versions(fleet)} == {*sender.versions.values()} == {VERSION + 2}
        assert hold(fleet, model) == [True] * 3
        assert not any(report.full for report in sender.reports.values())


def test_evict_that_fails_keeps_engines_of_ranks_back(fleet: FleetRig, model: Model) -> None:
    def evict(url: str, error: SyncError) -> None:
        raise RuntimeError("the router does not answer")

    with sender_of(fleet, model, quorum=2, evict=evict) as sender:
        refuse(fleet, 2)
        train(model)
        with pytest.raises(RankError, match="router"):
            sender.sync(whole(model))
        assert versions(fleet) == [VERSION] * 3
        assert all(fleet.prepared(url) is None for url in fleet.urls)
        refuse(fleet, 2, refuses=False)
        sender.sync(whole(model))
        assert hold(fleet, model) == [True] * 3


def test_engine_of_ranks_is_lost_after_the_decision(fleet: FleetRig, model: Model) -> None:
    lost, evicted = fleet.urls[1], list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        commits = b'"commit"' in request.read() and str(request.url).startswith(lost)
        if commits and fleet.incarnations[lost] == 1:
            fleet.start(lost)
        return fleet.answer(request)

    sender = sender_of(fleet, model, answer, evict=lambda url, error: evicted.append(url))
    with sender:
        train(model)
        with pytest.raises(PartialSyncError) as raised:
            sender.sync(whole(model))
        assert {*raised.value.reports} == {fleet.urls[0], fleet.urls[2]}
        assert states(sender) == ["committed", "failed", "committed"]
        assert evicted == [lost]
        train(model, 1)
        sender.sync(whole(model))
        assert hold(fleet, model) == [True] * 3
        assert len({*versions(fleet)}) == 1


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


@pytest.mark.parametrize("number", range(9))
def test_leader_dies_at_any_step(fleet: FleetRig, model: Model, number: int) -> None:
    """All engines end alike, and the next trainer brings all to one version."""
    before, steps, lock, is_dead = copied(model), 0, threading.Lock(), threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal steps
        if request.url.path == COMMIT:
            with lock:
                steps += 1
                if steps == number + 1:
                    is_dead.set()
        if is_dead.is_set():
            raise Dead
        return fleet.answer(request)

    dead = sender_of(fleet, model, answer, commit_window=0.2)
    train(model)
    with contextlib.suppress(SyncError, Dead):
        dead.sync(whole(model))
    assert is_dead.is_set()
    assert all(fleet.settle(url) for url in fleet.urls)
    assert len({*versions(fleet)}) == 1
    held = model if versions(fleet)[0] > VERSION else before
    assert hold(fleet, held) == [True] * 3
    with sender_of(fleet, held, takeover=True) as sender:
        train(model, 1)
        sender.sync(whole(model))
        assert hold(fleet, model) == [True] * 3


@pytest.mark.parametrize("number", range(9))
def test_lost_answer_to_the_leader_is_asked_for(
    fleet: FleetRig, model: Model, number: int, naps: list[float]
) -> None:
    steps, lock = 0, threading.Lock()

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal steps
        given = fleet.answer(request)
        if request.url.path == COMMIT:
            with lock:
                steps += 1
                is_lost = steps == number + 1
            if is_lost:
                raise httpx.ReadTimeout("late", request=request)
        return given

    with sender_of(fleet, model, answer) as sender:
        train(model)
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
