"""The folders of versions that other trainers publish: read as parts, and what they show.

Such a folder is what slime (since v0.3.1), vime and miles publish, see ``docs/wire-format.md``, or
a plain checkpoint. It is converted to parts: a delta to ``gap8_xor``, a checkpoint to a full sync.
Everything else (versions, staging, the proof of the new bytes, the commit) is as for other parts.

The folder of version 12 is called ``weight_v000012``, and the others are next to it. They show that
a version is empty, or that files of it did not arrive.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delta_server.intake import VerifiedPart
from delta_server.sources import Inlet
from delta_server.sources.disk_files import list_names, open_file, spool_each, spool_files
from delta_server.sources.store_files import ResolvedFiles
from delta_server.staging import not_applied
from engine_ext.dtypes import bits_dtype
from engine_ext.errors import BaseMismatch, DeltaError, MalformedPart, NotUpdatable, Unauthorized
from engine_ext.format import BIT_CHANGES, Limits, ParamDelta, encode_part, signing_key
from engine_ext.log import DONE
from engine_ext.ranks.operations import Delivery
from engine_ext.version_folders import (
    INDEX,
    SINGLE,
    FileTensor,
    Version,
    VersionIndex,
    find_change,
    read_file,
    read_header,
    read_tensor,
    read_version_folder,
)

_FULL_ENCODING: Final = "indices"  # of dense params only, so that it is their plain bytes
_BUCKET_BYTES: Final = 64 << 20  # of the params of a part, unless one alone is larger
_POSITIONS: Final = b'"__positions__"'  # in the header of every part, and of no checkpoint

_FOLDER: Final = re.compile(r"weight_v([0-9]{1,19})")
_SUFFIX: Final = ".safetensors"
_MAX_GAP: Final = 4096  # versions; each is a folder that is listed

_Spec = tuple[str, tuple[int, ...]]  # manifest dtype and shape of a checkpoint tensor


async def spool_request(inlet: Inlet, files: ResolvedFiles) -> list[VerifiedPart]:
    """Bring the files of a request to the spool, as parts.

    The parts of a version's folder have no part numbers: they are one transaction, as those of
    other files without numbers. None of them can be left out, and the same folder always gives the
    same parts. The spool holds the whole version, converted.

    Raises:
        MalformedPart, TooLarge, PathForbidden, Unauthorized, SpoolFull: see
            `delta_server.sources.disk_files` and `engine_ext.version_folders`.
        NotUpdatable: the checkpoint has no tensor of a name in a delta.
        BaseMismatch: a delta, and the engine has no weights yet. The engine is unchanged after
            any of these, and nothing is kept in the spool.
    """
    intake, roots, at_once = inlet.intake, files.roots, inlet.settings.read_workers
    folder = await asyncio.to_thread(version_folder, files.paths, roots)
    if folder is None:
        return await spool_files(intake, files.paths, roots, at_once)
    if signing_key() is not None:
        raise Unauthorized(
            "the folders of other trainers are not signed, and this engine wants signatures; "
            "unset DELTA_HMAC_KEY, or send signed parts"
        )
    version = await asyncio.to_thread(read_version, folder, roots)
    specs = {} if version.index.full else await inlet.coordinator.checkpoint()
    if specs is None:
        raise BaseMismatch("the engine was started without weights; its first version must be full")
    limits = Limits(max_part_bytes=inlet.settings.max_body_bytes)
    source = _Source(folder, roots, version, specs, limits)

    def convert(file: str) -> Iterator[VerifiedPart]:
        for body in _bodies(source, file):
            yield intake.read(io.BytesIO(body))

    verified = await spool_each(convert, list(version.index.files), at_once)
    if not verified:  # a version without changes
        verified = [await asyncio.to_thread(intake.read, io.BytesIO(_encode([], version)))]
    return verified


def version_folder(paths: Sequence[Path], roots: Sequence[str]) -> Path | None:
    """Return the folder of a version that the paths of a request mean; None if they are parts.

    Raises:
        MalformedPart, PathForbidden: the only path cannot be opened.
    """
    if len(paths) != 1:
        return None
    if os.path.isdir(paths[0]):
        return paths[0]
    if paths[0].name != SINGLE or signing_key() is not None:
        return None  # nothing of a file is parsed before its signature is verified
    with open_file(paths[0], roots) as file:
        try:
            header = read_header(file, Limits())
        except DeltaError:  # a part in a zstd frame, or nothing at all
            return None
    return None if _POSITIONS in header else paths[0].parent


def read_version(folder: Path, roots: Sequence[str]) -> Version:
    """Read and check the index of a version's folder, given by its real path below a root.

    Raises:
        MalformedPart, TooLarge, PathForbidden: see `read_version_folder` and `open_file`.
    """
    names = list_names(folder, roots)
    return read_version_folder(
        folder.name, names, lambda name: open_file(_path(folder, name), roots), Limits()
    )


def _path(folder: Path, name: str) -> Path:
    return Path(os.path.realpath(folder / name))


@dataclass(frozen=True, slots=True)
class _Source:
    """Input of a conversion: a version's folder, and the tensors of the engine's checkpoint."""

    folder: Path
    roots: Sequence[str]
    version: Version
    specs: Mapping[str, _Spec]
    limits: Limits


def _bodies(source: _Source, name: str) -> Iterator[bytes]:
    """Yield the parts that one file is converted to, each of one dtype."""
    limits, version = source.limits, source.version
    buckets: dict[str, list[ParamDelta]] = {}
    sizes: dict[str, int] = {}
    with open_file(_path(source.folder, name), source.roots) as file:
        for tensor in read_file(file, version.index, name, limits):
            raw = np.frombuffer(read_tensor(file, tensor), np.uint8)
            try:
                delta = _delta(tensor, raw, version.index, source.specs, limits)
            except DeltaError as error:
                error.operands.setdefault("file", name)
                raise
            nbytes = delta.values.nbytes + (0 if delta.indices is None else delta.indices.nbytes)
            if sizes.get(delta.dtype, 0) + nbytes > _BUCKET_BYTES and delta.dtype in buckets:
                yield _encode(buckets.pop(delta.dtype), version)
                sizes[delta.dtype] = 0
            buckets.setdefault(delta.dtype, []).append(delta)
            sizes[delta.dtype] = sizes.get(delta.dtype, 0) + nbytes
    for deltas in buckets.values():
        yield _encode(deltas, version)


def _delta(
    tensor: FileTensor,
    raw: NDArray[np.uint8],
    index: VersionIndex,
    specs: Mapping[str, _Spec],
    limits: Limits,
) -> ParamDelta:
    if index.encoding is None:
        bits = np.require(raw.view(bits_dtype(tensor.dtype)), requirements="A")
        return ParamDelta(tensor.name, tensor.dtype, tensor.shape, None, bits)
    if tensor.name not in specs:
        raise NotUpdatable(
            f"{tensor.name}: the checkpoint this engine was loaded from has no such tensor",
            tensor=tensor.name,
        )
    dtype, shape = specs[tensor.name]
    assert tensor.new_checksum is not None
    return find_change(tensor.name, dtype, shape, index.encoding, raw, tensor.new_checksum, limits)


def _encode(deltas: Sequence[ParamDelta], version: Version) -> bytes:
    full = version.index.full
    versions: dict[str, Any] = {"current_version": version.version}
    if not full:
        versions["base_version"] = version.base_version
    encoding = _FULL_ENCODING if full else BIT_CHANGES
    try:
        return encode_part(deltas, encoding=encoding, full=full, **versions)
    except ValueError as error:  # a name or a dtype that no part can have
        raise MalformedPart(f"the folder cannot be converted: {error}") from None


def version_of(folder: Path) -> int | None:
    """Return the version that a folder's name has, or None."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def beside(folder: Path, version: int) -> Path:
    """Return the folder of another version, given one whose name has a version."""
    digits = len(folder.name) - len("weight_v")
    return folder.with_name(f"weight_v{version:0{digits}d}")


def folder_of(source: Path, version: int) -> Path:
    """Return the folder of a version, below the one that a trainer publishes in."""
    return source / f"weight_v{version:06d}"


def holds_nothing(folder: Path, roots: Sequence[str]) -> bool:
    """Return whether a version's folder shows that the version is its predecessor's.

    It does if it has an index of no tensors. A folder without files shows nothing: it might
    be one that was emptied, or that is not filled yet. Nor does an index show anything where parts
    must be signed, as it has no signature.
    """
    if signing_key() is not None:
        return False
    try:
        if INDEX not in list_names(folder, roots):
            return False
        version = read_version(folder, roots)
    except DeltaError:
        return False
    one_step = version.version is not None and version.base_version == version.version - 1
    return one_step and not version.index.files


def gap_is_empty(
    folder: Path,
    versions: Sequence[int],
    roots: Sequence[str],
    bring: Callable[[Path], object] | None = None,
) -> bool:
    """Return whether the folders next to one show that versions hold nothing.

    Args:
        bring: brings what a folder has to show to this host, if it is elsewhere.
    """
    if len(versions) > _MAX_GAP:
        return False
    for version in versions:
        other = beside(folder, version)
        if bring is not None:
            bring(other)
        if not holds_nothing(other, roots):
            return False
    return True


def is_complete(delivery: Delivery, roots: Sequence[str]) -> bool | None:
    """Return whether all of a version has arrived; None if nothing can show it.

    A folder in a store is not asked.
    """
    if delivery.complete:
        return True
    if not_applied(delivery, lambda folder: list_names(Path(folder), roots)):
        return False
    if delivery.folder is not None and (Path(delivery.folder) / DONE).exists():
        return True  # the folder was settled, and all of its files have arrived
    return None
