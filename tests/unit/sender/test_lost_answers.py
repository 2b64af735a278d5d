"""A sender tracks possible commits when interruptions, lags and lost answers coincide.

Interruptions while it is noted how a sync has ended are at every line of the code that does so.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender import DeltaSender, LogSender, PartialSyncError, SyncError
from delta_sender.diff import device as diff_device
from delta_sender.diff import snapshot as sender_snapshot
from delta_sender.diff.snapshot import Changes, Snapshot
from delta_sender.publish import publisher
from delta_sender.publish.session_thread import SessionThread
from delta_sender.publish.state_file import read_state
from engine_ext.log import open_log
from engine_ext.log.writer import Draft
from tests.support.cases import case
from tests.support.fake_engine import (
    A,
    B,
    Engine,
    Handler,
    Model,
    breaks,
    copied,
    error,
    loses,
    model_of,
    sends,
    set_lag_limit,
    train,
)
from tests.support.line_interrupts import InterruptedAt
from tests.unit.sender.test_log_destination import chain, replayed
from tests.unit.sender.test_multi_sender import refuse, sender_of, two
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
    assert read_state(file).in_flight is not None
    with DeltaSender(A, model.items(), client=engine.client(), state=file) as sender:
        train(model, 1)
        report = sender.sync(model.items())
    assert (report.full, report.base_version, report.version) == (False, 1, 2)
    assert engine.holds(model)


@pytest.mark.parametrize(
    ("moved", "when"), [(0, "before"), (1, "before"), (3, "before"), (1, "then")]
)
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
    assert read_state(file).engines[A].digest == a.digest().hex()


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

        def interrupted(snapshot: Snapshot, changes: Changes) -> Changes:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Snapshot, "without_old", interrupted)
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


# Interruptions while it is noted how a sync has ended --------------------------------------------

# The functions that do so, and all that they call.
NOTING = (
    ("publisher.py", "_finish"),
    ("publisher.py", "_end_lagging"),
    ("publisher.py", "_end_unfinished"),
)


REFUSED = error(507, "SpoolFull")


def nudge(model: Model, step: int) -> None:
    """Change one element, another one in every step."""
    model[f"layers.{step % len(model)}.weight"][1, step] += 1


@pytest.mark.slow
def test_late_commit_interrupted_while_noted_loses_no_change(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "delta_sender")
    model = model_of(tensors=3)
    a, b, sender, slow = lagging(model)
    emit = caplog.handler.emit

    def interrupts(record: logging.LogRecord) -> None:
        emit(record)
        if "has committed version 1" in record.getMessage():
            raise KeyboardInterrupt

    with sender:
        for step in range(2):  # the late engine lacks the second
            nudge(model, step)
            sender.sync(model.items())
        slow.go.set()
        ended(sender)
        with monkeypatch.context() as patch:
            patch.setattr(caplog.handler, "emit", interrupts)
            with pytest.raises(KeyboardInterrupt):
                sender.sync(model.items())
        nudge(model, 2)
        assert sender.sync(model.items())[B].full
        assert a.holds(model)
        assert b.holds(model)
        nudge(model, 3)
        assert not sender.sync(model.items())[B].full
        assert b.holds(model)


def test_log_version_interrupted_while_noted_misleads_nobody(tmp_path: Path) -> None:
    model = model_of(tensors=3)
    base = copied(model)
    with LogSender(tmp_path, model.items()) as sender:
        nudge(model, 0)
        sender.sync(model.items())
        nudge(model, 1)
        interrupted = InterruptedAt(0, ("session.py", "acknowledge"))
        with interrupted, pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
        nudge(model, 2)
        assert sender.sync(model.items()).full
    assert replayed(tmp_path, base).holds(model)


class Steps:
    """A trainer's steps, and its sender to two engines, to two and a log, or to a log alone.

    Of the form "device" it sends to two and a log.

    Attributes:
        contents: The trainer's weights at each version of the log.
    """

    def __init__(self, log: Path, form: str) -> None:
        self.model, self.log, self.slow = model_of(tensors=3), log, Slow()
        self.contents, self._steps = {0: copied(self.model)}, itertools.count()
        self.a, self.b = two(self.model)
        self.sender: Any
        if form == "log alone":
            self.engines, self.sender = [], LogSender(log, self.model.items())
        else:
            self.engines = [self.a, self.b]
            has_log = form in ("log", "device")
            options = {"delta_log": log if has_log else None, "digest": form != "no digests"}
            self.sender = sender_of(self.a, self.b, self.model, lag_limit=None, **options)
        self.sync()  # the engines hold what this sender has sent

    def sync(self) -> None:
        nudge(self.model, next(self._steps))
        try:
            self.sender.sync(self.model.items())
        finally:
            for _, version in chain(self.log) if self.log.exists() else ():
                self.contents.setdefault(version, copied(self.model))

    def fails(self) -> None:
        with pytest.raises(SyncError):
            self.sync()

    def is_interrupted(self, line: int, *functions: tuple[str, str]) -> str | None:
        """Interrupt a sync; return where, or None if it has fewer lines."""
        with (
            contextlib.suppress(KeyboardInterrupt, SyncError),
            InterruptedAt(line, *functions) as it,
        ):
            self.sync()
        return it.place or None

    def let(self, engine: Engine, *faults: Callable[[Handler, httpx.Request], Any]) -> None:
        """Give an engine faults, beginning with its next part."""
        engine.faults = dict(enumerate(faults, len(engine.requests)))

    def heal(self) -> None:
        """Let the engines answer, and wait for them from now on."""
        self.slow.go.set()
        self.a.faults, self.b.faults = {}, {}
        if self.engines:
            ended(self.sender)

    def check(self, place: str | None) -> None:
        assert all(engine.holds(self.model) for engine in self.engines), place
        led_to = [version for _, version in chain(self.log)] if self.log.exists() else []
        for version in [0, *led_to[:-1]] if led_to else []:
            late = replayed(self.log, self.contents[version], version)
            assert late.holds(self.model), (place, version)


def both_commit(steps: Steps) -> None:
    steps.sync()


def one_refuses(steps: Steps) -> None:
    steps.let(steps.b, refuse())


def one_has_missed_a_step(steps: Steps) -> None:
    steps.let(steps.b, refuse())
    steps.fails()


def one_answer_is_lost(steps: Steps) -> None:
    steps.let(steps.b, *[loses] * 8)


def one_answer_was_lost(steps: Steps) -> None:
    one_answer_is_lost(steps)
    steps.fails()


def one_lags(steps: Steps) -> None:
    steps.let(steps.b, steps.slow)
    set_lag_limit(steps.sender, 0.0)


def one_still_lags(steps: Steps) -> None:
    one_lags(steps)
    steps.sync()


def one_has_lagged(steps: Steps) -> None:
    one_still_lags(steps)
    steps.sync()
    steps.heal()


def one_has_lagged_and_failed(steps: Steps) -> None:
    steps.let(steps.b, lambda take, request: steps.slow(lambda _: REFUSED, request))
    set_lag_limit(steps.sender, 0.0)
    steps.sync()
    steps.sync()
    steps.heal()


def both_refuse(steps: Steps) -> None:
    steps.let(steps.a, refuse())
    steps.let(steps.b, refuse())


def no_answer_comes(steps: Steps) -> None:
    steps.let(steps.a, *[breaks] * 8)
    steps.let(steps.b, *[loses] * 8)


def the_wait_was_interrupted(steps: Steps) -> None:
    assert steps.is_interrupted(0, ("session_thread.py", "wait_for"))


def the_snapshot_was_interrupted(steps: Steps) -> None:
    steps.let(steps.b, refuse())
    assert steps.is_interrupted(0, ("snapshot.py", "advance"))


PREPARED = (
    both_commit,
    one_refuses,
    one_has_missed_a_step,
    one_answer_is_lost,
    one_answer_was_lost,
    one_lags,
    one_still_lags,
    one_has_lagged,
    one_has_lagged_and_failed,
    both_refuse,
    no_answer_comes,
    the_wait_was_interrupted,
    the_snapshot_was_interrupted,
)
OFTEN = [
    ("no digests", one_has_lagged),
    ("log", both_refuse),
    ("log alone", both_commit),
    ("device", one_has_missed_a_step),
]
EVERY = [
    *itertools.product(["no digests", "log", "device"], PREPARED),
    ("log alone", both_commit),
    ("log alone", the_wait_was_interrupted),
    ("log alone", the_snapshot_was_interrupted),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("form", "prepare", "stride"),
    [
        *((*case, 3) for case in OFTEN),
        *(pytest.param(*case, 1, marks=pytest.mark.full) for case in EVERY),
    ],
)
def test_sync_interrupted_at_any_line_ends_in_equal_weights(
    form: str,
    prepare: Callable[[Steps], None],
    stride: int,
    tmp_path: Path,
    naps: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines that note how syncs have ended; after two more syncs all engines are equal.

    Some cases run often, each time at every third line from a random one on.

    Of the form "device", tensors are taken for those of a device, which encodes what differs.
    """
    if form == "device":
        monkeypatch.setattr(sender_snapshot, "is_on_device", lambda tensor: True)
        monkeypatch.setattr(diff_device, "free_bytes", lambda device: 1 << 30)
    for line in itertools.count(random.randrange(stride), stride):
        steps = Steps(tmp_path / str(line), form)
        with case(f"line {line}"), steps.sender:
            prepare(steps)
            place = steps.is_interrupted(line, *NOTING)
            steps.heal()
            steps.sync()
            steps.sync()
            steps.check(place)
        if place is None:
            break
    assert line > 30
