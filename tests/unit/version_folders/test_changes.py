"""What a frame says of a tensor: by an independent writer, for every dtype and both encodings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.conformance.verified_file import verified_file
from engine_ext.dtypes import TORCH_DTYPE, bits_dtype
from engine_ext.errors import DeltaError, MalformedPart, NotUpdatable, TooLarge
from engine_ext.format import Limits, ParamDelta, decode_part, encode_part
from engine_ext.version_folders import check_change, find_change
from tests.support.folder_writer import checksum, payload
from tests.support.served_models import PROPERTY
from tests.support.verified_part import read_verified

pytestmark = pytest.mark.slow

FORMATS = ("xxh3-128", "blake3", "adler32")
ENCODINGS = ("xor", "overwrite")


def compress(content: bytes, *, sized: bool = True) -> np.ndarray:
    frame = zstandard.ZstdCompressor(level=1, write_content_size=sized).compress(content)
    return np.frombuffer(frame, np.uint8)


def find(encoding: str, content: bytes, *, dtype: str = "bfloat16", numel: int = 4) -> ParamDelta:
    checked = f"adler32:{'0' * 8}"
    return find_change("w", dtype, (numel,), encoding, compress(content), checked, Limits())


def overwrite(*places: tuple[int, int]) -> bytes:
    where, new = [p for p, _ in places], [b for _, b in places]
    return np.array([len(places), *where], "<u4").tobytes() + bytes(new)


@PROPERTY
@given(
    dtype=st.sampled_from(sorted(TORCH_DTYPE)),
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    encoding=st.sampled_from(ENCODINGS),
    checksum_format=st.sampled_from(FORMATS),
    density=st.sampled_from([0.0, 0.1, 1.0]),
    sized=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_the_new_bytes_are_the_writers(
    dtype: str,
    shape: tuple[int, ...],
    encoding: str,
    checksum_format: str,
    density: float,
    sized: bool,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    numel, width = int(np.prod(shape, dtype=int)), TORCH_DTYPE[dtype].itemsize
    old = random.integers(0, 256, numel * width).astype(np.uint8)
    new = np.where(random.random(old.size) < density, random.integers(0, 256, old.size), old)
    new = new.astype(np.uint8)
    declared = f"{checksum_format}:{checksum(checksum_format, new.tobytes())}"
    frame = compress(payload(encoding, old, new), sized=sized)
    check_change("w", encoding, frame, Limits())
    sent = find_change("w", dtype, shape, encoding, frame, declared, Limits())
    body = encode_part([sent], encoding="gap8_xor", current_version=2)
    part = decode_part(body)
    identity, file = verified_file(body)
    mapped = read_verified(file, identity)
    assert mapped is not None
    for delta in (part.deltas[0], mapped.deltas[0]):
        assert (delta.name, delta.dtype, delta.shape) == ("w", dtype, shape)
        assert delta.new_checksum == declared
        before = old.view(bits_dtype(dtype))
        after = before.copy()
        assert delta.indices is not None
        after[delta.indices] = delta.new_bits(before[delta.indices], 0, delta.nnz, slice(None))
        assert after.tobytes() == new.tobytes()
        # No element that the writer leaves alone is written.
        assert np.array_equal(delta.indices, np.flatnonzero(before != new.view(before.dtype)))


def test_an_overwritten_byte_leaves_the_elements_other_byte() -> None:
    delta = find("overwrite", overwrite((3, 0xAB), (4, 0x11), (5, 0x22)))
    assert delta.indices is not None
    assert delta.indices.tolist() == [1, 2]
    old = np.array([0x1234, 0x5678], np.uint16)
    assert delta.new_bits(old, 0, 2, slice(None)).tolist() == [0xAB34, 0x2211]


@pytest.mark.parametrize(
    ("encoding", "content", "error"),
    [
        ("xor", bytes(7), MalformedPart),  # the tensor has 8 bytes
        ("xor", bytes(9), MalformedPart),
        ("xor", b"", MalformedPart),
        ("overwrite", b"", MalformedPart),
        ("overwrite", b"\0\0\0", MalformedPart),
        ("overwrite", b"\1\0\0\0", MalformedPart),  # no position, no byte
        ("overwrite", overwrite((1, 2)) + b"\0", MalformedPart),
        ("overwrite", overwrite((8, 2)), NotUpdatable),
        ("overwrite", overwrite((2, 2), (2, 3)), NotUpdatable),
        ("overwrite", overwrite((3, 2), (2, 3)), NotUpdatable),
        ("overwrite", b"\xff\xff\xff\xff" + bytes(5), MalformedPart),
    ],
)
def test_what_is_no_change_of_the_tensor(
    encoding: str, content: bytes, error: type[DeltaError]
) -> None:
    with pytest.raises(error) as caught:
        find(encoding, content)
    assert caught.value.operands["tensor"] == "w"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_change_over_the_limit_is_refused_before_it_expands(encoding: str) -> None:
    """A frame of a few bytes can change every element of a large tensor."""
    content = b"\1" * 100 if encoding == "xor" else overwrite(*((k, 1) for k in range(100)))
    frame, declared = compress(content), f"adler32:{'0' * 8}"
    sound, small = Limits(max_part_bytes=504), Limits(max_part_bytes=499)
    change = find_change("w", "int8", (100,), encoding, frame, declared, sound)
    assert change.nnz == 100
    with pytest.raises((TooLarge, MalformedPart)):
        find_change("w", "int8", (100,), encoding, frame, declared, small)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x28\xb5\x2f",
        bytes(20),
        compress(bytes(8)).tobytes()[:-1],
        compress(bytes(8)).tobytes() + b"\0",
        compress(bytes(8)).tobytes() * 2,
        compress(bytes(1 << 20)).tobytes(),  # more than any change of 8 bytes
        compress(bytes(1 << 20), sized=False).tobytes(),
    ],
)
def test_what_is_no_frame_of_the_tensor(encoding: str, frame: bytes) -> None:
    raw = np.frombuffer(frame, np.uint8)
    with pytest.raises(DeltaError) as caught:
        find_change("w", "bfloat16", (4,), encoding, raw, "adler32:00000000", Limits())
    assert caught.value.status in (400, 413)


def test_a_tensor_over_the_limit_is_not_inflated() -> None:
    limits = Limits(max_part_bytes=64)
    with pytest.raises(DeltaError, match="w has 66 bytes"):
        find_change("w", "bfloat16", (33,), "xor", compress(bytes(66)), "adler32:0", limits)


def test_a_bit_pattern_is_not_a_number() -> None:
    """NaNs, -0.0 and subnormals keep their bits."""
    odd = torch.tensor([0x7FC1, 0xFF81, 0x8000, 0x0001], dtype=torch.int32).to(torch.int16)
    new = odd.view(torch.uint8).numpy()
    delta = find("xor", payload("xor", np.zeros(8, np.uint8), new))
    assert delta.new_bits(np.zeros(4, np.uint16), 0, 4, slice(None)).tobytes() == new.tobytes()
