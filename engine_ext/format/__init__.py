"""Encode and decode the wire format: one part, from bytes to checked arrays and back; sans-I/O.

``docs/wire-format.md`` is the specification: what a part MUST and MAY be, every encoding with its
byte layout, the metadata, and the digest.

Reading is layered, and each layer can be used alone on a stream: `FrameReader` unwraps, `PartGate`
checks the header and the length, `decode_part` verifies and decodes. All of them raise
`engine_ext.errors.DeltaError` and nothing else for hostile bytes; the encoder, which is given
arguments and not bytes, raises ValueError.

Imports: `engine_ext.kernels`, and the ground floor.
"""

from engine_ext.format.checksum import (
    CHECKSUM_DIGITS,
    state_hash,
)
from engine_ext.format.compared_digest import digest_if_equal
from engine_ext.format.container import (
    Header,
    PartGate,
    read_container,
)
from engine_ext.format.digest import ALGORITHM as DIGEST_ALGORITHM
from engine_ext.format.digest import Digest, change_digest, tensor_digest
from engine_ext.format.digest_on_device import device_digest, device_factors, device_sums
from engine_ext.format.gap_streams import (
    byte_stream,
    bytes_suffice,
    decode_gaps,
    join_streams,
    read_streams,
)
from engine_ext.format.identity import Origin, PartId, RunSender, Unproven, continues, part_identity
from engine_ext.format.manifest import (
    ANONYMOUS,
    BIT_CHANGES,
    DIFFERENCES,
    ENCODINGS,
    MAX_VERSION,
    PACKED_ENCODINGS,
    Limits,
    Manifest,
    check_run,
    optional_version,
    skip_symbol,
    split_owner,
)
from engine_ext.format.param_delta import EncodedDelta, ParamDelta
from engine_ext.format.part import (
    DecodedPart,
    UnpackedPart,
    decode_part,
    encode_part,
    expand_part,
    warm_up_unpacking,
)
from engine_ext.format.positions import (
    position_bytes,
    split_positions,
)
from engine_ext.format.signature import (
    SIGNATURE_HEADER,
    SIGNATURE_SUFFIX,
    Verifier,
    sign,
    signing_key,
)
from engine_ext.format.streams_on_device import ChangedElements, DeviceEncoded, encode_on_device
from engine_ext.format.ulp_differences import (
    EncodedDifferences,
    differences_of,
    join_differences,
    read_differences,
)
from engine_ext.format.verified_part import read_unpacked, verify_container
from engine_ext.format.zstd_frames import ZSTD_MAGIC, FrameReader, inflate

__all__ = [
    "ANONYMOUS",
    "BIT_CHANGES",
    "CHECKSUM_DIGITS",
    "DIFFERENCES",
    "DIGEST_ALGORITHM",
    "ENCODINGS",
    "MAX_VERSION",
    "PACKED_ENCODINGS",
    "SIGNATURE_HEADER",
    "SIGNATURE_SUFFIX",
    "ZSTD_MAGIC",
    "ChangedElements",
    "DecodedPart",
    "DeviceEncoded",
    "Digest",
    "EncodedDelta",
    "EncodedDifferences",
    "FrameReader",
    "Header",
    "Limits",
    "Manifest",
    "Origin",
    "ParamDelta",
    "PartGate",
    "PartId",
    "RunSender",
    "UnpackedPart",
    "Unproven",
    "Verifier",
    "byte_stream",
    "bytes_suffice",
    "change_digest",
    "check_run",
    "continues",
    "decode_gaps",
    "decode_part",
    "device_digest",
    "device_factors",
    "device_sums",
    "differences_of",
    "digest_if_equal",
    "encode_on_device",
    "encode_part",
    "expand_part",
    "inflate",
    "join_differences",
    "join_streams",
    "optional_version",
    "part_identity",
    "position_bytes",
    "read_container",
    "read_differences",
    "read_streams",
    "read_unpacked",
    "sign",
    "signing_key",
    "skip_symbol",
    "split_owner",
    "split_positions",
    "state_hash",
    "tensor_digest",
    "verify_container",
    "warm_up_unpacking",
]
