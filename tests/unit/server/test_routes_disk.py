"""The endpoints: disk requests."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_server.intake import Intake
from tests.support.cases import case
from tests.support.delta_bodies import NEXT, bare, delta_part
from tests.support.endpoint_rig import DELTA, FROM_DISK, MAX_BODY_BYTES, Rig, assert_error
from tests.support.present import present
from tests.unit.server.service_parts import PHASES, assert_unchanged

GOOD = delta_part()

MakeRig = Callable[..., Rig]


def assert_disk_error(
    response: httpx.Response, path: str, status: int, kind: str, **operands: Any
) -> None:
    error = assert_error(response, status, kind, **operands)
    answer = response.json()
    if path == FROM_DISK:
        assert (answer["success"], answer["message"]) == (False, error["message"])
    else:
        assert answer.keys() == {"error"}


PATHS = (DELTA, FROM_DISK)  # either takes disk requests


def test_a_file_is_committed(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(bare(GOOD))
    for path, told in (
        (DELTA, {"success": None, "message": None}),
        (FROM_DISK, {"success": True, "message": "committed version 8"}),
    ):
        with case(path):
            response = disk_rig.disk(root, "a.safetensors", weight_version="8", path=path)
            disk_rig.assert_committed(response, NEXT, 8)
            assert (root / "a.safetensors").read_bytes() == bare(GOOD)
            answer = response.json()
            assert answer["timings_ms"].keys() == PHASES
            assert (answer["base_version"], answer["nnz"], answer["bytes"]) == (
                7,
                3,
                len(bare(GOOD)),
            )
            assert {key: answer.get(key) for key in ("success", "message")} == told
        assert disk_rig.post("/delta_rollback").status_code == 200


def test_other_load_formats(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    for load_format in ("auto", "safetensors", "DELTA", "", None):
        with case(load_format):
            response = disk_rig.disk(root, load_format=load_format, path=FROM_DISK)
            assert_disk_error(response, FROM_DISK, 400, "MalformedPart")
            assert_unchanged(disk_rig)
    disk_rig.assert_untouched()


def test_no_load_format(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    response = disk_rig.post(FROM_DISK, json={"model_path": str(root)})
    assert_disk_error(response, FROM_DISK, 400, "MalformedPart")
    response = disk_rig.post(DELTA, json={"model_path": str(root)})
    disk_rig.assert_committed(response, NEXT, 8)


def test_without_a_root(rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    for path in PATHS:
        assert_disk_error(rig.disk(root, path=path), path, 403, "PathForbidden")
    rig.assert_untouched()


def _absent(file: Path) -> None:
    pass


def test_what_is_no_file(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    makes: list[Callable[[Path], None]] = [_absent, Path.mkdir, os.mkfifo, Path.touch]
    for number, make in enumerate(makes):
        name = f"{number}.safetensors"
        make(root / name)
        for path in PATHS:
            with case((make, path)):
                response = disk_rig.disk(root, "a.safetensors", name, path=path)
                assert_disk_error(response, path, 400, "MalformedPart")
                assert_unchanged(disk_rig)
    disk_rig.assert_untouched()


def test_a_device_below_the_root(make_rig: MakeRig) -> None:
    rig = make_rig(roots=("/dev",))
    for path, device in itertools.product(PATHS, ("zero", "null")):
        response = rig.disk("/dev", device, path=path)
        assert_disk_error(response, path, 400, "MalformedPart", file=device)
    rig.assert_untouched()


def test_a_file_over_the_limit(disk_rig: Rig, root: Path) -> None:
    with open(root / "a.safetensors", "wb") as file:
        file.write((MAX_BODY_BYTES * 2).to_bytes(8, "little"))
        file.truncate(1 << 40)
    for path in PATHS:
        response = disk_rig.disk(root, path=path)
        assert_disk_error(response, path, 413, "TooLarge", limit=MAX_BODY_BYTES)
    disk_rig.assert_untouched()


def test_a_bad_disk_request(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(GOOD)
    malformed: list[dict[str, Any]] = [
        {"weight_version": "eight"},
        {"weight_version": -1},
        {"weight_version": 9},
        {"pause_mode": "now"},
        {"flush_cache": "yes"},
        {"files": []},
        {"files": ["a.safetensors"] * 2},
        {"files": ["a\0.safetensors"]},
        {"files": "a.safetensors"},
        {"model_path": None},
    ]
    cases = [(keys, 400, "MalformedPart") for keys in malformed]
    cases.append(({"base_version": 6}, 409, "VersionConflict"))
    for (keys, status, kind), path in itertools.product(cases, PATHS):
        with case((keys, path)):
            body = {"model_path": str(root), "load_format": "delta", **keys}
            assert_disk_error(disk_rig.post(path, json=body), path, status, kind)
            assert_unchanged(disk_rig)
    for query, status in (
        ({"weight_version": "9"}, 400),
        ({"pause_mode": "now"}, 400),
        ({"base_version": "5"}, 409),
    ):
        for path in PATHS:
            with case((query, path)):
                body = {"model_path": str(root), "load_format": "delta"}
                assert disk_rig.post(path, json=body, params=query).status_code == status
                assert_unchanged(disk_rig)
    disk_rig.assert_untouched()


def test_what_is_no_json(disk_rig: Rig) -> None:
    for path, body in itertools.product(PATHS, (b"", b"{", b"[]", GOOD)):
        with case((path, body)):
            headers = {"Content-Type": "application/json"}
            response = disk_rig.post(path, content=body, headers=headers)
            assert_disk_error(response, path, 400, "MalformedPart")


@pytest.mark.parametrize("path", PATHS)
def test_a_failure_after_the_caller_has_left_is_reported(
    disk_rig: Rig, root: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a.safetensors").write_bytes(b"damaged")
    reads, goes_on, read = threading.Event(), threading.Event(), Intake.read

    def slowly(intake: Intake, *arguments: Any) -> Any:
        reads.set()
        assert goes_on.wait(30)
        return read(intake, *arguments)

    monkeypatch.setattr(Intake, "read", slowly)

    async def leave() -> None:
        body = {"model_path": str(root), "load_format": "delta", "weight_version": "8"}
        request = asyncio.ensure_future(disk_rig.request("POST", path, json=body))
        while not reads.is_set():
            await asyncio.sleep(0.001)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        goes_on.set()
        while not await disk_rig.service.reporter.history():
            await asyncio.sleep(0.001)

    disk_rig.run(leave())
    history = present(disk_rig.status(history="true").history)
    assert [(one.outcome, one.error) for one in history] == [("refused", "MalformedPart")]
    disk_rig.assert_untouched()
