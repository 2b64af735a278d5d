from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.errors import MalformedPart, NotUpdatable
from engine_ext.format import ENCODINGS
from engine_ext.format.positions import decode_positions, encode_positions, position_bytes
from tests.support.cases import in_one_test
from tests.support.independent_encoder import PROPERTY

# (encoding, indices, bytes, pos_width)
GOLDEN = [
    ("indices", [], "", 4),
    ("indices", [0], "00000000", 4),
    ("indices", [1, 2, 258], "01000000 02000000 02010000", 4),
    ("indices", [2**31 - 1], "ffffff7f", 4),
    ("deltas", [], "", 2),
    ("deltas", [0, 1, 2], "0000 0000 0000", 2),
    ("deltas", [3, 4, 70], "0300 0000 4100", 2),
    ("deltas", [65535], "ffff", 2),
    ("deltas", [0, 65536], "0000 ffff", 2),
    ("deltas", [65536], "00000100", 4),
    ("deltas", [0, 65537], "00000000 00000100", 4),
    ("deltas", [2**32 - 1, 2**33 - 1], "ffffffff ffffffff", 4),
    ("deltas_zstd", [3, 4, 70], "0300 0000 4100", 2),
    ("gap8_exp", [3, 4, 70], "03 00 41", 1),
    ("gap8_exp", [0, 65537], "00 ff 01  00 ff 00", 2),
    ("gap8_ulp", [3, 4, 70], "03 00 41", 1),
]


@in_one_test(("encoding", "indices", "raw", "width"), GOLDEN)
def test_golden(encoding: str, indices: list[int], raw: str, width: int) -> None:
    encoded, pos_width = encode_positions(encoding, np.array(indices, np.int64))
    assert (encoded.tobytes(), pos_width) == (bytes.fromhex(raw), width)
    assert encoded.dtype == np.uint8
    decoded = decode_positions(encoding, encoded, width, 2**40)
    assert decoded.tolist() == indices
    assert decoded.dtype == np.int64
    if max(indices, default=0) < 2**31:
        narrow = decode_positions(encoding, encoded, width, 2**31)
        assert narrow.tolist() == indices
        assert narrow.dtype == np.int32
    else:
        with pytest.raises(NotUpdatable, match=r"out of range|past the tensor"):
            decode_positions(encoding, encoded, width, 2**31)


@in_one_test(
    ("encoding", "indices"),
    [
        ("indices", [2**31]),
        ("deltas", [2**32]),
        ("deltas", [5, 6 + 2**32]),
        ("deltas", [2**63 - 1]),
        ("deltas_zstd", [2**32]),
        *((encoding, bad) for encoding in ENCODINGS for bad in ([-1], [1, 1], [2, 1], [0, -5])),
        ("gaps", [1]),
        ("", []),
    ],
)
def test_what_cannot_be_encoded(encoding: str, indices: list[int]) -> None:
    with pytest.raises(ValueError):
        encode_positions(encoding, np.array(indices, np.int64))


@in_one_test(
    ("encoding", "width", "raw", "numel"),
    [
        ("indices", 4, "05000000", 5),
        ("indices", 4, "ffffffff", 5),
        ("indices", 4, "00000080", 2**31),
        ("indices", 4, "01000000 01000000", 5),
        ("indices", 4, "02000000 01000000", 5),
        ("indices", 4, "01000000 ffffffff", 5),
        ("indices", 4, "00000000", 0),
        ("indices", 4, "00000000 01000000 02000000", 2),
        ("deltas", 2, "0500", 5),
        ("deltas", 2, "0100 0300", 5),
        ("deltas", 2, "0000", 0),
        ("deltas", 2, "0000 0000 0000", 2),
        ("deltas", 4, "ffffffff", 2**32 - 1),
        ("deltas", 4, "ffffffff" * 1000, 2**40),
        ("deltas_zstd", 2, "0500", 5),
    ],
)
def test_bad_index(encoding: str, width: int, raw: str, numel: int) -> None:
    with pytest.raises(NotUpdatable, match="out of range or not ascending"):
        decode_positions(encoding, np.frombuffer(bytes.fromhex(raw), np.uint8), width, numel)


@in_one_test(
    ("encoding", "width", "size"),
    [
        *(("indices", 2, 4), ("indices", 4, 5), ("indices", 0, 4), ("gaps", 4, 4)),
        *(("deltas", 3, 3), ("deltas", 2, 3), ("deltas", 4, 6), ("deltas", 0, 0)),
        *(("deltas", 1, 1), ("gap8_exp", 2, 3), ("gap8_exp", 4, 4), ("gap8_exp", 0, 0)),
    ],
)
def test_bad_width(encoding: str, width: int, size: int) -> None:
    with pytest.raises(MalformedPart):
        decode_positions(encoding, np.zeros(size, np.uint8), width, 100)


def test_unaligned_read_only_bytes() -> None:
    for encoding, width in (("indices", 4), ("deltas", 4), ("deltas", 2)):
        raw = np.frombuffer(b"\xff" + (7).to_bytes(width, "little"), np.uint8)[1:]
        assert decode_positions(encoding, raw, width, 8).tolist() == [7]


@PROPERTY
@given(
    st.sampled_from(ENCODINGS),
    st.lists(st.integers(0, 2**31 - 2), max_size=50, unique=True).map(sorted),
    st.integers(0, 3),
)
def test_round_trip(encoding: str, indices: list[int], shift: int) -> None:
    wanted = np.unique(np.array(indices, np.int64) >> (8 * shift))
    raw, width = encode_positions(encoding, wanted)
    if not encoding.startswith("gap8"):
        assert raw.size == wanted.size * width == position_bytes(encoding, wanted)
    numel = int(wanted[-1]) + 1 if wanted.size else 0
    assert np.array_equal(decode_positions(encoding, raw, width, numel), wanted)
    if wanted.size:
        with pytest.raises(NotUpdatable):
            decode_positions(encoding, raw, width, numel - 1)


@PROPERTY
@given(
    st.sampled_from(ENCODINGS),
    st.binary(max_size=64),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 99),
)
def test_any_bytes(encoding: str, raw: bytes, width: int, numel: int) -> None:
    try:
        indices = decode_positions(encoding, np.frombuffer(raw, np.uint8), width, numel)
    except (MalformedPart, NotUpdatable):
        return
    assert indices.size <= len(raw) // width
    assert (np.diff(indices, prepend=-1) > 0).all()
    assert (indices < numel).all()
