"""Parts whose positions and values are compressed inside the container, by literal bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.errors import DeltaError, MalformedPart, NotUpdatable, TooLarge
from engine_ext.format import Limits, ParamDelta, decode_part, encode_part
from tests.support.cases import in_one_test
from tests.support.independent_encoder import (
    PROPERTY,
    assert_same,
    assert_well_formed,
    bits16,
    good_metadata,
    safetensors_file,
    xxh3,
)


def frame(*contents: str) -> str:
    """One zstd frame as it stands in RFC 8878, of raw blocks: magic, size, blocks."""
    sizes = [len(bytes.fromhex(content)) for content in contents]
    heads = [(size << 3).to_bytes(3, "little").hex() for size in sizes]
    heads[-1] = (1 | sizes[-1] << 3).to_bytes(3, "little").hex()
    blocks = (f"{head} {content}" for head, content in zip(heads, contents, strict=True))
    return f"28b52ffd 20 {sum(sizes):02x} {' '.join(blocks)}"


# positions 1, 2, 6, and 258 in a param of its own
GAPS = "01 00 03  ff 03"
PARAMS: list[dict[str, Any]] = [
    {
        "name": "a.weight",
        "dtype": "bfloat16",
        "shape": [2, 4],
        **{"pos_start": 0, "pos_end": 3, "pos_width": 1, "val_start": 0, "val_end": 3},
    },
    {
        "name": "b",
        "dtype": "bfloat16",
        "shape": [],
        **{"pos_start": 3, "pos_end": 3, "pos_width": 0, "val_start": 3, "val_end": 4},
    },
    {
        "name": "c",
        "dtype": "bfloat16",
        "shape": [1000],
        **{"pos_start": 3, "pos_end": 5, "pos_width": 1, "val_start": 4, "val_end": 5},
    },
]
# 3f80 ffc1 8000, c000, 0001 rotated: 7f00 ff83 0001, 8001, 0002
LOWER, HIGHEST = "00 83 01  01  02", "7f ff 00 80 00"
EXP_DELTAS = [
    ParamDelta("a.weight", "bfloat16", (2, 4), np.array([1, 2, 6]), bits16(0x3F80, 0xFFC1, 0x8000)),
    ParamDelta("b", "bfloat16", (), None, bits16(0xC000)),
    ParamDelta("c", "bfloat16", (1000,), np.array([258]), bits16(0x0001)),
]


def packed(
    positions: str | None = None,
    values: str | None = None,
    params: list[dict[str, Any]] = PARAMS,
    dtype: torch.dtype = torch.uint8,
    **changes: str | None,
) -> bytes:
    """A part built without our encoder; the default is a good one."""
    raw = bytes.fromhex(frame(GAPS) if positions is None else positions)
    data = bytes.fromhex(LOWER + frame(HIGHEST) if values is None else values)
    changes.setdefault("encoding", "gap8_exp")
    metadata = good_metadata(params=json.dumps(params), checksum=xxh3(raw, data), **changes)
    return safetensors_file(
        metadata, np.frombuffer(raw, np.uint8), np.frombuffer(data, np.uint8), dtype
    )


def changed(at: int, **changes: Any) -> list[dict[str, Any]]:
    """`PARAMS` with one entry changed."""
    return [{**entry, **changes} if k == at else entry for k, entry in enumerate(PARAMS)]


@pytest.mark.usefixtures("both_ways")
def test_a_part_built_without_our_encoder() -> None:
    part = decode_part(packed())
    assert_same(part, EXP_DELTAS)
    assert_well_formed(part)


def test_the_specification_shows_what_is_written() -> None:
    """The values tensor, then the positions."""
    page = " ".join((Path(__file__).parents[3] / "docs/wire-format.md").read_text().split())
    where = np.array([1, 2, 6])
    values = ParamDelta("a", "bfloat16", (2, 4), where, bits16(0x3F80, 0x7FC1, 0x8000))
    dense = ParamDelta("b", "bfloat16", (), None, bits16(0xC000))
    body = encode_part([values, dense], encoding="gap8_exp", current_version=8)
    shown = "008201 01 28b52ffd 20 04 210000 7fff0080 28b52ffd 20 03 190000 010003"
    assert shown in page
    assert body.endswith(bytes.fromhex(shown))
    change = ParamDelta("a", "bfloat16", (2, 4), where, bits16(1, 0xFFFF, 20), True)
    body = encode_part([change], encoding="gap8_ulp", current_version=8, digest_part="0" * 32)
    shown = "28b52ffd 20 04 100000 120f 110000 2800 28b52ffd 20 03 190000 010003"
    assert shown in page
    assert body.endswith(bytes.fromhex(shown))
    where = np.array([70000, 140001])
    wide = ParamDelta("a", "bfloat16", (200_000,), where, bits16(0x3F80, 0x4000))
    body = encode_part([wide], encoding="gap8_exp", current_version=8)
    shown = "0000 28b52ffd 20 02 110000 7f80 28b52ffd 20 08 200000 ff71ff71 210000 ff11ff11"
    assert shown in page
    assert body.endswith(bytes.fromhex(shown))
    assert_same(decode_part(body), [wide])


def test_high_bytes_lie_behind_the_bytes_of_all_params() -> None:
    """Positions 258 in bytes; 65535 + 0x0102 and 5 in words; 1 in bytes."""
    rows = [(1000, 2, 1, 1), (10**6, 4, 2, 1), (10**6, 2, 2, 1), (10, 1, 1, 1)]
    params, pos, val = [], 0, 0
    for number, (numel, size, width, nnz) in enumerate(rows):
        place = {"pos_start": pos, "pos_end": pos + size, "pos_width": width}
        entry = {"name": f"w{number}", "dtype": "float8_e5m2", "shape": [numel], **place}
        params.append({**entry, "val_start": val, "val_end": val + nnz})
        pos, val = pos + size, val + nnz
    low, high = "ff 03  ff 02  05  01", "ff 01  00"
    body = packed(frame(low, high), frame("00 01 02 fd"), params)
    deltas = decode_part(body).deltas
    assert [delta.indices.tolist() for delta in deltas if delta.indices is not None] == [
        [258],
        [65535 + 0x0102],
        [5],
        [1],
    ]
    assert [delta.values.tolist() for delta in deltas] == [[0], [0x80], [1], [0xFE]]
    again = encode_part(deltas[:1] + deltas[3:], encoding="gap8_exp", current_version=8)
    assert again.endswith(bytes.fromhex(frame("00 fd") + frame("ff 03  01")))


@pytest.mark.usefixtures("both_ways")
def test_ours_is_the_same_to_the_byte() -> None:
    again = encode_part(
        EXP_DELTAS, encoding="gap8_exp", current_version=8, with_manifest_checksum=False
    )
    assert again[-len(bytes.fromhex(LOWER + frame(HIGHEST) + frame(GAPS))) :] == bytes.fromhex(
        LOWER + frame(HIGHEST) + frame(GAPS)
    )


# +1, -1, +20; none; -32768: zigzag 2, 1, 40, 65535
NIBBLES, ESCAPED = "12 0f  0f", "28 00  ff ff"
ULP_PARAMS = [
    PARAMS[0],
    {
        "name": "b",
        "dtype": "bfloat16",
        "shape": [2],
        **{"pos_start": 3, "pos_end": 3, "pos_width": 1, "val_start": 3, "val_end": 3},
    },
    {**PARAMS[2], "val_start": 3, "val_end": 4},
]
ULP_DELTAS = [
    ParamDelta("a.weight", "bfloat16", (2, 4), np.array([1, 2, 6]), bits16(1, 0xFFFF, 20), True),
    ParamDelta("b", "bfloat16", (2,), np.empty(0, np.int64), bits16(), True),
    ParamDelta("c", "bfloat16", (1000,), np.array([258]), bits16(0x8000), True),
]


def ulp(values: str = frame(NIBBLES + ESCAPED), **changes: Any) -> bytes:
    """A ``gap8_ulp`` part built without our encoder; the default is a good one."""
    digest = {"digest_algorithm": "multilinear-1", "digest_part": "0" * 32}
    given = {"encoding": "gap8_ulp", "params": ULP_PARAMS, **digest, **changes}
    return packed(values=values, **given)


@pytest.mark.usefixtures("both_ways")
def test_differences_built_without_our_encoder() -> None:
    part = decode_part(ulp())
    assert_same(part, ULP_DELTAS)
    assert_well_formed(part)


@pytest.mark.usefixtures("both_ways")
def test_our_differences_are_the_same_to_the_byte() -> None:
    wanted = bytes.fromhex(frame(NIBBLES, ESCAPED) + frame(GAPS))
    again = encode_part(ULP_DELTAS, encoding="gap8_ulp", current_version=8, digest_part="0" * 32)
    assert again[-len(wanted) :] == wanted


BROKEN_ULP: list[tuple[str, dict[str, Any], str]] = [
    ("nothing", {"values": ""}, "differences"),
    ("no frame", {"values": NIBBLES + ESCAPED}, "differences"),
    ("cut", {"values": frame(NIBBLES + ESCAPED)[:-2]}, "differences"),
    ("two frames", {"values": frame(NIBBLES + ESCAPED) * 2}, "differences"),
    ("holds less than declared", {"values": "28b52ffd 20 07 310000 120f0f2800ff"}, "differences"),
    ("holds more", {"values": "28b52ffd 20 07 410000 120f0f2800ffff00"}, "differences"),
    ("no nibbles", {"values": frame("12 0f")}, "declares 2 bytes"),
    ("more than is possible", {"values": frame("00" * 12)}, "declares 12 bytes"),
    ("escapes missing", {"values": frame(NIBBLES + "28 00")}, "missing"),
    ("half an escape", {"values": frame(NIBBLES + "28 00 ff")}, "missing"),
    ("an escape too many", {"values": frame(NIBBLES + ESCAPED + "ff ff")}, "2 bytes after"),
    ("an escape not announced", {"values": frame("12 02 0f" + ESCAPED)}, "2 bytes after"),
    ("an escape that fits", {"values": frame(NIBBLES + "0e 00 ff ff")}, "fits a nibble"),
    ("padding", {"values": frame("12 1f 0f" + ESCAPED)}, "padding"),
    ("no digest", {"digest_part": None, "digest_algorithm": None}, "needs digest_part"),
    ("full", {"full": "true", "params": []}, "full part cannot be"),
    (
        "dense",
        {"params": [ULP_PARAMS[0], {**ULP_PARAMS[1], "shape": [0], "pos_width": 0}, ULP_PARAMS[2]]},
        "no dense form",
    ),
]


@pytest.mark.usefixtures("both_ways")
@in_one_test(
    ("broken", "message"), [case[1:] for case in BROKEN_ULP], ids=[case[0] for case in BROKEN_ULP]
)
def test_broken_differences(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedPart, match=message):
        decode_part(ulp(**broken))


def test_differences_are_for_their_encoding_only() -> None:
    for deltas, encoding in ((ULP_DELTAS, "gap8_exp"), (EXP_DELTAS, "gap8_ulp")):
        with pytest.raises(ValueError, match="differences"):
            encode_part(deltas, encoding=encoding, current_version=1, digest_part="0" * 32)


# One literal part for each invariant ---------------------------------------------------------

BOMB = "28b52ffd a4 00000040 " + "02ffff 00" * 4  # declares 1 GiB
NO_SIZE = "28b52ffd 00 38 290000 01 00 03 ff 03"
BROKEN: list[tuple[str, dict[str, Any], type[DeltaError], str]] = [
    ("positions: no frame", {"positions": GAPS}, MalformedPart, "gap streams"),
    ("positions: nothing", {"positions": ""}, MalformedPart, "gap streams"),
    ("positions: cut", {"positions": frame(GAPS)[:-2]}, MalformedPart, "gap streams"),
    ("positions: longer", {"positions": frame(GAPS + "00")}, MalformedPart, "declares 6 bytes"),
    ("positions: shorter", {"positions": frame(GAPS[:-2])}, MalformedPart, "declares 4 bytes"),
    ("positions: two frames", {"positions": frame(GAPS) * 2}, MalformedPart, "gap streams"),
    ("positions: a byte more", {"positions": frame(GAPS) + "00"}, MalformedPart, "gap streams"),
    (
        "positions: declare more than they hold",
        {"positions": "28b52ffd 20 05 210000 01 00 03 ff"},
        MalformedPart,
        "gap streams",
    ),
    (
        "positions: hold more than they declare",
        {"positions": "28b52ffd 20 05 310000 01 00 03 ff 03 00"},
        MalformedPart,
        "gap streams",
    ),
    ("positions: no size", {"positions": NO_SIZE}, MalformedPart, "does not declare its size"),
    ("positions: bomb", {"positions": BOMB}, MalformedPart, "declares 1073741824 bytes"),
    ("a gap too many", {"positions": frame("01 00 03 02 03")}, MalformedPart, "2 gaps for 1"),
    (
        "a gap too few",
        {"positions": frame("ff 00 03 ff 03"), "params": changed(0, shape=[1000])},
        MalformedPart,
        "2 gaps for 3 values",
    ),
    ("no end", {"positions": frame("01 00 03 03 ff")}, MalformedPart, "within a gap"),
    ("past the tensor", {"positions": frame("01 00 05 ff 03")}, NotUpdatable, "past the tensor"),
    ("planes: cut", {"values": "00 83 01 01"}, MalformedPart, "5 are not compressed"),
    ("exponents: nothing", {"values": LOWER}, MalformedPart, "exponents"),
    ("exponents: no frame", {"values": LOWER + HIGHEST}, MalformedPart, "exponents"),
    ("exponents: longer", {"values": LOWER + frame(HIGHEST + "00")}, MalformedPart, "6 bytes"),
    ("exponents: shorter", {"values": LOWER + frame("7f ff 00 80")}, MalformedPart, "4 bytes"),
    (
        "exponents: a plane too long",
        {"values": LOWER + "00" + frame(HIGHEST)},
        MalformedPart,
        "exponents",
    ),
    (
        "exponents: declare more than they hold",
        {"values": LOWER + "28b52ffd 20 05 210000 7fff0080"},
        MalformedPart,
        "exponents",
    ),
    (
        "exponents: hold more than they declare",
        {"values": LOWER + "28b52ffd 20 05 310000 7fff00800000"},
        MalformedPart,
        "exponents",
    ),
    ("exponents: bomb", {"values": LOWER + BOMB}, MalformedPart, "declares 1073741824 bytes"),
    (
        "values: not bytes",
        {"values": "00 83 01 01 02 00", "dtype": torch.bfloat16},
        MalformedPart,
        "not uint8",
    ),
    ("fewer symbols", {"params": changed(0, val_end=4)}, MalformedPart, "lengths"),
    (
        "more skips than the tensor has",
        {"params": changed(2, shape=[254], pos_end=5)},
        MalformedPart,
        "lengths",
    ),
    ("skips of no value", {"params": changed(2, val_end=4)}, MalformedPart, "lengths"),
    ("half a symbol", {"params": changed(0, pos_width=2)}, MalformedPart, "lengths"),
    ("wide symbols", {"params": changed(0, pos_width=4)}, MalformedPart, "lengths"),
    (
        "dense with positions",
        {"params": changed(1, pos_end=4)},
        MalformedPart,
        "lengths",
    ),
]


@pytest.mark.usefixtures("both_ways")
@in_one_test(
    ("broken", "error", "message"),
    [case[1:] for case in BROKEN],
    ids=[case[0] for case in BROKEN],
)
def test_broken(broken: dict[str, Any], error: type[DeltaError], message: str) -> None:
    with pytest.raises(error, match=message):
        decode_part(packed(**broken))


def test_index_errors_name_the_tensor() -> None:
    for positions in ("01 00 05 ff 03", "01 00 03 02 03", "01 00 03 03 ff"):
        with pytest.raises(DeltaError) as caught:
            decode_part(packed(positions=frame(positions)))
        assert caught.value.operands["tensor"] in ("a.weight", "c")


def test_header_with_too_large_unpacked_size_is_refused() -> None:
    body = packed(params=changed(2, shape=[10**9], pos_end=2000))
    with pytest.raises(MalformedPart, match="declares 5 bytes"):
        decode_part(body, Limits(max_part_bytes=2026))
    with pytest.raises(TooLarge, match="2026 bytes, unpacked"):
        decode_part(body, Limits(max_part_bytes=2025))


# Whatever the bytes are, under a right checksum --------------------------------------------------


@st.composite
def streams(draw: st.DrawFn, good: str) -> str:
    """Hex of `good` with some bytes replaced, taken out or put in; or framed anew like that."""
    raw = bytes.fromhex(good)
    at = draw(st.integers(0, len(raw)))
    size = draw(st.integers(0, 3))
    new = draw(st.one_of(st.binary(min_size=size, max_size=size), st.binary(max_size=4)))
    return (raw[:at] + new + raw[at + size :]).hex()


@pytest.mark.slow
@PROPERTY
@given(
    st.one_of(streams(frame(GAPS)), streams(GAPS).map(frame), st.just(frame(GAPS))),
    st.one_of(
        streams(LOWER + frame(HIGHEST)),
        streams(HIGHEST).map(lambda highest: LOWER + frame(highest)),
    ),
    st.one_of(streams(frame(NIBBLES + ESCAPED)), streams(NIBBLES + ESCAPED).map(frame)),
)
def test_other_bytes_are_refused_or_well_formed(
    positions: str, values: str, differences: str
) -> None:
    for body in (packed(positions, values), ulp(differences, positions=positions)):
        try:
            part = decode_part(body)
        except DeltaError:
            continue
        assert_well_formed(part)
