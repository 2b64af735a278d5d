"""A sender tracks possible commits when interruptions, lags and lost answers coincide."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender import DeltaSender, PartialSyncError, SyncError
from delta_sender.diff.snapshot import Changes
from delta_sender.publish import publisher
from delta_sender.publish.session_thread import SessionThread
from delta_sender.publish.state_file import StateFile
from engine_ext.log import open_log
from engine_ext.log.writer import Draft
from tests.support.fake_engine import (
    Engine,
    Handler,
    breaks,
    error,
    loses,
    model_of,
    sends,
    set_lag_limit,
    train,
)
from tests.unit.sender.test_log_destination import chain, copied, replayed
from tests.unit.sender.test_multi_sender import A, B, refuse, sender_of, two
from tests.unit.sender.test_slow_engines import SOON, Slow, ended, lagging


def interrupt_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """Every engine is done, and who waits for them is interrupted."""

    def wait(threads: Sequence[SessionThread], *arguments: object) -> None:
        for thread in threads:
            thread.join()
        raise KeyboardInterrupt

    patch.setattr(publisher, "wait_for", wait)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("digest", [True, False])
def test_a_wait_that_is_interrupted(
    commits: bool, digest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that an engine has committed stays in the log; any other is refused there."""
    model = model_of(tensors=3)
    base, log = copied(model), tmp_path / "log"
    a, b = two(model)
    b.faults = {0: refuse()}
    a.faults = {} if commits else {0: refuse()}
    sender = sender_of(a, b, model, delta_log=log, digest=digest)
    train(model)
    with monkeypatch.context() as patch:
        interrupt_at_the_end(patch)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
    model["layers.1.weight"].copy_(base["layers.1.weight"])  # less than was committed
    reports = sender.sync(model.items())
    assert [report.version for report in reports.values()] == [2, 2]
    assert not any(report.full for report in reports.values())
    assert chain(log) == ([(0, 1), (1, 2)] if commits else [(0, 2)])
    assert a.holds(model)
    assert b.holds(model)
    assert replayed(log, base).holds(model)
    train(model, 1)
    assert not any(report.full for report in sender.sync(model.items()).values())


def test_closed_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sender continues from what had been in flight."""
    model = model_of(tensors=2)
    engine, file = Engine.of(model), tmp_path / "state"
    with DeltaSender(A, model.items(), client=engine.client(), state=file) as sender:
        train(model)
        with monkeypatch.context() as patch:
            interrupt_at_the_end(patch)
            with pytest.raises(KeyboardInterrupt):
                sender.sync(model.items())
    assert StateFile(file).state.in_flight is not None
    with DeltaSender(A, model.items(), client=engine.client(), state=file) as sender:
        train(model, 1)
        report = sender.sync(model.items())
    assert (report.full, report.base_version, report.version) == (False, 1, 2)
    assert engine.holds(model)


@pytest.mark.parametrize("moved", [0, 1, 3])
@pytest.mark.parametrize("when", ["before", "then"])
def test_a_snapshot_interrupted_while_one_lags(
    moved: int, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lags since the step before, or in the one that is interrupted."""
    model = model_of(tensors=3)
    file = tmp_path / "state"
    a, b, sender, slow = lagging(model, state=file)
    with sender:
        if when == "before":
            train(model, 5, 0.01)
            sender.sync(model.items())
            assert sender.lagging == [B]
        advance = sender._publisher.snapshot.advance

        def interrupted(changes: Changes) -> None:
            advance(dict([*changes.items()][:moved]))
            slow.go.set()
            raise KeyboardInterrupt

        train(model, 6, 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(sender._publisher.snapshot, "advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sender.sync(model.items())
        ended(sender)
        train(model, 7, 0.01)
        reports = sender.sync(model.items())
        assert [reports[url].full for url in (A, B)] == [True, True]
        assert a.holds(model)
        assert b.holds(model)
        train(model, 8, 0.01)
        assert not any(report.full for report in sender.sync(model.items()).values())
        assert a.holds(model)
        assert b.holds(model)
    assert StateFile(file).state.engines[A].digest == a.digest().hex()


@pytest.mark.slow
def test_others_go_on_while_one_is_asked_what_it_holds(naps: list[float]) -> None:
    model = model_of(tensors=3)
    a, b = two(model)
    b.faults = dict.fromkeys(range(8), loses)
    asked, answer = Slow(), b.status

    def status() -> httpx.Response:
        return asked(lambda request: answer(), httpx.Request("GET", B))

    with sender_of(a, b, model) as sender:
        train(model, 0, 0.01)
        with pytest.raises(PartialSyncError):
            sender.sync(model.items())
        assert b.version == 1
        set_lag_limit(sender, SOON)
        b.status = status  # type: ignore[method-assign]
        for step in (1, 2):
            train(model, step, 0.01)
            assert list(sender.sync(model.items())) == [A]
            assert sender.lagging == [B]
        asked.go.set()
        ended(sender)
        train(model, 3, 0.01)
        reports = sender.sync(model.items())
    assert (reports[B].full, reports[B].base_version) == (False, 1)
    assert a.holds(model)
    assert b.holds(model)


def test_a_refusal_after_a_lost_answer_is_none(tmp_path: Path, naps: list[float]) -> None:
    """The engine has committed what it refuses to take again."""
    model = model_of(tensors=2)
    base = copied(model)
    engine = Engine.of(model)
    engine.faults = {0: loses, 1: sends(error(507, "SpoolFull"))}
    with DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path) as sender:
        train(model)
        with pytest.raises(SyncError, match="SpoolFull"):
            sender.sync(model.items())
        assert engine.version == 1
        train(model, 1)
        report = sender.sync(model.items())
    assert (report.full, report.base_version, report.version) == (False, 1, 2)
    assert chain(tmp_path) == [(0, 1), (1, 2)]
    assert replayed(tmp_path, base).holds(model)


def test_without_any_patience(tmp_path: Path) -> None:
    """The log is waited for all the same."""
    model = model_of(tensors=3)
    base = copied(model)
    a, b = two(model)
    with sender_of(a, b, model, lag_limit=0.0, delta_log=tmp_path) as sender:
        for step in range(5):
            train(model, step, 0.01)
            sender.sync(model.items())
        ended(sender)
        train(model, 9, 0.01)
        sender.sync(model.items())
    assert a.holds(model)
    assert b.holds(model)
    assert replayed(tmp_path, base).holds(model)


def test_a_doubt_outlives_a_step_that_was_never_begun(
    naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before its thread had started; nothing of it is taken for the one in doubt."""
    model = model_of(tensors=3)
    base = copied(model)
    engine = Engine.of(model)
    engine.faults = dict.fromkeys(range(8), loses)
    with DeltaSender(A, model.items(), client=engine.client(), digest=False) as sender:
        train(model)
        with pytest.raises(SyncError):
            sender.sync(model.items())
        assert engine.version == 1

        def interrupted(thread: threading.Thread) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sender.sync(model.items())
        model["layers.1.weight"].copy_(base["layers.1.weight"])
        report = sender.sync(model.items())
    assert (report.full, report.base_version) == (False, 1)
    assert engine.holds(model)


def test_a_log_that_moves_on_alone_is_interrupted(
    tmp_path: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the version that engines might have; its next version starts from that one."""
    model = model_of(tensors=3)
    base = copied(model)
    engine = Engine.of(model)
    engine.faults = dict.fromkeys(range(8), breaks)
    options: dict[str, Any] = {"client": engine.client(), "delta_log": tmp_path}
    options |= {"digest": False, "full": "allow"}
    with DeltaSender(A, model.items(), **options) as sender:
        train(model)

        def interrupted(changes: Changes) -> Changes:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(publisher, "without_old", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sender.sync(model.items())
        model["layers.1.weight"].copy_(base["layers.1.weight"])
        sender.sync(model.items())
    assert engine.holds(model)
    assert replayed(tmp_path, base).holds(model)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_number_of_lagging_full_sync_is_not_reused(bucket_bytes: int) -> None:
    """The engine was one version further, so that its full sync has the number of the next step."""
    model = model_of(tensors=3)
    a, b = two(model)
    b.version, slow = 1, Slow()
    b.faults = {1: slow}

    def patient(take: Handler, request: httpx.Request) -> httpx.Response:
        assert slow.begun.wait(20)
        return take(request)

    a.faults = {0: patient}
    # One part at a time, so that the request that waits is the full sync's first, and not a part
    # that was on its way when another was refused.
    options = {"lag_limit": SOON, "digest": False, "bucket_bytes": bucket_bytes, "full": "allow"}
    with sender_of(a, b, model, posts_in_flight=1, **options) as sender:
        train(model, 0, 0.01)
        assert list(sender.sync(model.items())) == [A]
        train(model, 1, 0.01)
        assert list(sender.sync(model.items())) == [A]
        assert a.version == 3
        slow.go.set()
        ended(sender)
        assert b.version == 2
        train(model, 2, 0.01)
        reports = sender.sync(model.items())
    assert not any(report.full for report in reports.values())
    assert a.version == b.version == 4
    assert a.holds(model)
    assert b.holds(model)


@pytest.mark.slow
def test_closed_while_the_log_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sender can write only when the thread of this one is done."""
    model = model_of(tensors=3)
    base, log = copied(model), tmp_path / "log"
    engine = Engine.of(model)
    writing, go = threading.Event(), threading.Event()
    finish = Draft.finish

    def slow(draft: Draft, key: str | None = None) -> Path:
        writing.set()
        assert go.wait(20)
        return finish(draft, key)

    def interrupted(*arguments: object) -> None:
        assert writing.wait(20)
        raise KeyboardInterrupt

    sender = DeltaSender(A, model.items(), client=engine.client(), delta_log=log)
    train(model)
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "wait_for", interrupted)
        patch.setattr(Draft, "finish", slow)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
        threading.Timer(0.1, go.set).start()
        sender.close()
    assert (open_log(log).listing().damaged, chain(log)) == ({}, [(0, 1)])
    with DeltaSender(A, base.items(), client=engine.client(), delta_log=log) as sender:
        assert sender.sync(model.items()).version == 2
    assert chain(log) == [(0, 1), (0, 2)]
    assert replayed(log, base).holds(model)
    assert engine.holds(model)
