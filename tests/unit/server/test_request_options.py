"""Requests, read and checked: query parameters, JSON bodies, part identities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delta_server.request_options import (
    DiskRequest,
    Options,
    parse_body,
    parse_query,
)
from delta_server.sources.numbering import part_id
from engine_ext.errors import MalformedPart
from engine_ext.format import Manifest, decode_part
from tests.support.cases import case
from tests.support.delta_bodies import bare, delta_part, forged, fresh_weights, full_part

BIGGEST = 2**63 - 1
NO_VERSIONS = [
    "", " ", "8 ", " 8", "+8", "-1", "08", "8.0", "1e3", "0x8", "eight", "None", "true",
    "\u0668", "\uff18", "8\n", str(BIGGEST + 1), "9" * 5000,
]  # fmt: skip


# Query parameters ----------------------------------------------------------------------------


def test_query_defaults() -> None:
    assert parse_query({}) == Options(
        weight_version=None, base_version=None, pause_mode="keep", flush_cache=True
    )
    assert parse_query({"something": "else"}) == Options()


def test_query_versions() -> None:
    for key in ("weight_version", "base_version"):
        for version in (0, 8, BIGGEST):
            assert getattr(parse_query({key: str(version)}), key) == version
        for text in NO_VERSIONS:
            with case((key, text)), pytest.raises(MalformedPart, match=key):
                parse_query({key: text})


def test_pause_modes() -> None:
    for mode in ("keep", "wait", "abort"):
        assert parse_query({"pause_mode": mode}).pause_mode == mode
    for mode in ("", "Keep", "retract", "in_place"):
        with case(mode), pytest.raises(MalformedPart, match="keep, wait, abort"):
            parse_query({"pause_mode": mode})


def test_flush_cache() -> None:
    for text, flush in (("true", True), ("false", False), ("salt", "salt"), ("SALT", "salt")):
        assert parse_query({"flush_cache": text}).flush_cache == flush
    for text in ("", "0", "1", "no", "none", "pepper"):
        with case(text), pytest.raises(MalformedPart, match="flush_cache"):
            parse_query({"flush_cache": text})


# JSON bodies ---------------------------------------------------------------------------------


def disk_request(**keys: Any) -> DiskRequest:
    return parse_body(json.dumps({"model_path": "/deltas", **keys}).encode(), DiskRequest)


def test_disk_request_defaults() -> None:
    request = disk_request()
    assert (request.model_path, request.files, request.load_format) == ("/deltas", None, None)
    assert request.options({}) == Options()


def test_disk_request_ignores_unknown_keys() -> None:
    assert disk_request(abort_all_requests=True, keep_pause=None).options({}) == Options()


def test_disk_request_versions() -> None:
    for version in ("12", 12):
        options = disk_request(weight_version=version, base_version=11).options({})
        assert (options.weight_version, options.base_version) == (12, 11)
    for none in (*NO_VERSIONS, -1, BIGGEST + 1):
        with case(none), pytest.raises(MalformedPart, match="weight_version"):
            disk_request(weight_version=none).options({})


def test_disk_request_types() -> None:
    wrong: list[dict[str, Any]] = [
        {"model_path": None},
        {"model_path": 3},
        {"files": "part.safetensors"},
        {"files": [None]},
        {"weight_version": 1.5},
        {"weight_version": True},
        {"weight_version": ["12"]},
        {"flush_cache": "true"},
        {"pause_mode": True},
    ]
    for keys in wrong:
        with case(keys), pytest.raises(MalformedPart, match="bad request body"):
            disk_request(**keys)
    for body in (
        *(b"", b"{", b"[]", b'"x"', b"{}", b"\xff\xfe", b'{"model_path": "\xff"}'),
        *(b"[" * 100_000, b'{"a":' * 100_000),
    ):
        with case(body[:9]), pytest.raises(MalformedPart, match="bad request body"):
            parse_body(body, DiskRequest)


@pytest.mark.parametrize(
    ("keys", "query"),
    [
        ({}, {"weight_version": "12", "base_version": "4", "pause_mode": "abort"}),
        ({"weight_version": 12, "base_version": "4", "pause_mode": "abort"}, {}),
        ({"weight_version": "12", "pause_mode": "abort"}, {"base_version": "4"}),
        (
            {"weight_version": 12, "base_version": "4", "pause_mode": "abort"},
            {"weight_version": "12", "base_version": "4", "pause_mode": "abort"},
        ),
    ],
    ids=["query", "body", "either", "both"],
)
def test_disk_request_options_stand_in_body_or_query(
    keys: dict[str, Any], query: dict[str, str]
) -> None:
    options = disk_request(**keys).options(query)
    assert options == Options(weight_version=12, base_version=4, pause_mode="abort")


def test_disk_request_flush_cache() -> None:
    for flush in (False, "salt"):
        assert disk_request(flush_cache=flush).options({}).flush_cache == flush
        query = {"flush_cache": str(flush).lower()}
        assert disk_request().options(query).flush_cache == flush


def test_disk_request_and_query_must_agree() -> None:
    others: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"weight_version": "12"}, {"weight_version": "13"}),
        ({"base_version": 3}, {"base_version": "4"}),
        ({"pause_mode": "keep"}, {"pause_mode": "abort"}),
        ({"flush_cache": True}, {"flush_cache": "false"}),
        ({"flush_cache": "salt"}, {"flush_cache": "true"}),
    ]
    for keys, query in others:
        [name] = keys
        with case((keys, query)), pytest.raises(MalformedPart, match=name):
            disk_request(**keys).options(query)


# What a part is ------------------------------------------------------------------------------


def manifest(body: bytes) -> Manifest:
    return decode_part(body).manifest


def test_part_id_from_the_metadata() -> None:
    part = part_id(
        manifest(delta_part(version=9, base_version=6, sync_id="s", part=2, num_parts=4)),
        "identity",
        Options(),
    )
    assert (part.version, part.base_version, part.sync_id) == (9, 6, "s")
    assert (part.part, part.num_parts, part.full, part.continues) == (2, 4, False, False)
    assert part.identity == "identity"


def test_part_id_from_the_query() -> None:
    part = part_id(manifest(bare(delta_part())), "", Options(weight_version=9, base_version=6))
    assert (part.version, part.base_version, part.sync_id) == (9, 6, None)
    assert (part.part, part.num_parts) == (0, 1)


def test_part_id_agrees_with_itself() -> None:
    body = delta_part(version=9, base_version=6)
    part = part_id(manifest(body), "", Options(weight_version=9, base_version=6))
    assert (part.version, part.base_version) == (9, 6)


def test_base_is_the_version_before() -> None:
    assert part_id(manifest(delta_part(version=9)), "", Options()).base_version == 8


def test_full_has_no_base() -> None:
    body = full_part(fresh_weights(), 9, base_version=6)
    part = part_id(manifest(body), "", Options())
    assert (part.full, part.base_version) == (True, None)


@pytest.mark.parametrize(
    ("metadata", "num_parts"),
    [
        ({}, 1),
        ({"num_parts": "1"}, 1),
        ({"part": "0"}, None),
        ({"part": "3"}, None),
        ({"part": "3", "num_parts": "4"}, 4),
    ],
)
def test_a_part_without_a_number_is_the_only_one(
    metadata: dict[str, str], num_parts: int | None
) -> None:
    part = part_id(manifest(forged(delta_part(), **metadata)), "", Options())
    assert (part.part, part.num_parts) == (int(metadata.get("part", 0)), num_parts)


def test_no_version_at_all() -> None:
    with pytest.raises(MalformedPart, match="no version"):
        part_id(manifest(bare(delta_part())), "", Options(base_version=7))


def test_metadata_and_query_must_agree() -> None:
    delta = delta_part(base_version=6)
    full = full_part(fresh_weights(), 8, base_version=6)
    for body in (delta, full):
        for options in (Options(weight_version=9), Options(base_version=5)):
            with pytest.raises(MalformedPart) as caught:
                part_id(manifest(body), "", options)
            in_part, in_request = (8, 9) if options.weight_version else (6, 5)
            assert caught.value.operands == {"in_part": in_part, "in_request": in_request}
