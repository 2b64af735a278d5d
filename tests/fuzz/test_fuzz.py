"""Any input is applied exactly or refused with a documented error, in bounded time and memory.

`make fuzz` runs this for ten minutes, the tests for some seconds. A failure shows the smallest
example, which becomes a unit test of the code that was wrong.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from engine_ext.conformance.verified_file import verified_file
from engine_ext.errors import DeltaError
from engine_ext.format import DecodedPart, FrameReader, Limits, PartGate, decode_part
from engine_ext.format import part as wire_part
from engine_ext.format.manifest import parse_manifest
from engine_ext.ranks.operations import AbortSync
from tests.fuzz.bodies import TEXTS, any_json, bodies, chunks, good
from tests.fuzz.requests import REQUESTS
from tests.fuzz.time_boxed import SECONDS, check_for
from tests.support.delta_bodies import SHAPES, Weights, after, delta_part, same
from tests.support.endpoint_rig import DELTA, FROM_DISK, Rig
from tests.support.independent_encoder import assert_same, assert_well_formed, header_of, unwrap
from tests.support.verified_part import read_verified

LIMITS = Limits(max_part_bytes=1 << 18, max_header_bytes=1 << 20)
# A value becomes at most 8 bytes of an index, and JSON becomes objects.
MOST_BYTES = 32 << 20

REFUSALS = {400, 403, 405, 409, 413, 415, 422}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


def test_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in chunks pass the frame reader and the gate to the decoder, also its path for large
    parts."""

    def check(example: tuple[bytes, list[int]]) -> None:
        body, sizes = example
        reader, gate, kept = FrameReader(LIMITS.max_part_bytes), PartGate(LIMITS), bytearray()
        try:
            for chunk in chunks(body, sizes):
                for piece in reader.feed(chunk):
                    gate.feed(piece)
                    kept += piece
            reader.finish()
            header = gate.finish()
            monkeypatch.setattr(wire_part, "_WORTH_THREADS", 0 if len(sizes) == 1 else 1 << 19)
            part = decode_part(kept, LIMITS)
        except DeltaError as error:
            check_refusal(error)
            return
        assert part.manifest == header.manifest
        identity, file = verified_file(bytes(kept))
        mapped = read_verified(file, identity)
        assert mapped is not None
        assert_same(mapped, part.deltas)
        assert_well_formed(part)

    sizes = st.lists(st.integers(0, 300), max_size=5)
    count = check_for(check, st.tuples(bodies(SHAPES), sizes), 0.35, MOST_BYTES)
    print(f"container: {count} examples")


def test_manifest() -> None:
    """Metadata of any strings, most of them of a good part."""
    known = good(SHAPES).map(metadata_of)
    strings = st.text(max_size=30) | st.sampled_from(TEXTS) | any_json().map(json.dumps)
    keys = st.sampled_from(sorted(metadata_of(delta_part()))) | st.text(max_size=9)

    def check(example: tuple[dict[str, str], dict[str, str]]) -> None:
        metadata, changes = example
        try:
            manifest = parse_manifest({**metadata, **changes}, LIMITS)
        except DeltaError as error:
            check_refusal(error)
            return
        assert all(entry.nnz <= entry.numel for entry in manifest.params)

    changes = st.dictionaries(keys, strings, max_size=3)
    count = check_for(check, st.tuples(known, changes), 0.15, MOST_BYTES)
    print(f"manifest: {count} examples")


def check_refusal(error: DeltaError) -> None:
    """It can be sent."""
    wire = json.loads(json.dumps(error.to_wire()))
    assert wire["message"]
    assert error.status in REFUSALS


def metadata_of(body: bytes) -> dict[str, str]:
    found: dict[str, str] = header_of(unwrap(body))[0]["__metadata__"]
    return found


def test_http(tmp_path: Path) -> None:
    """Requests to every route: an answer of the table, and weights that agree with it."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(delta_part())
    (root / "a.safetensors").write_bytes(delta_part())
    (root / "b").write_bytes(delta_part()[:-1])
    os.mkfifo(root / "pipe")

    commits = 0

    def check(requests: list[dict[str, Any]]) -> None:
        nonlocal commits
        rig = Rig(tmp_path / "spool", roots=(str(root.resolve()),))
        try:
            for request in requests:
                commits += check_one(rig, request, str(root))
            rig.run(rig.engine.call(AbortSync()))
            version = rig.status().version.number
            claim = {"action": "claim", "run": "last", "takeover": True}
            assert rig.post("/delta_run", json=claim).status_code == 200
            step = {"norm.weight": {3: 0x7777}}
            expected = after(rig.engine.weights, step)
            last = {"base_version": version, "sync_id": "last", "run": "last"}
            rig.assert_committed(
                rig.send(delta_part(step, version + 1, **last)), expected, version + 1
            )
        finally:
            rig.close()

    count = check_for(check, st.lists(REQUESTS, min_size=1, max_size=4), 0.5, MOST_BYTES)
    print(f"http: {count} sequences of requests, {commits} commits in them")
    assert commits


def check_one(rig: Rig, request: dict[str, Any], root: str) -> bool:
    """Returns whether something was committed or rolled back."""
    before, version = rig.engine.weights, rig.status().version.number
    is_json = request["type"] == "application/json"
    text = request["json"].replace("ROOT", root).encode("utf-8", "surrogatepass")
    response = rig.run(
        rig.request(
            request["method"],
            request["path"],
            params=request["params"],
            headers={"Content-Type": request["type"], **request["headers"]},
            content=text if is_json or request["path"] == FROM_DISK else request["body"],
        )
    )
    answer = response.json()
    assert rig.spooled() == []
    if response.status_code != 200:
        assert response.status_code in REFUSALS, response.text
        assert response.status_code == 405 or answer["error"]["engine_state"] == "unchanged"
        assert same(rig.engine.weights, before)
        return False
    moved = rig.status().version.number
    if answer.get("status") not in ("committed", "rolled_back"):
        assert same(rig.engine.weights, before)
        assert moved == version
        return False
    assert moved == answer["version"]
    assert rig.engine.weight_version == str(moved)
    if answer["status"] == "committed" and request["path"] == DELTA and not is_json:
        check_exact(rig, before, decode_part(unwrap(request["body"])))
    return True


def check_exact(rig: Rig, before: Weights, part: DecodedPart) -> None:
    """The weights are what a part makes of them that is all of its sync."""
    if (part.manifest.num_parts or 1) > 1:
        return
    for delta in part.deltas:
        where = np.arange(delta.numel) if delta.indices is None else delta.indices
        old = before[delta.name][where]
        before[delta.name][where] = old + delta.values if delta.differences else delta.values
    assert same(rig.engine.weights, before)
