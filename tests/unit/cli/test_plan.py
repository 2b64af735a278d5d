from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_ext.cli import plan
from engine_ext.settings import Settings
from tests.support.statuses import engine_status

pytestmark = pytest.mark.slow


def row(
    status: str, reason: str = "", live: tuple[str, ...] = ("w",), **more: Any
) -> dict[str, Any]:
    return {
        "name": "a.weight",
        "dtype": "bfloat16",
        "shape": [2, 3],
        "status": status,
        "reason": reason,
        "live": list(live),
        "repacked": False,
        "recomputed": [],
        "digested": True,
        **more,
    }


@pytest.mark.parametrize(
    ("ranks", "status", "reason"),
    [
        ([row("exact")], "exact", ""),
        ([row("exact"), row("not on this rank", live=())], "exact", ""),
        ([row("not on this rank", live=()), row("cast")], "cast", ""),
        ([row("exact"), row("uncertified", "moved")], "uncertified", "moved"),
        ([row("ignored", live=()), row("ignored", live=())], "ignored", ""),
    ],
)
def test_a_tensor_is_as_good_as_its_worst_rank(
    ranks: list[dict[str, Any]], status: str, reason: str
) -> None:
    [merged] = plan.merge([[one] for one in ranks])
    assert (merged["status"], merged["reason"]) == (status, reason)


def test_live_names_and_repacks_of_all_ranks() -> None:
    [merged] = plan.merge(
        [
            [row("exact", live=("x",), recomputed=["m.b"])],
            [row("exact", live=("w", "x"), repacked=True, recomputed=["m.a", "m.b"])],
        ]
    )
    assert merged["live"] == ["w", "x"]
    assert merged["repacked"] is True
    assert merged["recomputed"] == ["m.a", "m.b"]


def test_summary() -> None:
    rows = [row("exact"), row("exact"), row("uncertified")]
    assert plan.summary(rows, 2) == "3 tensors on 2 ranks: 2 exact, 1 uncertified"


def plan_of(ranks: list[list[dict[str, Any]]] | None) -> bytes:
    return msgspec.json.encode(engine_status(plan=ranks))


class Server(HTTPServer):
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    path = ""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.path, self.server.headers = self.path, dict(self.headers)
        body = self.server.body or b""
        self.send_response(200 if body else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def ask(server: Server, *flags: str) -> int:
    return plan.main([f"http://127.0.0.1:{server.server_port}/", *flags])


def test_asks_a_running_server(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTA_API_KEY", "secret")
    server.body = plan_of([[row("exact")], [row("exact")]])
    assert ask(server) == 0
    assert server.path == "/delta_status?plan=true"
    assert server.headers["Authorization"] == "Bearer secret"
    text = capsys.readouterr().out
    assert "a.weight" in text
    assert "2x3" in text
    assert text.endswith("1 tensors on 2 ranks: 1 exact\n")


def test_text_of_a_server_is_no_markup(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.body = plan_of([[row("exact", "moved by [abc][/x]", name="a[0]")]])
    assert ask(server) == 0
    out = capsys.readouterr().out
    assert "moved by [abc][/x]" in out
    assert "a[0]" in out


def test_what_is_uncertified_is_told_by_the_exit_status(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    good = row("exact", name="b.weight")
    server.body = plan_of([[row("uncertified", "the engine moved it"), good]])
    assert ask(server, "--json", "--uncertified") == 3
    [shown] = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["reason"]) == ("a.weight", "the engine moved it")


def test_no_plan_is_said_on_standard_error(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(server) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "401" in captured.err


def test_an_engine_that_waits_for_its_weights(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.body = plan_of(None)
    assert ask(server) == 1
    assert "full sync" in capsys.readouterr().err


def test_a_folder_is_loaded_by_the_engine_which_may_print(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Offline:
        @staticmethod
        def load_plan(model: str, flags: list[str]) -> list[list[dict[str, Any]]]:
            asked.append((model, flags, os.environ["DELTA_UPDATES_SETTINGS"]))
            os.write(1, b"the engine says something\n")
            return [[row("exact")]]

    monkeypatch.setenv("DELTA_UPDATES_SETTINGS", "")

    def imported(name: str) -> type[Offline]:
        assert importlib.util.find_spec(name) is not None
        return Offline

    monkeypatch.setattr(importlib, "import_module", imported)
    flags = ["--tensor-parallel-size", "2"]
    assert plan.main([str(tmp_path), "--json", *flags]) == 0
    [(model, given, settings)] = asked
    assert (model, given) == (str(tmp_path), flags)
    assert msgspec.json.decode(settings, type=Settings) == Settings()
    captured = capfd.readouterr()
    assert json.loads(captured.out)[0]["status"] == "exact"
    assert "the engine says something" in captured.err


@pytest.mark.parametrize(
    ("missing", "said"), [("vllm", "give its address"), ("another", "No module named 'another'")]
)
def test_without_the_engine(
    missing: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Offline:
        @staticmethod
        def load_plan(model: str, flags: list[str]) -> None:
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setenv("DELTA_UPDATES_SETTINGS", "")
    monkeypatch.setattr(importlib, "import_module", lambda name: Offline)
    assert plan.main([str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["nowhere"], ["http://127.0.0.1:1", "--dtype", "bfloat16"], []])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        plan.main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("delta-plan: error: ")
