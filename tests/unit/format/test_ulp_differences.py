"""All params in one compiled call: the same as one by one, and nothing that they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.errors import MalformedPart
from engine_ext.format import ulp_differences
from engine_ext.format.manifest import ParamEntry
from engine_ext.format.ulp_differences import decode_differences, encode_differences
from engine_ext.format.zstd_frames import compress_planes
from tests.support.served_models import PROPERTY

DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "int64"}


def entries_of(sizes: list[int], width: int) -> list[ParamEntry]:
    return [
        ParamEntry(f"{n}", DTYPES[width], (size,), 0, 0, 1, 0, size) for n, size in enumerate(sizes)
    ]


@PROPERTY
@given(
    st.lists(st.integers(0, 70), max_size=6),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 1 << 16),
    st.sampled_from([2, 20, 1 << 7]),
)
def test_round_trip(sizes: list[int], width: int, seed: int, most: int) -> None:
    random = np.random.default_rng(seed)
    bits = np.dtype(f"u{width}")
    values = [
        random.integers(-most, most, size, np.int64).astype(bits.str.replace("u", "i")).view(bits)
        for size in sizes
    ]
    raw = encode_differences(values)
    found = decode_differences(raw, entries_of(sizes, width))
    assert found.tobytes() == b"".join(own.tobytes() for own in values)


@PROPERTY
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 1 << 16),
    st.integers(0, 9),
    st.booleans(),
)
def test_any_content(sizes: list[int], width: int, seed: int, more: int, padded: bool) -> None:
    """It decodes to the same without the compiled loop, or is refused by both."""
    random = np.random.default_rng(seed)
    params = entries_of(sizes, width)
    halves = sum((size + 1) // 2 for size in sizes)
    pairs = random.choice([0, 0x21, 0x0F, 0xF0, 0xFF], halves).astype(np.uint8)
    if padded:
        ends = np.cumsum([(size + 1) // 2 for size in sizes])
        odd = [end - 1 for end, size in zip(ends, sizes, strict=True) if size % 2]
        pairs[odd] &= 15
    escaped = random.integers(0, 256, width * more).astype(np.uint8)
    content = np.concatenate([pairs, escaped])
    own = ulp_differences._decode_all(content[:halves], content[halves:], params)
    try:
        wanted = ulp_differences._decode_by_numpy(content, halves, params)
    except MalformedPart:
        assert own is None
        return
    assert own is not None
    assert own.tolist() == [value for one in wanted for value in one.tolist()]


@pytest.mark.parametrize(
    ("pairs", "escaped", "message"),
    [
        ("0f 10", "1000", "the padding nibble is not 0"),
        ("ff 0f", "1000 1100", "escaped differences are missing"),
        ("0f 01", "0e00", "an escaped difference fits a nibble"),
        ("0f 01", "1000 1100", "2 bytes after the differences"),
    ],
)
def test_what_is_wrong_is_said(pairs: str, escaped: str, message: str) -> None:
    planes = (np.frombuffer(bytes.fromhex(text), np.uint8) for text in (pairs, escaped))
    raw = compress_planes(*planes, search=False)
    with pytest.raises(MalformedPart, match=message):
        decode_differences(raw, entries_of([3], 2))
