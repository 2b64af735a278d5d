"""The encoding ``gap8_xor``: its bytes, and what its manifest must have."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine_ext.errors import MalformedPart
from engine_ext.format import Limits, ParamDelta, decode_part, encode_part, read_container
from engine_ext.format.checksum import xxh3_checksum
from engine_ext.format.container import write_container
from engine_ext.format.zstd_frames import compress_frame
from tests.support.delta_bodies import forged

CHECKSUM = "adler32:0000000a"
FLIPPED, CLEARED = b"\x01\x00\x34\x12", b"\xff\x00\xff\xff"
POSITIONS = np.frombuffer(compress_frame(b"\1\2"), np.uint8)  # elements 1 and 4
ENTRY = {
    "name": "w",
    "dtype": "bfloat16",
    "shape": [2, 3],
    "pos_start": 0,
    "pos_end": 2,
    "pos_width": 1,
    "val_start": 0,
    "val_end": 2,
    "new_checksum": CHECKSUM,
}


def container(values: bytes, entry: dict[str, Any] = ENTRY, **metadata: str) -> bytes:
    raw = np.frombuffer(values, np.uint8)
    known = {
        "encoding": "gap8_xor",
        "params": json.dumps([entry]),
        "checksum": xxh3_checksum(POSITIONS.data, raw.data),
        "current_version": "1",
    }
    return write_container(POSITIONS, [raw], "uint8", {**known, **metadata})


def delta(**changes: Any) -> ParamDelta:
    fields = {
        "name": "w",
        "dtype": "bfloat16",
        "shape": (2, 3),
        "indices": np.array([1, 4]),
        "values": np.array([0x0001, 0x1234], np.uint16),
        "cleared": np.array([0x00FF, 0xFFFF], np.uint16),
        "new_checksum": CHECKSUM,
    }
    return ParamDelta(**(fields | changes))


@pytest.mark.parametrize(
    ("values", "cleared", "new"),
    [
        (FLIPPED, [0, 0], [0xABCC, 0xEDCA]),
        (FLIPPED + CLEARED, [0x00FF, 0xFFFF], [0xAB01, 0x1234]),
    ],
)
def test_its_bytes(values: bytes, cleared: list[int], new: list[int]) -> None:
    [found] = decode_part(container(values)).deltas
    assert found.indices is not None
    assert found.cleared is not None
    assert (found.indices.tolist(), found.cleared.tolist()) == ([1, 4], cleared)
    assert found.needs_old
    assert found.new_checksum == CHECKSUM
    old = np.array([0xABCD, 0xFFFE], np.uint16)
    assert found.new_bits(old, 0, 2, slice(None)).tolist() == new
    assert found.new_bits(old[1:], 0, 2, np.array([1])).tolist() == new[1:]
    assert found.new_bits(old[1:], 1, 2, slice(None)).tolist() == new[1:]


def test_it_is_written_as_it_is_read() -> None:
    for cleared in ([0, 0], [0x00FF, 0xFFFF]):
        sent = delta(cleared=np.array(cleared, np.uint16))
        [found] = decode_part(encode_part([sent], encoding="gap8_xor", current_version=1)).deltas
        assert found.values.tolist() == sent.values.tolist()
        assert found.cleared is not None
        assert found.cleared.tolist() == cleared


def test_params_of_several_dtypes_follow_each_other() -> None:
    """All that is flipped comes before all that is cleared."""
    others = [delta(), delta(name="v", cleared=np.zeros(2, np.uint16))]
    body = encode_part(others, encoding="gap8_xor", current_version=1)
    assert body.find(FLIPPED + FLIPPED + CLEARED + bytes(4)) > 0
    assert [d.name for d in decode_part(body).deltas] == ["w", "v"]


@pytest.mark.parametrize(
    "changes",
    [
        {"new_checksum": None},
        {"new_checksum": ""},
        {"new_checksum": "adler32:0000000A"},
        {"new_checksum": "adler32:0"},
        {"new_checksum": "md5:" + "0" * 32},
        {"new_checksum": "xxh3-128:" + "0" * 31},
        {"pos_width": 0, "pos_end": 0},
        {"pos_width": 0, "pos_end": 0, "shape": [2]},
        {"pos_width": 2},
        {"pos_width": 4, "pos_end": 8},
        {"val_end": 1},
        {"dtype": "float32"},
    ],
)
def test_params_that_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedPart):
        decode_part(container(FLIPPED, {**ENTRY, **changes}))


def test_a_full_part_is_refused() -> None:
    with pytest.raises(MalformedPart):
        decode_part(container(FLIPPED, full="true"))


@pytest.mark.parametrize("size", [0, 3, 5, 7, 9])
def test_bytes_too_few_or_too_many(size: int) -> None:
    with pytest.raises(MalformedPart):
        decode_part(container((FLIPPED + CLEARED + b"\0")[:size]))


def test_other_encodings_have_no_new_checksum() -> None:
    plain = encode_part(
        [delta(cleared=None, new_checksum=None)], encoding="deltas", current_version=1
    )
    params = json.loads(read_container(plain, Limits())[0].metadata["params"])
    params[0]["new_checksum"] = CHECKSUM
    with pytest.raises(MalformedPart, match="new_checksum"):
        decode_part(forged(plain, params=json.dumps(params)))


@pytest.mark.parametrize(
    ("encoding", "changes"),
    [
        ("gap8_xor", {"cleared": None}),
        ("gap8_xor", {"new_checksum": None}),
        ("gap8_exp", {}),
        ("deltas", {"cleared": None}),
    ],
)
def test_what_cannot_be_encoded(encoding: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="w"):
        encode_part([delta(**changes)], encoding=encoding, current_version=1)
