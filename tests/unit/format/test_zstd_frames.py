from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.errors import MalformedPart, TooLarge
from engine_ext.format import ZSTD_MAGIC, FrameReader
from engine_ext.format.zstd_frames import compress_frame, compress_planes, decompress_planes
from tests.support.cases import in_one_test
from tests.support.independent_encoder import PROPERTY, unwrap

MIB = 1 << 20
BLOCK = 128 << 10
# magic, no content size, no checksum, a window of 128 KiB
BARE_HEADER = ZSTD_MAGIC + bytes([0x00, 7 << 3])
RANDOM = os.urandom(300_000)
SAMPLES = [b"", b"x", b"abc" * 100, bytes(5 * MIB), RANDOM, RANDOM + bytes(MIB) + RANDOM]


def block(kind: int, size: int, last: bool) -> bytes:
    return (last | kind << 1 | size << 3).to_bytes(3, "little")


def raw_frame(content: bytes) -> bytes:
    return BARE_HEADER + block(0, len(content), last=True) + content


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


@in_one_test("content", SAMPLES)
@in_one_test("checksum", [True, False])
@in_one_test("size", [True, False])
def test_unwraps_what_zstd_writes(content: bytes, checksum: bool, size: bool) -> None:
    wrapped = frame(content, write_checksum=checksum, write_content_size=size)
    assert unwrap(wrapped) == content
    assert zstandard.decompress(compress_frame(content)) == content
    assert zstandard.frame_content_size(compress_frame(content)) == len(content)


def test_frame_without_content() -> None:
    assert unwrap(raw_frame(b"")) == b""


@in_one_test("content", [b"{", b"plain", ZSTD_MAGIC[:3] + b"\0", RANDOM])
def test_anything_else_passes_through(content: bytes) -> None:
    content = b"\0" + content if content is RANDOM else content
    reader = FrameReader(MIB)
    assert b"".join(reader.feed(content)) == content
    reader.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"plain", ZSTD_MAGIC[:3] + b"tail", raw_frame(b"raw"), frame(RANDOM)]
)
def test_byte_at_a_time(body: bytes) -> None:
    reader = FrameReader(MIB)
    out = b"".join(piece for at in range(len(body)) for piece in reader.feed(body[at : at + 1]))
    reader.finish()
    assert out == unwrap(body)


@PROPERTY
@given(st.lists(st.integers(0, 70_000), max_size=12), st.sampled_from(SAMPLES))
def test_any_split(cuts: list[int], content: bytes) -> None:
    body = frame(content, write_checksum=True)
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    reader = FrameReader(len(content))
    out = [
        piece
        for begin, end in pairwise(edges)
        for piece in reader.feed(memoryview(body)[begin:end])
    ]
    reader.finish()
    assert b"".join(out) == content
    assert all(out)


def test_bomb_is_stopped_by_what_came_out() -> None:
    # 128 KiB for 4 bytes: 4 GiB in one body of 128 KiB, that declares no size
    bomb = BARE_HEADER + (block(1, BLOCK, last=False) + b"\0") * 32768
    produced: list[int] = []
    reader = FrameReader(8 * MIB)
    with pytest.raises(TooLarge) as caught:
        produced.extend(len(piece) for piece in reader.feed(bomb))
    assert caught.value.operands == {"limit": 8 * MIB}
    assert sum(produced) <= 8 * MIB
    assert max(produced) <= 2 * MIB


def test_pieces_of_a_good_frame_are_small() -> None:
    pieces = list(FrameReader(64 * MIB).feed(frame(bytes(64 * MIB))))
    assert sum(map(len, pieces)) == 64 * MIB
    assert max(map(len, pieces)) <= 2 * MIB


def test_declared_size_over_the_limit_is_refused_at_once() -> None:
    header = frame(bytes(MIB))[: zstandard.frame_header_size(frame(bytes(MIB)))]
    with pytest.raises(TooLarge, match="declares 1048576 bytes"):
        list(FrameReader(MIB - 1).feed(header))
    assert list(FrameReader(MIB).feed(header)) == []


@pytest.mark.parametrize("plain", [True, False])
def test_output_over_the_limit(plain: bool) -> None:
    content = bytes(1001)
    body = content if plain else frame(content, write_content_size=False)
    assert unwrap(body, 1001) == content
    with pytest.raises(TooLarge):
        unwrap(body, 1000)


@pytest.mark.parametrize("delta", [-1, 1])
def test_lying_content_size(delta: int) -> None:
    body = frame(bytes(1000))
    # a content size of two bytes is stored less 256
    at = body.index((1000 - 256).to_bytes(2, "little"))
    lie = (1000 - 256 + delta).to_bytes(2, "little")
    with pytest.raises(MalformedPart):
        unwrap(body[:at] + lie + body[at + 2 :])


GOOD = frame(b"content" * 100, write_checksum=True)
BROKEN = {
    "empty": b"",
    "half a magic": ZSTD_MAGIC[:2],
    "only the magic": ZSTD_MAGIC,
    "only the frame header": BARE_HEADER,
    "cut in a block": GOOD[:-8],
    "cut in the checksum": GOOD[:-1],
    "wrong checksum": GOOD[:-1] + bytes([GOOD[-1] ^ 1]),
    "one byte behind": GOOD + b"\0",
    "a second frame": GOOD + GOOD,
    "a skippable frame behind": GOOD + b"\x50\x2a\x4d\x18\0\0\0\0",
    "no last block": BARE_HEADER + block(0, 1, last=False) + b"x",
    "a reserved block": BARE_HEADER + block(3, 0, last=True),
    "a block of over 128 KiB": BARE_HEADER + block(0, BLOCK + 1, last=True) + bytes(BLOCK + 1),
    "an RLE block of over 128 KiB": BARE_HEADER + block(1, BLOCK + 1, last=True) + b"\0",
    "a corrupt compressed block": BARE_HEADER + block(2, 9, last=True) + b"\xff" * 9,
    "a reserved header bit": ZSTD_MAGIC + bytes([0x08, 7 << 3]) + bytes(20),
    "a window of 256 MiB": ZSTD_MAGIC + bytes([0, 18 << 3]) + block(0, 1, last=True) + b"x",
    "a dictionary": ZSTD_MAGIC + bytes([1, 7 << 3, 99]) + block(0, 1, last=True) + b"x",
}


@in_one_test("body", BROKEN.values(), ids=BROKEN)
def test_broken_frame(body: bytes) -> None:
    with pytest.raises(MalformedPart):
        unwrap(body)
    with pytest.raises(MalformedPart):
        unwrap(body, step=7)


def test_truncation_anywhere() -> None:
    for end in range(len(GOOD)):
        with pytest.raises(MalformedPart):
            unwrap(GOOD[:end])


@PROPERTY
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255), st.integers(1, len(GOOD)))
def test_flipped_bits(at: int, mask: int, step: int) -> None:
    body = bytearray(GOOD)
    body[at] ^= mask
    try:
        out = unwrap(bytes(body), MIB, step)
    except (MalformedPart, TooLarge):
        return
    # a broken magic is no frame; otherwise the frame's own checksum has held
    assert out == (bytes(body) if at < 4 else b"content" * 100)


@PROPERTY
@given(st.binary(max_size=200))
def test_any_bytes_behind_a_magic(tail: bytes) -> None:
    try:
        out = unwrap(ZSTD_MAGIC + tail, MIB)
    except (MalformedPart, TooLarge):
        return
    assert out == zstandard.ZstdDecompressor().decompressobj().decompress(ZSTD_MAGIC + tail)


# --- planes that are stored ---


def test_a_stored_frame_by_hand() -> None:
    plane = np.arange(512).astype(np.uint8)  # compresses to less
    frame = compress_planes(plane, search=True, stored=True).tobytes()
    header = ZSTD_MAGIC + bytes.fromhex("60 0001")  # one segment of 256 + 256 bytes
    assert frame == header + block(0, 512, last=True) + plane.tobytes()
    assert compress_planes(plane, search=True).size < 300


@pytest.mark.parametrize("search", [True, False])
def test_stored_planes_are_raw_blocks(search: bool) -> None:
    """However well they compress: there is no entropy code to decode."""
    random = np.random.default_rng(0)
    gaps = np.minimum(random.geometric(0.02, 3 * BLOCK) - 1, 255).astype(np.uint8)
    nibbles = random.choice([0x11, 0x12, 0x21, 0x22], BLOCK + 5).astype(np.uint8)
    frame = compress_planes(gaps, nibbles, search=search, stored=True)
    size = gaps.size + nibbles.size
    raw, at, kinds = frame.tobytes(), zstandard.frame_header_size(frame.tobytes()), set()
    last = False
    while not last:
        word = int.from_bytes(raw[at : at + 3], "little")
        last, kind = bool(word & 1), word >> 1 & 3
        kinds.add(kind)
        at += 3 + (word >> 3)
    assert (kinds, at) == ({0}, len(raw))
    assert len(raw) < size + 3 * (size // BLOCK + 3) + 18
    found = decompress_planes(frame, size, size, "planes")
    assert found.tobytes() == gaps.tobytes() + nibbles.tobytes()
