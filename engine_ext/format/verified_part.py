"""What intake leaves of a part for the ranks of a host: one file, verified and decompressed.

Only processes of one engine read such a file, so its layout is no contract::

    what            bytes
    data            a plain container as it was sent; or, of a packed encoding, the params' values,
                    then the bits cleared before, then the gap streams, each one after another
    columns         of the params: `PartColumns`, int64
    layout          msgpack of `PartLayout`
    its length      8, little-endian

Gap streams stay as they are: each rank expands them where it locates the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from engine_ext.dtypes import itemsize
from engine_ext.format.container import Header
from engine_ext.format.identity import part_identity
from engine_ext.format.manifest import PACKED_ENCODINGS, Manifest
from engine_ext.format.part import UnpackedPart, place_arrays, unpack_part
from engine_ext.format.part_arrays import PartColumns
from engine_ext.structs import prepare

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LENGTH: Final = 8


class PartLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where a verified file has what; its manifest is checked already."""

    identity: str
    manifest: Manifest
    values_dtype: str | None  # of all values; None: each param has its own
    positions: int  # offset of the params' positions, in bytes
    values: int  # offset of the params' values
    columns: int  # offset of the columns
    cleared: int | None = None  # offset of the bits cleared before, in the order of the values


prepare(PartLayout)


@dataclass(frozen=True, slots=True)
class VerifiedContents:
    """What the file of a part must hold for the ranks.

    Attributes:
        replaces: whether `pieces` are all of it; else they follow the container. They can be views
            of the container only if they follow it.
    """

    identity: str
    replaces: bool
    pieces: Sequence[Buffer]


def verify_container(header: Header, container: Buffer) -> VerifiedContents:
    """Verify the data of a whole container, and decompress it if it is packed.

    Raises:
        ChecksumMismatch: the data is not what the sender hashed.
        MalformedPart: a frame is corrupt, or a size is not that of the manifest.
    """
    identity, manifest = part_identity(header, container), header.manifest
    begins = header.positions.begin, header.values.begin
    if manifest.encoding not in PACKED_ENCODINGS:
        columns = PartColumns.of(manifest.params)
        end = memoryview(container).nbytes
        layout = PartLayout(identity, manifest, header.values.dtype, *begins, end)
        return VerifiedContents(identity, False, _footer(columns, layout))
    data = np.frombuffer(memoryview(container), np.uint8)
    positions = data[header.positions.begin : header.positions.end]
    unpacked = unpack_part(header, positions, data[header.values.begin : header.values.end])
    given = (unpacked.values, unpacked.cleared, unpacked.streams)
    found = [None if arrays is None else arrays.whole for arrays in given]
    # Views of the container would change when the file is written.
    pieces = [
        one.copy() if np.may_share_memory(one, data) else one for one in found if one is not None
    ]
    ends = np.cumsum([piece.size for piece in pieces]).tolist()
    cleared = None if unpacked.cleared is None else ends[0]
    layout = PartLayout(identity, manifest, None, ends[-2], 0, ends[-1], cleared)
    whole = [*(piece.data for piece in pieces), *_footer(unpacked.columns, layout)]
    return VerifiedContents(identity, True, whole)


def read_unpacked(file: Buffer, identity: str) -> UnpackedPart | None:
    """Return the part in a verified file; None if it is not whole, or of another identity.

    It keeps views of the file, which must stay unchanged as long as they live.
    """
    with memoryview(file) as view:
        end = len(view) - _LENGTH
        size = int.from_bytes(view[end:], "little")
        try:
            layout = msgspec.msgpack.decode(view[max(end - size, 0) : end], type=PartLayout)
        except (ValueError, RecursionError):
            return None
    if layout.identity != identity:
        return None
    data = np.frombuffer(memoryview(file), np.uint8)
    columns = PartColumns.read(data[layout.columns : end - size])
    nnz, own = columns.nnz, layout.values_dtype
    nbytes = int((nnz * columns.width).sum() if own is None else nnz.sum() * itemsize(own))
    arrays = (data[at : at + nbytes] for at in (layout.values, layout.cleared) if at is not None)
    streams = data[layout.positions : layout.positions + int(columns.pos_size.sum())]
    return place_arrays(layout.manifest, columns, own, streams, *arrays)


def _footer(columns: PartColumns, layout: PartLayout) -> list[Buffer]:
    encoded = msgspec.msgpack.encode(layout)
    return [columns.whole().view(np.uint8).data, encoded + len(encoded).to_bytes(_LENGTH, "little")]
