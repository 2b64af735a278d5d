"""``delta-top``: what it asks, what it shows, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console

from engine_ext.cli import top
from engine_ext.log import Heartbeat, open_log, write_heartbeat
from engine_ext.ranks.replies import ScrubState
from engine_ext.ranks.status import EngineStatus, PauseStatus
from engine_ext.settings import API_KEY_ENVIRONMENT, HMAC_KEY_ENVIRONMENT
from tests.support.cases import case
from tests.support.delta_bodies import VERSION, delta_part, fresh_weights, full_part
from tests.support.endpoint_rig import Rig, app_of
from tests.support.statuses import changed
from tests.unit.log.test_fold import sparse, write


class FakeEngine(ThreadingHTTPServer):
    """Answers every request with one body.

    Attributes:
        answer: status and body.
        asked: path and Authorization header of every request.
    """

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] = (200, b"{}")
        self.asked: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeEngine

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        status, body = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not on standard error."""


@pytest.fixture(scope="module")
def status(tmp_path_factory: pytest.TempPathFactory) -> EngineStatus:
    """A server's answer after a sync and a refusal; no test changes it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (API_KEY_ENVIRONMENT, HMAC_KEY_ENVIRONMENT):
            patch.delenv(name, raising=False)
        rig = Rig(tmp_path_factory.mktemp("spool"))
        rig.send(delta_part(sync_id="a"))
        rig.send(delta_part(version=VERSION + 5, base_version=VERSION + 4))
        found = rig.status(history="true")
        rig.close()
    return found


@pytest.fixture
def engine(status: EngineStatus) -> Iterator[FakeEngine]:
    with FakeEngine() as server:
        server.answer = (200, msgspec.json.encode(status))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def shown(answers: list[top.Answer], syncs: int = 10, columns: int = 250) -> str:
    console = Console(width=columns)
    with console.capture() as capture:
        console.print(top.table(answers, syncs, columns))
    return capture.get()


def test_nothing_is_cut_at_80_columns(status: EngineStatus) -> None:
    gone = top.Answer("http://10.20.30.41:8000", None, "nothing listens there")
    printed = shown([top.Answer("http://10.20.30.40:8000", status), gone], columns=80)
    assert max(map(len, printed.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    words = " ".join(printed.split())
    for text in ("10.20.30.40:8000", "10.20.30.41:8000", "unreachable", "kind in-memory", "ranks"):
        assert text in words
    committed = (status.history or [])[0]
    assert f"committed {committed.base_version} -> {committed.version} " in words
    assert "VersionConflict:" in words


def test_a_pause_that_lasts_is_shown(status: EngineStatus) -> None:
    def text(paused: PauseStatus | None) -> str:
        return shown([top.Answer("http://h:1", changed(status, health={"paused": paused}))])

    paused = PauseStatus(since=1.7e9, seconds=700.0, by="10.0.0.3")
    assert re.search(r"paused since 1[45] Nov \d\d:\d\d by 10\.0\.0\.3", text(paused))
    unknown = PauseStatus(since=None, seconds=None, by=None)
    assert "paused since ? by an unknown client" in text(unknown)
    assert "paused" not in text(None)


def test_mismatched_tensors_are_named(status: EngineStatus) -> None:
    found = changed(status, health={"state": "mismatched", "mismatched": ["a.weight", "b"]})
    text = shown([top.Answer("http://h:1", found)])
    assert "other bits than written in a.weight, b; send a full sync" in text
    many = changed(status, health={"state": "mismatched", "mismatched": [*"abcdefgh"]})
    assert "in a, b, c, d, e and 3 more; send" in shown([top.Answer("http://h:1", many)])


def test_what_scrubbing_has_found(status: EngineStatus) -> None:
    scrub = ScrubState(passes=1, passed_at=1.0, mismatched=["a.weight", "b"], error="OSError: no")
    text = shown([top.Answer("http://h:1", changed(status, scrub=scrub))])
    assert "scrubbing found other bits in a.weight, b" in text
    assert "scrubbing fails: OSError: no" in text
    assert "scrubbing" not in shown([top.Answer("http://h:1", status)])


def test_who_owns_an_engine_and_why_it_was_full(rig: Rig) -> None:
    sender = {"run": "a-run-of-a-trainer", "run_epoch": 2, "run_owner": "trainer-host:11"}
    body = full_part(fresh_weights(), VERSION + 1, sync_id="a", **sender)
    rig.send(body, reason="requested by its user")
    status = rig.status(history="true")
    text = shown([top.Answer("http://h:1", status)])
    for cell in (" a-run-of-a-t ", "owned by trainer-host:11 since", "epoch 2"):
        assert cell in text
    assert "full: requested by its user" in text
    status = changed(status, version={"run": "another"})
    assert "of run a-run-of-a-t" in shown([top.Answer("http://h:1", status)])


def test_a_real_server(rig: Rig) -> None:
    rig.send(delta_part(sync_id="a"))

    async def ask() -> top.Answer:
        transport = httpx.ASGITransport(app_of(rig.service), client=("127.0.0.1", 9))
        async with httpx.AsyncClient(transport=transport) as client:
            return await top.ask(client, "http://engine")

    seen = rig.run(ask())
    assert (seen.state, seen.error) == ("certain", None)
    [row] = [line for line in shown([seen]).splitlines() if "committed" in line]
    for cell in ("7 -> 8", " 3 ", "9.38 %"):
        assert cell in row


@pytest.mark.slow
def test_the_table(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main([engine.url, "--once"]) == 0
    printed = capsys.readouterr().out
    assert engine.asked == [("/delta_status?history=true", None)]
    for text in ("in-memory", "certain", "committed", "refused", "VersionConflict: the delta"):
        assert text in printed
    assert printed.index("refused") < printed.index("committed")
    assert top.main([engine.url, "--once", "--syncs", "1"]) == 0
    assert "committed" not in capsys.readouterr().out


def test_json_for_scripts(
    engine: FakeEngine, status: EngineStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = "http://127.0.0.1:9"
    assert top.main([engine.url + "/", dead, "--json"]) == 1
    one, other = json.loads(capsys.readouterr().out)
    shown_status = msgspec.to_builtins(status)
    no_error = {"error": None, "http_status": None, "has_failed": False}
    answered = {"url": engine.url, "status": shown_status, **no_error}
    assert one == answered
    assert (other["url"], other["status"]) == (dead, None)
    assert other["error"]


def test_the_token(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, "secret")
    assert top.main([engine.url, "--once"]) == 0
    assert [authorization for _, authorization in engine.asked] == ["Bearer secret"]


def test_what_is_no_engine(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    unauthorized = b'{"error": {"type": "Unauthorized", "message": "it needs a token"}}'
    failed = b'{"error": {"type": "DeltaError", "message": "the ranks are gone"}}'
    answers: list[tuple[int, bytes, list[str]]] = [
        (401, unauthorized, ["denied HTTP 401: Unauthorized: it needs a token"]),
        (
            *(404, b'{"detail": "Not Found"}'),
            ["no engine HTTP 404: no delta endpoint at", "--enable-delta-updates"],
        ),
        (500, failed, ["failing HTTP 500: DeltaError: the ranks are gone"]),
        (500, b"<html><p>Oops</p></html>", ["no engine HTTP 500 from", ": Oops"]),
        (200, b'{"version": {"number": 1}}', ["no engine no status of this version"]),
        (200, b"[]", ["no engine no status of this version"]),
    ]
    for code, body, texts in answers:
        with case((code, body)):
            engine.answer = (code, body)
            assert top.main([engine.url, "--once"]) == 1
            printed = " ".join(capsys.readouterr().out.split())
            assert "unreachable" not in printed
            assert all(text in printed for text in texts), printed


def test_proxys_refusal_is_not_the_engines(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answer = (403, b"Forbidden by policy")
    monkeypatch.setenv("http_proxy", engine.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert top.main(["http://10.20.30.41:8000", "--once"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "unreachable HTTP 403" in printed
    assert "http_proxy sends this request to a proxy" in printed


def test_a_url_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["http://host:80a0", "--once"]) == 1
    assert "Invalid port: '80a0'" in " ".join(capsys.readouterr().out.split())


def test_an_engine_that_does_not_answer_in_time(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.shutdown()
    assert top.main([engine.url, "--once", "--timeout", "0.05"]) == 1
    assert "ReadTimeout" in capsys.readouterr().out


def test_the_state(status: EngineStatus) -> None:
    states: list[tuple[dict[str, Any], str, int]] = [
        ({}, "certain", 0),
        ({"asleep": True}, "asleep", 0),
        ({"state": "uncertain"}, "uncertain", 3),
        ({"state": "mismatched", "mismatched": ["w"]}, "mismatched", 3),
    ]
    for changes, state, code in states:
        with case(changes):
            seen = [top.Answer("http://engine", changed(status, health=changes))]
            assert (seen[0].state, top.exit_status(seen)) == (state, code)
            assert state in shown(seen)
            assert top.exit_status([*seen, top.Answer("http://other", None, "gone")]) == 1


def test_an_engine_cannot_steer_the_terminal(status: EngineStatus) -> None:
    status = changed(status, engine="\x1b]0;title\x07[red]x\nnext")
    printed = shown([top.Answer("http://engine", status)])
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "[red]x" in printed


@pytest.mark.slow
def test_it_reads_a_status_without_torch() -> None:
    """Whose import takes longer than the question."""
    program = "import sys, engine_ext.cli.top; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"False\n"


def test_wrong_usage() -> None:
    for wrong in (
        [],
        ["host:8000"],
        ["http://h", "--interval", "0"],
        ["http://h", "--syncs", "-1"],
    ):
        with case(wrong), pytest.raises(SystemExit) as stopped:
            top.main(wrong)
        assert stopped.value.code == 2


@pytest.mark.slow
def test_it_refreshes_until_ctrl_c(engine: FakeEngine) -> None:
    terminal, end = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TERM": "xterm",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "engine_ext.cli.top", engine.url, "--interval", "0.02"]
    # A shell's background job ignores the signal, and so would the program.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(end)
    printed = bytearray()
    deadline = time.monotonic() + 20
    try:
        while len(engine.asked) < 3 and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.05)[0]:
                printed += os.read(terminal, 1 << 16)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how a terminal without a program ends
            while more := os.read(terminal, 1 << 16):
                printed += more
        assert process.wait(10) == 0, printed
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert len(engine.asked) >= 3
    assert b"committed" in printed
    assert b"Traceback" not in printed
    assert b"\x1b[?1049l" in printed  # the terminal is as it was


def test_engines_that_follow_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (1, 2, 3):
        write(tmp_path, version, [sparse("a", {version: version})])
    facts: dict[str, Any] = {"engine": "vllm", "newest": 3, "failures": 2, "at": 0.0}
    beats: list[tuple[str, int, Any, float, str | None]] = [
        ("host-a", 3, "following", 60.0, None),
        ("host-b", 1, "failing", 60.0, "LogDamaged: x"),
        ("host-d", 2, "diverged", 60.0, "LogDiverged: y"),
    ]
    for name, at, state, expires_s, error in [*beats, ("host-c", 1, "pinned", -1.0, None)]:
        write_heartbeat(
            open_log(tmp_path),
            Heartbeat(
                name=name,
                version=at,
                behind=0,
                state=state,
                expires_s=expires_s,
                error=error,
                **facts,
            ),
        )
    assert top.main(["--delta-log", str(tmp_path), "--once"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if "host-" in row]
    cells = [row.split() for row in rows]
    assert [row[:5] for row in cells] == [
        ["host-a", "vllm", "3", "following", "0"],
        ["host-b", "vllm", "1", "failing", "2"],
        ["host-c", "vllm", "1", "expired", "2"],
        ["host-d", "vllm", "2", "diverged", "1"],
    ]
    assert "LogDamaged: x" in rows[1]
    assert "LogDiverged: y" in rows[3]
    assert top.main(["--delta-log", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engines"] == []
    assert [one["versions"] for one in found["followers"]] == [0, 2, 2, 1]
    assert found["followers"][1]["nbytes"] > 0
    assert top.main(["--delta-log", str(tmp_path / "none"), "--once"]) == 1
    assert "none" in capsys.readouterr().err
