"""Every encoding on every dtype; of those that compress, every bit pattern and any gap."""

from __future__ import annotations

import numpy as np
import pytest

from engine_ext.dtypes import TORCH_DTYPE, bits_dtype, itemsize
from engine_ext.format import ENCODINGS, ParamDelta, decode_part, encode_part
from tests.support.cases import in_one_test
from tests.support.independent_encoder import (
    assert_same,
    assert_well_formed,
    bits16,
    sendable,
    unwrap,
)

pytestmark = pytest.mark.usefixtures("both_ways")


@in_one_test("dtype", sorted(TORCH_DTYPE))
def test_odd_patterns_of_every_dtype(dtype: str) -> None:
    width = itemsize(dtype)
    top = 1 << (8 * width - 1)
    # -0.0, all ones (a NaN), denormals, NaN payloads with either sign
    odd = [0, 1, 2, top, top + 1, top - 1, 2 * top - 1, 0x7F, (0x7F81 << 8 * width >> 16)]
    values = np.array(odd, np.uint64).astype(bits_dtype(dtype))
    if dtype == "bool":
        values = values % 2
    indices = np.arange(values.size) * 300
    sparse = ParamDelta("s", dtype, (10**6,), indices, values)
    dense = ParamDelta("d", dtype, values.shape, None, values)
    one = ParamDelta("o", dtype, (), np.array([0]), values[:1])
    empty = ParamDelta("e", dtype, (10,), np.empty(0, np.int64), values[:0])
    full = ParamDelta("f", dtype, values.shape, np.arange(values.size), values)
    for encoding in ENCODINGS:
        deltas, extra = sendable(encoding, [sparse, dense, one, empty, full])
        body = encode_part(deltas, encoding=encoding, current_version=1, **extra)
        part = decode_part(unwrap(body))
        assert_same(part, deltas)
        assert_well_formed(part)


@in_one_test("dtype", ["bfloat16", "float16"])
def test_every_pattern(dtype: str) -> None:
    values = np.arange(1 << 16).astype(np.uint16)
    sparse = ParamDelta("w", dtype, (2**33,), np.arange(1 << 16) * 70_000, values)
    for encoding in ("gap8_exp", "gap8_ulp"):
        deltas, extra = sendable(encoding, [sparse])
        part = decode_part(encode_part(deltas, encoding=encoding, current_version=1, **extra))
        assert_same(part, deltas)


@pytest.mark.slow
@pytest.mark.parametrize("far", [65536, 2**32, 2**32 + 1, 2**40 - 1])
def test_far_gaps(far: int) -> None:
    delta = ParamDelta("w", "bfloat16", (2**40,), np.array([0, far]), bits16(1, 2))
    for encoding in ("gap8_exp", "gap8_ulp"):
        deltas, extra = sendable(encoding, [delta])
        part = decode_part(encode_part(deltas, encoding=encoding, current_version=1, **extra))
        assert_same(part, deltas)
    with pytest.raises(ValueError, match="beyond its"):
        encode_part(
            [ParamDelta("w", "bfloat16", (far,), np.array([0, far]), bits16(1, 2))],
            encoding="gap8_exp",
            current_version=1,
        )
