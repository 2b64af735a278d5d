"""Keep what a part decodes to in a file, so that the ranks of one host decode it once.

Only processes of one engine read such a file, on the machine that wrote it, so its layout is no
contract. What the part itself holds in plain is not repeated::

    what                bytes
    magic, key          16 + 32
    length of the file  8
    then for each param, everything at a multiple of 64:
    indices             nnz * 4, or nnz * 8 for a tensor of more than 2**31 elements
    values              nnz * width; only of a packed encoding
    cleared             nnz * width; only of gap8_xor

A dense param has no indices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype
from engine_ext.format.container import Header, read_container
from engine_ext.format.gap_streams import index_dtype
from engine_ext.format.manifest import BIT_CHANGES, PACKED_ENCODINGS, Limits, ParamEntry
from engine_ext.format.part import Part, make_delta, plain_values

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAGIC: Final = b"decoded part 02\n"
_ALIGN: Final = 64

_Array = tuple[np.dtype[Any], int]  # its dtype and how many elements it has


def write_decoded(file: BinaryIO, part: Part, key: str) -> None:
    """Write what a part was decoded to; `key` has 32 characters and tells it from others."""
    layout = _layout(part.header)
    _write(file, _head(key, layout))
    for delta, arrays in zip(part.deltas, layout, strict=True):
        own: list[NDArray[Any]] = [] if delta.indices is None else [delta.indices]
        if part.manifest.encoding in PACKED_ENCODINGS:
            own.append(delta.values)
        if delta.cleared is not None:
            own.append(delta.cleared)
        for array, (dtype, _) in zip(own, arrays, strict=True):
            _write(file, array.astype(dtype, copy=False).view(np.uint8).data)


def is_decoded(decoded: Buffer, key: str) -> bool:
    """Return whether a file is whole, and was written with this key."""
    with memoryview(decoded) as view:
        head = bytes(view[: len(_MAGIC) + 40])
        return head == _MAGIC + key.encode() + len(view).to_bytes(8, "little")


def read_decoded(container: Buffer, decoded: Buffer, limits: Limits) -> Part:
    """Return the same as `decode_part` of a container that has been decoded and verified.

    The deltas keep views of both buffers.

    Args:
        decoded: what was written for this very container, see `is_decoded`.
    """
    header, _, values = read_container(container, limits)
    manifest = header.manifest
    packed = manifest.encoding in PACKED_ENCODINGS
    plain = iter(() if packed else plain_values(header, values))
    data = np.frombuffer(memoryview(decoded), np.uint8)
    at = _padded(len(_MAGIC) + 40)
    deltas = []
    for entry, arrays in zip(manifest.params, _layout(header), strict=True):
        own: list[NDArray[Any]] = []
        for dtype, count in arrays:
            end = at + count * dtype.itemsize
            own.append(data[at:end].view(dtype))
            at = _padded(end)
        indices = None if entry.is_dense else own[0]
        cleared = own.pop() if manifest.encoding == BIT_CHANGES else None
        bits = own[-1] if packed else next(plain)
        deltas.append(make_delta(manifest.encoding, entry, indices, bits, cleared))
    return Part(header, tuple(deltas))


def _layout(header: Header) -> list[list[_Array]]:
    """Return which arrays the file has of each param."""
    encoding = header.manifest.encoding
    return [_arrays(entry, encoding) for entry in header.manifest.params]


def _arrays(entry: ParamEntry, encoding: str) -> list[_Array]:
    packed = encoding in PACKED_ENCODINGS
    arrays: list[_Array] = []
    if not entry.is_dense:
        arrays.append((index_dtype(entry.numel), entry.nnz))
    if packed:
        arrays += [(bits_dtype(entry.dtype), entry.nnz)] * (2 if encoding == BIT_CHANGES else 1)
    return arrays


def _head(key: str, layout: list[list[_Array]]) -> bytes:
    sizes = [count * dtype.itemsize for arrays in layout for dtype, count in arrays]
    length = _padded(len(_MAGIC) + 40) + sum(map(_padded, sizes))
    return _MAGIC + key.encode() + length.to_bytes(8, "little")


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)
    file.write(bytes(_padded(len(data)) - len(data)))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
