"""A whole part: from the params' changed elements to bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import TORCH_DTYPE, bits_dtype
from engine_ext.errors import DeltaError, MalformedPart
from engine_ext.wire.checksum import verify_checksum, xxh3_checksum
from engine_ext.wire.container import Header, read_container, write_container
from engine_ext.wire.exponent_planes import read_planes, write_planes
from engine_ext.wire.gap_streams import read_streams, write_streams
from engine_ext.wire.limits import Limits
from engine_ext.wire.manifest import (
    DIFFERENCES,
    PACKED_ENCODINGS,
    Manifest,
    ParamEntry,
    manifest_checksum,
    parse_manifest,
)
from engine_ext.wire.positions import Positions, decode_positions, encode_positions
from engine_ext.wire.ulp_differences import read_differences, write_differences
from engine_ext.wire.undo_promotion import narrow_values
from engine_ext.wire.zstd_frames import compress_frame

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DEFAULT_LIMITS: Final = Limits()
_WORTH_THREADS = 1 << 19  # bytes that take much longer to pack or unpack than threads to start

_Place = tuple[NDArray[np.int64] | None, Positions | None]


@dataclass(frozen=True, slots=True)
class ParamDelta:
    """What one part says of one param, in checkpoint coordinates.

    Attributes:
        name, dtype, shape: As in the checkpoint; the dtype by its manifest name.
        indices: int64 [nnz], ascending unique flat indices, to be encoded also int32; None means
            dense.
        values: The new elements' bit patterns, unsigned ints of the dtype's width; [nnz], or
            [numel] where dense. May be a read-only view of the part's buffer.
        differences: The values are new less old bit patterns, modulo the width, and never dense.
        positions: What `indices` were decoded from, where they were; may be such a view too.
        stream: Their gap stream, to be encoded, where it is known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: NDArray[np.int64] | None
    values: NDArray[Any]
    differences: bool = False
    positions: Positions | None = field(default=None, compare=False, repr=False)
    stream: NDArray[np.uint8] | None = field(default=None, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nnz(self) -> int:
        """Elements that the part sends."""
        return self.values.size


@dataclass(frozen=True, slots=True)
class Part:
    """A decoded part; the deltas stand in the order of ``params``."""

    header: Header
    deltas: tuple[ParamDelta, ...]

    @property
    def manifest(self) -> Manifest:
        """The part's parsed metadata."""
        return self.header.manifest


def decode_part(buffer: Buffer, limits: Limits = _DEFAULT_LIMITS) -> Part:
    """Verify a container and decode every param of it.

    Args:
        buffer: The decompressed container. The deltas may keep views of it, so it must stay
            alive and unchanged as long as they do.
        limits: Bounds on what it may declare.

    Raises:
        MalformedPart: It is truncated, contradicts itself, is not what the sender hashed
            (`ChecksumMismatch`), or a value does not narrow to its param's dtype.
        TooLarge: A declared size is over `limits`.
        NotUpdatable: An index is out of range or not ascending.
    """
    header, positions, values = read_container(buffer, limits)
    manifest = header.manifest
    verify_checksum(manifest.checksum, positions, values, header.values.dtype)
    if manifest.encoding in PACKED_ENCODINGS:
        places, own_values = _unpacked(manifest, positions, values)
    else:
        streams = (positions[entry.pos_start : entry.pos_end] for entry in manifest.params)
        places = _places(manifest.encoding, manifest.params, streams)
        own_values = [*_own_values(header, values)]
    return Part(
        header,
        tuple(
            ParamDelta(
                entry.name,
                entry.dtype,
                entry.shape,
                indices,
                own,
                manifest.encoding == DIFFERENCES,
                sent,
            )
            for entry, (indices, sent), own in zip(manifest.params, places, own_values, strict=True)
        ),
    )


def _unpacked(
    manifest: Manifest, positions: NDArray[np.uint8], values: NDArray[np.uint8]
) -> tuple[list[_Place], list[NDArray[Any]]]:
    """Each param's places and values, of tensors that are compressed; large ones by threads."""
    encoding, params = manifest.encoding, manifest.params
    read = read_differences if encoding == DIFFERENCES else read_planes
    if positions.size + values.size < _WORTH_THREADS:
        streams = read_streams(positions, params)
        return _places(encoding, params, streams), read(values, params)
    with ThreadPoolExecutor(2, thread_name_prefix="delta-decode") as pool:
        own_values = pool.submit(read, values, params)
        unpacked = [*read_streams(positions, params)]
        half = sum(2 * entry.pos_end <= params[-1].pos_end for entry in params)
        first = pool.submit(_places, encoding, params[:half], unpacked[:half])
        second = _places(encoding, params[half:], unpacked[half:])
        return first.result() + second, own_values.result()


def _places(
    encoding: str, params: Sequence[ParamEntry], streams: Iterable[NDArray[np.uint8]]
) -> list[_Place]:
    """Each param's indices, and what they were decoded from."""
    return [
        (_indices(entry, encoding, stream), _positions(entry, encoding, stream))
        for entry, stream in zip(params, streams, strict=True)
    ]


def _own_values(header: Header, raw: NDArray[np.uint8]) -> Iterator[NDArray[Any]]:
    """Each param's values, out of a tensor that holds them as they are or widened."""
    wide = header.values.dtype
    values = np.require(raw.view(bits_dtype(wide)), requirements="A")
    for entry in header.manifest.params:
        own = values[entry.val_start : entry.val_end]
        yield narrow_values(own, wide, entry.dtype, entry.name)


def _positions(entry: ParamEntry, encoding: str, raw: NDArray[np.uint8]) -> Positions | None:
    return None if entry.is_dense else Positions(encoding, raw, entry.pos_width)


def _indices(entry: ParamEntry, encoding: str, raw: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    if entry.is_dense:
        return None
    try:
        indices = decode_positions(encoding, raw, entry.pos_width, entry.numel)
        if indices.size != entry.nnz:
            raise MalformedPart(f"{indices.size} gaps end in the stream of {entry.nnz} values")
    except DeltaError as error:
        error.operands["tensor"] = entry.name
        raise
    return indices


def encode_part(
    deltas: Sequence[ParamDelta],
    *,
    encoding: str,
    current_version: int | None,
    base_version: int | None = None,
    sync_id: str | None = None,
    part: int | None = None,
    num_parts: int | None = None,
    full: bool = False,
    digest_part: str | None = None,
    digest_before: str | None = None,
    digest_after: str | None = None,
    with_manifest_checksum: bool = True,
) -> bytes:
    """Build one part; `decode_part` of the (unwrapped) result gives `deltas` back.

    Args:
        deltas: One dtype for all; may be empty. Differences with ``gap8_ulp``, and with it only.
        encoding: One of `positions.ENCODINGS`. ``deltas_zstd`` gives the wrapped frame.
        current_version: The version that the sync leads to. This and what follows is metadata, left
            out if None.
        base_version: The version that it starts from.
        sync_id: One string for all parts of the sync.
        part: 0-based number of this part.
        num_parts: How many parts the sync has.
        full: Every param is dense, and the sync replaces whatever the engine holds.
        digest_part: Of the new values minus that of the old ones, 32 hex digits.
        digest_before: Of all covered tensors at the base version.
        digest_after: Of all covered tensors at the target version.
        with_manifest_checksum: Whether to write ``manifest_checksum``.

    Raises:
        ValueError: The deltas have several dtypes, an argument is one that `decode_part` would
            refuse, or an index that the encoding cannot carry.
    """
    dtypes = {delta.dtype for delta in deltas}
    if len(dtypes) > 1:
        raise ValueError(f"a part holds one dtype, not {', '.join(sorted(dtypes))}")
    values_dtype = dtypes.pop() if dtypes else "uint8"
    if values_dtype not in TORCH_DTYPE:
        raise ValueError(f"unknown dtype {values_dtype!r}")

    entries: list[ParamEntry] = []
    pieces: list[NDArray[np.uint8]] = []
    pos_end = val_end = 0
    for delta in deltas:
        _check_delta(delta, differences=encoding == DIFFERENCES)
        if delta.indices is None:
            raw, width = np.empty(0, np.uint8), 0
        else:
            raw, width = encode_positions(encoding, delta.indices, delta.stream)
        pos_start, pos_end = pos_end, pos_end + raw.size
        val_start, val_end = val_end, val_end + delta.nnz
        entries.append(
            ParamEntry(
                name=delta.name,
                dtype=delta.dtype,
                shape=delta.shape,
                pos_start=pos_start,
                pos_end=pos_end,
                pos_width=width,
                val_start=val_start,
                val_end=val_end,
            )
        )
        pieces.append(raw)
    if encoding in PACKED_ENCODINGS:
        widths = [entry.pos_width for entry in entries]
        positions, packed = _packed(encoding, pieces, widths, [delta.values for delta in deltas])
        values, values_dtype = [packed], "uint8"
    else:
        positions = np.concatenate([np.empty(0, np.uint8), *pieces])
        values = [np.ascontiguousarray(delta.values) for delta in deltas]

    optional = {
        "current_version": current_version,
        "base_version": base_version,
        "part": part,
        "num_parts": num_parts,
        "sync_id": sync_id,
        "full": "true" if full else None,
        "digest_part": digest_part,
        "digest_before": digest_before,
        "digest_after": digest_after,
    }
    metadata = {
        "encoding": encoding,
        "params": msgspec.json.encode(entries).decode(),
        "checksum": xxh3_checksum(positions.data, *(piece.data for piece in values)),
        **{key: str(value) for key, value in optional.items() if value is not None},
    }
    if with_manifest_checksum:
        metadata["manifest_checksum"] = manifest_checksum(metadata)
    try:
        parse_manifest(metadata, _DEFAULT_LIMITS)
    except DeltaError as error:
        raise ValueError(f"{error.message} {error.operands or ''}".rstrip()) from None
    container = write_container(positions, values, values_dtype, metadata)
    return compress_frame(container) if encoding == "deltas_zstd" else container


def _packed(
    encoding: str,
    streams: Sequence[NDArray[np.uint8]],
    widths: Sequence[int],
    values: Sequence[NDArray[Any]],
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Both tensors of a part that compresses them; large ones side by side."""
    write = write_differences if encoding == DIFFERENCES else write_planes
    if sum(array.nbytes for array in (*streams, *values)) < _WORTH_THREADS:
        return write_streams(streams, widths), write(values)
    with ThreadPoolExecutor(1, thread_name_prefix="delta-encode") as pool:
        positions = pool.submit(write_streams, streams, widths)
        packed = write(values)
        return positions.result(), packed


def _check_delta(delta: ParamDelta, *, differences: bool) -> None:
    if delta.values.ndim != 1 or delta.values.dtype != bits_dtype(delta.dtype):
        raise ValueError(
            f"{delta.name}: values are {delta.values.dtype} {delta.values.shape},"
            f" not the bits of {delta.dtype} in one dimension"
        )
    sent = delta.numel if delta.indices is None else delta.indices.size
    if delta.nnz != sent:
        raise ValueError(f"{delta.name}: {delta.nnz} values for {sent} elements")
    if delta.differences != differences:
        raise ValueError(f"{delta.name}: differences are for {DIFFERENCES}, and it for them")
    if delta.indices is not None:
        if delta.indices.ndim != 1 or delta.indices.dtype not in (np.int32, np.int64):
            raise ValueError(f"{delta.name}: indices are not int32 or int64 in one dimension")
        if delta.indices.size and delta.indices[-1] >= delta.numel:
            raise ValueError(f"{delta.name}: an index beyond its {delta.numel} elements")
