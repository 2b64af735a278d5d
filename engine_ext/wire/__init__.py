"""Encode and decode the wire format: one part, from bytes to checked arrays and back; sans-I/O.

A part is one safetensors file; with ``deltas_zstd`` the whole file is one zstd frame. All integers
are little-endian.

File (the two tensors may be in either order; the encoder's is shown, which aligns the values)::

    offset          bytes         content
    0               8             n, length of the header
    8               n             header, JSON: __metadata__, __positions__, __values__
    8 + n           nnz * width   __values__, the params' new elements, in the params' dtype
    ... + values    positions     __positions__, uint8, the params' positions

Positions of one param, ``pos_width`` bytes each, for flat indices idx[0] < idx[1] < ...::

    encoding        pos_width     content
    indices         4             int32 idx[k]; tensors of less than 2**31 elements
    deltas          2             uint16 idx[k] - idx[k-1] - 1, with idx[-1] = -1
    deltas          4             uint32, the same, for a param with a larger gap
    deltas_zstd     2, 4          as deltas
    gap8_exp        1             a gap stream: idx[k] - idx[k-1] - 1 in bytes; 255 skips 255
                                  elements and continues the gap; a smaller byte ends it
    gap8_exp        2             the same in uint16; 65535 skips 65535
    gap8_ulp        1, 2          as gap8_exp
    any             0             dense: no positions, every element's value; not with gap8_ulp

In the packed encodings (gap8) both tensors are uint8 and hold zstd frames that declare their
content sizes; there is no frame if there is nothing to compress. ``pos_start`` and ``pos_end``
count bytes of the gap streams, ``val_start`` and ``val_end`` elements::

    __positions__   one frame: param by param the gap stream, or the low bytes of a uint16 one; then
                    param by param the high bytes of the uint16 ones
    __values__      gap8_exp: of each bit pattern, rotated left by one bit, the lower bytes: param
                    by param in planes, the more significant one first; then one frame: the highest
                    bytes of all params (bfloat16: mantissa and sign as they are, exponents in
                    the frame)
                    gap8_ulp: one frame. z is the zigzag code of new - old, the bit patterns taken
                    as unsigned ints, modulo their width: z = 2d for d >= 0, else -2d - 1. Param by
                    param min(z, 15) in nibbles, two a byte, the first one low, the last byte
                    padded with 0; then param by param every z >= 15, in the dtype's width

The differences of ``gap8_ulp`` are added to the current values, so the encoding requires
``digest_part``, which proves the old values of the elements, and cannot be ``full``.

``__metadata__``, all strings::

    encoding            one of the above
    params              JSON list of {name, dtype, shape, pos_start, pos_end, pos_width,
                        val_start, val_end}: slices of the two tensors, without gaps, in order;
                        pos in bytes, val in elements
    checksum            xxh3_128:<32 hex> of the positions' bytes then the values', or slime's
                        decimal
    manifest_checksum   xxh3_128:<32 hex> of the other metadata as sorted lines key=value
    current_version     decimal, 0 to 2**63 - 1: the version that the sync leads to
    base_version        the version that it starts from
    part, num_parts     0-based number, count
    sync_id             one string for all parts of a sync
    full                true: all params are dense and replace the current values
    digest_part, digest_before, digest_after
                        32 hex digits each

Only the first three are required. Unknown keys are ignored.

Reading is layered, and each layer can be used alone on a stream: `FrameReader` unwraps, `PartGate`
checks the header and the length, `decode_part` verifies and decodes. All of them raise
`engine_ext.errors.DeltaError` and nothing else for hostile bytes; the encoder, which is given
arguments and not bytes, raises ValueError.
"""

from engine_ext.wire.checksum import slime_checksum, verify_checksum, xxh3_checksum
from engine_ext.wire.container import (
    Header,
    PartGate,
    Span,
    parse_header,
    read_container,
    write_container,
)
from engine_ext.wire.digest import Digest, change_digest, tensor_digest
from engine_ext.wire.gap_streams import byte_stream, join_streams
from engine_ext.wire.identity import PartId, part_identity
from engine_ext.wire.limits import Limits
from engine_ext.wire.manifest import (
    DIFFERENCES,
    ENCODINGS,
    MAX_VERSION,
    PACKED_ENCODINGS,
    Manifest,
    ParamEntry,
    manifest_checksum,
    parse_manifest,
    parse_version,
)
from engine_ext.wire.part import ParamDelta, Part, decode_part, encode_part
from engine_ext.wire.positions import Positions, decode_positions, encode_positions, position_bytes
from engine_ext.wire.signature import (
    HMAC_KEY_ENVIRONMENT,
    SIGNATURE_HEADER,
    SIGNATURE_SUFFIX,
    Verifier,
    sign,
    signing_key,
)
from engine_ext.wire.zstd_frames import ZSTD_MAGIC, FrameReader, compress_frame

__all__ = [
    "DIFFERENCES",
    "ENCODINGS",
    "HMAC_KEY_ENVIRONMENT",
    "MAX_VERSION",
    "PACKED_ENCODINGS",
    "SIGNATURE_HEADER",
    "SIGNATURE_SUFFIX",
    "ZSTD_MAGIC",
    "Digest",
    "FrameReader",
    "Header",
    "Limits",
    "Manifest",
    "ParamDelta",
    "ParamEntry",
    "Part",
    "PartGate",
    "PartId",
    "Positions",
    "Span",
    "Verifier",
    "byte_stream",
    "change_digest",
    "compress_frame",
    "decode_part",
    "decode_positions",
    "encode_part",
    "encode_positions",
    "join_streams",
    "manifest_checksum",
    "parse_header",
    "parse_manifest",
    "parse_version",
    "part_identity",
    "position_bytes",
    "read_container",
    "sign",
    "signing_key",
    "slime_checksum",
    "tensor_digest",
    "verify_checksum",
    "write_container",
    "xxh3_checksum",
]
