"""The endpoints: what each refusal answers, and what a body, a token and a path must be."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from starlette.responses import PlainTextResponse

from delta_server import spool_files
from delta_server.routes import UncertainGuard
from engine_ext.errors import BaseMismatch, DeltaError, MalformedPart, NotUpdatable
from engine_ext.wire import xxh3_checksum
from tests.support.in_process_engine import (
    COMPLETIONS,
    DELTA,
    FROM_DISK,
    MAX_BODY_BYTES,
    SHAPES,
    STATUS,
    STEP,
    VERSION,
    Rig,
    after,
    assert_error,
    bare,
    delta_part,
    forged,
    forged_params,
    fresh_weights,
    full_part,
    part_of,
    pieces,
    same,
    sparse,
    zstd_declaring,
)
from tests.unit.wire.test_packed import BROKEN, BROKEN_ULP, packed, ulp

OCTETS = {"Content-Type": "application/octet-stream"}
NEXT = after(fresh_weights(), STEP)

MakeRig = Callable[..., Rig]


# Refusals of a body --------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A body that is refused, and the answer to it."""

    id: str
    body: bytes
    status: int
    kind: str
    operands: dict[str, Any] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)


GOOD = delta_part()
NOT_A_VERSION = ["8.0", "-1", "08", "", "eight", str(2**63)]


def flipped(body: bytes, at: int = -1) -> bytes:
    """The body with one bit of one byte changed."""
    changed = bytearray(body)
    changed[at] ^= 1
    return bytes(changed)


REFUSALS = [
    # 400
    Refusal("empty", b"", 400, "MalformedPart"),
    Refusal("truncated", GOOD[:-1], 400, "MalformedPart"),
    Refusal("truncated header", GOOD[:60], 400, "MalformedPart"),
    Refusal("bytes behind it", GOOD + b"\0", 400, "MalformedPart"),
    Refusal("no JSON", (4).to_bytes(8, "little") + b"{{{{", 400, "MalformedPart"),
    Refusal("no metadata", (2).to_bytes(8, "little") + b"{}", 400, "MalformedPart"),
    Refusal("no params", forged(GOOD, params=None), 400, "MalformedPart"),
    Refusal("no checksum", forged(GOOD, checksum=None), 400, "MalformedPart"),
    Refusal("unknown encoding", forged(GOOD, encoding="runs"), 400, "MalformedPart"),
    Refusal("other data", flipped(GOOD), 400, "ChecksumMismatch"),
    Refusal("other checksum", forged(GOOD, checksum="12"), 400, "ChecksumMismatch"),
    Refusal(
        "other metadata",
        GOOD.replace(b'"current_version":"8"', b'"current_version":"9"'),
        400,
        "ChecksumMismatch",
    ),
    Refusal("no version", bare(GOOD), 400, "MalformedPart"),
    Refusal("no later version", delta_part(version=7, base_version=7), 400, "MalformedPart"),
    Refusal("an earlier version", delta_part(version=3, base_version=7), 400, "MalformedPart"),
    Refusal("version 0", delta_part(version=0), 400, "MalformedPart"),
    Refusal("part beyond the last", forged(GOOD, part="2", num_parts="2"), 400, "MalformedPart"),
    Refusal("no parts", forged(GOOD, num_parts="0"), 400, "MalformedPart"),
    Refusal("which part", forged(GOOD, num_parts="2"), 400, "MalformedPart"),
    *(
        Refusal(f"{key} {text!r}", forged(GOOD, **{key: text}), 400, "MalformedPart")
        for key in ("current_version", "base_version")
        for text in NOT_A_VERSION
    ),
    *(
        Refusal(f"query {key} {text!r}", bare(GOOD), 400, "MalformedPart", query={key: text})
        for key in ("weight_version", "base_version")
        for text in NOT_A_VERSION
    ),
    Refusal(
        "query has another version",
        GOOD,
        400,
        "MalformedPart",
        {"in_part": 8, "in_request": 9},
        {"weight_version": "9"},
    ),
    Refusal(
        "query has another base",
        delta_part(base_version=7),
        400,
        "MalformedPart",
        {"in_part": 7, "in_request": 6},
        {"base_version": "6"},
    ),
    Refusal("pause_mode", GOOD, 400, "MalformedPart", query={"pause_mode": "now"}),
    Refusal("flush_cache", GOOD, 400, "MalformedPart", query={"flush_cache": "maybe"}),
    Refusal("zstd cut", zstandard.compress(GOOD)[:-1], 400, "MalformedPart"),
    Refusal("zstd declares less", zstd_declaring(len(GOOD) - 1, GOOD), 400, "MalformedPart"),
    Refusal("zstd declares more", zstd_declaring(len(GOOD) + 1, GOOD), 400, "MalformedPart"),
    Refusal("zstd corrupt", flipped(zstandard.compress(GOOD), 12), 400, "MalformedPart"),
    # 409
    Refusal(
        "base is behind",
        delta_part(version=7),
        409,
        "VersionConflict",
        {"expected": 6, "actual": 7},
    ),
    Refusal(
        "base is ahead",
        delta_part(version=9),
        409,
        "VersionConflict",
        {"expected": 8, "actual": 7},
    ),
    Refusal(
        "base in the query",
        bare(GOOD),
        409,
        "VersionConflict",
        {"expected": 5, "actual": 7},
        {"weight_version": "8", "base_version": "5"},
    ),
    # 413
    Refusal(
        "body over the limit",
        bytes(MAX_BODY_BYTES + 1),
        413,
        "TooLarge",
        {"limit": MAX_BODY_BYTES},
    ),
    Refusal(
        "decompressed over the limit",
        zstandard.compress(GOOD + bytes(MAX_BODY_BYTES)),
        413,
        "TooLarge",
        {"limit": MAX_BODY_BYTES},
    ),
    Refusal("zstd declares too much", zstd_declaring(1 << 40, GOOD), 413, "TooLarge"),
    Refusal("header over the limit", b"\xff" * 40, 413, "TooLarge"),
    Refusal("tensor over the limit", forged_params(GOOD, shape=[1 << 50]), 413, "TooLarge"),
    Refusal("too many parts", forged(GOOD, part="0", num_parts="70000"), 413, "TooLarge"),
    # 422
    Refusal(
        "unknown tensor",
        delta_part({"lm_head.weight": {0: 1}}),
        422,
        "NotUpdatable",
        {"tensor": "lm_head.weight"},
    ),
    Refusal(
        "wrong shape",
        part_of(sparse("norm.weight", {0: 1}, shape=(2, 4))),
        422,
        "NotUpdatable",
        {"tensor": "norm.weight"},
    ),
    Refusal(
        "wrong dtype",
        part_of(sparse("norm.weight", {0: 1}, dtype="float16")),
        422,
        "NotUpdatable",
        {"tensor": "norm.weight"},
    ),
    Refusal(
        "index out of range",
        forged_params(delta_part({"norm.weight": {7: 1}}), shape=[7]),
        422,
        "NotUpdatable",
        {"tensor": "norm.weight"},
    ),
    Refusal(
        "full without a tensor",
        full_part(fresh_weights(), 9, ["norm.weight"]),
        422,
        "NotUpdatable",
        {"tensors": ["embed.weight", "layer.weight"]},
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_a_refused_body_leaves_the_engine_unchanged(rig: Rig, refusal: Refusal) -> None:
    response = rig.send(refusal.body, **refusal.query)
    assert_error(response, refusal.status, refusal.kind, **refusal.operands)
    assert rig.engine.events == []
    rig.assert_untouched()


BROKEN_PACKED = [
    *((id, packed(**broken), error) for id, broken, error, _ in BROKEN),
    *((f"differences: {id}", ulp(**broken), MalformedPart) for id, broken, _ in BROKEN_ULP),
]


@pytest.mark.parametrize(
    ("body", "error"), [case[1:] for case in BROKEN_PACKED], ids=[case[0] for case in BROKEN_PACKED]
)
def test_a_broken_gap8_part_leaves_the_engine_unchanged(
    rig: Rig, body: bytes, error: type[DeltaError]
) -> None:
    assert_error(rig.send(body), error.status, error.__name__)
    assert rig.engine.events == []
    rig.assert_untouched()


@pytest.mark.parametrize("indices", [[5, 2], [2, 2], [2, 8], [-1, 2]], ids=str)
def test_bad_indices(rig: Rig, indices: list[int]) -> None:
    good = np.array([2, 5], "<i4")
    body = delta_part({"norm.weight": {2: 0x1111, 5: 0x2222}})
    assert body.count(good.tobytes()) == 1
    bad = np.array(indices, "<i4")
    checksum = xxh3_checksum(bad.tobytes(), np.array([0x1111, 0x2222], "<u2").tobytes())
    response = rig.send(forged(body.replace(good.tobytes(), bad.tobytes()), checksum=checksum))
    assert_error(response, 422, "NotUpdatable", tensor="norm.weight")
    rig.assert_untouched()


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (NotUpdatable("repacked", tensor="norm.weight", reason="r"), 422, "NotUpdatable"),
        (BaseMismatch("other bytes", tensor="norm.weight", reason="r"), 409, "BaseMismatch"),
    ],
)
def test_what_one_rank_refuses(rig: Rig, refusal: Exception, status: int, kind: str) -> None:
    rig.engine.shards[1].refuses["norm.weight"] = refusal
    assert_error(rig.send(GOOD), status, kind, tensor="norm.weight", reason="r")
    rig.assert_untouched()


def test_a_fault_of_the_program_is_500(rig: Rig) -> None:
    rig.engine.shards[1].refuses["norm.weight"] = ZeroDivisionError("a fault")
    error = assert_error(rig.send(GOOD), 500, "DeltaError")
    assert "ZeroDivisionError" in error["message"]
    rig.assert_untouched()


def test_weights_asleep(rig: Rig) -> None:
    rig.engine.set_asleep(True)
    assert_error(rig.send(GOOD), 409, "WeightsAsleep")
    assert_error(rig.send(full_part(fresh_weights(), 9)), 409, "WeightsAsleep")
    assert rig.status()["asleep"] is True
    rig.engine.set_asleep(False)
    rig.assert_untouched()


def test_a_paused_engine_is_not_asleep(rig: Rig) -> None:
    rig.engine.paused = True
    assert rig.send(GOOD).json()["status"] == "committed"


# The body on its way -------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["indices", "deltas", "deltas_zstd", "gap8_exp"])
@pytest.mark.parametrize("chunk", [None, 1, 50], ids=["length", "chunks-of-1", "chunks-of-50"])
def test_a_body_is_committed(rig: Rig, encoding: str, chunk: int | None) -> None:
    body = delta_part(encoding=encoding)
    response = rig.send(body if chunk is None else pieces(body, chunk))
    rig.assert_committed(response, NEXT, VERSION + 1)
    answer = response.json()
    timings = answer["timings_ms"]
    phases = {"receive_ms", "stage_ms", "pause_ms", "commit_ms"}
    assert timings.keys() == {*phases, "total_ms"}
    assert timings["total_ms"] >= timings["receive_ms"] + timings["stage_ms"] + timings["pause_ms"]
    assert all(ms >= 0 for ms in answer.pop("timings_ms").values())
    assert answer == {
        "status": "committed",
        "version": 8,
        "base_version": 7,
        "nnz": 3,
        "tensors": 2,
        "skipped": {},
        "bytes": len(body),
        "apply": "shard",
        "rollback": True,
        "digest": rig.digest_of(NEXT),
    }


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


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        (OCTETS | {"Content-Length": str(MAX_BODY_BYTES + 1)}, 413, "TooLarge"),
        (OCTETS | {"Content-Length": str(1 << 70)}, 413, "TooLarge"),
        (OCTETS | {"Content-Encoding": "zstd"}, 415, "UnsupportedMedia"),
        (OCTETS | {"Content-Encoding": "gzip"}, 415, "UnsupportedMedia"),
        (OCTETS | {"Content-Encoding": "identity, br"}, 415, "UnsupportedMedia"),
        ({"Content-Type": "application/json", "Content-Encoding": "zstd"}, 415, "UnsupportedMedia"),
        ({"Content-Type": "application/octet-streams"}, 415, "UnsupportedMedia"),
        ({"Content-Type": "text/plain"}, 415, "UnsupportedMedia"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415, "UnsupportedMedia"),
        ({"Content-Type": ""}, 415, "UnsupportedMedia"),
        ({}, 415, "UnsupportedMedia"),
    ],
    ids=str,
)
def test_refused_by_the_headers_alone(
    rig: Rig, headers: dict[str, str], status: int, kind: str
) -> None:
    assert_error(rig.post(DELTA, content=unread(), headers=headers), status, kind)
    rig.assert_untouched()


@pytest.mark.parametrize("query", [{"weight_version": "x"}, {"pause_mode": "x"}])
def test_refused_by_the_query_alone(rig: Rig, query: dict[str, str]) -> None:
    response = rig.post(DELTA, content=unread(), headers=OCTETS, params=query)
    assert_error(response, 400, "MalformedPart")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "Application/Octet-Stream; charset=binary"},
        OCTETS | {"Content-Encoding": "identity"},
    ],
)
def test_accepted_headers(rig: Rig, headers: dict[str, str]) -> None:
    rig.assert_committed(rig.post(DELTA, content=GOOD, headers=headers), NEXT, 8)


@pytest.mark.parametrize("body", [b" " * MAX_BODY_BYTES, zstandard.compress(b" " * (1 << 20))])
def test_a_chunked_body_is_stopped_at_the_limit(rig: Rig, body: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield (1 << 24).to_bytes(8, "little") if body[:1] == b" " else b""
        yield body
        raise AssertionError("read beyond the limit")

    response = rig.post(DELTA, content=chunks(), headers=OCTETS)
    assert_error(response, 413, "TooLarge", limit=MAX_BODY_BYTES)
    rig.assert_untouched()


@pytest.mark.parametrize("path", [DELTA, FROM_DISK])
def test_a_json_body_is_bounded(disk_rig: Rig, path: str) -> None:
    response = disk_rig.post(path, json={"model_path": "x" * (1 << 20), "load_format": "delta"})
    assert_error(response, 413, "TooLarge", limit=1 << 20)


async def stalling(body: bytes) -> AsyncIterator[bytes]:
    yield body
    await asyncio.sleep(60)


@pytest.mark.parametrize("body", [b"", GOOD[:40]], ids=["nothing", "some"])
@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        (DELTA, "application/octet-stream"),
        (DELTA, "application/json"),
        (FROM_DISK, "application/json"),
    ],
)
def test_a_slow_body(make_rig: MakeRig, path: str, content_type: str, body: bytes) -> None:
    rig = make_rig(stage_timeout=0.05)
    response = rig.post(path, content=stalling(body), headers={"Content-Type": content_type})
    assert_error(response, 408, "UploadTooSlow")
    rig.assert_untouched()


def test_a_full_spool(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool_files.os, "pwritev", full)
        assert_error(rig.send(GOOD), 507, "SpoolFull")
    rig.assert_untouched()


def exchange(rig: Rig, path: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What the app answers to these ASGI messages; the client is gone after the last."""
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


@pytest.mark.parametrize("path", [DELTA, FROM_DISK])
@pytest.mark.parametrize("body", [b"", GOOD[:40], GOOD], ids=["nothing", "some", "all"])
def test_a_client_that_goes_away_mid_body(
    rig: Rig, path: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = {"type": "http.request", "body": body, "more_body": True}
    sent = exchange(rig, path, chunk)
    assert sent[0]["status"] == 400
    assert not [record for record in caplog.records if record.exc_info]
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
        while ("resume",) not in rig.engine.events:
            await asyncio.sleep(0.001)

    rig.run(cancelled())
    assert same(rig.engine.weights, NEXT)
    assert rig.engine.weight_version == "8"
    assert rig.status()["version"] == 8
    assert rig.spooled() == []


# Another sync in progress --------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"sync_id": "b"},
        {"sync_id": None},
        {"sync_id": "a", "version": 9, "base_version": 7},
    ],
)
def test_another_sync_in_progress(rig: Rig, other: dict[str, Any]) -> None:
    assert rig.send(delta_part(sync_id="a", part=0, num_parts=2)).json()["status"] == "staged"
    response = rig.send(delta_part(**other))
    error = assert_error(
        response, 409, "SyncInProgress", staged_version=VERSION + 1, staged_sync_id="a"
    )
    assert 1 <= int(response.headers["Retry-After"]) <= 60
    assert response.headers["Retry-After"] == str(error["retry_after"])
    rest = rig.send(delta_part({"layer.weight": {0: 1}}, sync_id="a", part=1, num_parts=2))
    expected = after(NEXT, {"layer.weight": {0: 1}})
    rig.assert_committed(rest, expected, VERSION + 1)


@pytest.mark.parametrize("path", [DELTA, FROM_DISK])
def test_another_sync_in_progress_from_disk(disk_rig: Rig, root: Path, path: str) -> None:
    disk_rig.send(delta_part(sync_id="a", part=0, num_parts=2))
    (root / "a.safetensors").write_bytes(GOOD)
    response = disk_rig.disk(root, path=path)
    error = assert_error(response, 409, "SyncInProgress", staged_sync_id="a")
    assert response.headers["Retry-After"] == str(error["retry_after"])


def test_a_stale_sync_is_dropped(make_rig: MakeRig) -> None:
    rig = make_rig(stage_timeout=0.05)
    rig.send(delta_part(sync_id="a", part=0, num_parts=2))
    assert rig.status()["staged"]["parts"] == [0]
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
    assert rig.status()["staged"]["parts"] == [0]
    rig.assert_committed(rig.send(delta_part({}, sync_id="a", part=1, num_parts=2)), NEXT, 8)


@pytest.mark.parametrize(
    "second",
    [
        {"part": 1, "num_parts": 3},
        {"part": 2},
        {"part": 1, "num_parts": 2, "base_version": 5},
    ],
)
def test_parts_that_disagree(rig: Rig, second: dict[str, Any]) -> None:
    rig.send(delta_part(sync_id="a", part=0, num_parts=2))
    assert_error(rig.send(delta_part({}, sync_id="a", **second)), 400, "MalformedPart")
    rig.assert_committed(rig.send(delta_part({}, sync_id="a", part=1, num_parts=2)), NEXT, 8)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", DELTA), ("PUT", DELTA), ("GET", FROM_DISK), ("POST", STATUS)]
)
def test_other_methods(rig: Rig, method: str, path: str) -> None:
    assert rig.run(rig.request(method, path)).status_code == 405


# Disk requests -------------------------------------------------------------------------------


def assert_disk_error(
    response: httpx.Response, path: str, status: int, kind: str, **operands: Any
) -> None:
    error = assert_error(response, status, kind, **operands)
    answer = response.json()
    if path == FROM_DISK:
        assert (answer["success"], answer["message"]) == (False, error["message"])
    else:
        assert answer.keys() == {"error"}


@pytest.fixture(params=[DELTA, FROM_DISK])
def path(request: pytest.FixtureRequest) -> str:
    """Either route of a disk request."""
    return str(request.param)


def test_a_file_is_committed(disk_rig: Rig, root: Path, path: str) -> None:
    (root / "a.safetensors").write_bytes(bare(GOOD))
    response = disk_rig.disk(root, "a.safetensors", weight_version="8", path=path)
    disk_rig.assert_committed(response, NEXT, 8)
    assert (root / "a.safetensors").read_bytes() == bare(GOOD)
    answer = response.json()
    assert answer["timings_ms"].keys() == {"receive_ms", "stage_ms", "pause_ms", "commit_ms"}
    assert (answer["base_version"], answer["nnz"], answer["bytes"]) == (7, 3, len(bare(GOOD)))
    told = {key: answer.get(key) for key in ("success", "message")}
    if path == FROM_DISK:
        assert told == {"success": True, "message": "committed version 8"}
    else:
        assert told == {"success": None, "message": None}


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "DELTA", "", None])
def test_other_load_formats(disk_rig: Rig, root: Path, load_format: str | None) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    response = disk_rig.disk(root, load_format=load_format, path=FROM_DISK)
    assert_disk_error(response, FROM_DISK, 400, "MalformedPart")
    disk_rig.assert_untouched()


def test_no_load_format(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    response = disk_rig.post(FROM_DISK, json={"model_path": str(root)})
    assert_disk_error(response, FROM_DISK, 400, "MalformedPart")
    response = disk_rig.post(DELTA, json={"model_path": str(root)})
    disk_rig.assert_committed(response, NEXT, 8)


def test_without_a_root(rig: Rig, root: Path, path: str) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    assert_disk_error(rig.disk(root, path=path), path, 403, "PathForbidden")
    rig.assert_untouched()


def _absent(file: Path) -> None:
    pass


@pytest.mark.parametrize("make", [_absent, Path.mkdir, os.mkfifo, Path.touch])
def test_what_is_no_file(disk_rig: Rig, root: Path, path: str, make: Any) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    make(root / "b.safetensors")
    response = disk_rig.disk(root, "a.safetensors", "b.safetensors", path=path)
    assert_disk_error(response, path, 400, "MalformedPart")
    disk_rig.assert_untouched()


@pytest.mark.parametrize("device", ["zero", "null"])
def test_a_device_below_the_root(make_rig: MakeRig, path: str, device: str) -> None:
    rig = make_rig(roots=("/dev",))
    assert_disk_error(rig.disk("/dev", device, path=path), path, 400, "MalformedPart", file=device)
    rig.assert_untouched()


def test_a_file_over_the_limit(disk_rig: Rig, root: Path, path: str) -> None:
    with open(root / "a.safetensors", "wb") as file:
        file.write((MAX_BODY_BYTES * 2).to_bytes(8, "little"))
        file.truncate(1 << 40)
    response = disk_rig.disk(root, path=path)
    assert_disk_error(response, path, 413, "TooLarge", limit=MAX_BODY_BYTES)
    disk_rig.assert_untouched()


@pytest.mark.parametrize(
    ("keys", "status", "kind"),
    [
        ({"weight_version": "eight"}, 400, "MalformedPart"),
        ({"weight_version": -1}, 400, "MalformedPart"),
        ({"weight_version": 9}, 400, "MalformedPart"),
        ({"base_version": 6}, 409, "VersionConflict"),
        ({"pause_mode": "now"}, 400, "MalformedPart"),
        ({"flush_cache": "yes"}, 400, "MalformedPart"),
        ({"files": []}, 400, "MalformedPart"),
        ({"files": ["a.safetensors"] * 2}, 400, "MalformedPart"),
        ({"files": ["a\0.safetensors"]}, 400, "MalformedPart"),
        ({"files": "a.safetensors"}, 400, "MalformedPart"),
        ({"model_path": None}, 400, "MalformedPart"),
    ],
    ids=str,
)
def test_a_bad_disk_request(
    disk_rig: Rig, root: Path, path: str, keys: dict[str, Any], status: int, kind: str
) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    body = {"model_path": str(root), "load_format": "delta", **keys}
    assert_disk_error(disk_rig.post(path, json=body), path, status, kind)
    disk_rig.assert_untouched()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", GOOD])
def test_what_is_no_json(disk_rig: Rig, path: str, body: bytes) -> None:
    response = disk_rig.post(path, content=body, headers={"Content-Type": "application/json"})
    assert_disk_error(response, path, 400, "MalformedPart")


@pytest.mark.parametrize(
    ("query", "status"),
    [({"weight_version": "9"}, 400), ({"pause_mode": "now"}, 400), ({"base_version": "5"}, 409)],
    ids=str,
)
def test_the_query_of_a_disk_request_counts(
    disk_rig: Rig, root: Path, path: str, query: dict[str, str], status: int
) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    body = {"model_path": str(root), "load_format": "delta"}
    assert disk_rig.post(path, json=body, params=query).status_code == status
    disk_rig.assert_untouched()


# Status --------------------------------------------------------------------------------------


def test_status(rig: Rig) -> None:
    expected = {
        "engine": "in-memory",
        "ranks": 2,
        "versions": [7, 7],
        "version": 7,
        "weight_version": "7",
        "engine_state": "certain",
        "resume_owed": False,
        "asleep": False,
        "foreign": None,
        "complete": "yes",
        "staged": None,
        "last_sync": None,
        "delta_log": None,
        "scrub": None,
        "apply": "shard",
        "certification": [{"exact": len(SHAPES)}] * 2,
        "uncertified": {},
        "can_roll_back": False,
        "digest": rig.digest_of(rig.engine.weights),
        "digest_algorithm": "multilinear-1",
    }
    assert rig.status() == expected
    rig.send(delta_part(sync_id="s", part=1, num_parts=2))
    staged = {
        "version": 8,
        "base_version": 7,
        "sync_id": "s",
        "full": False,
        "num_parts": 2,
        "parts": [1],
    }
    assert rig.status() == expected | {"staged": staged}
    rig.send(delta_part({}, sync_id="s", part=0, num_parts=2))
    status = rig.status()
    last_sync = status.pop("last_sync")
    assert last_sync.pop("commit_ms") >= 0
    assert last_sync == {
        "version": 8,
        "base_version": 7,
        "sync_id": "s",
        "full": False,
        "apply": "shard",
        "parts": 2,
        "nnz": 3,
        "tensors": 2,
        "elements": 32,
        "skipped": {},
        "rollback": True,
        "digest": rig.engine.shards[0].digest.hex(),
    }
    moved = {"version": 8, "versions": [8, 8], "weight_version": "8", "can_roll_back": True}
    moved["digest"] = rig.digest_of(rig.engine.weights)
    assert {**status, "last_sync": None} == expected | moved


def test_one_rank_without_its_old_values_keeps_all_from_rolling_back(rig: Rig) -> None:
    rig.engine.receivers[1]._undo_bytes = -1
    assert rig.send(delta_part()).json()["rollback"] is False
    assert rig.status()["can_roll_back"] is False
    assert_error(rig.post("/delta_rollback"), 409, "Conflict")


def test_status_of_ranks_that_differ_is_uncertain(rig: Rig) -> None:
    rig.engine.receivers[1]._sync_state.version = 9
    assert (rig.status()["engine_state"], rig.status()["versions"]) == ("uncertain", [7, 9])


def test_status_tells_what_one_rank_alone_is_in(rig: Rig) -> None:
    rig.engine.receivers[1]._sync_state.asleep = True
    rig.engine.receivers[1]._sync_state.foreign = "its own update"
    assert (rig.status()["asleep"], rig.status()["foreign"]) == (True, "its own update")


def test_status_when_the_engine_does_not_answer(rig: Rig) -> None:
    rig.engine.fails["status"] = ConnectionError("the engine is gone")
    error = assert_error(rig.get(STATUS), 500, "DeltaError")
    assert "the engine is gone" in error["message"]


@pytest.mark.parametrize("operation", ["begin", "status", None])
def test_a_bug_is_logged_once(
    rig: Rig, operation: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the engine's adapter, a reply without an update, or a rank fails."""
    if operation is None:
        rig.engine.shards[0].refuses["embed.weight"] = KeyError("w")
    else:
        rig.engine.fails[operation] = KeyError("w")
    response = rig.get(STATUS) if operation == "status" else rig.send(delta_part())
    assert_error(response, 500, "DeltaError")
    assert [r.getMessage() for r in caplog.records if r.exc_info] == ["a delta operation failed"]


# The guard -----------------------------------------------------------------------------------


@pytest.fixture
def uncertain(rig: Rig) -> Rig:
    """A server whose last write failed half-way."""
    assert_error(rig.fail_commit(), 500, "CommitFailed", "uncertain")
    return rig


@pytest.mark.parametrize(
    "path",
    [COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v2/rerank",
     "/generate", "/inference/v1/generate", "/pooling", "/score", "/rerank", "/classify",
     "/invocations", "/api/chat", "/api/generate", "/vertex_generate", "/generative_scoring"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_generation_is_unavailable_while_uncertain(uncertain: Rig, method: str, path: str) -> None:
    answer = uncertain.run(uncertain.request(method, path))
    assert_error(answer, 503, "EngineUncertain", "uncertain")


def test_paths_that_others_choose_are_unavailable_too(uncertain: Rig) -> None:
    async def served(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("generated")(scope, receive, send)

    guarded = UncertainGuard(served, uncertain.app.state, ["/predict"])

    async def post(path: str) -> int:
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return (await client.post(path)).status_code

    assert [uncertain.run(post(path)) for path in ("/predict", "/other")] == [503, 200]


def test_a_websocket_is_unavailable_while_uncertain(uncertain: Rig) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/realtime", "root_path": "", "headers": []}
    uncertain.run(uncertain.app(scope, receive, send))
    assert sent[0]["type"] == "websocket.http.response.start"
    assert sent[0]["status"] == 503


@pytest.mark.parametrize("root_path", ["/api", "/v1/tenant"])
def test_the_guard_behind_a_root_path(uncertain: Rig, root_path: str) -> None:
    async def post(path: str) -> int:
        transport = httpx.ASGITransport(uncertain.app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return (await client.post(root_path + path)).status_code

    assert uncertain.run(post(COMPLETIONS)) == 503
    assert uncertain.run(post("/generate")) == 503
    assert uncertain.run(post("/tokenize")) == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/tokenize")])
def test_the_rest_is_served_while_uncertain(uncertain: Rig, method: str, path: str) -> None:
    assert uncertain.run(uncertain.request(method, path)).status_code == 200


def test_generation_is_served_otherwise(rig: Rig) -> None:
    for answer in (rig.send(delta_part({})), rig.send(b""), rig.get(STATUS)):
        assert answer.status_code in (200, 400)
        assert rig.post(COMPLETIONS).status_code == 200
        assert rig.post("/generate").status_code == 200


def test_lifespan_and_errors_pass_the_guard(rig: Rig) -> None:
    async def startup() -> list[str]:
        sent: list[str] = []

        async def receive() -> dict[str, str]:
            return {"type": "lifespan.shutdown" if sent else "lifespan.startup"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        served: Awaitable[None] = rig.app({"type": "lifespan", "state": {}}, receive, send)
        await served
        return sent

    assert rig.run(startup()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert rig.post("/absent").status_code == 404
    assert json.loads(rig.get("/absent").content) == {"detail": "Not Found"}
