"""Signed parts: with a key, nothing that its holder has not signed is even looked at."""

from __future__ import annotations

import errno
import hashlib
import hmac
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from delta_server import spool as spool_module
from delta_server.intake import Intake
from engine_ext.format import FrameReader, Limits, PartGate, Verifier
from engine_ext.settings import HMAC_KEY_ENVIRONMENT
from tests.support.cases import case
from tests.support.delta_bodies import NEXT, delta_part, pieces
from tests.support.descriptors import open_descriptors
from tests.support.endpoint_rig import DELTA, FROM_DISK, MAX_BODY_BYTES, STATUS, Rig, assert_error

KEY = "a key of both"
BODIES = {
    "plain": delta_part(encoding="deltas"),
    "zstd": delta_part(encoding="deltas_zstd"),
}
GOOD = BODIES["plain"]


def signed(body: bytes, key: str = KEY) -> dict[str, str]:
    mac = hmac.new(key.encode(), body, hashlib.sha256).hexdigest()
    return {"X-Delta-Signature": mac}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, KEY)


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Whatever parses a byte of a part fails."""

    def parsed(*arguments: Any) -> Any:
        raise AssertionError("a byte was parsed")

    for reader in (FrameReader, PartGate):
        monkeypatch.setattr(reader, "feed", parsed)
        monkeypatch.setattr(reader, "finish", parsed)
    return monkeypatch


def post(rig: Rig, body: Any, headers: dict[str, str]) -> Any:
    sent = {"Content-Type": "application/octet-stream", **headers}
    return rig.post(DELTA, content=body, headers=sent)


def assert_nothing_taken(rig: Rig) -> None:
    assert rig.engine.writes == [0, 0]
    assert rig.status().version.number == 7
    assert rig.spooled() == []


# Bodies --------------------------------------------------------------------------------------


def test_a_signed_body_is_committed(rig: Rig) -> None:
    for body, size in itertools.product(BODIES.values(), (7, 1 << 20)):
        with case((body, size)):
            response = post(rig, pieces(body, size), signed(body))
            rig.assert_committed(response, NEXT, 8)
            assert response.json()["bytes"] == len(body)
        assert rig.post("/delta_rollback").status_code == 200


@pytest.mark.usefixtures("unparsed")
def test_another_signature(rig: Rig) -> None:
    others = {
        "key": signed(GOOD, "another key"),
        "bytes": signed(GOOD[:-1]),
        "empty": signed(b""),
        "form": {"X-Delta-Signature": "0"},
    }
    for (kind, headers), body in itertools.product(
        others.items(), (GOOD, zstandard.compress(GOOD), b"no part at all")
    ):
        with case((kind, body)):
            assert_error(post(rig, body, headers), 401, "Unauthorized")
    assert_nothing_taken(rig)


async def unread() -> AsyncIterator[bytes]:
    yield pytest.fail("the body was read")


def test_no_signature(rig: Rig) -> None:
    error = assert_error(post(rig, unread(), {}), 401, "Unauthorized")
    assert HMAC_KEY_ENVIRONMENT in error["message"]
    assert KEY not in error["message"]


def test_an_empty_key_takes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, "")
    assert_error(post(rig, GOOD, signed(GOOD, "")), 401, "Unauthorized")


def test_without_a_key_a_signature_is_not_looked_at(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HMAC_KEY_ENVIRONMENT)
    rig.assert_committed(post(rig, GOOD, {"X-Delta-Signature": "0"}), NEXT, 8)


def test_what_is_signed_is_still_checked(rig: Rig) -> None:
    for body in (b"", b"\xff" * 64, GOOD[:-1], GOOD + b"\0"):
        with case(body):
            assert post(rig, body, signed(body)).status_code in (400, 413)
            assert_nothing_taken(rig)


@pytest.mark.usefixtures("unparsed")
def test_a_body_over_the_limit_is_stopped(rig: Rig) -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1024
            yield bytes(1024)

    response = post(rig, endless(), signed(GOOD))
    assert_error(response, 413, "TooLarge", limit=MAX_BODY_BYTES)
    assert taken <= MAX_BODY_BYTES + 1024
    assert_nothing_taken(rig)


def test_a_full_spool(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "pwritev", full)
    assert_error(post(rig, GOOD, signed(GOOD)), 507, "SpoolFull")


@pytest.mark.slow
def test_no_descriptor_is_left(rig: Rig) -> None:
    post(rig, GOOD, signed(b""))
    before = open_descriptors()
    for body, content in ((GOOD, b"x"), (b"", b""), (b"no part", b"no part")):
        assert post(rig, body, signed(content)).status_code in (400, 401)
    assert open_descriptors() <= before


def test_a_signed_part_needs_room_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def parent(room: int) -> str:
        asked.append(room)
        return str(tmp_path)

    monkeypatch.setattr(spool_module, "_default_parent", parent)
    Intake(None, Limits(max_part_bytes=100)).close()
    monkeypatch.delenv(HMAC_KEY_ENVIRONMENT)
    Intake(None, Limits(max_part_bytes=100)).close()
    assert asked == [200, 100]


def test_what_is_no_part_needs_no_signature(rig: Rig) -> None:
    for path in (STATUS, "/delta_digest"):
        assert rig.get(path).status_code == 200, path


# Files ---------------------------------------------------------------------------------------


PATHS = (DELTA, FROM_DISK)


def put(file: Path, body: bytes, signature: str | None = None) -> None:
    file.write_bytes(body)
    text = signed(body)["X-Delta-Signature"] if signature is None else signature
    file.with_name(file.name + ".sig").write_text(text)


def test_a_signed_file_is_committed(disk_rig: Rig, root: Path) -> None:
    for body, path in itertools.product(BODIES.values(), PATHS):
        with case((body, path)):
            put(root / "a.safetensors", body)
            disk_rig.assert_committed(disk_rig.disk(root, path=path), NEXT, 8)
        assert disk_rig.post("/delta_rollback").status_code == 200


@pytest.mark.usefixtures("unparsed")
def test_a_file_without_its_signature(disk_rig: Rig, root: Path) -> None:
    """With another one, none, or what is no file in its place."""
    file, signature = root / "a.safetensors", root / "a.safetensors.sig"
    for text, path in itertools.product(("", "0" * 64, "\xff" * 999), PATHS):
        with case((text, path)):
            put(file, GOOD, text)
            assert_error(disk_rig.disk(root, path=path), 401, "Unauthorized")
            assert_nothing_taken(disk_rig)
    signature.unlink()
    makes: list[Callable[[Path], None]] = [Path.mkdir, Path.rmdir, os.mkfifo]
    for make, path in itertools.product(makes, PATHS):
        with case((make, path)):
            if path == PATHS[0]:
                make(signature)
            error = assert_error(disk_rig.disk(root, path=path), 401, "Unauthorized")
            assert ".sig" in error["message"]
            assert_nothing_taken(disk_rig)


def test_a_signature_behind_a_link_is_not_read(disk_rig: Rig, root: Path) -> None:
    put(root.parent / "a.safetensors", GOOD)
    (root / "a.safetensors").write_bytes(GOOD)
    (root / "a.safetensors.sig").symlink_to(root.parent / "a.safetensors.sig")
    for path in PATHS:
        assert_error(disk_rig.disk(root, path=path), 403, "PathForbidden")


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_changes_after_its_check(
    disk_rig: Rig, root: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader parses the copy that was checked."""
    put(root / "a.safetensors", GOOD)
    finish = Verifier.finish

    def swapped(verifier: Any) -> None:
        finish(verifier)
        (root / "a.safetensors").write_bytes(b"\0" * len(GOOD))

    monkeypatch.setattr(Verifier, "finish", swapped)
    disk_rig.assert_committed(disk_rig.disk(root, path=path), NEXT, 8)
