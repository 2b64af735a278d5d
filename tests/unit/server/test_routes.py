"""The endpoints: a body on its way, its headers, and another sync in progress."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.support.cases import case
from tests.support.delta_bodies import (
    NEXT,
    OTHER_STEP,
    VERSION,
    after,
    bare,
    delta_part,
    fresh_weights,
    pieces,
    same,
)
from tests.support.endpoint_rig import DELTA, FROM_DISK, MAX_BODY_BYTES, STATUS, Rig, assert_error
from tests.support.present import present
from tests.unit.server.service_parts import PHASES, assert_unchanged

OCTETS = {"Content-Type": "application/octet-stream"}
GOOD = delta_part()

MakeRig = Callable[..., Rig]


# The body on its way -------------------------------------------------------------------------


def test_a_body_is_committed(rig: Rig) -> None:
    """In each encoding, and in each kind of stream."""
    encodings = ("indices", "deltas", "deltas_zstd", "gap8_exp")
    for number, (encoding, chunk) in enumerate(itertools.product(encodings, (None, 1, 50)), 1):
        with case(f"{encoding} in chunks of {chunk}"):
            body = delta_part(encoding=encoding)
            response = rig.send(body if chunk is None else pieces(body, chunk))
            rig.assert_committed(response, NEXT, VERSION + 1)
            timings = response.json()["timings_ms"]
            # Ranks search their model before each sync whose number is a power of two.
            assert ("search_ms" in timings) == (number & (number - 1) == 0)
            assert_timings({"search_ms": 0.0, **timings})
            assert {**response.json(), "timings_ms": None} == {
                "status": "committed",
                "version": 8,
                "base_version": 7,
                "run": f"anonymous-{number}",
                "nnz": 3,
                "tensors": 2,
                "skipped": {},
                "bytes": len(body),
                "apply": "shard",
                "rollback": True,
                "digest": rig.digest_of(NEXT),
                "timings_ms": None,
            }
            assert rig.post("/delta_rollback").status_code == 200
            assert same(rig.engine.weights, fresh_weights())


def assert_timings(timings: dict[str, float]) -> None:
    assert timings.keys() == {*PHASES, "total_ms"}
    longer = {"receive_ms", "stage_ms", "pause_ms"}
    assert timings["total_ms"] >= sum(timings[phase] for phase in longer)
    assert timings["stage_ms"] >= timings["search_ms"]
    paused = PHASES - longer - {"search_ms"}
    assert timings["pause_ms"] >= sum(timings[phase] for phase in paused) - 0.01
    assert all(ms >= 0 for ms in timings.values())


def test_any_encoding_may_come_in_a_frame(rig: Rig) -> None:
    rig.assert_committed(rig.send(zstandard.compress(GOOD)), NEXT, VERSION + 1)


def test_versions_from_the_query(rig: Rig) -> None:
    rig.assert_committed(rig.send(bare(GOOD), weight_version="8"), NEXT, 8)
    response = rig.send(bare(delta_part({})), weight_version="20", base_version="8")
    rig.assert_committed(response, NEXT, 20)


def test_a_part_without_params_advances_the_version(rig: Rig) -> None:
    response = rig.send(delta_part({}))
    rig.assert_committed(response, fresh_weights(), 8)
    assert (response.json()["nnz"], response.json()["tensors"]) == (0, 0)


def unread() -> AsyncIterator[bytes]:
    class Body:
        def __aiter__(self) -> Any:
            raise AssertionError("the body was read")

    return Body()  # type: ignore[return-value]


def test_refused_by_the_headers_alone(rig: Rig) -> None:
    large = (413, "TooLarge")
    other = (415, "UnsupportedMedia")
    cases: list[tuple[dict[str, str], tuple[int, str]]] = [
        (OCTETS | {"Content-Length": str(MAX_BODY_BYTES + 1)}, large),
        (OCTETS | {"Content-Length": str(1 << 70)}, large),
        (OCTETS | {"Content-Encoding": "zstd"}, other),
        (OCTETS | {"Content-Encoding": "gzip"}, other),
        (OCTETS | {"Content-Encoding": "identity, br"}, other),
        ({"Content-Type": "application/json", "Content-Encoding": "zstd"}, other),
        ({"Content-Type": "application/octet-streams"}, other),
        ({"Content-Type": "text/plain"}, other),
        ({"Content-Type": "multipart/form-data; boundary=x"}, other),
        ({"Content-Type": ""}, other),
        ({}, other),
    ]
    for headers, error in cases:
        with case(headers):
            assert_error(rig.post(DELTA, content=unread(), headers=headers), *error)
            assert_unchanged(rig)
    for query in ({"weight_version": "x"}, {"pause_mode": "x"}):
        with case(query):
            response = rig.post(DELTA, content=unread(), headers=OCTETS, params=query)
            assert_error(response, 400, "MalformedPart")
    rig.assert_untouched()


def test_accepted_headers(rig: Rig) -> None:
    type_with_more = {"Content-Type": "Application/Octet-Stream; charset=binary"}
    rig.assert_committed(rig.post(DELTA, content=GOOD, headers=type_with_more), NEXT, 8)
    identity = OCTETS | {"Content-Encoding": "identity"}
    following = delta_part(OTHER_STEP, 9)
    response = rig.post(DELTA, content=following, headers=identity)
    rig.assert_committed(response, after(NEXT, OTHER_STEP), 9)


def test_a_chunked_body_is_stopped_at_the_limit(rig: Rig) -> None:
    async def chunks(body: bytes) -> AsyncIterator[bytes]:
        yield (1 << 24).to_bytes(8, "little") if body[:1] == b" " else b""
        yield body
        raise AssertionError("read beyond the limit")

    for body in (b" " * MAX_BODY_BYTES, zstandard.compress(b" " * (1 << 20))):
        response = rig.post(DELTA, content=chunks(body), headers=OCTETS)
        assert_error(response, 413, "TooLarge", limit=MAX_BODY_BYTES)
        assert_unchanged(rig)
    rig.assert_untouched()


def test_a_json_body_is_bounded(disk_rig: Rig) -> None:
    for path in (DELTA, FROM_DISK):
        body = {"model_path": "x" * (1 << 20), "load_format": "delta"}
        assert_error(disk_rig.post(path, json=body), 413, "TooLarge", limit=1 << 20)


async def stalling(body: bytes) -> AsyncIterator[bytes]:
    yield body
    await asyncio.sleep(60)


def test_a_slow_body(make_rig: MakeRig) -> None:
    rig = make_rig(stage_timeout=0.05)
    ways = (
        (DELTA, "application/octet-stream"),
        (DELTA, "application/json"),
        (FROM_DISK, "application/json"),
    )
    for (path, content_type), body in itertools.product(ways, (b"", GOOD[:40])):
        with case((path, content_type, body)):
            headers = {"Content-Type": content_type}
            response = rig.post(path, content=stalling(body), headers=headers)
            assert_error(response, 408, "UploadTooSlow")
            assert_unchanged(rig)
    rig.assert_untouched()


def test_a_full_spool(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert_error(rig.send(GOOD), 507, "SpoolFull")
    rig.assert_untouched()


def exchange(rig: Rig, path: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the app's answers to these ASGI messages; the client is gone after the last."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/octet-stream")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    queue = [*messages, {"type": "http.disconnect"}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return queue.pop(0) if len(queue) > 1 else queue[0]

    async def send(message: Any) -> None:
        sent.append(message)

    rig.run(rig.app(scope, receive, send))
    return sent


def test_a_client_that_goes_away_mid_body(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for path, body in itertools.product((DELTA, FROM_DISK), (b"", GOOD[:40], GOOD)):
        with case((path, body)):
            sent = exchange(rig, path, {"type": "http.request", "body": body, "more_body": True})
            assert sent[0]["status"] == 400
            assert not [record for record in caplog.records if record.exc_info]
            assert_unchanged(rig)
    rig.assert_untouched()


def test_a_client_that_goes_away_after_its_body(rig: Rig) -> None:
    sent = exchange(rig, DELTA, {"type": "http.request", "body": GOOD, "more_body": False})
    assert sent[0]["status"] == 200
    assert same(rig.engine.weights, NEXT)
    assert rig.spooled() == []


def test_a_request_that_is_cancelled_does_not_stop_its_commit(rig: Rig) -> None:
    async def cancelled() -> None:
        request = asyncio.ensure_future(rig.sending(GOOD))
        while not rig.engine.events:
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert request.cancelled()
        while ("publish", "8", True) not in rig.engine.events:
            await asyncio.sleep(0.001)

    rig.run(cancelled())
    assert same(rig.engine.weights, NEXT)
    assert rig.engine.weight_version == "8"
    assert rig.status().version.number == 8
    assert rig.spooled() == []


# Another sync in progress --------------------------------------------------------------------


def test_another_sync_in_progress(rig: Rig) -> None:
    assert rig.send(delta_part(sync_id="a", part=0, num_parts=2)).json()["status"] == "staged"
    others: list[dict[str, Any]] = [
        {"sync_id": "b"},
        {"sync_id": None},
        {"sync_id": "a", "version": 9, "base_version": 7},
    ]
    for other in others:
        with case(other):
            response = rig.send(delta_part(**other))
            operands: dict[str, Any] = {"staged_version": VERSION + 1, "staged_sync_id": "a"}
            error = assert_error(response, 409, "SyncInProgress", **operands)
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            assert response.headers["Retry-After"] == str(error["retry_after"])
    rest = rig.send(delta_part({"layer.weight": {0: 1}}, sync_id="a", part=1, num_parts=2))
    expected = after(NEXT, {"layer.weight": {0: 1}})
    rig.assert_committed(rest, expected, VERSION + 1)


def test_another_sync_in_progress_from_disk(disk_rig: Rig, root: Path) -> None:
    disk_rig.send(delta_part(sync_id="a", part=0, num_parts=2))
    (root / "a.safetensors").write_bytes(GOOD)
    for path in (DELTA, FROM_DISK):
        response = disk_rig.disk(root, path=path)
        error = assert_error(response, 409, "SyncInProgress", staged_sync_id="a")
        assert response.headers["Retry-After"] == str(error["retry_after"])


def test_a_stale_sync_is_dropped(make_rig: MakeRig) -> None:
    rig = make_rig(stage_timeout=0.05)
    rig.send(delta_part(sync_id="a", part=0, num_parts=2))
    assert present(rig.status().staged).parts == [0]
    rig.run(asyncio.sleep(0.06))
    rig.assert_untouched()
    late = rig.send(delta_part({"layer.weight": {0: 1}}, sync_id="a", part=1, num_parts=2))
    assert_error(late, 409, "VersionConflict", expected=7, actual=8)


def test_a_slow_sender_keeps_its_own_sync(make_rig: MakeRig) -> None:
    rig = make_rig(stage_timeout=0.05)
    rig.send(delta_part({}, sync_id="a", part=0, num_parts=2))
    rig.run(asyncio.sleep(0.06))
    rig.assert_committed(rig.send(delta_part(sync_id="a", part=1, num_parts=2)), NEXT, 8)


def test_one_part_number_with_other_bytes(rig: Rig) -> None:
    rig.send(delta_part(sync_id="a", part=0, num_parts=2))
    other = delta_part({"layer.weight": {0: 1}}, sync_id="a", part=0, num_parts=2)
    assert_error(rig.send(other), 409, "Conflict")
    assert present(rig.status().staged).parts == [0]
    rig.assert_committed(rig.send(delta_part({}, sync_id="a", part=1, num_parts=2)), NEXT, 8)


def test_parts_that_disagree(rig: Rig) -> None:
    rig.send(delta_part(sync_id="a", part=0, num_parts=2))
    seconds: list[dict[str, Any]] = [
        {"part": 1, "num_parts": 3},
        {"part": 2},
        {"part": 1, "num_parts": 2, "base_version": 5},
    ]
    for second in seconds:
        with case(second):
            assert_error(rig.send(delta_part({}, sync_id="a", **second)), 400, "MalformedPart")
            assert present(rig.status().staged).parts == [0]
    rig.assert_committed(rig.send(delta_part({}, sync_id="a", part=1, num_parts=2)), NEXT, 8)


def test_other_methods(rig: Rig) -> None:
    for method, path in (("GET", DELTA), ("PUT", DELTA), ("GET", FROM_DISK), ("POST", STATUS)):
        assert rig.run(rig.request(method, path)).status_code == 405, (method, path)
