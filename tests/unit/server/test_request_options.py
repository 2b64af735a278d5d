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


@pytest.mark.parametrize("key", ["weight_version", "base_version"])
@pytest.mark.parametrize("version", [0, 8, BIGGEST])
def test_query_versions(key: str, version: int) -> None:
    assert getattr(parse_query({key: str(version)}), key) == version


@pytest.mark.parametrize("key", ["weight_version", "base_version"])
@pytest.mark.parametrize("text", NO_VERSIONS)
def test_query_versions_are_decimals(key: str, text: str) -> None:
    with pytest.raises(MalformedPart, match=key):
        parse_query({key: text})


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_modes(mode: str) -> None:
    assert parse_query({"pause_mode": mode}).pause_mode == mode


@pytest.mark.parametrize("mode", ["", "Keep", "retract", "in_place"])
def test_other_pause_modes_are_refused(mode: str) -> None:
    with pytest.raises(MalformedPart, match="keep, wait, abort"):
        parse_query({"pause_mode": mode})


@pytest.mark.parametrize(
    ("text", "flush"), [("true", True), ("false", False), ("salt", "salt"), ("SALT", "salt")]
)
def test_flush_cache(text: str, flush: bool | str) -> None:
    assert parse_query({"flush_cache": text}).flush_cache == flush


@pytest.mark.parametrize("text", ["", "0", "1", "no", "none", "pepper"])
def test_other_values_of_flush_cache_are_refused(text: str) -> None:
    with pytest.raises(MalformedPart, match="flush_cache"):
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


@pytest.mark.parametrize("version", ["12", 12])
def test_disk_request_versions(version: str | int) -> None:
    options = disk_request(weight_version=version, base_version=11).options({})
    assert (options.weight_version, options.base_version) == (12, 11)


@pytest.mark.parametrize("version", [*NO_VERSIONS, -1, BIGGEST + 1])
def test_disk_request_versions_are_decimals(version: str | int) -> None:
    with pytest.raises(MalformedPart, match="weight_version"):
        disk_request(weight_version=version).options({})


@pytest.mark.parametrize(
    "keys",
    [
        {"model_path": None},
        {"model_path": 3},
        {"files": "part.safetensors"},
        {"files": [None]},
        {"weight_version": 1.5},
        {"weight_version": True},
        {"weight_version": ["12"]},
        {"flush_cache": "true"},
        {"pause_mode": True},
    ],
)
def test_disk_request_types(keys: dict[str, Any]) -> None:
    with pytest.raises(MalformedPart, match="bad request body"):
        disk_request(**keys)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"x"', b"{}", b"\xff\xfe", b'{"model_path": "\xff"}'),
        *(b"[" * 100_000, b'{"a":' * 100_000),
    ],
    ids=lambda body: repr(body[:9]),
)
def test_what_is_no_disk_request(body: bytes) -> None:
    with pytest.raises(MalformedPart, match="bad request body"):
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


@pytest.mark.parametrize("flush", [False, "salt"])
@pytest.mark.parametrize("place", ["body", "query"])
def test_disk_request_flush_cache(place: str, flush: bool | str) -> None:
    if place == "body":
        options = disk_request(flush_cache=flush).options({})
    else:
        options = disk_request().options({"flush_cache": str(flush).lower()})
    assert options.flush_cache == flush


@pytest.mark.parametrize(
    ("keys", "query"),
    [
        ({"weight_version": "12"}, {"weight_version": "13"}),
        ({"base_version": 3}, {"base_version": "4"}),
        ({"pause_mode": "keep"}, {"pause_mode": "abort"}),
        ({"flush_cache": True}, {"flush_cache": "false"}),
        ({"flush_cache": "salt"}, {"flush_cache": "true"}),
    ],
)
def test_disk_request_and_query_must_agree(keys: dict[str, Any], query: dict[str, str]) -> None:
    with pytest.raises(MalformedPart, match=next(iter(keys))):
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


@pytest.mark.parametrize("options", [Options(weight_version=9), Options(base_version=5)])
@pytest.mark.parametrize("full", [False, True])
def test_metadata_and_query_must_agree(options: Options, full: bool) -> None:
    body = full_part(fresh_weights(), 8, base_version=6) if full else delta_part(base_version=6)
    with pytest.raises(MalformedPart) as caught:
        part_id(manifest(body), "", options)
    in_part, in_request = (8, 9) if options.weight_version else (6, 5)
    assert caught.value.operands == {"in_part": in_part, "in_request": in_request}
