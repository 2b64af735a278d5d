"""Access to the endpoints: every route, every kind of client, and every kind of token."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from delta_server.auth import check_client, check_token
from delta_server.routes import attach
from engine_ext.errors import AccessDenied, Unauthorized
from engine_ext.settings import API_KEY_ENVIRONMENT
from tests.support.delta_bodies import delta_part
from tests.support.endpoint_rig import COMPLETIONS, DELTA, FROM_DISK, STATUS, Rig, assert_error

DISK = json.dumps({"model_path": "/", "load_format": "delta"}).encode()
PULL = b'{"local_checkpoint_dir": "/c", "source_dir": "/", "target_version": 7}'
RPC = json.dumps({"method": "apply_delta_from_disk", "kwargs": {"model_path": "/"}}).encode()
RUN = json.dumps({"action": "claim", "run": "r"}).encode()
ASK = json.dumps({"action": "ask", "group": "g"}).encode()
REMOTE = ("192.0.2.7", 4711)

# Every route that the package adds: method, path, body, its type, and the answer to a client
# with access.
ROUTES: dict[str, tuple[str, str, bytes, str, int]] = {
    "part": ("POST", DELTA, delta_part(), "application/octet-stream", 200),
    "files": ("POST", DELTA, DISK, "application/json", 403),  # there is no --delta-root
    "disk": ("POST", FROM_DISK, DISK, "application/json", 403),
    "version": ("POST", "/update_weight_version", b'{"new_version": "7"}', "application/json", 200),
    "pull": ("POST", "/pull_weights", PULL, "application/json", 403),
    "rpc": ("POST", "/collective_rpc", RPC, "application/json", 403),
    "status": ("GET", STATUS, b"", "", 200),
    "plan": ("GET", f"{STATUS}?plan=true", b"", "", 200),
    "digest": ("GET", "/delta_digest", b"", "", 200),
    "page": ("GET", "/delta_dashboard", b"", "", 200),
    "rollback": ("POST", "/delta_rollback", b"", "", 409),  # there is nothing to go back to
    "catch up": ("POST", "/delta_catch_up", b"", "", 409),  # there is no --delta-log
    "pin": ("POST", "/delta_pin", b"", "", 409),  # nor --delta-follow
    "offer": ("GET", "/delta_parts", b"", "", 409),  # nor --delta-log
    "peer": ("GET", "/delta_parts/{content}", b"", "", 409),
    "run": ("POST", "/delta_run", RUN, "application/json", 200),
    "group": ("POST", "/delta_commit", ASK, "application/json", 200),
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


def test_the_table_has_every_route() -> None:
    """Whatever `attach` adds, from whichever module: a route that nobody put in the table fails."""
    app = FastAPI()
    before = set(map(id, app.routes))
    attach(app)
    added = {
        (method, route.path)  # type: ignore[attr-defined]
        for route in app.routes
        if id(route) not in before
        for method in route.methods  # type: ignore[attr-defined]
    }
    guarded = {(method, path.partition("?")[0]) for method, path, *_ in ROUTES.values()}
    assert added - guarded == {("GET", "/delta_ready")}  # for probes, which have no token
    assert guarded <= added


def test_the_documentation_has_every_route() -> None:
    text = (Path(__file__).parents[3] / "docs/security.md").read_text()
    documented = set(re.findall(r"^\| `(GET|POST) ([^`]*)`.*\| token \|", text, re.MULTILINE))
    assert documented == {(method, path.partition("?")[0]) for method, path, *_ in ROUTES.values()}


# Every route, token and client ---------------------------------------------------------------

# Who is at the other end, and what its request says besides.
CLIENTS: dict[str, tuple[Any, dict[str, str]]] = {
    "here": (("127.0.0.1", 1), {}),
    "a proxy here": (("127.0.0.1", 1), {"X-Forwarded-For": "127.0.0.1"}),
    "another site's page": (("127.0.0.1", 1), {"Origin": "https://example.org"}),
    "elsewhere": (REMOTE, {}),
    "a socket": (None, {}),
}
GIVEN = {"none": {}, "wrong": {"Authorization": "Bearer wrong"},
         "right": {"Authorization": "Bearer secret"}}  # fmt: skip


def is_allowed(token: str | None, given: str, client: str) -> bool:
    """The right token counts from everywhere; where none is set, only being on this host does."""
    return given == "right" if token else client == "here"


CASES = list(itertools.product((None, SECRET), GIVEN, CLIENTS))
ALLOWED = [case for case in CASES if is_allowed(*case)]
DENIED = [case for case in CASES if not is_allowed(*case)]


@pytest.fixture
def ask(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def ask(route: str, token: str | None, given: str, client: str) -> Any:
        peer, headers = CLIENTS[client]
        with monkeypatch.context() as patch:
            if token is not None:
                patch.setenv(API_KEY_ENVIRONMENT, token)
            return call(rig, route, {**headers, **GIVEN[given]}, peer=peer)

    return ask


@pytest.mark.parametrize("route", ROUTES)
def test_who_may(ask: Callable[..., Any], route: str) -> None:
    for case in ALLOWED:
        assert (case, ask(route, *case).status_code) == (case, ROUTES[route][-1])


@pytest.mark.parametrize("route", ROUTES)
def test_who_may_not(rig: Rig, ask: Callable[..., Any], route: str) -> None:
    for case in DENIED:
        token, response = case[0], ask(route, *case)
        status, kind = (401, "Unauthorized") if token else (403, "AccessDenied")
        assert (case, response.status_code) == (case, status)
        error = assert_error(response, status, kind)
        assert ("--delta-api-key" in error["message"], SECRET in response.text) == (True, False)
        assert response.headers.get("WWW-Authenticate") == ("Bearer" if token else None)
    rig.assert_untouched()


async def unread() -> AsyncIterator[bytes]:
    yield pytest.fail("the body was read")


@pytest.mark.parametrize("content_type", ["application/octet-stream", "application/json"])
@pytest.mark.parametrize("token", [None, SECRET])
def test_nothing_is_read_of_who_may_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, content_type: str, token: str | None
) -> None:
    if token is not None:
        monkeypatch.setenv(API_KEY_ENVIRONMENT, token)
    headers = {"Content-Type": content_type}
    for path in (DELTA, FROM_DISK, "/collective_rpc"):
        response = rig.post(path, content=unread(), headers=headers, peer=REMOTE)
        assert (path, response.status_code) == (path, 403 if token is None else 401)


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
    for client in ("DELTA_API_KEY", "delta-send --api-key", "api_key=", "Authorization: Bearer"):
        assert client in caught.value.message


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Bearer x"])
def test_an_empty_token_lets_nobody_in(authorization: str | None) -> None:
    with pytest.raises(Unauthorized):
        check_token(authorization, "")


@pytest.mark.parametrize(("token", "status"), [("secret\n", 200), ("\n", 401)])
def test_engine_drops_white_space_of_token(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, token: str, status: int
) -> None:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, token)
    assert call(rig, "status", GIVEN["right"]).status_code == status


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
    # The page's GET requests to its own host name have neither header.
    {"Host": "example.org:8000", "User-Agent": "Mozilla/5.0"},
    {"Host": "127.0.0.1.example.org"},
    {"Host": "localhost."},
    {"Host": "["},
]
OWN_PAGES = [
    {"Origin": "http://localhost:8000", "Host": "localhost:8000"},
    {"Origin": "http://127.0.0.1:8000", "Host": "127.0.0.1:8000"},
    {"Sec-Fetch-Site": "same-origin", "Host": "[::1]:8000"},
]


@pytest.mark.parametrize("client", HERE)
def test_without_a_token_clients_on_this_host_may(client: str) -> None:
    check_client(client, {"host": "the-name-of-this-host:8000"})


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "10.0.0.1", "engine", "a.localhost:1", ""]
)
def test_names_that_no_other_site_can_have(host: str) -> None:
    check_client("127.0.0.1", {"host": host})


def test_the_name_of_this_host_may_be_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Node7.example.org")
    check_client("127.0.0.1", {"host": "node7.example.org:8000"})
    with pytest.raises(AccessDenied, match="Host"):
        check_client("127.0.0.1", {"host": "node8.example.org:8000"})


@pytest.mark.parametrize("client", ELSEWHERE)
def test_without_a_token_no_other_client_may(client: str | None) -> None:
    with pytest.raises(AccessDenied, match="--delta-api-key"):
        check_client(client, {})


@pytest.mark.parametrize("client", ["10.0.4.7", "::ffff:10.0.4.7", "fd00::1", "127.0.0.1"])
def test_clients_of_trusted_networks_may(client: str) -> None:
    check_client(client, {"host": "10.0.4.2:8000"}, ["10.0.4.0/24", "fd00::/8"])


@pytest.mark.parametrize("client", ["10.0.5.7", "fe80::1", None, "trainer"])
def test_clients_of_other_networks_may_not(client: str | None) -> None:
    with pytest.raises(AccessDenied, match="--delta-allow-from"):
        check_client(client, {}, ["10.0.4.0/24", "fd00::/8"])


def test_trusted_networks_are_the_settings(make_rig: Any) -> None:
    rig = make_rig(allow_from=("192.0.2.0/24",))
    assert rig.run(rig.request("GET", STATUS, peer=REMOTE)).status_code == 200
    other = rig.run(rig.request("GET", STATUS, peer=("198.51.100.1", 1)))
    assert_error(other, 403, "AccessDenied")


@pytest.mark.parametrize("headers", [*PROXIED, *OTHER_SITES], ids=str)
def test_who_only_speaks_for_another_may_not(headers: dict[str, str]) -> None:
    lower = {name.lower(): value for name, value in headers.items()}
    with pytest.raises(AccessDenied, match="--delta-api-key"):
        check_client("127.0.0.1", lower)
    with pytest.raises(AccessDenied):  # from a trusted network, too
        check_client("10.0.4.7", lower, ["10.0.4.0/24"])


@pytest.mark.parametrize("headers", OWN_PAGES, ids=str)
def test_a_page_of_this_host_may(headers: dict[str, str]) -> None:
    check_client("127.0.0.1", {name.lower(): value for name, value in headers.items()})


def test_the_first_of_two_headers_is_enough(rig: Rig) -> None:
    """A header that comes twice is seen."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(rig.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            headers = [("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-For", "192.0.2.7")]
            return await client.get(STATUS, headers=headers)

    assert_error(rig.run(asyncio.wait_for(send(), 5)), 403, "AccessDenied")


@pytest.mark.parametrize("peer", [("127.0.0.1", 1), REMOTE], ids=["proxy here", "proxy elsewhere"])
def test_what_a_proxy_says_of_its_client_is_not_believed(rig: Rig, peer: Any) -> None:
    """Also where the HTTP server believes it, and names that client as the peer."""
    trusting = ProxyHeadersMiddleware(rig.app, trusted_hosts="*")  # type: ignore[arg-type]
    headers = {"X-Forwarded-For": "127.0.0.1"}
    request = rig.request("GET", STATUS, app=trusting, peer=peer, headers=headers)  # type: ignore[arg-type]
    assert_error(rig.run(request), 403, "AccessDenied")
