"""Senders with ``commit="all_or_none"`` against the engines' own endpoints."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from delta_sender import (
    GroupAborted,
    MultiSender,
    PartialSyncError,
    RankError,
    ShardedSender,
    SyncError,
)
from engine_ext.errors import NotUpdatable, SaltUnavailable
from engine_ext.log import Draft, open_log
from engine_ext.log.folder_store import FolderDraft
from tests.support.delta_bodies import SHAPES, VERSION, fresh_weights
from tests.support.endpoint_rig import DELTA
from tests.support.fake_engine import Model, bits, copied, train
from tests.support.fleet_rig import COMMIT, FleetRig, posts
from tests.unit.sender.sharded.test_one_rank import whole

pytestmark = pytest.mark.slow

Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetRig]:
    made = FleetRig(tmp_path, 3)
    yield made
    made.close()


@pytest.fixture
def model() -> Model:
    return fresh_model()


def fresh_model() -> Model:
    """The tensors that the engines have loaded."""
    found = {}
    for name, values in fresh_weights().items():
        tensor = torch.empty(SHAPES[name], dtype=torch.bfloat16)
        tensor.view(-1).view(torch.int16).numpy()[:] = values.view(np.int16)
        found[name] = tensor
    return found


OPTIONS: dict[str, Any] = {"commit": "all_or_none", "commit_window": 5.0, "timeout": 5.0}


def client_of(fleet: FleetRig, answer: Answer | None) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer or fleet.answer))


def sender_of(fleet: FleetRig, base: Model, answer: Answer | None = None, **options: Any) -> Any:
    given = {**OPTIONS, "client": client_of(fleet, answer), **options}
    return MultiSender(fleet.urls, base.items(), **given)


def one_rank(fleet: FleetRig, base: Model, answer: Answer | None = None, **options: Any) -> Any:
    given = {**OPTIONS, "client": client_of(fleet, answer), **options}
    return ShardedSender(fleet.urls, whole(base), **given)


def sync_rank(sender: Any, model: Model) -> Any:
    sender.sync(whole(model))
    return sender.reports


@dataclass(frozen=True)
class Kind:
    """A sender to several engines: how it is opened, and syncs; it returns reports by url."""

    opened: Callable[..., Any]
    sync: Callable[[Any, Model], Any]


KINDS = {
    "MultiSender": Kind(sender_of, lambda sender, model: sender.sync(model.items())),
    "ShardedSender": Kind(one_rank, sync_rank),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def versions(fleet: FleetRig) -> list[int]:
    return [fleet.status(url).version.number for url in fleet.urls]


def states(sender: Any) -> list[str]:
    return [one.state for one in sender.outcomes.values()]


def hold(fleet: FleetRig, model: Model) -> list[bool]:
    """Whether each engine holds a model."""
    return [
        all(np.array_equal(rig.engine.weights[n], bits(t)) for n, t in model.items())
        for rig in (fleet.rigs[url] for url in fleet.urls)
    ]


def refuse(fleet: FleetRig, number: int, *, refuses: bool = True) -> None:
    """Let an engine refuse what it is sent, or take it again."""
    shard = fleet.rigs[fleet.urls[number]].engine.shards[1]
    shard.refuses = {name: NotUpdatable("no") for name in SHAPES} if refuses else {}


def test_all_engines_commit(kind: Kind, fleet: FleetRig, model: Model) -> None:
    with kind.opened(fleet, model) as sender:
        for step in range(3):
            train(model, step)
            reports = kind.sync(sender, model)
            assert [r.version for r in reports.values()] == [VERSION + step + 1] * 3
            assert not any(r.full for r in reports.values())
            assert {r.status for r in reports.values()} == {"committed"}
            assert states(sender) == ["committed"] * 3
            assert hold(fleet, model) == [True] * 3


def test_engine_that_refuses_keeps_all_back(kind: Kind, fleet: FleetRig, model: Model) -> None:
    before = copied(model)
    with kind.opened(fleet, model) as sender:
        refuse(fleet, 1)
        train(model)
        with pytest.raises(GroupAborted) as raised:
            kind.sync(sender, model)
        assert raised.value.reports == {}
        assert {*raised.value.failures} == {*fleet.urls}
        assert states(sender) == ["aborted", "refused", "aborted"]
        assert getattr(sender, "reports", {}) == {}
        assert versions(fleet) == [VERSION] * 3
        assert hold(fleet, before) == [True] * 3
        assert all(
            fleet.status(url).staged is None or not fleet.prepared(url) for url in fleet.urls
        )
        refuse(fleet, 1, refuses=False)
        reports = kind.sync(sender, model)
        # The number of what was prepared names nothing else.
        assert {r.version for r in reports.values()} == {VERSION + 2}
        assert hold(fleet, model) == [True] * 3


def test_all_engines_salt_when_they_commit(fleet: FleetRig, model: Model) -> None:
    with sender_of(fleet, model, flush_cache="salt") as sender:
        train(model)
        assert len(sender.sync(model.items())) == 3
        assert hold(fleet, model) == [True] * 3
    for rig in fleet.rigs.values():
        assert rig.engine.events[0] == ("stop", "salt")


def test_engine_that_cannot_salt_keeps_all_back(fleet: FleetRig, model: Model) -> None:
    """It is found before any engine commits, and is no reason to send values."""
    posted = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == DELTA:
            posted.append(f"http://{request.url.host}:8000")
        return fleet.answer(request)

    before, plain = copied(model), fleet.urls[1]
    options: dict[str, Any] = {"flush_cache": "salt", "encoding": "gap8_ulp"}
    fleet.rigs[plain].engine.fails["salt"] = SaltUnavailable("not as it was started")
    with sender_of(fleet, model, answer, **options) as sender:
        train(model)
        with pytest.raises(GroupAborted) as raised:
            sender.sync(model.items())
        assert raised.value.failures[plain].error["type"] == "SaltUnavailable"
        assert states(sender) == ["aborted", "refused", "aborted"]
        assert sorted(posted) == fleet.urls  # once each
        assert versions(fleet) == [VERSION] * 3
        assert all(fleet.status(url).staged is None for url in fleet.urls)
    with sender_of(fleet, before, answer, **options, quorum=2) as sender:
        assert [*sender.sync(model.items())] == [fleet.urls[0], fleet.urls[2]]
        assert states(sender) == ["committed", "left out", "committed"]


def test_commit_that_failed_once_is_taken_again(fleet: FleetRig, model: Model) -> None:
    """The engine holds the sync, as its group has decided: its weights are to be these."""
    with sender_of(fleet, model) as sender:
        train(model)
        fleet.rigs[fleet.urls[1]].engine.fails["stop"] = RuntimeError("no answer")
        with pytest.raises(PartialSyncError):
            sender.sync(model.items())
        assert states(sender) == ["committed", "failed", "committed"]
        assert versions(fleet) == [VERSION + 1, VERSION, VERSION + 1]
        train(model, 1)
        reports = sender.sync(model.items())
        assert [report.full for report in reports.values()] == [False] * 3
        assert hold(fleet, model) == [True] * 3


def test_engine_is_left_out_by_quorum(kind: Kind, fleet: FleetRig, model: Model) -> None:
    evicted: list[tuple[str, list[int]]] = []

    def evict(url: str, error: SyncError) -> None:
        assert "no" in str(error)
        evicted.append((url, versions(fleet)))

    with kind.opened(fleet, model, quorum=2, evict=evict) as sender:
        refuse(fleet, 0)
        train(model)
        reports = kind.sync(sender, model)
        assert [*reports] == fleet.urls[1:]
        assert states(sender) == ["left out", "committed", "committed"]
        assert evicted == [(fleet.urls[0], [VERSION] * 3)]  # before any has committed
        refuse(fleet, 0, refuses=False)
        train(model, 1)
        reports = kind.sync(sender, model)
        assert [report.full for report in reports.values()] == [False] * 3
        assert hold(fleet, model) == [True] * 3
        assert {*versions(fleet)} == {*sender.versions.values()} == {VERSION + 2}


def test_prepared_engines_wait_for_a_slow_evict(fleet: FleetRig, model: Model) -> None:
    def evict(url: str, error: SyncError) -> None:
        time.sleep(1.5)  # as long as a router that drains

    options: dict[str, Any] = {"quorum": 2, "evict": evict, "timeout": 0.3, "commit_window": 0.3}
    with sender_of(fleet, model, **options) as sender:
        refuse(fleet, 2)
        train(model)
        assert len(sender.sync(model.items())) == 2
        assert states(sender) == ["committed", "committed", "left out"]


def test_aborted_group_says_who_did_not_record(fleet: FleetRig, model: Model) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if b'"record"' in request.read() and str(request.url).startswith(fleet.urls[1]):
            error = {"type": "Conflict", "message": "lost", "engine_state": "unchanged"}
            return httpx.Response(409, json={"error": error})
        return fleet.answer(request)

    with sender_of(fleet, model, answer) as sender:
        train(model)
        with pytest.raises(GroupAborted) as raised:
            sender.sync(model.items())
        texts = [str(error) for error in raised.value.failures.values()]
        assert len(texts) == 3
        assert all("lost" in text for text in texts), texts


def test_evict_that_fails_keeps_all_back(kind: Kind, fleet: FleetRig, model: Model) -> None:
    def evict(url: str, error: SyncError) -> None:
        raise RuntimeError("the router does not answer")

    with kind.opened(fleet, model, quorum=2, evict=evict) as sender:
        refuse(fleet, 2)
        train(model)
        with pytest.raises((RuntimeError, RankError), match="router"):
            kind.sync(sender, model)
        assert versions(fleet) == [VERSION] * 3
        assert all(fleet.prepared(url) is None for url in fleet.urls)
        refuse(fleet, 2, refuses=False)
        assert len(kind.sync(sender, model)) == 3
        assert hold(fleet, model) == [True] * 3


def all_follow(sender: MultiSender, fleet: FleetRig, model: Model) -> bool:
    """Wait for those that lag; return whether all hold the model after one more step."""
    while sender.lagging:
        time.sleep(0.01)
    train(model, 1)
    return len(sender.sync(model.items())) == 3 and hold(fleet, model) == [True] * 3


def test_slow_engine_is_left_out(fleet: FleetRig, model: Model) -> None:
    slow, ends = fleet.urls[2], threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if posts(request) and str(request.url).startswith(slow):
            ends.wait(20)
        return fleet.answer(request)

    with sender_of(fleet, model, answer, quorum=2, lag_limit=0.3, commit_window=10.0) as sender:
        train(model)
        start = time.monotonic()
        assert [*sender.sync(model.items())] == fleet.urls[:2]
        assert time.monotonic() - start < 5  # the window is for those that commit
        assert states(sender) == ["committed", "committed", "left out"]
        ends.set()
        assert all_follow(sender, fleet, model)


def test_engine_that_prepares_too_late_is_left_out(fleet: FleetRig, model: Model) -> None:
    slow, evicted, seconds = fleet.urls[2], list[str](), [0.8]

    def answer(request: httpx.Request) -> httpx.Response:
        answered = fleet.answer(request)
        if b'"prepare"' in request.read() and str(request.url).startswith(slow) and seconds:
            time.sleep(seconds.pop())
        return answered

    def evict(url: str, error: SyncError) -> None:
        evicted.append(url)

    options: dict[str, Any] = {"quorum": 2, "lag_limit": 0.3, "commit_window": 10.0}
    with sender_of(fleet, model, answer, evict=evict, **options) as sender:
        train(model)
        assert [*sender.sync(model.items())] == fleet.urls[:2]
        assert states(sender) == ["committed", "committed", "left out"]
        assert evicted == [slow]
        assert all_follow(sender, fleet, model)


def test_engines_that_are_all_late_are_no_success(fleet: FleetRig, model: Model) -> None:
    ends, evicted = threading.Event(), list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == COMMIT and b'"commit"' in request.read():
            ends.wait(20)
        return fleet.answer(request)

    options: dict[str, Any] = {"evict": lambda url, error: evicted.append(url)}
    with sender_of(fleet, model, answer, commit_window=0.3, **options) as sender:
        train(model)
        with pytest.raises(PartialSyncError, match="not done in time") as raised:
            sender.sync(model.items())
        assert not isinstance(raised.value, GroupAborted)
        assert ({*raised.value.failures}, raised.value.reports) == ({*fleet.urls}, {})
        assert sorted(evicted) == fleet.urls
        assert states(sender) == ["prepared"] * 3
        ends.set()
        assert all_follow(sender, fleet, model)


def test_engine_lost_after_the_decision(kind: Kind, fleet: FleetRig, model: Model) -> None:
    """The others commit; it starts again below them, and the next sync brings it there."""
    lost, evicted = fleet.urls[1], list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        commits = b'"commit"' in request.read() and str(request.url).startswith(lost)
        if commits and fleet.incarnations[lost] == 1:
            fleet.start(lost)
        return fleet.answer(request)

    sender = kind.opened(fleet, model, answer, evict=lambda url, error: evicted.append(url))
    with sender:
        train(model)
        with pytest.raises(PartialSyncError) as raised:
            kind.sync(sender, model)
        assert not isinstance(raised.value, GroupAborted)
        assert {*raised.value.reports} == {fleet.urls[0], fleet.urls[2]}
        assert states(sender) == ["committed", "failed", "committed"]
        assert evicted == [lost]
        assert versions(fleet) == [VERSION + 1, VERSION, VERSION + 1]
        train(model, 1)
        assert len(kind.sync(sender, model)) == 3
        assert hold(fleet, model) == [True] * 3


def test_lost_engine_is_evicted_without_the_state(
    fleet: FleetRig, model: Model, tmp_path: Path
) -> None:
    """The state's file system fails as soon as the engines commit."""
    lost, evicted, folder = fleet.urls[1], list[str](), tmp_path / "states"
    folder.mkdir()

    def answer(request: httpx.Request) -> httpx.Response:
        commits = b'"commit"' in request.read() and str(request.url).startswith(lost)
        if commits and fleet.incarnations[lost] == 1:
            fleet.start(lost)
            folder.rename(tmp_path / "away")
        return fleet.answer(request)

    options: dict[str, Any] = {"state": folder / "state.json"}
    options["evict"] = lambda url, error: evicted.append(url)
    with sender_of(fleet, model, answer, **options) as sender:
        train(model)
        with pytest.raises(PartialSyncError):
            sender.sync(model.items())
        assert evicted == [lost]


class Dead(Exception):
    """The trainer does nothing more."""


# Steps 0 to 2 prepare the three engines, 3 to 5 record, and 6 to 8 commit.
@pytest.mark.parametrize(
    ("name", "number", "is_delivered"),
    [
        *(("MultiSender", number, False) for number in (0, 2, 3, 4, 5, 6, 8)),
        *(("MultiSender", number, True) for number in (0, 2, 5, 8)),
        *(("ShardedSender", number, number % 2 == 0) for number in (2, 3, 5, 6)),
    ],
)
def test_trainer_dies_at_any_step(
    name: str, fleet: FleetRig, model: Model, number: int, is_delivered: bool
) -> None:
    """All engines end alike, and the next trainer brings all to one version."""
    kind = KINDS[name]
    before, steps, lock, is_dead = copied(model), 0, threading.Lock(), threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal steps
        if is_dead.is_set():
            raise Dead
        if request.url.path == COMMIT:
            with lock:
                steps += 1
                dies = steps == number + 1
            if dies:
                if is_delivered:
                    fleet.answer(request)
                is_dead.set()
                raise Dead
        return fleet.answer(request)

    dead = kind.opened(fleet, model, answer, commit_window=0.2)
    train(model)
    with pytest.raises((SyncError, Dead)):
        kind.sync(dead, model)
    assert is_dead.is_set()
    assert all(fleet.settle(url) for url in fleet.urls)
    assert len({*versions(fleet)}) == 1
    commits = versions(fleet)[0] > VERSION
    assert hold(fleet, model if commits else before) == [True] * 3
    if number < 3 or number > 5:  # the records are on their way at once
        assert commits == (number > 5)
    held = model if commits else before
    with kind.opened(fleet, held, takeover=True) as sender:
        train(model, 1)
        reports = kind.sync(sender, model)
        assert len(reports) == 3
        assert hold(fleet, model) == [True] * 3


@pytest.mark.parametrize("number", [0, 2, 3, 5, 6, 8])
def test_engine_dies_at_any_step(fleet: FleetRig, model: Model, number: int) -> None:
    """The others end alike, and the next sync brings all to one version."""
    before, steps, lock, dying = copied(model), 0, threading.Lock(), fleet.urls[1]

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal steps
        if request.url.path == COMMIT:
            with lock:
                steps += 1
                dies = steps == number + 1
            if dies:
                fleet.start(dying)
        return fleet.answer(request)

    with sender_of(fleet, model, answer) as sender:
        train(model)
        with contextlib.suppress(PartialSyncError):
            sender.sync(model.items())
        assert "prepared" not in states(sender)
        assert all(fleet.prepared(url) is None for url in fleet.urls)
        first, _, last = versions(fleet)
        assert first == last
        assert hold(fleet, model if first > VERSION else before)[::2] == [True, True]
        train(model, 1)
        assert len(sender.sync(model.items())) == 3
        assert hold(fleet, model) == [True] * 3
        assert len({*versions(fleet)}) == 1


def logged(log: Path) -> list[int]:
    """The versions in a log."""
    return [entry.version for entry in open_log(log).listing().entries]


def test_log_has_what_all_have_agreed_on(fleet: FleetRig, model: Model, tmp_path: Path) -> None:
    log, seen = tmp_path / "log", list[tuple[str, list[int]]]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == COMMIT:
            seen.append((json.loads(request.read())["action"], logged(log)))
        return fleet.answer(request)

    with sender_of(fleet, model, answer, delta_log=log) as sender:
        train(model)
        assert len(sender.sync(model.items())) == 3
        assert sorted(seen) == [
            *[("commit", [VERSION + 1])] * 3,
            *[("prepare", [])] * 3,
            *[("record", [])] * 3,
        ]
        refuse(fleet, 1)
        train(model, 1)
        with pytest.raises(GroupAborted):
            sender.sync(model.items())
        assert logged(log) == [VERSION + 1]
        refuse(fleet, 1, refuses=False)
        sender.sync(model.items())
        assert hold(fleet, model) == [True] * 3
        assert logged(log) == [VERSION + 1, versions(fleet)[0]]


def test_log_that_cannot_be_written_keeps_all_back(
    fleet: FleetRig, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    with sender_of(fleet, model, delta_log=log) as sender:
        train(model)
        with monkeypatch.context() as full:
            full.setattr(Draft, "finish", out_of_space)
            with pytest.raises(GroupAborted, match="no space"):
                sender.sync(model.items())
        assert (versions(fleet), logged(log)) == ([VERSION] * 3, [])
        assert all(fleet.prepared(url) is None for url in fleet.urls)
        assert len(sender.sync(model.items())) == 3
        assert hold(fleet, model) == [True] * 3
        assert logged(log) == [versions(fleet)[0]]


def test_log_that_is_written_slowly_is_waited_for(
    fleet: FleetRig, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine settles meanwhile what the sender still decides."""
    client, log = fleet.client(), tmp_path / "log"

    def slow(draft: Draft, key: str | None = None) -> Path:
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            for url in fleet.urls:  # the engines work
                assert client.get(f"{url}/delta_status").status_code == 200
        return out_of_space(draft)

    with sender_of(fleet, model, delta_log=log, commit_window=0.2) as sender:
        train(model)
        with monkeypatch.context() as full:
            full.setattr(Draft, "finish", slow)
            with pytest.raises(GroupAborted, match="no space"):
                sender.sync(model.items())
        assert (versions(fleet), logged(log)) == ([VERSION] * 3, [])
        assert len(sender.sync(model.items())) == 3
        assert hold(fleet, model) == [True] * 3


def test_version_that_the_log_has_is_committed(
    fleet: FleetRig, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers might have it: an answer that is lost must not abort it."""
    log, publish = tmp_path / "log", FolderDraft.publish

    def lost(draft: FolderDraft, mark: str, data: bytes) -> None:
        publish(draft, mark, data)
        raise OSError("the answer is lost")

    with sender_of(fleet, model, delta_log=log) as sender:
        train(model)
        monkeypatch.setattr(FolderDraft, "publish", lost)
        assert len(sender.sync(model.items())) == 3
        assert hold(fleet, model) == [True] * 3
        assert logged(log) == [versions(fleet)[0]]


def out_of_space(draft: Draft, key: str | None = None) -> Path:
    raise OSError("no space")


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("MultiSender", number) for number in (0, 4, 8)),
        ("ShardedSender", 2),
        ("ShardedSender", 5),
    ],
)
def test_step_without_answer_is_taken_again(
    name: str, fleet: FleetRig, model: Model, number: int, naps: list[float]
) -> None:
    kind, steps, lock = KINDS[name], 0, threading.Lock()

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

    with kind.opened(fleet, model, answer) as sender:
        train(model)
        assert len(kind.sync(sender, model)) == 3
        assert states(sender) == ["committed"] * 3
        assert hold(fleet, model) == [True] * 3


def test_wrong_options_are_refused(fleet: FleetRig, model: Model) -> None:
    wrong: list[dict[str, Any]] = [
        {"commit": "some"},
        {"commit": "each", "quorum": 2},
        {"commit": "each", "evict": print},
        {"quorum": 0},
        {"quorum": 4},
        {"commit_window": 0.0},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=r"commit|quorum"):
            sender_of(fleet, model, **options)
