"""Parse and check the manifest of a part: the strings of its safetensors ``__metadata__``.

Everything that can be known to be wrong without the data is refused here. Checks against the sizes
of the two tensors are in `engine_ext.format.container`, checks against the engine in the receiver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import xxhash

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import ChecksumMismatch, MalformedPart, TooLarge
from engine_ext.format.checksum import is_state_checksum
from engine_ext.format.digest import ALGORITHM
from engine_ext.structs import prepare

# encoding -> legal `pos_width` of a sparse param; a dense one has 0 in all of them
POSITION_WIDTHS: Final[dict[str, tuple[int, ...]]] = {
    "indices": (4,),
    "deltas": (2, 4),
    "deltas_zstd": (2, 4),
    "gap8_exp": (1, 2),
    "gap8_ulp": (1, 2),
    "gap8_xor": (1, 2),
}
# the encoding that the folders of other trainers are converted to, whose values change single bits
BIT_CHANGES: Final = "gap8_xor"
# those that a sender chooses from
ENCODINGS: Final = tuple(name for name in POSITION_WIDTHS if name != BIT_CHANGES)
# encodings that compress positions inside the container, and have values of all dtypes as bytes
PACKED_ENCODINGS: Final = frozenset({"gap8_exp", "gap8_ulp", BIT_CHANGES})
# the encoding whose values are differences from the old ones, which `digest_part` must prove
DIFFERENCES: Final = "gap8_ulp"

INDICES_MAX_NUMEL: Final = 2**31 - 1
MAX_VERSION: Final = 2**63 - 1

_DIGESTS: Final = ("digest_part", "digest_before", "digest_after")
_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,18}")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_RUN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OWNER: Final = re.compile(r"([\x21-\x7e]{1,255}):(0|[1-9][0-9]{0,9})")
ANONYMOUS: Final = "anonymous-"  # begins the names that engines give to runs of no name

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on what a part can declare; checked before such memory is allocated."""

    max_header_bytes: int = 64 << 20  # length of the safetensors header JSON
    max_params: int = 1 << 20
    max_part_bytes: int = 4 << 30  # length of the decompressed container, header and data
    max_numel: int = 1 << 40  # elements of one tensor, in checkpoint coordinates
    max_name_bytes: int = 4096  # UTF-8 length of a tensor's name, and of ``sync_id``
    max_ndim: int = 16
    max_parts: int = 1 << 16  # of one sync


class ParamEntry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One entry of ``params``: a tensor of the checkpoint and its slices of the two tensors.

    With a packed encoding the slices are those of the decompressed gap streams and values.
    """

    name: str
    dtype: str  # manifest name (``bfloat16``)
    shape: tuple[_Count, ...]
    pos_start: _Count  # in bytes
    pos_end: _Count
    pos_width: _Count  # bytes of a position, or of a gap stream's symbol; 0 if dense
    val_start: _Count  # in elements
    val_end: _Count
    new_checksum: str | None = None  # of the tensor's whole new bytes, see `is_state_checksum`

    @property
    def numel(self) -> int:
        """Elements of the tensor (1 for a 0-d one)."""
        return math.prod(self.shape)

    @property
    def nnz(self) -> int:
        """Elements that the part sends."""
        return self.val_end - self.val_start

    @property
    def is_dense(self) -> bool:
        """Whether every element is sent, in row-major order, without positions."""
        return self.pos_width == 0 and self.nnz == self.numel


prepare(ParamEntry)


def skip_symbol(width: int) -> int:
    """Return the symbol of `width` bytes that skips, as many elements as its value."""
    return (1 << 8 * width) - 1


class Manifest(msgspec.Struct, frozen=True):
    """A part's metadata, parsed; None for an absent optional key.

    ``checksum`` is kept as written; see `engine_ext.format.checksum.verify_checksum`. The digests
    are 32 lower-case hex digits each.
    """

    encoding: str
    params: tuple[ParamEntry, ...]
    checksum: str
    manifest_checksum: str | None
    current_version: int | None
    base_version: int | None
    part: int | None
    num_parts: int | None
    sync_id: str | None
    full: bool
    digest_algorithm: str | None
    digest_part: str | None
    digest_before: str | None
    digest_after: str | None
    run: str | None = None
    run_epoch: int | None = None  # 1 if only ``run`` is given
    run_owner: str | None = None  # HOST:PID of the sender

    @property
    def proves_states(self) -> bool:
        """Whether the params carry checksums of their tensors' whole new bytes."""
        return self.encoding == BIT_CHANGES


def parse_version(text: str, what: str) -> int:
    """Parse a version: ASCII decimal digits without sign or leading zero, 0 to 2**63 - 1.

    MalformedPart is raised for any other text; the message names it as `what`.
    """
    if _DECIMAL.fullmatch(text) is None or int(text) > MAX_VERSION:
        raise MalformedPart(f"{what} is not a decimal from 0 to 2**63 - 1: {text[:80]!r}")
    return int(text)


def manifest_checksum(metadata: Mapping[str, str]) -> str:
    r"""Return the hash of the metadata as ``xxh3_128:<32 hex digits>``.

    The hashed bytes are the UTF-8 lines ``key=value\n`` of every key other than
    ``manifest_checksum`` itself, sorted by key.
    """
    digest = xxhash.xxh3_128()
    for key in sorted(metadata):
        if key != "manifest_checksum":
            digest.update(f"{key}={metadata[key]}\n".encode())
    return f"xxh3_128:{digest.hexdigest()}"


def parse_manifest(metadata: dict[str, str], limits: Limits) -> Manifest:
    """Parse and check a part's metadata. Unknown keys are ignored.

    Raises:
        MalformedPart: A required key is missing, or a value violates the format.
        ChecksumMismatch: ``manifest_checksum`` is present and wrong.
        TooLarge: A count exceeds `limits`.
    """
    declared = metadata.get("manifest_checksum")
    if declared is not None:
        _check_manifest_checksum(declared, metadata)
    encoding = _required(metadata, "encoding")
    if encoding not in POSITION_WIDTHS:
        known = ", ".join(POSITION_WIDTHS)
        raise MalformedPart(f"unknown encoding {encoding[:80]!r}; known are {known}")
    params = _parse_params(_required(metadata, "params"), encoding, limits)
    part, num_parts = _parse_part(metadata, limits)
    full = metadata.get("full", "false")
    if full not in ("true", "false"):
        raise MalformedPart(f"full is neither 'true' nor 'false': {full[:80]!r}")
    sparse = next((entry.name for entry in params if not entry.is_dense), None)
    if full == "true" and sparse is not None:
        raise MalformedPart("a full part has a param that is not dense", tensor=sparse)
    if encoding == DIFFERENCES:
        _check_differences(metadata, full == "true", params)
    _check_new_checksums(encoding, full == "true", params)
    _check_digest_algorithm(metadata)
    return Manifest(
        encoding=encoding,
        params=params,
        checksum=_required(metadata, "checksum"),
        manifest_checksum=declared,
        current_version=optional_version(metadata, "current_version"),
        base_version=optional_version(metadata, "base_version"),
        part=part,
        num_parts=num_parts,
        sync_id=_parse_sync_id(metadata.get("sync_id"), limits),
        full=full == "true",
        digest_algorithm=metadata.get("digest_algorithm"),
        digest_part=_optional_digest(metadata, "digest_part"),
        digest_before=_optional_digest(metadata, "digest_before"),
        digest_after=_optional_digest(metadata, "digest_after"),
        **_parse_run(metadata),
    )


def check_run(run: str) -> str:
    """Return a run's name; MalformedPart if no sender can use it."""
    if _RUN.fullmatch(run) is None or run.startswith(ANONYMOUS):
        raise MalformedPart(
            f"run is not 1 to 64 of A-Z a-z 0-9 _ . - or begins with {ANONYMOUS!r}: {run[:80]!r}"
        )
    return run


def split_owner(owner: str) -> tuple[str, int]:
    """Return host and pid of a ``run_owner``; MalformedPart if it is not HOST:PID."""
    found = _OWNER.fullmatch(owner)
    if found is None:
        raise MalformedPart(f"run_owner is not HOST:PID: {owner[:80]!r}")
    return found[1], int(found[2])


def _parse_run(metadata: Mapping[str, str]) -> dict[str, Any]:
    run, epoch, owner = map(metadata.get, ("run", "run_epoch", "run_owner"))
    if run is None:
        if epoch is not None or owner is not None:
            raise MalformedPart("run_epoch or run_owner without a run")
        return {}
    if epoch is not None and parse_version(epoch, "run_epoch") == 0:
        raise MalformedPart("run_epoch is 0; epochs count from 1")
    if owner is not None:
        split_owner(owner)
    return {"run": check_run(run), "run_epoch": int(epoch or 1), "run_owner": owner}


def _check_differences(
    metadata: Mapping[str, str], full: bool, params: Sequence[ParamEntry]
) -> None:
    """Check that ``digest_part`` can prove the old values that differences are added to."""
    if "digest_part" not in metadata:
        raise MalformedPart(f"{DIFFERENCES} needs digest_part, to prove the old values")
    if full:
        raise MalformedPart(f"a full part cannot be {DIFFERENCES}: it must not need old values")
    for entry in params:
        if entry.pos_width == 0:
            raise MalformedPart(f"{DIFFERENCES} has no dense form", tensor=entry.name)


def _check_new_checksums(encoding: str, full: bool, params: Sequence[ParamEntry]) -> None:
    """Check that each param's new checksum can prove the old bits that single bits change."""
    if encoding == BIT_CHANGES and full:
        raise MalformedPart(f"a full part cannot be {BIT_CHANGES}: it must not need old values")
    for entry in params:
        declared = entry.new_checksum
        if (declared is not None) != (encoding == BIT_CHANGES):
            raise MalformedPart(
                f"every param of {BIT_CHANGES}, and of no other encoding, has a new_checksum",
                tensor=entry.name,
            )
        if declared is not None and not is_state_checksum(declared):
            raise MalformedPart(f"unknown new_checksum {declared[:80]!r}", tensor=entry.name)
        if encoding == BIT_CHANGES and entry.pos_width == 0:
            raise MalformedPart(f"{BIT_CHANGES} has no dense form", tensor=entry.name)


def _check_digest_algorithm(metadata: Mapping[str, str]) -> None:
    """Check that the part's digests, if it has any, are those that are computed here."""
    stated = metadata.get("digest_algorithm")
    given = [key for key in _DIGESTS if key in metadata]
    if stated != ALGORITHM and (given or stated is not None):
        named = "without a digest_algorithm" if stated is None else f"of {stated[:80]!r}"
        raise MalformedPart(
            f"{given[0] if given else 'the digest'} is {named}; this version computes "
            f"{ALGORITHM!r}: use sender and engine (or delta log) of one version"
        )


def _check_manifest_checksum(declared: str, metadata: dict[str, str]) -> None:
    for key, value in metadata.items():
        # Two different sets of keys could hash to the same lines.
        if "=" in key or "\n" in key or "\n" in value:
            raise MalformedPart(
                f"manifest_checksum is ambiguous: '=' or a newline in metadata key {key[:80]!r}"
            )
    actual = manifest_checksum(metadata)
    if declared != actual:
        raise ChecksumMismatch(
            "the metadata is not what the sender hashed", expected=declared[:80], actual=actual
        )


def _required(metadata: dict[str, str], key: str) -> str:
    if key not in metadata:
        raise MalformedPart(f"the metadata has no {key!r}")
    return metadata[key]


def optional_version(metadata: Mapping[str, str], key: str) -> int | None:
    """Return the version under a key, see `parse_version`; None if there is no such key."""
    text = metadata.get(key)
    return None if text is None else parse_version(text, key)


def _optional_digest(metadata: dict[str, str], key: str) -> str | None:
    text = metadata.get(key)
    if text is not None and _DIGEST.fullmatch(text) is None:
        raise MalformedPart(f"{key} is not 32 lower-case hex digits: {text[:80]!r}")
    return text


def _parse_sync_id(text: str | None, limits: Limits) -> str | None:
    if text is not None:
        if not text or _CONTROL.search(text):
            raise MalformedPart(f"sync_id is empty or has control characters: {text[:80]!r}")
        if len(text.encode()) > limits.max_name_bytes:
            raise MalformedPart(f"sync_id is longer than {limits.max_name_bytes} bytes")
    return text


def _parse_part(metadata: dict[str, str], limits: Limits) -> tuple[int | None, int | None]:
    part = optional_version(metadata, "part")
    num_parts = optional_version(metadata, "num_parts")
    if num_parts == 0:
        raise MalformedPart("num_parts is 0; a sync has at least one part")
    if max((part or 0) + 1, num_parts or 1) > limits.max_parts:
        raise TooLarge(f"a sync of more than {limits.max_parts} parts", limit=limits.max_parts)
    if part is None and num_parts is not None and num_parts > 1:
        raise MalformedPart(f"one of {num_parts} parts has no part number")
    if part is not None and num_parts is not None and part >= num_parts:
        raise MalformedPart(f"part {part} of {num_parts}; parts count from 0")
    return part, num_parts


def _parse_params(text: str, encoding: str, limits: Limits) -> tuple[ParamEntry, ...]:
    # The header limit bounds what decoding can allocate: an entry has nine keys.
    try:
        params = msgspec.json.decode(text, type=tuple[ParamEntry, ...])
    except (ValueError, RecursionError) as error:
        raise MalformedPart(f"params: {error}") from None
    if len(params) > limits.max_params:
        raise TooLarge(f"params has over {limits.max_params} entries", limit=limits.max_params)
    names: set[str] = set()
    pos_end = val_end = 0
    for entry in params:
        _check_entry(entry, encoding, limits)
        if entry.name in names:
            raise MalformedPart("params names a tensor twice", tensor=entry.name)
        if (entry.pos_start, entry.val_start) != (pos_end, val_end):
            raise MalformedPart("the offsets of params leave a gap or overlap", tensor=entry.name)
        names.add(entry.name)
        pos_end, val_end = entry.pos_end, entry.val_end
    return params


def _check_entry(entry: ParamEntry, encoding: str, limits: Limits) -> None:
    name, shape, width = entry.name, entry.shape, entry.pos_width
    if not name or (len(name) if name.isascii() else len(name.encode())) > limits.max_name_bytes:
        raise MalformedPart(
            f"a name in params is empty or over {limits.max_name_bytes} bytes: {name[:80]!r}"
        )
    if entry.dtype not in TORCH_DTYPE:
        raise MalformedPart(f"unknown dtype {entry.dtype[:80]!r}", tensor=name)
    if len(shape) > limits.max_ndim:
        raise MalformedPart(f"more than {limits.max_ndim} dimensions", tensor=name)
    numel = math.prod(shape)  # not before: the product of many takes long
    nnz = entry.val_end - entry.val_start
    if (numel or max(shape)) > limits.max_numel:
        message = f"a tensor of more than {limits.max_numel} elements"
        raise TooLarge(message, tensor=name, limit=limits.max_numel)
    is_legal = width in POSITION_WIDTHS[encoding]
    size = entry.pos_end - entry.pos_start
    if is_legal and encoding in PACKED_ENCODINGS:
        agree = _is_stream(size, width, nnz, numel)
    else:
        agree = size == nnz * width
    if nnz < 0 or not agree:
        raise MalformedPart("the lengths of positions and values disagree", tensor=name)
    if width == 0 and nnz == numel:  # dense
        return
    if not is_legal:
        sent = f"pos_width {width} with {nnz} of {numel} values"
        raise MalformedPart(f"{sent} is not valid for {encoding}", tensor=name)
    if nnz > numel:
        raise MalformedPart("more values than elements", tensor=name)
    if encoding == "indices" and numel > INDICES_MAX_NUMEL:
        raise MalformedPart("a tensor too large for int32 indices", tensor=name)


def _is_stream(size: int, width: int, nnz: int, numel: int) -> bool:
    """Return whether the gap stream of some elements can have so many bytes.

    Every element ends one symbol; the others are skips, and only so many of them fit the tensor.
    """
    symbols, rest = divmod(size, width)
    if symbols == nnz:
        return rest == 0
    skips = numel // skip_symbol(width) if nnz else 0
    return rest == 0 and nnz <= symbols <= nnz + skips
