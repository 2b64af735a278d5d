"""Read and write zstd frames: around a ``deltas_zstd`` part, and inside a packed container.

``FrameReader`` unwraps an outer frame from a stream. It never asks the library to decompress more
than a few blocks at a time: a zstd block holds at most 128 KiB and its header states its size, so
the stream is cut between blocks, and a decompression bomb is stopped by the output so far, whatever
its ratio. The size of an inner frame is known from the manifest before it is decompressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from engine_ext.errors import MalformedPart, TooLarge

if TYPE_CHECKING:
    from typing_extensions import Buffer

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"

_MAX_WINDOW: Final = 128 << 20
_MAX_FRAME_HEADER: Final = 18
_BLOCK_HEADER: Final = 3
_RLE_BLOCK: Final = 1
_RESERVED_BLOCK: Final = 3
_CONTENT_CHECKSUM: Final = 4
# 16 blocks of at most 128 KiB: 2 MiB of output for each call into the library
_BLOCKS_PER_CALL: Final = 16
_SEARCH: Final = zstandard.ZstdCompressionParameters.from_level(1)
# So small a hash table that hardly any repeat is found.
_NO_SEARCH: Final = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6)
# Steps so long that nothing is compared; then zstd writes no entropy code, but raw blocks.
_STORED: Final = zstandard.ZstdCompressionParameters.from_level(
    1, hash_log=6, target_length=1 << 17
)


def compress_frame(data: Buffer) -> bytes:
    """Wrap `data` in one zstd frame that declares its content size."""
    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(memoryview(data))


def compress_planes(
    *planes: NDArray[np.uint8], search: bool, stored: bool = False
) -> NDArray[np.uint8]:
    """Compress planes of bytes, one after the other, into one zstd frame.

    Args:
        planes: uint8 [bytes] each. Each begins a new block, and so has an entropy code of its own.
        search: Whether repeats are worth searching for. In data without any, those that zstd finds
            by chance cost more bytes than they save, and most of the time.
        stored: Whether the bytes are written as they are, in raw blocks: for links that are faster
            than compressing.

    Returns:
        The frame, uint8 [bytes], which declares its content size; empty if all planes are.
    """
    planes = tuple(plane for plane in planes if plane.size)
    if not planes:
        return np.empty(0, np.uint8)
    parameters = _STORED if stored else _SEARCH if search else _NO_SEARCH
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    stream = compressor.compressobj(size=sum(plane.size for plane in planes))
    pieces = []
    for number, plane in enumerate(planes):
        if number:
            pieces.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        pieces.append(stream.compress(np.ascontiguousarray(plane).data))
    return np.frombuffer(b"".join([*pieces, stream.flush()]), np.uint8)


def decompress_planes(
    frame: NDArray[np.uint8], least: int, most: int, what: str
) -> NDArray[np.uint8]:
    """Decompress the result of `compress_planes` to the planes, concatenated: uint8 [bytes].

    Args:
        frame: uint8 [bytes].
        least, most: Bounds of the decompressed length; so much memory can be allocated.
        what: What the frame holds, for the messages.

    Raises:
        MalformedPart: The frame is corrupt, cut short or followed by other data; or it declares
            no size, a wrong one, or one out of bounds.
    """
    if not frame.size and least == 0:
        return frame
    try:
        parameters = zstandard.get_frame_parameters(bytes(frame[:_MAX_FRAME_HEADER]))
        if parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN or parameters.dict_id:
            raise MalformedPart(f"the zstd frame of {what} does not declare its size")
        if not max(least, 1) <= parameters.content_size <= most:
            message = f"the zstd frame of {what} declares {parameters.content_size} bytes"
            raise MalformedPart(message, least=least, most=most)
        content = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompress(
            frame.data, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise MalformedPart(f"the zstd frame of {what}: {error}") from None
    if len(content) != parameters.content_size:
        raise MalformedPart(
            f"the zstd frame of {what} declares {parameters.content_size} bytes and holds "
            f"{len(content)}"
        )
    return np.frombuffer(content, np.uint8)


def inflate(frame: NDArray[np.uint8], least: int, most: int, what: str) -> NDArray[np.uint8]:
    """Decompress one frame of another writer, which might not declare its size: uint8 [bytes].

    Arguments and errors as for `decompress_planes`; but there must be a frame.
    """
    head = bytes(frame[:_MAX_FRAME_HEADER])
    if not head.startswith(ZSTD_MAGIC):
        raise MalformedPart(f"no zstd frame: {what}")
    try:
        size = zstandard.get_frame_parameters(head).content_size
    except zstandard.ZstdError as error:
        raise MalformedPart(f"the zstd frame of {what}: {error}") from None
    if size not in (0, zstandard.CONTENTSIZE_UNKNOWN):
        return decompress_planes(frame, least, most, what)
    reader = FrameReader(most)
    content = b"".join(reader.feed(frame.data))
    reader.finish()
    if len(content) < least:
        raise MalformedPart(f"the zstd frame of {what} holds {len(content)} bytes", least=least)
    return np.frombuffer(content, np.uint8)


class FrameReader:
    """Unwraps a stream that might be one zstd frame; sans-I/O.

    A stream that starts with the zstd magic is decompressed, any other passes through unchanged.
    `max_bytes` limits the unwrapped length.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._produced = 0
        self._head = bytearray()  # the magic, then the frame header, until it is complete
        self._plain = False
        self._frame: _Frame | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the stream is no frame, so that its bytes pass through as they are."""
        return self._plain

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Take the next bytes of the stream, and yield the unwrapped bytes in pieces.

        A decompressed piece has at most a few MiB. The iterator must be exhausted before the
        next call.

        Raises:
            TooLarge: The declared content size, or the output so far, exceeds `max_bytes`.
            MalformedPart: The frame is corrupt, needs a dictionary or a window over 128 MiB, or
                is followed by other data.
        """
        if not self._plain and self._frame is None:
            self._head += data
            data = self._open()
        if self._frame is None:
            if data:
                yield self._count(bytes(data))
            return
        for piece in self._frame.feed(memoryview(data)):
            if piece:
                yield self._count(piece)

    def finish(self) -> None:
        """Check that the stream can end here; MalformedPart if it or its frame is not whole."""
        if self._frame is not None:
            self._frame.finish(self._produced)
        elif not self._plain:
            raise MalformedPart("the body is empty or ends within its first bytes")

    def _open(self) -> bytes:
        """Find out whether the stream is a frame; return the bytes so far once that is known."""
        head = bytes(self._head)
        if not head.startswith(ZSTD_MAGIC[: len(head)]):
            self._plain = True
            self._head.clear()
            return head
        if len(head) < len(ZSTD_MAGIC):
            return b""
        try:
            parameters = zstandard.get_frame_parameters(head[:_MAX_FRAME_HEADER])
        except zstandard.ZstdError as error:
            if len(head) < _MAX_FRAME_HEADER:
                return b""
            raise MalformedPart(f"zstd frame header: {error}") from None
        size, limit = parameters.content_size, self._max_bytes
        if size != zstandard.CONTENTSIZE_UNKNOWN and size > limit:
            raise TooLarge.of_part(f"the zstd frame declares {size} bytes", limit)
        if parameters.dict_id:
            raise MalformedPart("the zstd frame needs a dictionary")
        self._frame = _Frame(parameters, zstandard.frame_header_size(head))
        self._head.clear()
        return head

    def _count(self, piece: bytes) -> bytes:
        self._produced += len(piece)
        if self._produced > self._max_bytes:
            raise TooLarge.of_part(f"the part has over {self._max_bytes} bytes", self._max_bytes)
        return piece


class _Frame:
    """Decompresses one frame, given the parameters and the length of its header."""

    def __init__(self, parameters: zstandard.FrameParameters, header_bytes: int) -> None:
        self._content_size = parameters.content_size
        self._has_checksum = parameters.has_checksum
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        self._skip = header_bytes  # bytes of the frame until the next block header
        self._block_header = bytearray()
        self._last_block = False

    def feed(self, data: memoryview) -> Iterator[bytes]:
        start = at = blocks = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
            elif self._last_block:
                raise MalformedPart("data after the end of the zstd frame")
            else:
                at += self._read_block_header(data[at:])
                blocks += 1
            if blocks == _BLOCKS_PER_CALL:
                yield self._decompress(data[start:at])
                start, blocks = at, 0
        yield self._decompress(data[start:])

    def finish(self, produced: int) -> None:
        if not self._decompressor.eof:
            raise MalformedPart("the zstd frame is cut short")
        if self._content_size not in (zstandard.CONTENTSIZE_UNKNOWN, produced):
            declared = self._content_size
            raise MalformedPart(f"the zstd frame declares {declared} bytes and holds {produced}")

    def _read_block_header(self, data: memoryview) -> int:
        """Consume the bytes of the next block header that are in `data`; return their number."""
        taken = min(_BLOCK_HEADER - len(self._block_header), len(data))
        self._block_header += data[:taken]
        if len(self._block_header) == _BLOCK_HEADER:
            word = int.from_bytes(self._block_header, "little")
            self._block_header.clear()
            self._last_block = bool(word & 1)
            kind, size = (word >> 1) & 3, word >> 3
            if kind == _RESERVED_BLOCK:
                raise MalformedPart("the zstd frame has a block of a reserved type")
            self._skip = 1 if kind == _RLE_BLOCK else size
            if self._last_block and self._has_checksum:
                self._skip += _CONTENT_CHECKSUM
        return taken

    def _decompress(self, data: memoryview) -> bytes:
        if not data:
            return b""
        try:
            return self._decompressor.decompress(data)
        except zstandard.ZstdError as error:
            raise MalformedPart(f"the zstd frame is corrupt: {error}") from None
