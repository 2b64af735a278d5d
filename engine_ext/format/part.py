"""Encode a whole part from the params' changed elements to bytes, and decode it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import TORCH_DTYPE, bits_dtype, itemsize
from engine_ext.errors import DeltaError, MalformedPart
from engine_ext.format import exponent_planes, ulp_differences
from engine_ext.format.bit_changes import decode_changes, encode_changes
from engine_ext.format.checksum import verify_checksum, xxh3_checksum
from engine_ext.format.container import Header, read_container, write_container
from engine_ext.format.digest import ALGORITHM
from engine_ext.format.exponent_planes import decode_planes, encode_planes
from engine_ext.format.gap_streams import (
    check_streams,
    decode_many_gaps,
    pack_streams,
    unpack_streams,
)
from engine_ext.format.manifest import (
    BIT_CHANGES,
    DIFFERENCES,
    PACKED_ENCODINGS,
    Limits,
    Manifest,
    ParamEntry,
    manifest_checksum,
    parse_manifest,
    skip_symbol,
)
from engine_ext.format.param_delta import EncodedDelta, ParamDelta
from engine_ext.format.part_arrays import PartArrays, PartColumns
from engine_ext.format.positions import decode_positions, encode_positions
from engine_ext.format.ulp_differences import decode_differences, encode_differences
from engine_ext.format.undo_promotion import narrow_values
from engine_ext.format.zstd_frames import compress_frame
from engine_ext.resources import usable_cores

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DEFAULT_LIMITS: Final = Limits()
_NOTHING: Final = np.empty(0, np.uint8)
_WORTH_THREADS = 1 << 19  # bytes that take far longer to pack or unpack than threads take to start
_SHARE = 1 << 20  # bytes of gap streams that are worth a thread of their own

_Indices = NDArray[Any] | None  # None for a dense param


@dataclass(frozen=True, slots=True)
class DecodedPart:
    """A decoded part; the deltas are in the order of ``params``."""

    manifest: Manifest
    deltas: tuple[ParamDelta, ...]


@dataclass(frozen=True, slots=True)
class UnpackedPart:
    """A part without compression, one array per param; `expand_part` makes deltas of it.

    Attributes:
        columns: of the manifest's params.
        streams: uint8 [bytes], the positions as the encoding has them.
        values: unsigned ints [nnz], in the width of `values_dtype`, or of the param's own dtype if
            that is None.
        cleared: like `values`, only of ``gap8_xor``; None if all of them are 0.
    """

    manifest: Manifest
    columns: PartColumns
    values_dtype: str | None
    streams: PartArrays
    values: PartArrays
    cleared: PartArrays | None = None


def decode_part(buffer: Buffer, limits: Limits = _DEFAULT_LIMITS) -> DecodedPart:
    """Verify a decompressed container and decode all its params.

    The deltas can keep views of `buffer`, so it must stay unchanged as long as they live.

    Raises:
        MalformedPart: It is truncated, contradicts itself, is not what the sender hashed
            (`ChecksumMismatch`), or a value does not narrow to its param's dtype.
        TooLarge: A declared size is over `limits`.
        NotUpdatable: An index is out of range or not ascending.

    Example:
        >>> import numpy as np
        >>> delta = ParamDelta("w", "bfloat16", (4,), np.array([2]), np.array([0x3F80], np.uint16))
        >>> raw = encode_part([delta], encoding="deltas", current_version=1)
        >>> decode_part(raw).deltas[0].indices
        array([2], dtype=int32)
    """
    header, positions, values = read_container(buffer, limits)
    verify_checksum(header.manifest.checksum, positions, values, header.values.dtype)
    return expand_part(unpack_part(header, positions, values))


def unpack_part(
    header: Header, positions: NDArray[np.uint8], values: NDArray[np.uint8]
) -> UnpackedPart:
    """Decompress what a verified container holds, with threads if it is large.

    Args:
        positions, values: The bytes of both tensors. Data that is not compressed stays a view of
            them.

    Raises:
        MalformedPart: A frame is corrupt, or a size is not that of the manifest.
    """
    manifest = header.manifest
    params, columns = manifest.params, PartColumns.of(manifest.params)
    if manifest.encoding not in PACKED_ENCODINGS:
        return place_arrays(manifest, columns, header.values.dtype, positions, values)
    if positions.size + values.size < _WORTH_THREADS or usable_cores() == 1:
        streams = unpack_streams(positions, params)
        return place_arrays(manifest, columns, None, streams, *_packed_values(manifest, values))
    with ThreadPoolExecutor(1, thread_name_prefix="delta-decode") as pool:
        unpacked = pool.submit(_packed_values, manifest, values)
        streams = unpack_streams(positions, params)
        return place_arrays(manifest, columns, None, streams, *unpacked.result())


def _packed_values(
    manifest: Manifest, raw: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Return the values of all params of a packed part, and the bits cleared before."""
    if manifest.encoding == BIT_CHANGES:
        return decode_changes(raw, manifest.params)
    decode = decode_differences if manifest.encoding == DIFFERENCES else decode_planes
    return decode(raw, manifest.params), None


def place_arrays(
    manifest: Manifest,
    columns: PartColumns,
    values_dtype: str | None,
    positions: NDArray[np.uint8],
    values: NDArray[np.uint8],
    cleared: NDArray[np.uint8] | None = None,
) -> UnpackedPart:
    """Return the part whose arrays are in these, param by param; uint8 [bytes] each.

    Args:
        values_dtype: See `UnpackedPart`, for it and what precedes it.
    """
    nnz, width = columns.nnz, columns.width
    if values_dtype is not None:
        width = np.full_like(width, itemsize(values_dtype))
    return UnpackedPart(
        manifest,
        columns,
        values_dtype,
        PartArrays(positions, columns.pos_size, np.ones_like(width)),
        PartArrays(values, nnz, width),
        None if cleared is None else PartArrays(cleared, nnz, width),
    )


def expand_part(
    part: UnpackedPart, threads: int | None = None, numbers: Sequence[int] | None = None
) -> DecodedPart:
    """Make the indices and values of each param, with threads if there are many positions.

    The deltas can keep views of the arrays.

    Args:
        numbers: which of the params, ascending; None: all.

    Raises:
        MalformedPart: The positions are not as many as the values, or a value does not narrow to
            its param's dtype.
        NotUpdatable: An index is out of range or not ascending.
    """
    manifest = part.manifest
    encoding, params = manifest.encoding, manifest.params
    if numbers is None:
        numbers = range(len(params))
    else:
        params = tuple(params[number] for number in numbers)
    streams, own = part.streams.views(numbers), part.values.views(numbers)
    cleared = None if part.cleared is None else part.cleared.views(numbers)
    size, cores = sum(stream.size for stream in streams), threads or usable_cores()
    if encoding not in PACKED_ENCODINGS or size < _WORTH_THREADS or cores == 1:
        places = _places(encoding, params, streams)
    else:
        with ThreadPoolExecutor(cores, thread_name_prefix="delta-decode") as pool:
            shares = [
                pool.submit(_places, encoding, params[share], streams[share])
                for share in _shares(params, cores)
            ]
            places = [place for share in shares for place in share.result()]
    deltas = []
    for number, (entry, indices, values) in enumerate(zip(params, places, own, strict=True)):
        if part.values_dtype is not None:
            values = narrow_values(values, part.values_dtype, entry.dtype, entry.name)
        before = None
        if encoding == BIT_CHANGES:
            before = np.zeros_like(values) if cleared is None else cleared[number]
        deltas.append(
            ParamDelta(
                entry.name,
                entry.dtype,
                entry.shape,
                indices,
                values,
                differences=encoding == DIFFERENCES,
                cleared=before,
                new_checksum=entry.new_checksum,
            )
        )
    return DecodedPart(manifest, tuple(deltas))


def _shares(params: Sequence[ParamEntry], most: int) -> list[slice]:
    """Divide params into at most so many shares, of about as many bytes of positions each."""
    size = params[-1].pos_end if params else 0
    count = max(2, min(most, size // _SHARE))
    numbers = [entry.pos_end * count // (size + 1) for entry in params]
    ends = [*(bisect_right(numbers, share) for share in range(count - 1)), len(params)]
    return [slice(start, end) for start, end in pairwise([0, *ends]) if start < end]


def _places(
    encoding: str, params: Sequence[ParamEntry], streams: Sequence[NDArray[np.uint8]]
) -> list[_Indices]:
    """Decode each param's indices."""
    known: Sequence[_Indices] = [None] * len(streams)
    if encoding in PACKED_ENCODINGS:
        known = decode_many_gaps(streams, params)
    return [
        None if entry.is_dense else _indices(entry, encoding, stream) if own is None else own
        for entry, stream, own in zip(params, streams, known, strict=True)
    ]


def _indices(entry: ParamEntry, encoding: str, raw: NDArray[np.uint8]) -> NDArray[Any]:
    try:
        indices = decode_positions(encoding, raw, entry.pos_width, entry.numel)
        if indices.size != entry.nnz:
            raise MalformedPart(f"the positions have {indices.size} gaps for {entry.nnz} values")
    except DeltaError as error:
        error.operands["tensor"] = entry.name
        raise
    return indices


def encode_part(
    deltas: Sequence[ParamDelta | EncodedDelta],
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
    run: str | None = None,
    run_epoch: int | None = None,
    run_owner: str | None = None,
    stored: bool = False,
    with_manifest_checksum: bool = True,
) -> bytes:
    """Encode one part; `decode_part` of the (unwrapped) result returns `deltas` again.

    Args:
        deltas: One dtype for all; can be empty. Differences with ``gap8_ulp``, and with it only,
            maybe encoded; `cleared` with ``gap8_xor`` likewise.
        encoding: One of `positions.ENCODINGS`. ``deltas_zstd`` gives the wrapped frame.
        current_version, base_version: Where the sync leads to, and where it starts. These and what
            follows are metadata, left out if None; see ``docs/wire-format.md``.
        sync_id: Equal in all parts of one sync, and in no other sync.
        part, num_parts: This part's number, from 0, and the number of parts of the sync.
        full: Whether the sync's params are dense and together cover the model.
        digest_part: Of the new values minus that of the old ones, of the tensors that the digest
            covers; 32 hex digits.
        digest_before, digest_after: Digests of all covered tensors at the base and target version.
        run, run_epoch, run_owner: The sender's run, which opening of it this is, from 1, and its
            HOST:PID.
        stored: Whether the frames of a gap8 encoding hold their bytes as they are.

    Raises:
        ValueError: The deltas have several dtypes, `decode_part` would refuse an argument, or the
            encoding cannot hold an index.
    """
    dtypes = {delta.dtype for delta in deltas}
    if len(dtypes) > 1:
        raise ValueError(f"a part holds one dtype, not {', '.join(sorted(dtypes))}")
    values_dtype = dtypes.pop() if dtypes else "uint8"
    if values_dtype not in TORCH_DTYPE:
        raise ValueError(f"unknown dtype {values_dtype!r}")
    bits = bits_dtype(values_dtype)
    packed = encoding in PACKED_ENCODINGS
    entries: list[ParamEntry] = []
    pieces: list[NDArray[np.uint8]] = []
    given: list[tuple[NDArray[np.uint8], NDArray[Any]]] = []  # streams, and their indices
    pos_end = val_end = 0
    for delta in deltas:
        checksum = None
        if isinstance(delta, EncodedDelta):
            _check_encoded(delta, encoding, bits)
            raw, width = delta.stream, 1
        else:
            _check_delta(delta, encoding, bits)
            checksum = delta.new_checksum
            if delta.indices is None:
                raw, width = _NOTHING, 0
            elif packed and delta.stream is not None:
                raw, width = delta.stream, 1
                given.append((raw, delta.indices))
            else:
                raw, width = encode_positions(encoding, delta.indices)
        pos_start, pos_end = pos_end, pos_end + raw.size
        val_start, val_end = val_end, val_end + delta.values.size
        slices = (pos_start, pos_end, width, val_start, val_end)
        entries.append(ParamEntry(delta.name, delta.dtype, delta.shape, *slices, checksum))
        pieces.append(raw)
    check_streams([stream for stream, _ in given], [indices for _, indices in given])
    if packed:
        widths = [entry.pos_width for entry in entries]
        positions, compressed = _packed(encoding, pieces, widths, deltas, stored)
        values, values_dtype = [compressed], "uint8"
    else:
        positions = np.concatenate([_NOTHING, *pieces])
        values = [
            np.ascontiguousarray(delta.values) for delta in deltas if isinstance(delta, ParamDelta)
        ]

    digests = {
        "digest_part": digest_part,
        "digest_before": digest_before,
        "digest_after": digest_after,
    }
    digested = any(value is not None for value in digests.values())
    optional = {
        "current_version": current_version,
        "base_version": base_version,
        "part": part,
        "num_parts": num_parts,
        "sync_id": sync_id,
        "run": run,
        "run_epoch": run_epoch,
        "run_owner": run_owner,
        "full": "true" if full else None,
        "digest_algorithm": ALGORITHM if digested else None,
        **digests,
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
    deltas: Sequence[ParamDelta | EncodedDelta],
    stored: bool,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return both tensors of a packed part; large ones are compressed in parallel."""
    values: list[Any] = [delta.values for delta in deltas]
    if encoding == BIT_CHANGES:
        cleared = [
            delta.cleared
            for delta in deltas
            if isinstance(delta, ParamDelta) and delta.cleared is not None
        ]
        return pack_streams(streams, widths, stored=stored), encode_changes(values, cleared)
    write: Callable[..., NDArray[np.uint8]]
    write = encode_differences if encoding == DIFFERENCES else encode_planes
    size = sum(array.nbytes for array in (*streams, *values))
    if size < _WORTH_THREADS or usable_cores() == 1:
        return pack_streams(streams, widths, stored=stored), write(values, stored=stored)
    with ThreadPoolExecutor(1, thread_name_prefix="delta-encode") as pool:
        positions = pool.submit(pack_streams, streams, widths, stored=stored)
        packed = write(values, stored=stored)
        return positions.result(), packed


def _check_encoded(delta: EncodedDelta, encoding: str, bits: np.dtype[Any]) -> None:
    """Raise ValueError unless stream and differences are those of as many elements.

    That they are the right ones is for the digest to prove, which such a part declares.
    """
    stream, values = delta.stream, delta.values
    if encoding != DIFFERENCES or values.escaped.dtype != bits:
        raise ValueError(f"{delta.name}: differences of {bits} for {encoding}")
    ends = np.count_nonzero(stream != skip_symbol(1))
    whole = not stream.size or stream[-1] != skip_symbol(1)
    if ends != values.size or not whole or values.nibbles.size != (values.size + 1) // 2:
        raise ValueError(f"{delta.name}: a gap stream of {ends} elements for {values.size}")


def _check_delta(delta: ParamDelta, encoding: str, bits: np.dtype[Any]) -> None:
    if delta.values.ndim != 1 or delta.values.dtype != bits:
        raise ValueError(
            f"{delta.name}: values are {delta.values.dtype} {delta.values.shape},"
            f" not the bits of {delta.dtype} in one dimension"
        )
    numel, indices = delta.numel, delta.indices
    sent = numel if indices is None else indices.size
    if delta.values.size != sent:
        raise ValueError(f"{delta.name}: {delta.nnz} values for {sent} elements")
    if delta.differences != (encoding == DIFFERENCES):
        raise ValueError(f"{delta.name}: {DIFFERENCES} takes differences, other encodings values")
    if (delta.cleared is not None) != (encoding == BIT_CHANGES):
        raise ValueError(f"{delta.name}: {BIT_CHANGES} takes changes of bits, others values")
    if indices is not None:
        if indices.ndim != 1 or indices.dtype not in (np.int32, np.int64):
            raise ValueError(f"{delta.name}: indices are not int32 or int64 in one dimension")
        if sent and indices[-1] >= numel:
            raise ValueError(f"{delta.name}: an index beyond its {numel} elements")


def warm_up_unpacking() -> None:
    """Compile what `unpack_part` needs now, so that the first part does not wait for the compiler.

    Expanding has loops of its own, see `engine_ext.format.gap_streams.warm_up`.
    """
    exponent_planes.warm_up()
    ulp_differences.warm_up()
