"""Who may use the endpoints: every route, every kind of client, and every kind of token."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from delta_server.access import check_loopback, check_token
from engine_ext.errors import LoopbackOnly, Unauthorized
from engine_ext.settings import API_KEY_ENVIRONMENT

from .rig import COMPLETIONS, DELTA, FROM_DISK, STATUS, Rig, assert_error, delta_part

OCTETS = {"Content-Type": "application/octet-stream"}
DISK = json.dumps({"model_path": "/", "load_format": "delta"}).encode()
REMOTE = ("192.0.2.7", 4711)

# Every route that the package adds: method, path, body, its type, and the answer to who may.
ROUTES: dict[str, tuple[str, str, bytes, str, int]] = {
    "part": ("POST", DELTA, delta_part(), "application/octet-stream", 200),
    "files": ("POST", DELTA, DISK, "application/json", 403),  # there is no --delta-root
    "disk": ("POST", FROM_DISK, DISK, "application/json", 403),
    "status": ("GET", STATUS, b"", "", 200),
    "plan": ("GET", f"{STATUS}?plan=true", b"", "", 200),
    "digest": ("GET", "/delta_digest", b"", "", 200),
    "rollback": ("POST", "/delta_rollback", b"", "", 409),  # there is nothing to go back to
}

SECRET = "secret"
OTHERS = [
    None, "", "secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Bearer Secret",
    "Basic secret", "Bearer secret secret", "Token secret",
]  # fmt: skip


def call(rig: Rig, route: str, headers: dict[str, str] | None = None, **options: Any) -> Any:
    method, path, body, content_type, _ = ROUTES[route]
    sent = {**({"Content-Type": content_type} if content_type else {}), **(headers or {})}
    return rig.run(rig.request(method, path, content=body, headers=sent, **options))


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_table_has_every_route(rig: Rig) -> None:
    added = {
        (method, route.path)  # type: ignore[attr-defined]
        for route in rig.app.routes
        if getattr(getattr(route, "endpoint", None), "__module__", None) == "delta_server.app"
        for method in route.methods  # type: ignore[attr-defined]
    }
    assert added == {(method, path.partition("?")[0]) for method, path, *_ in ROUTES.values()}


def test_the_documentation_has_every_route() -> None:
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    documented = set(re.findall(r"^\| `(GET|POST) ([^`]*)`.*\| token \|", text, re.MULTILINE))
    assert documented == {(method, path.partition("?")[0]) for method, path, *_ in ROUTES.values()}


# With a token --------------------------------------------------------------------------------


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer wrong", "Basic secret"])
@pytest.mark.parametrize("peer", [("127.0.0.1", 1), REMOTE, None], ids=["here", "remote", "socket"])
def test_without_the_token(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, route: str, authorization: str | None, peer: Any
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    with monkeypatch.context() as patch:
        patch.setenv(API_KEY_ENVIRONMENT, SECRET)
        response = call(rig, route, headers, peer=peer)
    error = assert_error(response, 401, "Unauthorized")
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert "--delta-api-key" in error["message"]
    assert SECRET not in response.text
    rig.assert_untouched()


@pytest.mark.parametrize("authorization", ["Bearer secret", "bearer secret"])
@pytest.mark.parametrize("peer", [("127.0.0.1", 1), REMOTE, None], ids=["here", "remote", "socket"])
def test_with_the_token(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, route: str, authorization: str, peer: Any
) -> None:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, SECRET)
    headers = {"Authorization": authorization, "X-Forwarded-For": "192.0.2.7"}
    assert call(rig, route, headers, peer=peer).status_code == ROUTES[route][-1]


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


@pytest.mark.parametrize("path", [DELTA, FROM_DISK])
@pytest.mark.parametrize("content_type", ["application/octet-stream", "application/json"])
@pytest.mark.parametrize("token", [None, SECRET])
def test_nothing_is_read_of_who_may_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, path: str, content_type: str, token: str | None
) -> None:
    if token is not None:
        monkeypatch.setenv(API_KEY_ENVIRONMENT, token)
    headers = {"Content-Type": content_type}
    response = rig.post(path, content=unread(), headers=headers, peer=REMOTE)
    assert response.status_code == (403 if token is None else 401)


def test_the_token_guards_no_other_path(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.post(COMPLETIONS, peer=REMOTE).status_code == 200
    monkeypatch.setenv(API_KEY_ENVIRONMENT, SECRET)
    assert rig.post(COMPLETIONS, peer=REMOTE).status_code == 200


def test_the_disk_route_keeps_the_shape_of_its_answers(rig: Rig) -> None:
    answer = call(rig, "disk", peer=REMOTE).json()
    assert (answer["success"], answer["message"]) == (False, answer["error"]["message"])


@pytest.mark.parametrize("authorization", ["Bearer secret", "bearer secret", "Bearer  secret "])
def test_the_right_token(authorization: str) -> None:
    check_token(authorization, SECRET)


@pytest.mark.parametrize("authorization", [*OTHERS, "Bearer \udcff"])
def test_other_tokens(authorization: str | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        check_token(authorization, SECRET)
    assert SECRET not in caught.value.message


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Bearer x"])
def test_an_empty_token_lets_nobody_in(authorization: str | None) -> None:
    with pytest.raises(Unauthorized):
        check_token(authorization, "")


# Without a token -----------------------------------------------------------------------------

HERE = ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"]
ELSEWHERE = [
    None, "", "192.0.2.7", "10.0.0.1", "0.0.0.0", "::", "::ffff:192.0.2.7", "fe80::1",
    "2001:db8::1", "localhost", "testclient", "127.0.0.1.example.org", "127.1",
]  # fmt: skip
PROXIED = [
    {"Forwarded": "for=127.0.0.1"},
    {"X-Forwarded-For": "127.0.0.1"},
    {"x-forwarded-for": ""},
    {"X-Forwarded-Host": "localhost"},
    {"X-Forwarded-Proto": "https"},
    {"X-Forwarded-Prefix": "/engine"},
    {"X-FORWARDED-SOMETHING": "new"},
    {"X-Real-IP": "127.0.0.1"},
    {"Via": "1.1 proxy"},
]
OTHER_SITES = [
    {"Origin": "https://example.org"},
    {"Origin": "null"},
    {"Origin": "http://localhost.example.org:8000", "Host": "localhost:8000"},
    {"Origin": "http://[", "Host": "localhost:8000"},
    # The page's own host name resolves to this address now.
    {"Origin": "http://example.org:8000", "Host": "example.org:8000"},
    {"Sec-Fetch-Site": "same-origin", "Host": "example.org:8000"},
]
OWN_PAGES = [
    {"Origin": "http://localhost:8000", "Host": "localhost:8000"},
    {"Origin": "http://127.0.0.1:8000", "Host": "127.0.0.1:8000"},
    {"Sec-Fetch-Site": "same-origin", "Host": "[::1]:8000"},
]


@pytest.mark.parametrize("client", HERE)
def test_without_a_token_clients_on_this_host_may(client: str) -> None:
    check_loopback(client, {"host": "the-name-of-this-host:8000"})


@pytest.mark.parametrize("client", ELSEWHERE)
def test_without_a_token_no_other_client_may(client: str | None) -> None:
    with pytest.raises(LoopbackOnly, match="--delta-api-key"):
        check_loopback(client, {})


@pytest.mark.parametrize("peer", [REMOTE, ("::ffff:192.0.2.7", 1), None], ids=str)
def test_without_a_token_no_route_answers_others(rig: Rig, route: str, peer: Any) -> None:
    for authorization in ("", "Bearer", "Bearer anything"):
        response = call(rig, route, {"Authorization": authorization}, peer=peer)
        error = assert_error(response, 403, "LoopbackOnly")
        assert API_KEY_ENVIRONMENT in error["message"]
    rig.assert_untouched()


@pytest.mark.parametrize("headers", [*PROXIED, *OTHER_SITES], ids=str)
def test_who_only_speaks_for_another_may_not(headers: dict[str, str]) -> None:
    lower = {name.lower(): value for name, value in headers.items()}
    with pytest.raises(LoopbackOnly, match="--delta-api-key"):
        check_loopback("127.0.0.1", lower)


@pytest.mark.parametrize("headers", OWN_PAGES, ids=str)
def test_a_page_of_this_host_may(headers: dict[str, str]) -> None:
    check_loopback("127.0.0.1", {name.lower(): value for name, value in headers.items()})


@pytest.mark.parametrize("headers", [PROXIED[1], OTHER_SITES[0]], ids=str)
def test_no_route_answers_who_speaks_for_another(rig: Rig, route: str, headers: Any) -> None:
    assert_error(call(rig, route, headers), 403, "LoopbackOnly")
    rig.assert_untouched()


def test_every_route_answers_clients_on_this_host(rig: Rig, route: str) -> None:
    assert call(rig, route).status_code == ROUTES[route][-1]


def test_the_first_of_two_headers_is_enough(rig: Rig) -> None:
    """A header that comes twice is seen."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(rig.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            headers = [("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-For", "192.0.2.7")]
            return await client.get(STATUS, headers=headers)

    assert_error(rig.run(asyncio.wait_for(send(), 5)), 403, "LoopbackOnly")


@pytest.mark.parametrize("peer", [("127.0.0.1", 1), REMOTE], ids=["proxy here", "proxy elsewhere"])
def test_what_a_proxy_says_of_its_client_is_not_believed(rig: Rig, peer: Any) -> None:
    """Also where the HTTP server believes it, and names that client as the peer."""
    trusting = ProxyHeadersMiddleware(rig.app, trusted_hosts="*")  # type: ignore[arg-type]
    headers = {"X-Forwarded-For": "127.0.0.1"}
    request = rig.request("GET", STATUS, app=trusting, peer=peer, headers=headers)  # type: ignore[arg-type]
    assert_error(rig.run(request), 403, "LoopbackOnly")
