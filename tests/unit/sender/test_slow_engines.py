"""Engines that lag, and connections that are cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from delta_sender import DeltaSender, MultiSender, PartialSyncError, SyncReport
from delta_sender.options import SenderOptions
from delta_sender.publish.http_client import EngineClient
from delta_sender.publish.state_file import read_state
from tests.support.fake_engine import (
    A,
    B,
    Engine,
    Handler,
    Model,
    copied,
    error,
    model_of,
    set_lag_limit,
    train,
)
from tests.unit.sender.test_log_destination import chain, replayed
from tests.unit.sender.test_multi_sender import refuse, sender_of, two

pytestmark = pytest.mark.slow

SOON = 0.05


class Slow:
    """A fault: answers when it is let go.

    Attributes:
        begun: a request has come.
        go: lets it be taken.
    """

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, take: Handler, request: httpx.Request) -> httpx.Response:
        self.begun.set()
        assert self.go.wait(20)
        return take(request)


def ended(sender: MultiSender) -> None:
    """Wait until no engine lags; from now on every engine is waited for."""
    set_lag_limit(sender, None)
    deadline = time.monotonic() + 20
    while sender.lagging:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lagging(model: Model, **options: Any) -> tuple[Engine, Engine, MultiSender, Slow]:
    a, b = two(model)
    slow = Slow()
    b.faults = {0: slow}
    return a, b, sender_of(a, b, model, lag_limit=SOON, **options), slow


@pytest.mark.parametrize(("bucket_bytes", "meanwhile"), [(1, 0), (1 << 20, 1), (1, 3)])
def test_one_that_lags_holds_up_nobody(bucket_bytes: int, meanwhile: int) -> None:
    """It finishes the sync that it was being sent, and gets the rest afterwards."""
    model = model_of(torch.bfloat16, torch.float32, tensors=3)
    a, b, sender, slow = lagging(model, bucket_bytes=bucket_bytes)
    with sender:
        for step in range(1 + meanwhile):
            train(model, step, 0.01)
            reports = sender.sync(model.items())
            assert list(reports) == [A]
            assert sender.lagging == [B]
            assert sender.versions == {A: step + 1, B: 0}
            assert a.holds(model)
        slow.go.set()
        ended(sender)
        assert b.version == 1
        train(model, 9)
        reports = sender.sync(model.items())
        assert [reports[url].full for url in (A, B)] == [False, False]
        assert reports[B].base_version == 1
        assert a.version == b.version == meanwhile + 2
        assert a.holds(model)
        assert b.holds(model)


@pytest.mark.parametrize("lag_limit", [None, 60.0])
def test_one_that_never_answered_keeps_nobody_waiting(lag_limit: float | None) -> None:
    model, go, claims = model_of(tensors=2), threading.Event(), []
    a, b = two(model)
    takes = b.take_claim

    def take_claim(body: dict[str, object]) -> httpx.Response:
        claims.append(body)
        if len(claims) == 1:
            return error(500, "DeltaError")
        assert go.wait(20)
        return takes(body)

    b.take_claim = take_claim  # type: ignore[method-assign]
    with sender_of(a, b, model, lag_limit=lag_limit) as sender:
        train(model)
        with pytest.raises(PartialSyncError):
            sender.sync(model.items())
        train(model, 1)
        reports: dict[str, SyncReport] = {}
        syncs = threading.Thread(target=lambda: reports.update(sender.sync(model.items())))
        syncs.start()
        deadline = time.monotonic() + 10
        while a.version < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = a.version
        go.set()
        syncs.join(20)
        assert (found, a.holds(model), b.holds(model)) == (2, True, True)
        assert set(reports) == {A, B}


def test_one_that_lags_and_then_fails_gets_all_that_it_missed() -> None:
    model = model_of(tensors=3)
    a, b, sender, slow = lagging(model)
    b.faults = {0: lambda take, request: (slow(take, request), error(507, "SpoolFull"))[1]}
    b.take = lambda request: error(507, "SpoolFull")  # type: ignore[method-assign]
    with sender:
        train(model, 0, 0.01)
        sender.sync(model.items())
        slow.go.set()
        ended(sender)
        del b.take
        train(model, 1, 0.01)
        reports = sender.sync(model.items())
    assert (reports[B].full, reports[B].base_version, reports[B].version) == (False, 0, 2)
    assert a.holds(model)
    assert b.holds(model)


def test_one_that_missed_too_much_meanwhile_gets_all() -> None:
    model = model_of(tensors=3)
    a, b, sender, slow = lagging(model)
    with sender:
        for step in range(2):
            train(model, step, 0.9)
            sender.sync(model.items())
        slow.go.set()
        ended(sender)
        train(model, 7)
        reports = sender.sync(model.items())
    assert reports[B].full
    assert a.holds(model)
    assert b.holds(model)


def test_without_a_limit_all_are_waited_for() -> None:
    model = model_of(tensors=2)
    a, b = two(model)
    slow = Slow()
    b.faults = {0: slow}
    threading.Timer(0.2, slow.go.set).start()
    with sender_of(a, b, model, lag_limit=None) as sender:
        train(model)
        assert set(sender.sync(model.items())) == {A, B}
    assert b.holds(model)


def test_no_engine_holds_up_the_others_for_ever() -> None:
    a, b = two(model := model_of(tensors=2))
    with sender_of(a, b, model) as sender:
        assert sender._publisher.options.lag_limit == 60


def test_where_all_lag_one_is_waited_for() -> None:
    """The other has failed, so that nobody is held up; and then both lag."""
    model = model_of(tensors=2)
    a, b, sender, slow = lagging(model)
    with sender:
        a.faults = {0: refuse()}
        train(model, 0)
        threading.Timer(0.2, slow.go.set).start()
        with pytest.raises(PartialSyncError) as caught:
            sender.sync(model.items())
        assert list(caught.value.reports) == [B]
        ended(sender)
        train(model, 1)
        assert set(sender.sync(model.items())) == {A, B}
    assert a.holds(model)
    assert b.holds(model)


def test_a_dead_one_is_waited_for_no_longer(naps: list[float]) -> None:
    model = model_of(tensors=2)
    a, b = two(model)
    gone = Slow()

    def dies(take: Handler, request: httpx.Request) -> httpx.Response:
        gone(take, request)
        raise httpx.ConnectError("refused", request=request)

    take = b.take
    b.faults = dict.fromkeys(range(8), dies)
    b.take = lambda request: httpx.Response(200)  # type: ignore[method-assign]
    with sender_of(a, b, model, lag_limit=SOON) as sender:
        train(model, 0, 0.01)
        assert list(sender.sync(model.items())) == [A]
        gone.go.set()
        ended(sender)
        b.take, b.faults = take, {}  # type: ignore[method-assign]
        train(model, 1, 0.01)
        reports = sender.sync(model.items())
    assert not reports[B].full
    assert b.holds(model)


@pytest.mark.parametrize("timeout", [600.0, 3.0])
def test_a_host_that_is_gone_is_given_up_soon(timeout: float) -> None:
    """Work can take long, a connection does not; each is tried several times."""
    with httpx.Client(timeout=timeout) as given:
        for client, seconds in ((None, min(timeout, 10.0)), (given, timeout)):
            server = EngineClient(A, SenderOptions(timeout=timeout, client=client))
            assert server.client.timeout.connect == seconds
            assert server.client.timeout.read == timeout
            server.close()


def test_the_log_and_the_state_go_on_too(tmp_path: Path) -> None:
    model = model_of(tensors=3)
    base, log, file = copied(model), tmp_path / "log", tmp_path / "state"
    a, _, sender, slow = lagging(model, delta_log=log, state=file)
    with sender:
        for step in range(3):
            train(model, step, 0.01)
            sender.sync(model.items())
        state = read_state(file)
        assert (state.engines[A].version, B in state.engines) == (3, False)
        slow.go.set()
        ended(sender)
    # The state keeps the version that the engine was found to have committed at the end.
    assert read_state(file).engines[B].version == 1
    assert chain(log) == [(0, 1), (1, 2), (2, 3)]
    assert replayed(log, base).holds(model)
    assert a.holds(model)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_restart_resyncs_engine_that_committed_other_bytes(
    tmp_path: Path, late: bool, closed: bool
) -> None:
    """The state alone says so: nothing else does if the next sender keeps no digests."""
    model, file = model_of(tensors=3), tmp_path / "state"
    a, b, sender, slow = lagging(model, state=file)
    if not late:
        slow.go.set()
        set_lag_limit(sender, None)

    def corrupts(take: Handler, request: httpx.Request) -> httpx.Response:
        answer = slow(take, request)
        b.weights["layers.0.weight"][3] ^= 1
        return httpx.Response(200, json={**answer.json(), "digest": "f" * 32})

    b.faults = {0: corrupts}
    train(model, 0, 0.01)
    if late:
        assert list(sender.sync(model.items())) == [A]
        assert sender.late_outcomes == {}
        slow.go.set()
        ended(sender)
    else:
        with pytest.raises(PartialSyncError, match="version 1 is committed, but the engine"):
            sender.sync(model.items())
    if closed:
        sender.close()
        [failed] = sender.late_outcomes.values() if late else [None]
        assert failed is None or "the next sync will be full" in str(failed)
    else:  # killed, but after it has noted how the engine ended
        sender._publisher._end_lagging(wait=False)
        assert sender._publisher._tracker.file is not None
        sender._publisher._tracker.file.close()
    assert sender.versions == {A: 1, B: 1}
    client = sender._publisher.sessions[0].destination.client  # type: ignore[attr-defined]
    with MultiSender([A, B], model.items(), client=client, state=file, digest=False) as sender:
        train(model, 1, 0.01)
        reports = sender.sync(model.items())
    assert [reports[url].full for url in (A, B)] == [False, True]
    assert a.holds(model)
    assert b.holds(model)


def test_how_those_that_lagged_ended() -> None:
    """It is forgotten once a later sync of the engine has ended."""
    model = model_of(tensors=2)
    a, b, sender, slow = lagging(model)
    again = Slow()
    full = error(507, "SpoolFull")
    b.faults[1] = lambda take, request: again(lambda _: full, request)
    with sender:
        train(model, 0, 0.01)
        sender.sync(model.items())
        slow.go.set()
        ended(sender)
        set_lag_limit(sender, SOON)
        train(model, 1, 0.01)
        sender.sync(model.items())
        report = sender.late_outcomes[B]
        assert isinstance(report, SyncReport)
        assert (report.version, sender.versions) == (1, {A: 2, B: 1})
        again.go.set()
        ended(sender)
        train(model, 2, 0.01)
        assert sender.sync(model.items())[B].base_version == 1
        assert sender.late_outcomes == {}
    assert a.holds(model)
    assert b.holds(model)


def test_closing_does_not_wait_for_ever() -> None:
    model = model_of(tensors=2)
    _, _, sender, slow = lagging(model)
    train(model)
    sender.sync(model.items())
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 5
    slow.go.set()


# Connections that are cut ------------------------------------------------------------------------


class Cutting:
    """A real server before an engine, which cuts connections in tenths of a request or an answer.

    Attributes:
        url: its root.
        engine: takes what comes.
        cuts: for each POST to come, after how many tenths of its body the connection is cut; 11:
            the engine takes it, and its answer is cut; None: neither.
    """

    engine: Engine

    def __init__(self) -> None:
        self.cuts: list[int | None] = []
        outer = self

        class Request(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.pass_on(b"")

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                cut = outer.cuts.pop(0) if outer.cuts else None
                if cut is not None and cut <= 10:
                    self.rfile.read(length * cut // 10)
                    return self.hang_up()
                body = self.rfile.read(length)
                return self.pass_on(body, cut=cut is not None)

            def pass_on(self, body: bytes, *, cut: bool = False) -> None:
                request = httpx.Request(self.command, f"http://e{self.path}", content=body)
                answer = outer.engine.answer(request)
                self.send_response(answer.status_code)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                if cut:
                    self.wfile.write(answer.content[:7])
                    return self.hang_up()
                self.wfile.write(answer.content)
                return None

            def hang_up(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def cutting() -> Iterator[Cutting]:
    server = Cutting()
    yield server
    server.close()


def test_a_connection_that_is_cut_anywhere(cutting: Cutting, naps: list[float]) -> None:
    """At every tenth of a part's body, and in the answer; twice in a row."""
    places = [*((1, cut) for cut in range(12)), (0, 5), (2, 5), (2, 10), (2, 11)]
    model = model_of(tensors=3, numel=4000)
    cutting.engine = engine = Engine.of(model)
    with DeltaSender(cutting.url, model.items(), bucket_bytes=1) as sender:
        for number, (part, cut) in enumerate(places):
            naps.clear()
            cutting.cuts = [None] * part + [cut, cut]
            train(model, number)
            report = sender.sync(model.items())
            assert (report.full, report.version) == (False, number + 1), (part, cut)
            assert engine.holds(model)
            assert naps
        train(model, len(places))
        assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_a_server_that_cuts_every_time(cutting: Cutting, naps: list[float]) -> None:
    model = model_of(tensors=2)
    cutting.engine = engine = Engine.of(model)
    with DeltaSender(cutting.url, model.items()) as sender:
        cutting.cuts = list(range(2, 10))
        train(model)
        with pytest.raises(Exception, match="Error"):
            sender.sync(model.items())
        assert (sender.version, engine.version) == (0, 0)
        assert not sender.sync(model.items()).full
    assert engine.holds(model)
