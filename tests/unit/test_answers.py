"""How a command or a sender words what a server has answered."""

from __future__ import annotations

import json
import os

import httpx
import pytest

from engine_ext.answers import answer_in_words, failure_in_words, prefix_hint, proxy_variable
from engine_ext.errors import BaseMismatch, MalformedPart


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            MalformedPart("params names a tensor twice", tensor="a.weight"),
            "HTTP 400: MalformedPart: params names a tensor twice (a.weight)",
        ),
        (
            BaseMismatch("a.weight: its copies differ", tensor="a.weight"),
            "HTTP 409: BaseMismatch: a.weight: its copies differ",
        ),
        (MalformedPart("part 3 of 2"), "HTTP 400: MalformedPart: part 3 of 2"),
    ],
)
def test_refusal_names_its_tensor_once(error: MalformedPart | BaseMismatch, words: str) -> None:
    body = json.dumps({"error": error.to_wire()})
    assert answer_in_words(error.status, body, None, "http://engine") == words


LOCAL = "http://localhost:8000/delta_run"
REFUSED = "nothing listens there (connection refused)"
CLOSED = httpx.RemoteProtocolError("Server disconnected without sending a response.")


def refused() -> httpx.ConnectError:
    error = httpx.ConnectError("all attempts failed")
    error.__cause__ = ConnectionRefusedError(111, "refused")
    return error


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("scheme", "hint"), [("http", True), ("https", False)])
def test_closed_connection_suggests_https(scheme: str, hint: bool) -> None:
    said = failure_in_words(CLOSED, f"{scheme}://engine:8000/delta_run")
    assert said.startswith("RemoteProtocolError: Server disconnected")
    assert ("If it serves TLS, use https://" in said) is hint


@pytest.mark.parametrize(
    ("environment", "url", "variable"),
    [
        ({}, LOCAL, None),
        ({"HTTP_PROXY": "http://proxy:3128"}, LOCAL, "HTTP_PROXY"),
        ({"HTTP_PROXY": "proxy", "http_proxy": "other"}, LOCAL, "http_proxy"),
        ({"HTTP_PROXY": "proxy", "http_proxy": ""}, LOCAL, None),
        ({"HTTP_PROXY": "proxy"}, "https://localhost", None),
        ({"all_proxy": "proxy", "HTTP_PROXY": "proxy"}, "https://localhost", "all_proxy"),
        ({"all_proxy": "proxy", "HTTP_PROXY": "proxy"}, LOCAL, "HTTP_PROXY"),
        ({"HTTP_PROXY": "proxy", "NO_PROXY": "localhost"}, LOCAL, None),
        ({"HTTP_PROXY": "proxy", "no_proxy": "*"}, LOCAL, None),
        ({"HTTP_PROXY": "proxy"}, "http://[::1", None),
    ],
)
def test_variable_is_that_of_used_proxy(
    environment: dict[str, str], url: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_variable(url) == variable


def test_failure_names_proxy_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failure_in_words(refused(), LOCAL) == REFUSED
    monkeypatch.setenv("HTTP_PROXY", "http://user:pass@127.0.0.1:3128")
    said = failure_in_words(refused(), LOCAL)
    assert said == (
        f"{REFUSED}; HTTP_PROXY sends this request to a proxy: to go without it, add localhost to "
        "NO_PROXY"
    )
    assert failure_in_words(refused(), LOCAL, proxies=False) == REFUSED


def test_answer_names_proxy_unless_engine_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:3128")
    own = json.dumps({"error": MalformedPart("part 3 of 2").to_wire()})
    assert "HTTP_PROXY" not in answer_in_words(400, own, None, LOCAL)
    for status in (403, 404):
        assert "HTTP_PROXY" in answer_in_words(status, "Forbidden", "squid", LOCAL)
        assert "PROXY" not in answer_in_words(status, "No", "squid", LOCAL, proxies=False)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("module.a.w", "a.w", "; it has a.w: take the prefix 'module.' off the names"),
        ("a.w", "m.a.w", "; it has m.a.w: put the prefix 'm.' before the names"),
        (
            "model.language_model.layers.0.q.weight",
            "model.layers.0.q.weight",
            "; it has model.layers.0.q.weight: put 'model.' in the place of "
            "'model.language_model.'",
        ),
        (
            "model.layers.0.q.weight",
            "model.language_model.layers.0.q.weight",
            "; it has model.language_model.layers.0.q.weight: put 'model.language_model.' in the "
            "place of 'model.'",
        ),
        ("model.layers.5.q.weight", "model.layers.0.q.weight", ""),
        ("model.norm.weight", "model.layers.0.norm.weight", ""),
        ("a.weight", "b.weight", ""),
    ],
)
def test_hint_names_prefix_that_differs(name: str, known: str, hint: str) -> None:
    assert prefix_hint(name, ["x.y", known], whose="it") == hint
