"""A sender that publishes in a delta log alone, and engines that it asks to look there."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from delta_sender import DeltaSender, LogSender, MultiSender, SyncError
from delta_sender.locations import log_location, log_of
from delta_sender.publish import contact, log_destination, publisher
from engine_ext.log import Draft
from tests.support.fake_engine import Engine, Model, copied, model_of, train
from tests.unit.log.places import folders
from tests.unit.sender.test_log_destination import chain, replayed

NOTIFY = ["http://one", "http://two"]


class Followers:
    """Engines that replay a log when they are asked to look at it."""

    def __init__(self, log: Path, base: Model) -> None:
        self.log, self.base, self.asked = log, {n: t.clone() for n, t in base.items()}, list[str]()
        self.down: set[str] = set()
        self.hangs: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host in self.down:
            raise httpx.ConnectError("down")
        if request.method == "GET":
            if host in self.hangs:
                time.sleep(1.0)
            return Engine.of(self.base).status()
        assert request.url.path == "/delta_catch_up"
        self.asked.append(host)
        version = replayed(self.log, self.base).version
        self.hold.wait(10)
        return httpx.Response(200, json={"status": "caught_up", "version": version})


def sender_of(log: Path, model: Model, **options: Any) -> LogSender:
    return LogSender(log, model.items(), **options)


def test_without_engines_to_ask(tmp_path: Path) -> None:
    """There is no plan, and no digest of the model."""
    model = model_of()
    base = copied(model)
    with sender_of(tmp_path, model) as sender:
        train(model)
        assert sender.sync(model.items()).digest is None
        assert sender.told == {}
    assert replayed(tmp_path, base).holds(model)


@pytest.mark.usefixtures("naps")
def test_engines_that_are_down_do_not_stop_it(tmp_path: Path) -> None:
    model = model_of()
    followers = Followers(tmp_path, model)
    with sender_of(tmp_path, model, notify=NOTIFY, client=followers.client()) as sender:
        followers.down = {"two"}
        train(model)
        sender.sync(model.items())
        told = sender.wait(10)
        assert told["http://one"] == 1
        assert isinstance(told["http://two"], SyncError)
        followers.down = set()
        train(model, 2)
        sender.sync(model.items())
        assert sender.wait(10) == dict.fromkeys(NOTIFY, 2)


@pytest.mark.slow
def test_an_engine_that_hangs_does_not_keep_the_plan_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is asked; if none answers, the first one's last plan is good enough."""
    monkeypatch.setattr(log_destination, "_NEXT_S", 0.05)
    monkeypatch.setattr(log_destination, "_PLAN_S", 0.5)
    model = model_of()
    followers = Followers(tmp_path, model)
    with sender_of(tmp_path, model, notify=NOTIFY, client=followers.client()) as sender:
        followers.hangs = {"one"}
        train(model)
        assert sender.sync(model.items()).digest is not None
        followers.hangs = {"one", "two"}
        train(model, 2)
        assert sender.sync_full(model.items()).digest is not None
    assert replayed(tmp_path, followers.base).holds(model)


@pytest.mark.slow
def test_the_first_plan_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_destination, "_PLAN_S", 0.2)
    model = model_of()
    followers = Followers(tmp_path, model)
    followers.hangs = {"one"}
    sender = sender_of(tmp_path, model, notify=NOTIFY[:1], client=followers.client())
    with sender, pytest.raises(SyncError, match="has answered"):
        sender.sync(model.items())


@pytest.mark.parametrize("ends", ["error", "close"])
def test_nobody_waits_for_a_plan_at_the_end(tmp_path: Path, ends: str) -> None:
    model = model_of()
    followers = Followers(tmp_path, model)
    followers.hangs = {"one"}
    sender = sender_of(tmp_path, model, notify=NOTIFY[:1], client=followers.client())
    failure = ZeroDivisionError() if ends == "error" else KeyboardInterrupt()

    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(model.items()))
        raise failure

    began = time.monotonic()
    with pytest.raises(type(failure)):
        sender.sync(fails())
    sender.close()
    assert time.monotonic() - began < 0.8
    assert followers.hangs == {"one"}
    assert chain(tmp_path) == []


def interrupt_while_writing(monkeypatch: pytest.MonkeyPatch, done: list[str]) -> None:
    """Let Ctrl-C come while a thread writes a part, which takes longer than a close waits."""
    add, writing = Draft.add, threading.Event()

    def slow(draft: Draft, *arguments: Any) -> None:
        writing.set()
        time.sleep(0.3)
        add(draft, *arguments)
        done.append("added")

    def interrupts(*arguments: object) -> None:
        assert writing.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(Draft, "add", slow)
    monkeypatch.setattr(publisher, "wait_for", interrupts)
    monkeypatch.setattr(contact, "_RELEASE_S", 0.0)


@pytest.mark.slow
def test_close_waits_for_a_part_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft is deleted under the thread that writes it."""
    model, drop, done = model_of(), Draft.drop, list[str]()

    def dropped(draft: Draft) -> None:
        done.append("dropped")
        drop(draft)

    monkeypatch.setattr(Draft, "drop", dropped)
    interrupt_while_writing(monkeypatch, done)
    sender = sender_of(tmp_path, model, bucket_bytes=1)
    train(model)
    with pytest.raises(KeyboardInterrupt):
        sender.sync(model.items())
    sender.close()
    assert done == ["added", "dropped"]
    assert folders(tmp_path) == []


def test_closing_waits_for_nobody(tmp_path: Path) -> None:
    """Engines that were not asked yet are not asked any more."""
    model = model_of()
    followers = Followers(tmp_path, model)
    urls = [f"http://{number}" for number in range(40)]
    sender = sender_of(tmp_path, model, notify=urls, client=followers.client())
    followers.hold.clear()
    train(model)
    sender.sync(model.items())
    sender.close()
    followers.hold.set()
    assert sender.wait(10).keys() < set(urls)


def test_slow_engines_are_not_waited_for(tmp_path: Path) -> None:
    """Each has one request at a time; versions that come meanwhile are one more afterwards."""
    model = model_of()
    followers = Followers(tmp_path, model)
    with sender_of(tmp_path, model, notify=NOTIFY[:1], client=followers.client()) as sender:
        followers.hold.clear()
        for version in (1, 2, 3):
            train(model, version)
            sender.sync(model.items())
        assert sender.wait(0.0) == {}
        followers.hold.set()
        assert sender.wait(10) == {NOTIFY[0]: 3}
    assert len(followers.asked) == 2


@pytest.mark.parametrize("known", [True, False])
def test_a_restart_goes_on_where_the_log_ends(tmp_path: Path, known: bool) -> None:
    """Without a digest of the model, a full version shows what it starts from."""
    model = model_of()
    base = copied(model)
    followers = Followers(tmp_path, base)
    options: dict[str, Any] = {"notify": NOTIFY, "client": followers.client()} if known else {}
    with sender_of(tmp_path, model, **options) as sender:
        train(model)
        sender.sync(model.items())
    if known:
        with pytest.raises(ValueError, match="not what version 1 in"):
            sender_of(tmp_path, base, **options)
    with sender_of(tmp_path, model, **options) as sender:
        assert sender.version == 1
        train(model, 2)
        report = sender.sync(model.items())
    assert (report.version, report.full) == (2, not known)
    assert replayed(tmp_path, base).holds(model)


@pytest.mark.parametrize("undigested", [{1}, {0, 1}])
def test_a_restart_on_older_weights_that_no_digest_covers(
    tmp_path: Path, undigested: set[int]
) -> None:
    """The next version has all of them; it is full if the digest covers nothing."""
    model = model_of(tensors=2)
    names = {f"layers.{number}.weight" for number in undigested}
    base, asked = copied(model), Engine.of(model, undigested=names)
    client = httpx.Client(transport=httpx.MockTransport(lambda _: asked.status()))
    options: dict[str, Any] = {"notify": NOTIFY[:1], "client": client}
    with sender_of(tmp_path, model, **options) as sender:
        older = {}
        for step in range(2):
            older = copied(model)
            model["layers.1.weight"].view(-1)[step] += 1
            sender.sync(model.items())
    with sender_of(tmp_path, older, **options) as sender:
        older["layers.1.weight"].view(-1)[2] += 1
        report = sender.sync(older.items())
    assert (report.version, report.full) == (3, len(undigested) == 2)
    assert replayed(tmp_path, base, undigested=names).holds(older)


# By DeltaSender ------------------------------------------------------------------------------


def test_delta_sender_takes_a_log(tmp_path: Path) -> None:
    model = model_of()
    base = copied(model)
    followers, version = Followers(tmp_path, base), 0
    for url in (tmp_path, f"file://{tmp_path}"):
        with DeltaSender(
            url, model.items(), notify=NOTIFY, client=followers.client(), encoding="gap8_ulp"
        ) as sender:
            assert sender.version == version
            train(model, version)
            report = sender.sync(model.items())
            version += 1
            assert (report.version, report.full, sender.version) == (version, False, version)
            assert sender.wait(10) == sender.told == dict.fromkeys(NOTIFY, version)
    with DeltaSender(tmp_path, model.items(), client=followers.client()) as sender:
        assert sender.sync_full(model.items()).full
        with pytest.raises(BlockingIOError):
            DeltaSender(tmp_path, model.items())
    assert replayed(tmp_path, base).holds(model)


def test_delta_sender_refuses_what_is_not_for_its_url(tmp_path: Path) -> None:
    model = model_of()
    for options in ({"state": tmp_path / "state"}, {"delta_log": tmp_path}, {"adapter": "a"}):
        with pytest.raises(ValueError, match=f"not with a delta log.*: {next(iter(options))}"):
            DeltaSender(tmp_path / "log", model.items(), **options)
    with pytest.raises(ValueError, match="notify="):
        DeltaSender("http://one", model.items(), notify=NOTIFY)
    with pytest.raises(ValueError, match="not the URL of an object store"):
        DeltaSender("ftp://host/log", model.items())
    with pytest.raises(ValueError, match="credentials"):
        DeltaSender("s3://key:secret@bucket/log", model.items())
    assert list(tmp_path.iterdir()) == []


def test_an_engines_sender_has_told_nobody() -> None:
    sender = DeltaSender("http://one", model_of().items())
    assert (sender.told, sender.wait(1)) == ({}, {})
    sender.close()


@pytest.mark.parametrize(
    ("url", "log"),
    [
        ("http://engine:8000", None),
        ("https://engine/path", None),
        (Path("log"), Path("log")),
        ("file:///a%20folder", Path("/a folder")),
        ("file://localhost/log", Path("/log")),
        ("s3://bucket/log", "s3://bucket/log"),
        ("gs://bucket", "gs://bucket"),
        ("az://container/log", "az://container/log"),
    ],
)
def test_what_a_url_names(url: str | Path, log: str | Path | None) -> None:
    assert log_location(url) == log


@pytest.mark.parametrize("url", ["engine:8000", "logs/run1", "engine", "log", "C:/log"])
def test_what_names_neither_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"neither .* http://host:port; .* LogSender\(PATH\)"):
        DeltaSender(url, model_of().items())
    with pytest.raises(ValueError, match="neither"):
        MultiSender([url], model_of().items())


@pytest.mark.parametrize("url", ["/folder/log", "./log", "../log"])
def test_a_plain_path_is_a_log_and_warned_of(url: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"LogSender \(delta-send --log\)"):
        assert log_location(url) == Path(url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="a delta log is no engine"):
            MultiSender([url], model_of().items())


@pytest.mark.parametrize(
    ("given", "log"),
    [
        ("logs/run1", Path("logs/run1")),
        (Path("log"), Path("log")),
        ("file:///a%20folder", Path("/a folder")),
        ("s3://bucket/log", "s3://bucket/log"),
    ],
)
def test_what_a_log_sender_takes(given: str | Path, log: str | Path) -> None:
    assert log_of(given) == log


def test_a_log_sender_takes_no_engine() -> None:
    with pytest.raises(ValueError, match="'http://engine' is no delta log"):
        LogSender("http://engine", model_of().items())


@pytest.mark.parametrize("url", ["file://host/log", "file://", "file:log"])
def test_no_folder_of_this_host(url: str) -> None:
    with pytest.raises(ValueError, match="no folder of this host"):
        log_location(url)
