"""What intake leaves of a part for the ranks of a host: one file, verified and decompressed.

Only processes of one engine read such a file, so its layout is no contract::

    what            bytes
    data            a plain container as it was sent; or, of a packed encoding, the params' values,
                    then the bits cleared before, then the gap streams, each one after another
    layout          msgpack of `PartLayout`
    its length      8, little-endian

Gap streams stay as they are: each rank expands them where it locates the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype
from engine_ext.format.container import Header
from engine_ext.format.identity import part_identity
from engine_ext.format.manifest import PACKED_ENCODINGS, Manifest
from engine_ext.format.part import UnpackedPart, unpack_part
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
        layout = PartLayout(identity, manifest, header.values.dtype, *begins)
        return VerifiedContents(identity, False, [_footer(layout)])
    data = np.frombuffer(memoryview(container), np.uint8)
    positions = data[header.positions.begin : header.positions.end]
    unpacked = unpack_part(header, positions, data[header.values.begin : header.values.end])
    values, cleared, streams = (
        [own.view(np.uint8) for own in arrays]
        for arrays in (unpacked.values, unpacked.cleared or (), unpacked.streams)
    )
    end = sum(own.size for own in values)
    layout = PartLayout(
        identity,
        manifest,
        None,
        end + sum(own.size for own in cleared),
        0,
        end if cleared else None,
    )
    # Views of the container would change when the file is written.
    own = [
        piece.copy() if np.may_share_memory(piece, data) else piece for piece in values + cleared
    ]
    return VerifiedContents(
        identity, True, [*(p.data for p in own), *(s.data for s in streams), _footer(layout)]
    )


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
    data, params = np.frombuffer(memoryview(file), np.uint8), layout.manifest.params
    at = layout.positions
    streams = [data[at + entry.pos_start : at + entry.pos_end] for entry in params]
    values = [*_values(data, layout, layout.values)]
    cleared = None if layout.cleared is None else [*_values(data, layout, layout.cleared)]
    return UnpackedPart(layout.manifest, layout.values_dtype, streams, values, cleared)


def _values(data: NDArray[np.uint8], layout: PartLayout, start: int) -> Iterator[NDArray[Any]]:
    """Yield each param's values, or the bits cleared before, from their offset on."""
    for entry in layout.manifest.params:
        bits = bits_dtype(layout.values_dtype or entry.dtype)
        end = start + entry.nnz * bits.itemsize
        yield np.require(data[start:end].view(bits), requirements="A")
        start = end


def _footer(layout: PartLayout) -> bytes:
    encoded = msgspec.msgpack.encode(layout)
    return encoded + len(encoded).to_bytes(_LENGTH, "little")
