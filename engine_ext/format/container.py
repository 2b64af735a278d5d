"""Read and write the safetensors file that a part is, see ``docs/wire-format.md``.

The header is padded with spaces to a multiple of 8 bytes, the data of the two tensors has no gaps,
and ``data_offsets`` count from the end of the header, which has exactly these keys::

    {"__metadata__":  {...},                                                   strings to strings
     "__positions__": {"dtype": "U8", "shape": [bytes], "data_offsets": [begin, end]},
     "__values__":    {"dtype": ...,  "shape": [count], "data_offsets": [begin, end]}}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.answers import in_one_line
from engine_ext.dtypes import NAME_OF_CODE, SAFETENSORS_CODE, itemsize
from engine_ext.errors import MalformedPart, TooLarge
from engine_ext.format.gap_streams import index_dtype
from engine_ext.format.manifest import (
    PACKED_ENCODINGS,
    Limits,
    Manifest,
    ParamEntry,
    parse_manifest,
)
from engine_ext.format.zstd_frames import ZSTD_MAGIC
from engine_ext.structs import prepare

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LENGTH: Final = 8  # bytes of the header length at the start of the file
_ALIGN: Final = 8

_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Offset, ...]
    data_offsets: tuple[_Offset, _Offset]


class _HeaderJson(msgspec.Struct, forbid_unknown_fields=True):
    metadata: dict[str, str] = msgspec.field(name="__metadata__")
    positions: _Tensor = msgspec.field(name="__positions__")
    values: _Tensor = msgspec.field(name="__values__")


prepare(_HeaderJson)


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor's manifest dtype name, its shape, and its byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: everything that is known of a part without its data."""

    manifest: Manifest
    metadata: dict[str, str]  # as in the file
    positions: Span
    values: Span
    total_bytes: int  # length that the whole file must have

    @property
    def data_begin(self) -> int:
        """Offset of the data section, which holds both tensors without a gap."""
        return min(self.positions.begin, self.values.begin)


def parse_header(raw: bytes, limits: Limits) -> Header:
    """Parse the header of a container: the 8-byte length and the JSON of that length, no more.

    Raises:
        MalformedPart: The header is cut short or contradicts itself (`ChecksumMismatch` for the
            manifest's own checksum).
        TooLarge: A declared size exceeds `limits`.
    """
    header_end = _header_end(raw[:_LENGTH], limits)
    if len(raw) != header_end:
        raise MalformedPart(f"the header has {len(raw)} bytes of {header_end}")
    try:
        header = msgspec.json.decode(raw[_LENGTH:], type=_HeaderJson)
    except (ValueError, RecursionError) as error:
        why = in_one_line(str(error))  # it can quote a key of any length
        raise MalformedPart(f"safetensors header: {why}{_other_file(raw)}") from None

    positions = _span("__positions__", header.positions, header_end)
    values = _span("__values__", header.values, header_end)
    if positions.dtype != "uint8":
        raise MalformedPart(f"__positions__ is {positions.dtype}, not uint8")
    first, second = sorted((positions, values), key=lambda span: (span.begin, span.end))
    if first.begin != header_end or first.end != second.begin:
        raise MalformedPart("the tensors leave a gap in the data, or overlap")
    _check_size(second.end, "bytes", limits)
    manifest = parse_manifest(header.metadata, limits)
    last = manifest.params[-1] if manifest.params else None
    covered = [last.pos_end, last.val_end] if last else [0, 0]
    actual = [positions.shape[0], values.shape[0]]
    # Gaps shrink by any factor, so the indices that they expand to count as well.
    unpacked = sum(
        entry.nnz * (itemsize(entry.dtype) + _index_bytes(entry)) for entry in manifest.params
    )
    if manifest.encoding in PACKED_ENCODINGS:
        if values.dtype != "uint8":
            raise MalformedPart(f"__values__ of {manifest.encoding} is {values.dtype}, not uint8")
        unpacked += covered[0]
    elif covered != actual:
        raise MalformedPart("params does not cover the tensors", expected=covered, actual=actual)
    _check_size(unpacked, "bytes, unpacked", limits)
    return Header(manifest, header.metadata, positions, values, total_bytes=second.end)


def _index_bytes(entry: ParamEntry) -> int:
    """Return the bytes of each index that the positions of a param expand to."""
    return 0 if entry.is_dense else index_dtype(entry.numel).itemsize


class PartGate:
    """Checks a decompressed container while it arrives: its header, then its length; sans-I/O.

    Only the header is kept in memory; `header` is None until it is complete.
    """

    def __init__(self, limits: Limits) -> None:
        self.header: Header | None = None
        self._limits = limits
        self._raw = bytearray()
        self._header_end: int | None = None
        self._received = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes.

        Raises:
            MalformedPart, TooLarge: as soon as an error is known.
        """
        self._received += len(data)
        if self.header is None:
            self._feed_header(memoryview(data))
        if self.header is not None and self._received > self.header.total_bytes:
            raise MalformedPart(f"the part has more than its {self.header.total_bytes} bytes")

    def finish(self) -> Header:
        """Return the header; MalformedPart if the stream must not end here."""
        if self.header is None:
            raise MalformedPart(f"the part ends in its header, after {self._received} bytes")
        if self._received != self.header.total_bytes:
            raise MalformedPart(
                f"the part ends after {self._received} of {self.header.total_bytes} bytes"
            )
        return self.header

    def _feed_header(self, data: memoryview) -> None:
        if self._header_end is None:
            taken = _LENGTH - len(self._raw)
            self._raw += data[:taken]
            data = data[taken:]
            if len(self._raw) < _LENGTH:
                return
            self._header_end = _header_end(bytes(self._raw), self._limits)
        self._raw += data[: self._header_end - len(self._raw)]
        if len(self._raw) == self._header_end:
            self.header = parse_header(bytes(self._raw), self._limits)
            self._raw.clear()


def read_container(
    buffer: Buffer, limits: Limits
) -> tuple[Header, NDArray[np.uint8], NDArray[np.uint8]]:
    """Split a whole container into header and tensors, without copying it.

    Returns:
        The header; the bytes of the positions and of the values, uint8 [bytes] views of `buffer`.
        Their checksum is not verified.

    Raises:
        MalformedPart, TooLarge: See `parse_header`; or the file is shorter or longer than declared.
    """
    view = memoryview(buffer).cast("B")
    header_end = _header_end(bytes(view[:_LENGTH]), limits)
    header = parse_header(bytes(view[:header_end]), limits)
    if len(view) != header.total_bytes:
        raise MalformedPart(f"the part has {len(view)} bytes, not its {header.total_bytes}")
    data = np.frombuffer(view, np.uint8)
    positions, values = (data[span.begin : span.end] for span in (header.positions, header.values))
    return header, positions, values


def write_container(
    positions: NDArray[np.uint8],
    values: Sequence[NDArray[Any]],
    values_dtype: str,
    metadata: dict[str, str],
) -> bytes:
    """Return the bytes of the safetensors file. The metadata is not checked.

    Args:
        positions: uint8 [bytes].
        values: Each 1-d and contiguous, of any dtype; their bytes are concatenated.
        values_dtype: Manifest name of the dtype to declare for them.
    """
    width = itemsize(values_dtype)
    nbytes = sum(piece.nbytes for piece in values)
    # The values come first: safetensors puts wider dtypes first, which keeps them aligned.
    offsets = (0, nbytes, nbytes + positions.nbytes)
    header = msgspec.json.encode(
        _HeaderJson(
            metadata=metadata,
            positions=_Tensor("U8", (positions.size,), offsets[1:]),
            values=_Tensor(SAFETENSORS_CODE[values_dtype], (nbytes // width,), offsets[:2]),
        ),
        order="sorted",
    )
    header += b" " * (-len(header) % _ALIGN)
    length = len(header).to_bytes(_LENGTH, "little")
    raw = (piece.view(np.uint8).data for piece in values)
    return b"".join((length, header, *raw, positions.data))


def _check_size(declared: int, unit: str, limits: Limits) -> None:
    if declared > limits.max_part_bytes:
        raise TooLarge.of_part(f"the part declares {declared} {unit}", limits.max_part_bytes)


def _other_file(raw: bytes) -> str:
    """Return what a file is whose header is sound and not a part's; "" if it is not sound."""
    try:
        names = msgspec.json.decode(raw[_LENGTH:], type=dict[str, msgspec.Raw]).keys()
    except (ValueError, RecursionError):
        return ""
    if "__positions__" in names or "__values__" in names:
        return ""
    return "; it is a checkpoint's file, or another one with tensors, and not a part of a sync"


def _header_end(prefix: bytes, limits: Limits) -> int:
    """Return the offset of the header's end, from the first 8 bytes (fewer if cut short)."""
    if prefix.startswith(ZSTD_MAGIC):
        raise MalformedPart("a zstd frame where a container should be; unwrap it first")
    if len(prefix) < _LENGTH:
        raise MalformedPart("the part ends before its header")
    length = int.from_bytes(prefix, "little")
    if length > limits.max_header_bytes:
        raise TooLarge(
            f"the part declares a header of {length} bytes; is it a safetensors file?",
            limit=limits.max_header_bytes,
        )
    return _LENGTH + length


def _span(name: str, tensor: _Tensor, data_begin: int) -> Span:
    dtype = NAME_OF_CODE.get(tensor.dtype)
    if dtype is None:
        raise MalformedPart(f"{name} has the unknown dtype {tensor.dtype[:80]!r}")
    begin, end = tensor.data_offsets
    if len(tensor.shape) != 1 or tensor.shape[0] * itemsize(dtype) != end - begin:
        raise MalformedPart(
            f"{name} of shape {list(tensor.shape[:4])} is not {end - begin} bytes of {dtype}"
        )
    return Span(dtype, tensor.shape, data_begin + begin, data_begin + end)
