"""Spool what a disk request names: files of parts, or the folder of one version.

Such a folder is what slime (since v0.3.1), vime and miles publish, see ``docs/wire-format.md``, or
a plain checkpoint. It is converted to parts: a delta to ``gap8_xor``, a checkpoint to a full sync.
Everything else (versions, staging, the proof of the new bytes, the commit) is as for other parts.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delta_server.disk_files import list_names, open_file, spool_files
from delta_server.engine import Engine, call_all_ranks
from delta_server.intake import Intake, VerifiedPart
from engine_ext.dtypes import bits_dtype
from engine_ext.errors import BaseMismatch, DeltaError, MalformedPart, NotUpdatable, Unauthorized
from engine_ext.format import BIT_CHANGES, Limits, ParamDelta, encode_part, signing_key
from engine_ext.ranks.operations import GetPlan
from engine_ext.version_folders import (
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

_Spec = tuple[str, tuple[int, ...]]  # manifest dtype and shape of a checkpoint tensor


async def spool_request(
    intake: Intake, paths: Sequence[Path], roots: Sequence[str], concurrency: int, engine: Engine
) -> list[VerifiedPart]:
    """Bring what `delta_server.disk_files.resolve_files` returned to the spool, as parts.

    The parts of a version's folder have no part numbers: they are one transaction, as those of
    other files without numbers. None of them can be left out, and the same folder always gives the
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
        return await spool_files(intake, paths, roots, concurrency)
    if signing_key() is not None:
        raise Unauthorized(
            "the folders of other trainers are not signed, and this engine wants signatures; "
            "unset DELTA_HMAC_KEY, or send signed parts"
        )
    version = await asyncio.to_thread(read_version, folder, roots)
    specs = {} if version.index.full else await _specs(engine)
    source = _Source(folder, roots, version, specs)
    return await _convert(intake, source, concurrency)


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


async def _specs(engine: Engine) -> dict[str, _Spec]:
    """Return dtype and shape of each tensor in the checkpoint that the engine was loaded from."""
    [reply, *_] = await call_all_ranks(engine, GetPlan())
    if reply.tensors is None:
        raise BaseMismatch("the engine was started without weights; its first version must be full")
    return {row["name"]: (row["dtype"], tuple(row["shape"])) for row in reply.tensors}


@dataclass(frozen=True, slots=True)
class _Source:
    """Input of a conversion: a version's folder, and the tensors of the engine's checkpoint."""

    folder: Path
    roots: Sequence[str]
    version: Version
    specs: Mapping[str, _Spec]


async def _convert(intake: Intake, source: _Source, concurrency: int) -> list[VerifiedPart]:
    """Convert all files of a version; nothing is kept in the spool if that fails."""
    semaphore = asyncio.Semaphore(concurrency)
    verified: list[VerifiedPart] = []

    def convert(file: str, own: list[VerifiedPart]) -> None:
        for body in _bodies(source, file):
            own.append(intake.read(io.BytesIO(body)))

    async def one(file: str) -> list[VerifiedPart]:
        own: list[VerifiedPart] = []
        async with semaphore:
            try:
                await asyncio.to_thread(convert, file, own)
            finally:
                verified.extend(own)
        return own

    results = await asyncio.gather(*map(one, source.version.index.files), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        for part in verified:
            part.remove()
        raise failures[0]
    if not verified:  # a version without changes
        body = _encode([], source.version)
        return [await asyncio.to_thread(intake.read, io.BytesIO(body))]
    return [part for own in results if not isinstance(own, BaseException) for part in own]


def _bodies(source: _Source, name: str) -> Iterator[bytes]:
    """Yield the parts that one file is converted to, each of one dtype."""
    limits, version = Limits(), source.version
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
