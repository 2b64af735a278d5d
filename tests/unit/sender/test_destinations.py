"""Every sender behaves the same for each destination: an engine, engines, a folder, a store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from delta_sender import (
    DeltaSender,
    LogSender,
    MultiSender,
    PartialSyncError,
    RunConflict,
    SyncError,
    SyncReport,
)
from delta_sender.publish import log_sender
from delta_sender.publish.log_destination import LogDestination
from engine_ext.errors import LogDamaged
from engine_ext.log import Entry, read_manifests
from engine_ext.log.folder_store import FolderStore
from tests.support.fake_engine import Engine, Model, copied, error, loses, model_of, sends, train
from tests.unit.sender.test_log_destination import replayed

URLS = ["http://one", "http://two"]


class Rig:
    """Destinations of one kind; `held` returns engines that hold what they lead to."""

    conflict: type[Exception]  # of a second sender; a store has none, as the second takes over
    failure: type[Exception] = SyncError  # of a sync that is refused

    def __init__(self, base: Model) -> None:
        self.base = copied(base)

    def open(self, model: Model, **options: Any) -> Any:
        raise NotImplementedError

    def held(self) -> list[Engine]:
        raise NotImplementedError

    def refusing(self) -> contextlib.AbstractContextManager[None]:
        """Refuse the second part that comes inside the block."""
        raise NotImplementedError

    def losing(self) -> contextlib.AbstractContextManager[None]:
        """Take what comes inside the block, and lose the answer to the last part."""
        raise NotImplementedError

    def sync(self, sender: Any, model: Model, **full: bool) -> list[SyncReport]:
        found = (sender.sync_full if full else sender.sync)(model.items())
        return [*found.values()] if isinstance(found, dict) else [found]


class Engines(Rig):
    """One engine, or two."""

    def __init__(self, base: Model, urls: list[str]) -> None:
        super().__init__(base)
        self.engines = {httpx.URL(url).host: Engine.of(base) for url in urls}
        self.urls = urls
        self.conflict = RunConflict if len(urls) == 1 else PartialSyncError

    def open(self, model: Model, **options: Any) -> Any:
        client = httpx.Client(
            transport=httpx.MockTransport(lambda q: self.engines[q.url.host].answer(q))
        )
        if len(self.urls) == 1:
            return DeltaSender(self.urls[0], model.items(), client=client, **options)
        return MultiSender(self.urls, model.items(), client=client, **options)

    def held(self) -> list[Engine]:
        return [*self.engines.values()]

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        for engine in self.held():
            engine.faults[len(engine.requests) + 1] = sends(error(422, "NotUpdatable"))
        yield

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        for engine in self.held():
            engine.faults = dict.fromkeys(range(len(engine.requests), 999), loses)
        yield
        for engine in self.held():
            engine.faults = {}


class Log(Rig):
    """A delta log, and an engine that replays it and says what its digest covers."""

    conflict = BlockingIOError
    failure = OSError

    def __init__(self, base: Model, log: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(base)
        self.log, self.monkeypatch = log, monkeypatch

    def open(self, model: Model, base: Any = None, **options: Any) -> Any:
        client = httpx.Client(transport=httpx.MockTransport(self._answer))
        base = model.items() if base is None else base
        return LogSender(self.log, base, notify=URLS, client=client, **options)

    def held(self) -> list[Engine]:
        return [replayed(self.log, self.base)]

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        def refuses(deliver: Callable[..., Any], part: int, last: bool) -> Any:
            if part == 1:
                raise OSError(28, "no room")
            return deliver()

        with self._delivering(refuses):
            yield

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        def loses_last(deliver: Callable[..., Any], part: int, last: bool) -> Any:
            answer = deliver()
            if last:
                raise OSError(5, "no answer")
            return answer

        with self._delivering(loses_last):
            yield

    @contextlib.contextmanager
    def _delivering(self, how: Callable[..., Any]) -> Iterator[None]:
        deliver = LogDestination.deliver

        def changed(log: LogDestination, body: bytes, version: int, part: int, last: bool) -> Any:
            return how(lambda: deliver(log, body, version, part, last), part, last)

        with self.monkeypatch.context() as patched:
            patched.setattr(LogDestination, "deliver", changed)
            yield

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return Engine.of(self.base).status()
        [engine] = self.held()
        return httpx.Response(200, json={"status": "caught_up", "version": engine.version})


@pytest.fixture
def model() -> Model:
    return model_of(torch.bfloat16, torch.float32, tensors=5)


@pytest.fixture(
    params=["engine", "engines", "folder", pytest.param("store", marks=pytest.mark.slow)]
)
def rig(
    request: pytest.FixtureRequest,
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    naps: list[float],
) -> Rig:
    if request.param == "folder":
        return Log(model, tmp_path, monkeypatch)
    if request.param == "store":
        return Log(model, request.getfixturevalue("store_url"), monkeypatch)
    return Engines(model, URLS[: 1 + (request.param == "engines")])


def follows(rig: Rig, model: Model) -> bool:
    return all(engine.holds(model) for engine in rig.held())


@pytest.mark.parametrize("encoding", ["deltas_zstd", "gap8_ulp", "auto"])
def test_the_destination_follows_bit_for_bit(rig: Rig, model: Model, encoding: str) -> None:
    with rig.open(model, encoding=encoding, bucket_bytes=1000) as sender:
        for version, density in enumerate((0.05, 1.0, 0.0), 1):
            train(model, version, density)
            for report in rig.sync(sender, model):
                assert (report.version, report.base_version) == (version, version - 1)
                assert (report.full, bool(report.nnz)) == (False, density > 0)
                assert report.digest == rig.held()[0].digest().hex()
            assert follows(rig, model)
        assert all(report.full for report in rig.sync(sender, model, full=True))
    assert follows(rig, model)
    assert {engine.version for engine in rig.held()} == {4}


def test_parts_are_whole_before_the_last_commits(rig: Rig, model: Model) -> None:
    with rig.open(model, bucket_bytes=1, posts_in_flight=3) as sender:
        train(model)
        reports = rig.sync(sender, model)
    for report, engine in zip(reports, rig.held(), strict=True):
        numbers = [part.manifest.part or 0 for part in engine.log]
        assert report.parts == len(numbers) > 3
        assert (numbers[-1], sorted(numbers)) == (len(numbers) - 1, [*range(len(numbers))])


def test_a_refusal_moves_nothing(rig: Rig, model: Model) -> None:
    with rig.open(model, bucket_bytes=1) as sender:
        train(model)
        with rig.refusing(), pytest.raises(rig.failure):
            rig.sync(sender, model)
        assert {engine.version for engine in rig.held()} == {0}
        assert follows(rig, rig.base)
        train(model, 1)
        assert not any(report.full for report in rig.sync(sender, model))
        assert follows(rig, model)


def test_a_lost_last_answer_is_set_right(rig: Rig, model: Model) -> None:
    with rig.open(model, bucket_bytes=1) as sender:
        train(model)
        with rig.losing(), pytest.raises(rig.failure):
            rig.sync(sender, model)
        train(model, 1)
        rig.sync(sender, model)
        assert follows(rig, model)
        train(model, 2)
        reports = rig.sync(sender, model)
        assert follows(rig, model)
        assert not any(report.full for report in reports)


def test_a_trainer_that_fails_moves_nothing(rig: Rig, model: Model) -> None:
    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*model.items()][:3]
        raise ZeroDivisionError

    with rig.open(model, bucket_bytes=1) as sender:
        train(model)
        with pytest.raises(ZeroDivisionError):
            sender.sync(fails())
        assert follows(rig, rig.base)
        rig.sync(sender, model)
        assert follows(rig, model)


def test_a_new_sender_continues_with_a_delta(rig: Rig, model: Model) -> None:
    with rig.open(model) as first:
        train(model)
        rig.sync(first, model)
    with rig.open(model) as second:
        train(model, 1)
        reports = rig.sync(second, model)
    assert [(report.version, report.full) for report in reports] == [(2, False)] * len(reports)
    assert follows(rig, model)


@pytest.mark.parametrize("rig", ["engine", "engines", "folder"], indirect=True)
def test_another_sender_is_kept_out_until_close(rig: Rig, model: Model) -> None:
    with rig.open(model) as first:
        train(model)
        rig.sync(first, model)
        with pytest.raises(rig.conflict), rig.open(model) as second:
            rig.sync(second, model)
    with rig.open(model) as third:
        rig.sync(third, model)
    assert follows(rig, model)


def other(model: Model) -> Model:
    return {name: tensor + 1 for name, tensor in model.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rig", ["folder", "store"], indirect=True)
@pytest.mark.parametrize("wrong", ["missing", "other weights"])
def test_a_wrong_base_leaves_the_log_to_its_sender(
    rig: Rig, model: Model, tmp_path: Path, wrong: str
) -> None:
    with rig.open(model) as first:
        train(model)
        rig.sync(first, model)
        base = tmp_path / "none" if wrong == "missing" else other(model).items()
        with pytest.raises((FileNotFoundError, ValueError), match=r"none|is not what version 1"):
            rig.open(model, base=base)
        train(model, 1)
        rig.sync(first, model)
    assert follows(rig, model)


@pytest.mark.slow
@pytest.mark.parametrize("rig", ["folder", "store"], indirect=True)
def test_a_log_that_grows_while_it_is_opened_keeps_its_sender(
    rig: Log, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opens it has compared its base with a version that is not the newest any more."""
    with rig.open(model) as first:
        train(model)
        rig.sync(first, model)
        held, plan = dict(model), LogDestination.plan

        def meanwhile(log: LogDestination) -> Any:
            monkeypatch.setattr(LogDestination, "plan", plan)
            train(model, 1)
            rig.sync(first, model)
            return log.plan()

        monkeypatch.setattr(LogDestination, "plan", meanwhile)
        with pytest.raises(BlockingIOError, match="another sender writes into the log"):
            rig.open(held)
        train(model, 2)
        rig.sync(first, model)
    assert follows(rig, model)


@pytest.mark.parametrize(
    "rig", ["folder", pytest.param("store", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_version_that_is_listed_before_it_is_found(
    rig: Log, model: Model, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As a store can list it: a folder is taken for one."""
    with rig.open(model) as first:
        train(model)
        rig.sync(first, model)
    monkeypatch.setattr(FolderStore, "drafts_are_hidden", False)
    failures = [LogDamaged("weight_v000001 is not in the store")] * times
    read = read_manifests

    def late(entry: Entry) -> Any:
        if failures:
            raise failures.pop()
        return read(entry)

    monkeypatch.setattr(log_sender, "read_manifests", late)
    monkeypatch.setattr(log_sender, "_AGAIN_S", 0.0)
    if times == 1:
        with rig.open(model) as second:
            assert second.version == 1
    else:
        with pytest.raises(LogDamaged, match="not in the store"):
            rig.open(model)


def test_close_withdraws_what_is_staged(rig: Rig, model: Model) -> None:
    class Interrupted(BaseException):
        pass

    def stops() -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*model.items()][:4]
        raise Interrupted

    sender = rig.open(model, bucket_bytes=1)
    train(model)
    with pytest.raises(Interrupted):
        sender.sync(stops())
    sender.close()
    assert all(not engine.staged for engine in rig.held())
    assert follows(rig, rig.base)
    with rig.open(rig.base) as following:
        rig.sync(following, model)
    assert follows(rig, model)
