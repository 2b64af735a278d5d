"""Spool what a disk request names: files of parts, or the folder of one version.

Such a folder is what slime (since v0.3.1), vime and miles publish, see ``docs/wire-format.md``, or
a plain checkpoint. It is converted to parts: a delta to ``gap8_xor``, a checkpoint to a full sync.
Everything else (versions, staging, the proof of the new bytes, the commit) is as for other parts.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from delta_server.commit import call
from delta_server.disk_files import list_names, open_file, spool_files
from delta_server.engine import Engine
from delta_server.spool import Spool, Spooled
from engine_ext.dtypes import bits_dtype
from engine_ext.errors import BaseMismatch, DeltaError, MalformedPart, NotUpdatable, Unauthorized
from engine_ext.version_folders import (
    INDEX,
    LENGTH_BYTES,
    FileTensor,
    VersionIndex,
    find_change,
    header_bytes,
    parse_file,
    parse_index,
)
from engine_ext.wire import BIT_CHANGES, Limits, ParamDelta, encode_part, signing_key
from engine_ext.wire.operations import GetPlan

_SINGLE: Final = "model.safetensors"  # a checkpoint of one file has no index
_SUFFIX: Final = ".safetensors"
_FULL_ENCODING: Final = "indices"  # of dense params only, so that it is their plain bytes
_BUCKET_BYTES: Final = 64 << 20  # of the params of a part, unless one alone is larger
_READ_BYTES: Final = 1 << 30
_FOLDER: Final = re.compile(r"weight_v([0-9]{1,19})")
_POSITIONS: Final = b'"__positions__"'  # in the header of every part, and of no checkpoint

_Spec = tuple[str, tuple[int, ...]]  # manifest dtype and shape of a checkpoint tensor


async def spool_request(
    spool: Spool, paths: Sequence[Path], roots: Sequence[str], concurrency: int, engine: Engine
) -> list[Spooled]:
    """Bring what `delta_server.disk_files.resolve_files` returned to the spool, as parts.

    The parts of a version's folder have no part numbers: they are one transaction, as those of
    other files without numbers. None of them may be left out, and the same folder always gives the
    same parts. The spool holds the whole version, converted.

    Args:
        paths: real paths: files of parts, or one folder of a version.
        concurrency: how many files are read or converted at once.
        engine: is asked for the dtypes and shapes of its checkpoint.

    Raises:
        MalformedPart, TooLarge, PathForbidden, Unauthorized, SpoolFull: see
            `delta_server.disk_files` and `engine_ext.version_folders`.
        NotUpdatable: the checkpoint has no tensor of a name in a delta.
        BaseMismatch: a delta, and the engine has no weights yet. The engine is unchanged after
            any of these, and nothing is kept in the spool.
    """
    folder = await asyncio.to_thread(version_folder, paths, roots)
    if folder is None:
        return await spool_files(spool, paths, roots, concurrency)
    if signing_key() is not None:
        raise Unauthorized(
            "the folders of other trainers are not signed, and this engine wants signatures; "
            "unset DELTA_HMAC_KEY, or send signed parts"
        )
    version = await asyncio.to_thread(read_version_folder, folder, roots)
    specs = {} if version.index.full else await _specs(engine)
    return await _convert(spool, version, specs, roots, concurrency)


def version_folder(paths: Sequence[Path], roots: Sequence[str]) -> Path | None:
    """Return the folder of a version that the paths of a request mean; None if they are parts.

    Raises:
        MalformedPart, PathForbidden: the only path cannot be read.
    """
    if len(paths) != 1:
        return None
    if paths[0].is_dir():
        return paths[0]
    if paths[0].name != _SINGLE:
        return None
    with open_file(paths[0], roots) as file:
        header = _read_header(file, Limits())
    return None if _POSITIONS in header else paths[0].parent


@dataclass(frozen=True, slots=True)
class Version:
    """The folder of one version: its index, and the versions that a delta leads to and from.

    Attributes:
        version: None if neither the index nor the folder's name has it.
        base_version: None if the folder is a plain checkpoint.
    """

    folder: Path
    index: VersionIndex
    version: int | None
    base_version: int | None


def read_version_folder(folder: Path, roots: Sequence[str]) -> Version:
    """Read and check the index of a version's folder, which is written last.

    Args:
        folder: real path, below one of `roots`.

    Raises:
        MalformedPart: there is no index, it is damaged, or the folder has other files than it
            names, or is of another version.
        TooLarge, PathForbidden: see `parse_index` and `open_file`.
    """
    limits, names = Limits(), list_names(folder, roots)
    files = {name for name in names if name.endswith(_SUFFIX)}
    if INDEX in names:
        with open_file(folder / INDEX, roots) as file:
            index = parse_index(_read(file, 0, limits.max_header_bytes + 1, short=True), limits)
    elif files == {_SINGLE}:
        with open_file(folder / _SINGLE, roots) as file:
            index = VersionIndex.of_checkpoint(_SINGLE, _read_header(file, limits))
    else:
        raise MalformedPart(f"{folder.name} has no {INDEX}: it was not published completely")
    if not index.full and files != index.files.keys():
        odd = sorted(files ^ index.files.keys())
        raise MalformedPart(
            f"the files in {folder.name} are not those that its index names: {odd[:8]}", files=odd
        )
    match = _FOLDER.fullmatch(folder.name)
    named = int(match[1]) if match else None
    if None not in (named, index.version) and named != index.version:
        raise MalformedPart(f"the index in {folder.name} is of version {index.version}")
    version = named if index.version is None else index.version
    return Version(folder, index, version, index.base_version)


async def _specs(engine: Engine) -> dict[str, _Spec]:
    """Return dtype and shape of each tensor in the checkpoint that the engine was loaded from."""
    [reply, *_] = await call(engine, GetPlan())
    if reply.tensors is None:
        raise BaseMismatch("the engine was started without weights; its first version must be full")
    return {row["name"]: (row["dtype"], tuple(row["shape"])) for row in reply.tensors}


async def _convert(
    spool: Spool,
    version: Version,
    specs: Mapping[str, _Spec],
    roots: Sequence[str],
    concurrency: int,
) -> list[Spooled]:
    """Convert all files of a version; nothing is kept in the spool if that fails."""
    semaphore = asyncio.Semaphore(concurrency)
    spooled: list[Spooled] = []

    def convert(file: str, own: list[Spooled]) -> None:
        for body in _bodies(version, file, specs, roots):
            own.append(spool.read(io.BytesIO(body)))

    async def one(file: str) -> list[Spooled]:
        own: list[Spooled] = []
        async with semaphore:
            try:
                await asyncio.to_thread(convert, file, own)
            finally:
                spooled.extend(own)
        return own

    results = await asyncio.gather(*map(one, version.index.files), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        for part in spooled:
            part.remove()
        raise failures[0]
    if not spooled:  # a version without changes
        body = _encode([], version)
        return [await asyncio.to_thread(spool.read, io.BytesIO(body))]
    return [part for own in results if not isinstance(own, BaseException) for part in own]


def _bodies(
    version: Version, file: str, specs: Mapping[str, _Spec], roots: Sequence[str]
) -> Iterator[bytes]:
    """Yield the parts that one file is converted to, each of one dtype."""
    limits, index = Limits(), version.index
    path = Path(os.path.realpath(version.folder / file))
    buckets: dict[str, list[ParamDelta]] = {}
    sizes: dict[str, int] = {}
    with open_file(path, roots) as source:
        header = _read_header(source, limits)
        size = os.fstat(source.fileno()).st_size
        for tensor in parse_file(header, size, index, file, limits):
            raw = np.frombuffer(_read(source, tensor.begin, tensor.end), np.uint8)
            try:
                delta = _delta(tensor, raw, index, specs, limits)
            except DeltaError as error:
                error.operands.setdefault("file", file)
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
    return encode_part(deltas, encoding=encoding, full=full, **versions)


def _read_header(file: BinaryIO, limits: Limits) -> bytes:
    """Return the header of a safetensors file, with its length field."""
    return _read(file, 0, header_bytes(_read(file, 0, LENGTH_BYTES, short=True), limits))


def _read(file: BinaryIO, begin: int, end: int, *, short: bool = False) -> bytes:
    """Return some bytes of a file, which may end earlier only if `short`."""
    pieces = list[bytes]()
    at = begin
    while at < end and (piece := os.pread(file.fileno(), min(end - at, _READ_BYTES), at)):
        pieces.append(piece)
        at += len(piece)
    if at < end and not short:
        raise MalformedPart(f"the file ends after {at} bytes of {end}")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
