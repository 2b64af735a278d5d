"""The endpoints: what each refusal of a body answers, and that the engine is unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard

from engine_ext.errors import BaseMismatch, DeltaError, MalformedPart, NotUpdatable
from engine_ext.format.checksum import xxh3_checksum
from tests.support.cases import case
from tests.support.delta_bodies import (
    bare,
    delta_part,
    forged,
    forged_params,
    fresh_weights,
    full_part,
    part_of,
    sparse,
    zstd_declaring,
)
from tests.support.endpoint_rig import MAX_BODY_BYTES, Rig, assert_error
from tests.unit.format.test_packed import BROKEN, BROKEN_ULP, packed, ulp
from tests.unit.server.service_parts import assert_unchanged


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


def test_a_refused_body_leaves_the_engine_unchanged(rig: Rig) -> None:
    for refusal in REFUSALS:
        with case(refusal.id):
            response = rig.send(refusal.body, **refusal.query)
            assert_error(response, refusal.status, refusal.kind, **refusal.operands)
            assert rig.engine.events == []
            assert_unchanged(rig)
    rig.assert_untouched()


def test_size_limit_says_how_to_stay_below_it(rig: Rig) -> None:
    limited = [one.body for one in REFUSALS if one.operands.get("limit") == MAX_BODY_BYTES]
    assert len(limited) == 2
    for body in (*limited, zstd_declaring(1 << 40, GOOD)):
        error = rig.send(body).json()["error"]
        assert (error["type"], error["limit"]) == ("TooLarge", MAX_BODY_BYTES)
        assert error["message"].endswith(
            f"the limit is {MAX_BODY_BYTES}; send smaller parts (bucket_bytes=), or raise the "
            "engine's --delta-tuning max-body-bytes"
        )


def test_a_broken_gap8_part_leaves_the_engine_unchanged(rig: Rig) -> None:
    values = [(id, packed(**facts), error) for id, facts, error, _ in BROKEN]
    differences = [(id, ulp(**facts), MalformedPart) for id, facts, _ in BROKEN_ULP]
    broken: list[tuple[str, bytes, type[DeltaError]]] = [*values, *differences]
    for id, body, error in broken:
        with case(id):
            assert_error(rig.send(body), error.status, error.__name__)
            assert rig.engine.events == []
            assert_unchanged(rig)
    rig.assert_untouched()


def test_bad_indices(rig: Rig) -> None:
    good = np.array([2, 5], "<i4")
    body = delta_part({"norm.weight": {2: 0x1111, 5: 0x2222}})
    assert body.count(good.tobytes()) == 1
    for indices in ([5, 2], [2, 2], [2, 8], [-1, 2]):
        with case(indices):
            bad = np.array(indices, "<i4")
            checksum = xxh3_checksum(bad.tobytes(), np.array([0x1111, 0x2222], "<u2").tobytes())
            forgery = forged(body.replace(good.tobytes(), bad.tobytes()), checksum=checksum)
            assert_error(rig.send(forgery), 422, "NotUpdatable", tensor="norm.weight")
            assert_unchanged(rig)
    rig.assert_untouched()


def test_what_one_rank_refuses(rig: Rig) -> None:
    for refusal in (
        NotUpdatable("repacked", tensor="norm.weight", reason="r"),
        BaseMismatch("other bytes", tensor="norm.weight", reason="r"),
    ):
        with case(refusal):
            rig.engine.shards[1].refuses["norm.weight"] = refusal
            kind = type(refusal).__name__
            assert_error(rig.send(GOOD), refusal.status, kind, tensor="norm.weight", reason="r")
            assert_unchanged(rig)
    rig.engine.shards[1].refuses["norm.weight"] = ZeroDivisionError("a fault")
    error = assert_error(rig.send(GOOD), 500, "DeltaError")
    assert "ZeroDivisionError" in error["message"]
    rig.assert_untouched()


def test_weights_asleep(rig: Rig) -> None:
    rig.engine.set_asleep(True)
    assert_error(rig.send(GOOD), 409, "WeightsAsleep")
    assert_error(rig.send(full_part(fresh_weights(), 9)), 409, "WeightsAsleep")
    assert rig.status().health.asleep is True
    rig.engine.set_asleep(False)
    rig.assert_untouched()


def test_a_paused_engine_is_not_asleep(rig: Rig) -> None:
    rig.engine.paused = True
    assert rig.send(GOOD).json()["status"] == "committed"
