from __future__ import annotations

import functools
import operator
import struct

import numpy as np
import pytest
import torch

from engine_ext.dtypes import TORCH_DTYPE, bits_dtype
from engine_ext.errors import ChecksumMismatch, MalformedPart
from engine_ext.format.checksum import slime_checksum, verify_checksum, xxh3_checksum
from tests.support.cases import in_one_test
from tests.support.independent_encoder import xxh3

POSITIONS = np.array([3, 1, 4, 1, 5], np.uint8)
NO_POSITIONS = np.empty(0, np.uint8)


def slime_reference(positions: np.ndarray, values: list[float]) -> int:
    """The formula in plain Python, for values that a float64 holds."""
    p = functools.reduce(operator.xor, positions.tolist(), 0)
    words = (struct.unpack("<Q", struct.pack("<d", value))[0] for value in values)
    return p ^ (functools.reduce(operator.xor, words, 0) << 1)


def test_xxh3_golden() -> None:
    assert xxh3_checksum(b"", b"") == "xxh3_128:99aa06d3014798d86001c324468d497f"
    assert xxh3_checksum(b"ab", b"c") == "xxh3_128:06b05ab6733a618578af5f94892f3950"
    assert xxh3_checksum(b"ab", b"c") == xxh3_checksum(memoryview(b"a"), b"bc") == xxh3(b"abc")


def test_slime_golden() -> None:
    values = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    # 2 ^ ((0x3ff0 ^ 0xc000) << 48 << 1): more than 64 bits, because the shift keeps the sign
    assert slime_checksum(POSITIONS, values) == 2 ^ (0xFFF0 << 49)
    assert slime_checksum(NO_POSITIONS, values[:0]) == 0
    assert slime_checksum(POSITIONS, values[:0]) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_slime_hashes_floats_as_float64(dtype: str) -> None:
    values = [0.5, -0.0, 3.0, -1024.0, float("inf")]
    tensor = torch.tensor(values, dtype=TORCH_DTYPE[dtype])
    assert slime_checksum(POSITIONS, tensor) == slime_reference(POSITIONS, values)


def test_slime_hashes_ints_as_int64() -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        tensor = torch.tensor([-1, 5], dtype=dtype)
        assert slime_checksum(NO_POSITIONS, tensor) == (2**64 - 6) << 1
    assert slime_checksum(NO_POSITIONS, torch.tensor([255, 5], dtype=torch.uint8)) == 250 << 1


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64"]
)
def test_slime_is_torch_hash_tensor(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    width = TORCH_DTYPE[dtype].itemsize
    # the last size has a second chunk, that is not full
    for numel in (1, 2, 31, (1 << 20) + 3):
        raw = torch.randint(0, 256, (numel * width,), dtype=torch.uint8, generator=generator)
        values = raw.view(TORCH_DTYPE[dtype])
        if values.dtype.is_floating_point:
            # how a NaN widens is the processor's business
            values = values.nan_to_num()
        p = int(torch.hash_tensor(torch.from_numpy(POSITIONS)).item())
        v = int(torch.hash_tensor(values).item())
        assert slime_checksum(POSITIONS, values) == p ^ (v << 1)


@in_one_test("dtype", sorted(TORCH_DTYPE))
def test_verify(dtype: str) -> None:
    values = np.arange(6).astype(bits_dtype(dtype)) % 2
    tensor = torch.from_numpy(values.view(np.uint8)).view(TORCH_DTYPE[dtype])
    for declared in (
        xxh3_checksum(POSITIONS.data, values.data),
        str(slime_checksum(POSITIONS, tensor)),
    ):
        verify_checksum(declared, POSITIONS, values, dtype)
        with pytest.raises(ChecksumMismatch) as caught:
            verify_checksum(declared, POSITIONS[:-1], values, dtype)
        assert caught.value.operands["expected"] == declared
        with pytest.raises(ChecksumMismatch):
            verify_checksum(declared, POSITIONS, values[:-1], dtype)


def test_verify_takes_read_only_and_unaligned_bytes() -> None:
    values = np.array([1.5, -3.0], np.float32)
    raw = b"\0" + values.tobytes()
    for offset, buffer in ((1, raw), (1, bytearray(raw)), (0, raw[1:])):
        got = np.frombuffer(buffer, np.uint8)[offset:]
        declared = str(slime_checksum(POSITIONS, torch.from_numpy(values)))
        verify_checksum(declared, POSITIONS, got, "float32")


@pytest.mark.parametrize(
    "declared",
    [
        *("", "md5:00", "xxh3_128:", "xxh3_128:" + "0" * 31, "xxh3_128:" + "A" * 32),
        *("-1", "+1", "01", "1 ", "1\n", "1.0", "0x1", "1" * 21, "9" * 5000, "٣"),
    ],
)
def test_neither_form(declared: str) -> None:
    with pytest.raises(MalformedPart, match="neither") as caught:
        verify_checksum(declared, POSITIONS, NO_POSITIONS, "uint8")
    assert type(caught.value) is MalformedPart
