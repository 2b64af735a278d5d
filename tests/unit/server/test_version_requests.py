"""Requests that ask for a version are answered by it alone, whatever process commits meanwhile."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
import uvicorn

from delta_server import recent
from delta_server.version_requests import VersionRequests, Wanted
from engine_ext.errors import MalformedPart
from tests.support.cases import case
from tests.support.delta_bodies import OTHER_STEP, STEP, VERSION, after, delta_part, full_part
from tests.support.endpoint_rig import COMPLETIONS, DELTA, Rig, assert_error
from tests.unit.server.generating_app import (
    LINES,
    STREAM,
    WAITS,
    WHOLE,
    Generator,
    tokens_of,
)
from tests.unit.server.other_process import Process

HEADER = "X-Weight-Version"
NEXT_VERSION = VERSION + 1


@pytest.fixture
def generator(rig: Rig) -> Generator:
    return Generator(rig, rig.app)


def ask(rig: Rig, wanted: str, path: str = COMPLETIONS) -> httpx.Response:
    return rig.post(path, headers={HEADER: wanted})


def during(rig: Rig, generator: Generator, path: str, wanted: str, *commits: Any) -> httpx.Response:
    """The answer to a request in flight while parts are committed."""

    async def both() -> httpx.Response:
        asking = asyncio.ensure_future(rig.request("POST", path, headers={HEADER: wanted}))
        await generator.until_running()
        for body in commits:
            answer = await rig.sending(body)
            assert answer.json()["status"] == "committed", answer.text
        return await asking

    response: httpx.Response = rig.run(both())
    return response


# The header --------------------------------------------------------------------------------------


def test_a_header_is_read() -> None:
    for text, lowest, highest in (
        *(("7", 7, 7), (" 7 ", 7, 7), (">=7", 7, 2**63 - 1), (">= 7", 7, 2**63 - 1)),
        *(("7-9", 7, 9), ("7-7", 7, 7), ("0", 0, 0)),
    ):
        wanted = Wanted.parse([text.encode()])
        assert (wanted.lowest, wanted.highest) == (lowest, highest), text


def test_a_malformed_header_is_400(rig: Rig) -> None:
    """Also two of them."""
    for text in (
        *("", "x", "-7", "7-", "9-7", ">7", "<=7", ">=7-9", "7,8", "7.0", str(2**63), "\u0667"),
        "7-8-9",
    ):
        with case(text):
            with pytest.raises(MalformedPart):
                Wanted.parse([text.encode()])
            if text.isascii():
                assert_error(ask(rig, text), 400, "MalformedPart")
    answer = rig.run(rig.request("POST", COMPLETIONS, headers=[(HEADER, "7"), (HEADER, "8")]))
    assert_error(answer, 400, "MalformedPart")


def test_what_can_be_answered_later_is_400(rig: Rig) -> None:
    assert_error(ask(rig, str(VERSION), "/v1/responses"), 400, "MalformedPart")


# What the engine serves --------------------------------------------------------------------------


def test_only_a_version_that_is_served_is_answered(rig: Rig) -> None:
    for wanted in ("7", ">=7", ">=0", "6-7", "7-9"):
        answer = ask(rig, wanted)
        assert (answer.status_code, answer.json()) == (200, "served"), wanted
        assert answer.headers[HEADER] == "7"
    for wanted in ("6", "8", ">=8", "8-9", "0-6"):
        answer = ask(rig, wanted)
        assert_error(answer, 409, "VersionNotServed", version=VERSION, wanted=wanted)
        assert answer.headers["Retry-After"] == "1"


def test_requests_without_the_header_pass(rig: Rig) -> None:
    answer = rig.post(COMPLETIONS)
    assert answer.status_code == 200
    assert HEADER not in answer.headers


def test_other_routes_ignore_the_header(rig: Rig) -> None:
    assert ask(rig, "99", "/tokenize").status_code == 200


def test_a_commit_and_a_rollback_are_followed(rig: Rig) -> None:
    assert rig.send(delta_part()).json()["status"] == "committed"
    assert ask(rig, str(NEXT_VERSION)).headers[HEADER] == str(NEXT_VERSION)
    assert_error(ask(rig, str(VERSION)), 409, "VersionNotServed", version=NEXT_VERSION)
    assert rig.post("/delta_rollback").status_code == 200
    assert ask(rig, str(VERSION)).status_code == 200
    assert rig.post("/update_weight_version", json={"new_version": "12"}).status_code == 200
    assert ask(rig, "12").status_code == 200


def test_uncertain_weights_serve_no_version(rig: Rig) -> None:
    rig.fail_commit()
    assert_error(ask(rig, ">=0"), 503, "EngineUncertain", "uncertain")


def test_weights_that_something_else_changed_serve_none(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", 0.0)  # the start has asked just now
    for receiver in rig.engine.receivers:
        receiver.weights_replaced("a loader")
    error = assert_error(ask(rig, ">=0"), 409, "VersionNotServed", version=None)
    assert "a loader changed the weights" in error["message"]


# Requests in flight ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [WHOLE, WAITS])
def test_an_answer_of_left_weights_is_409(rig: Rig, generator: Generator, path: str) -> None:
    generator.tokens = 1000
    answer = during(rig, generator, path, "7", delta_part())
    assert_error(answer, 409, "VersionNotServed", version=NEXT_VERSION, wanted="7")
    assert generator.gone == [path]


def test_a_stream_of_left_weights_ends_in_the_error(rig: Rig, generator: Generator) -> None:
    generator.tokens = 1000
    answer = during(rig, generator, STREAM, "7", delta_part())
    tokens, error = tokens_of(STREAM, answer.text)
    assert answer.headers[HEADER] == "7"
    assert {*tokens} == {7}
    assert error is not None
    assert (error["type"], error["version"], error["wanted"]) == ("VersionNotServed", 8, "7")


def test_another_stream_of_left_weights_is_cut(rig: Rig, generator: Generator) -> None:
    generator.tokens = 1000
    with pytest.raises(Exception, match="7 is not served any more"):
        during(rig, generator, LINES, "7", delta_part())


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [">=7", "7-8"])
@pytest.mark.parametrize("path", [WHOLE, STREAM])
def test_versions_within_the_range_are_passed(
    rig: Rig, generator: Generator, path: str, wanted: str
) -> None:
    generator.tokens = 100
    answer = during(rig, generator, path, wanted, delta_part())
    tokens, error = tokens_of(path, answer.text)
    assert (len(tokens), {*tokens}, error) == (100, {7, 8}, None)
    assert HEADER not in answer.headers


def test_a_range_that_is_left_later_ends_then(rig: Rig, generator: Generator) -> None:
    generator.tokens = 1000
    bodies = [delta_part(), delta_part(OTHER_STEP, version=9)]
    tokens, error = tokens_of(STREAM, during(rig, generator, STREAM, "7-8", *bodies).text)
    assert {*tokens} <= {7, 8}
    assert error is not None


@pytest.mark.slow
def test_a_refused_commit_stops_nobody(rig: Rig, generator: Generator) -> None:
    generator.tokens = 50

    async def both() -> httpx.Response:
        asking = asyncio.ensure_future(rig.request("POST", WHOLE, headers={HEADER: "7"}))
        await generator.until_running()
        rig.engine.shards[1].breaks, rig.engine.shards[0].undoes = True, True
        rig.engine.shards[1].undoes = True
        assert (await rig.sending(delta_part())).json()["error"]["type"] == "WriteUndone"
        return await asking

    answer = rig.run(both())
    assert (answer.status_code, {*answer.json()}) == (200, {7})


def test_a_failed_write_stops_a_request(rig: Rig, generator: Generator) -> None:
    generator.tokens = 1000

    async def both() -> httpx.Response:
        asking = asyncio.ensure_future(rig.request("POST", WAITS, headers={HEADER: ">=0"}))
        await generator.until_running()
        rig.engine.shards[1].breaks = True
        await rig.sending(delta_part())
        return await asking

    assert_error(rig.run(both()), 409, "VersionNotServed", version=None)


def test_a_number_with_other_weights_stops_a_request(rig: Rig, generator: Generator) -> None:
    """Another run has led to the same version."""
    generator.tokens = 1000
    other = full_part(after(rig.engine.weights, STEP), VERSION)
    assert_error(during(rig, generator, WHOLE, "7", other), 409, "VersionNotServed", version=7)


def test_a_client_that_leaves_is_noticed(rig: Rig, generator: Generator) -> None:
    generator.tokens = 1000

    async def leave() -> None:
        messages = [{"type": "http.request", "body": b"", "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """Nobody listens."""

        scope = {
            "type": "http", "method": "POST", "path": WHOLE, "root_path": "", "query_string": b"",
            "headers": [(HEADER.lower().encode(), b"7")], "client": None,
        }  # fmt: skip
        request = asyncio.ensure_future(rig.app(scope, receive, send))
        await generator.until_running()
        left.set()
        await request

    rig.run(leave())
    assert generator.gone == [WHOLE]


def test_an_app_that_receives_twice_at_once_gets_each_message(rig: Rig) -> None:
    """As one does that reads a body while another task waits for the client to leave."""

    async def received() -> list[Any]:
        arriving: asyncio.Queue[Any] = asyncio.Queue()
        got: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            two = [asyncio.ensure_future(receive()) for _ in range(2)]
            await asyncio.sleep(0)
            for body in (b"1", b"2"):
                arriving.put_nowait({"type": "http.request", "body": body, "more_body": True})
            got.extend(await asyncio.gather(*two))

        scope = {"type": "http", "path": "/", "headers": [(HEADER.lower().encode(), b"7")]}
        served = rig.service.committer.served
        await VersionRequests(served).serve(app, None, scope, arriving.get, arriving.put)
        return sorted(one["body"] for one in got)

    assert rig.run(received()) == [b"1", b"2"]


@pytest.mark.slow
def test_a_slow_client_gets_the_error_of_its_stream(rig: Rig, generator: Generator) -> None:
    """The app has ended before the client has read it."""
    generator.tokens = 10000

    async def stop() -> list[bytes]:
        messages: list[Any] = [{"type": "http.request", "body": b"", "more_body": False}]
        errors, reads = asyncio.Event(), asyncio.Event()
        read: list[bytes] = []

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if b'"error"' in (body := message.get("body", b"")):
                errors.set()
                await reads.wait()
                read.append(body)

        scope = {
            "type": "http", "method": "POST", "path": STREAM, "root_path": "", "query_string": b"",
            "headers": [(HEADER.lower().encode(), b"7")], "client": None,
        }  # fmt: skip
        request = asyncio.ensure_future(rig.app(scope, receive, send))
        await generator.until_running()
        assert (await rig.sending(delta_part())).json()["status"] == "committed"
        await errors.wait()
        await asyncio.wait({request}, timeout=0.2)
        assert not request.done()
        reads.set()
        await request
        return read

    [event] = rig.run(stop())
    assert b"VersionNotServed" in event


# A real server -----------------------------------------------------------------------------------


def connected(rig: Rig, generator: Generator, path: str) -> tuple[int, str, bool]:
    """Status and text of an answer that a commit stops, and whether it was cut off."""

    async def ask(url: str) -> tuple[int, str, bool]:
        headers, text = {HEADER: "7"}, ""
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
            client.stream("POST", path, headers=headers) as response,
        ):
            try:
                async for piece in response.aiter_text():
                    text += piece
            except httpx.RemoteProtocolError:
                return response.status_code, text, True
            return response.status_code, text, False

    async def serve() -> tuple[int, str, bool]:
        config = uvicorn.Config(rig.app, port=0, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        asking = asyncio.ensure_future(ask(f"http://127.0.0.1:{port}"))
        await generator.until_running()
        await asyncio.sleep(0.05)
        assert (await rig.sending(delta_part())).json()["status"] == "committed"
        found = await asking
        while not generator.gone:
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
        return found

    found: tuple[int, str, bool] = rig.run(serve())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", [WHOLE, WAITS, STREAM, LINES])
def test_a_client_sees_why_its_answer_ends(rig: Rig, generator: Generator, path: str) -> None:
    generator.tokens = 10000
    status, text, was_cut = connected(rig, generator, path)
    assert was_cut is (path == LINES)
    assert status == (200 if path in (STREAM, LINES) else 409)
    tokens, error = tokens_of(path, text)
    assert {*tokens} == ({7} if path in (STREAM, LINES) else set())
    assert (error is None) is was_cut
    assert generator.gone == [path]


# Several processes -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_answer_has_a_version_not_asked_for(rig: Rig, other: Process, seed: int) -> None:
    """Two processes commit, roll back and answer at random."""
    rng = random.Random(seed)
    rig.run(rig.service.start())
    rig.run(other.service.start())
    apps = [rig.app, other.app]
    generators = [Generator(rig, app) for app in apps]
    over = False
    outcomes: list[str] = []

    async def client(number: int) -> None:
        while not over:
            low = rig_version() + rng.choice([-1, 0, 0, 0, 1])
            high = rng.choice([low, low, low + 1, low + 3, None])
            wanted = f">={low}" if high is None else str(low) if high == low else f"{low}-{high}"
            path = rng.choice([WHOLE, STREAM, WAITS])
            which = rng.randrange(2)
            generators[which].tokens = rng.choice([1, 5, 40])
            answer = await rig.request("POST", path, app=apps[which], headers={HEADER: wanted})
            tokens, error = tokens_of(path, answer.text)
            assert all(low <= token <= (high or 1 << 62) for token in tokens), (wanted, tokens)
            known = answer.headers.get(HEADER)
            assert known is None or {*tokens} <= {int(known)}
            outcomes.append("whole" if error is None else "stopped" if tokens else "refused")

    def rig_version() -> int:
        return rig.service.committer.served.version

    async def commit() -> None:
        nonlocal over
        for number in range(12):
            await asyncio.sleep(rng.random() * 0.05)
            process = rng.choice(apps)
            if rng.random() < 0.2:
                await rig.request("POST", "/delta_rollback", app=process)
                continue
            version = rig_version()
            body = delta_part(
                {"embed.weight": {0: number}}, version=version + 1, base_version=version
            )
            mode = rng.choice(["keep", "keep", "abort"])
            headers = {"Content-Type": "application/octet-stream"}
            answer = await rig.request(
                "POST",
                f"{DELTA}?pause_mode={mode}",
                app=process,
                content=body,
                headers=headers,
            )
            assert answer.status_code in (200, 409), answer.text
        over = True

    async def all_at_once() -> None:
        await asyncio.gather(commit(), *(client(number) for number in range(6)))

    rig.run(all_at_once())
    assert {"whole", "refused"} <= {*outcomes}
