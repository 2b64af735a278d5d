"""Resolve and open the files that a disk request names, only below the allowed folders.

A path is resolved first; its links can lead anywhere below a root. The resolved path is then opened
component by component from the root without following links, so that a link that is created after
the check has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from delta_server.intake import Intake, VerifiedPart
from delta_server.request_options import DiskRequest
from engine_ext.errors import MalformedPart, PathForbidden, TooLarge
from engine_ext.format import SIGNATURE_SUFFIX, Limits, Verifier, signing_key
from engine_ext.version_folders import INDEX

_File = TypeVar("_File")

_SUFFIX = ".safetensors"
_MAX_SIGNATURE_BYTES = 128
_MAX_FILES = Limits().max_parts
# Longer than the clocks by which file systems date a write go between two ticks.
_CLOCK_NS = 100_000_000
_COARSE_CLOCK_NS = 2_500_000_000


def resolve_files(request: DiskRequest, roots: Sequence[str]) -> list[Path]:
    """Return the files of a disk request, with symlinks resolved; or one folder of a version.

    Args:
        request: its `files` are names in `model_path`. Without `files`, they are all
            ``*.safetensors``, or the folder itself if it has an index.
        roots: real paths of the allowed folders.

    Raises:
        PathForbidden: a file is outside every root, or there is no root.
        MalformedPart: there is no file.
        TooLarge: there are more files than a sync can have parts.
    """
    if not roots:
        raise PathForbidden("disk requests are refused: the engine has no --delta-root")
    if any("\0" in name for name in (request.model_path, *(request.files or ()))):
        raise MalformedPart("a path contains a NUL character")
    folder = Path(os.path.realpath(request.model_path))
    _root_of(folder, roots)
    names = request.files
    if names is None:
        found = list_names(folder, roots)
        if INDEX in found:
            return [folder]
        names = sorted(name for name in found if name.endswith(_SUFFIX))
    if not names:
        raise MalformedPart(f"no files to apply in {folder.name}")
    if len(names) > _MAX_FILES:
        raise TooLarge(f"{len(names)} files in one request", limit=_MAX_FILES)
    if len(set(names)) != len(names):
        raise MalformedPart("a file is named twice")
    paths = [Path(os.path.realpath(folder / name)) for name in names]
    for path in paths:
        _root_of(path, roots)
    return paths


def is_read(name: str) -> bool:
    """Return whether the bytes of a file of this name count, in the folder of a version."""
    return name == INDEX or name.removesuffix(SIGNATURE_SUFFIX).endswith(_SUFFIX)


def marks(folder: Path, roots: Sequence[str]) -> dict[str, str]:
    """Return a mark per file of a version's folder, which changes when the file is written.

    It is empty for a file that was written so shortly before that another write might leave its
    times as they are.

    Args:
        folder: its real path.

    Raises:
        PathForbidden, MalformedPart: see `open_file`.
    """
    found = {}
    for name in list_names(folder, roots):
        if is_read(name):
            # Opened, because network file systems might answer from their cache otherwise.
            with open_file(Path(os.path.realpath(folder / name)), roots) as file:
                found[name] = _mark(os.fstat(file.fileno()))
    return found


def _mark(found: os.stat_result) -> str:
    written = max(found.st_mtime_ns, found.st_ctime_ns)
    in_seconds = found.st_ctime_ns % 1_000_000_000 == 0
    if time.time_ns() - written < (_COARSE_CLOCK_NS if in_seconds else _CLOCK_NS):
        return ""
    facts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return ":".join(map(str, facts))


def open_file(path: Path, roots: Sequence[str]) -> BinaryIO:
    """Open a file of `resolve_files`, unbuffered.

    Raises:
        PathForbidden: it is outside every root, or behind a link created after it was resolved.
        MalformedPart: it cannot be read, or is not a regular file.
    """
    # Opening a fifo without a writer must not block.
    descriptor = _open_below(path, roots, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MalformedPart(f"{path.name} is not a regular file", file=path.name)
    return os.fdopen(descriptor, "rb", buffering=0)


def make_verifier(path: Path, roots: Sequence[str]) -> Verifier | None:
    """Return a verifier with the signature in the file next to a part's; None if no key is set.

    Raises:
        Unauthorized: there is no signature.
        PathForbidden: the signature is behind a link.
    """
    key = signing_key()
    if key is None:
        return None
    given = None
    with contextlib.suppress(MalformedPart):
        with open_file(path.with_name(path.name + SIGNATURE_SUFFIX), roots) as file:
            given = file.read(_MAX_SIGNATURE_BYTES).decode("ascii", "replace")
    return Verifier(key, given)


async def spool_files(
    intake: Intake, paths: Sequence[Path], roots: Sequence[str], concurrency: int
) -> list[VerifiedPart]:
    """Copy some files of `resolve_files` to the spool, at most `concurrency` at a time.

    Raises:
        DeltaError: see `open_file` and `Intake.read`; no copy is kept then.
    """

    def copy(path: Path) -> Iterator[VerifiedPart]:
        verifier = make_verifier(path, roots)
        with open_file(path, roots) as source:
            yield intake.read(source, verifier)

    return await spool_each(copy, paths, concurrency)


async def spool_each(
    read: Callable[[_File], Iterable[VerifiedPart]], files: Sequence[_File], concurrency: int
) -> list[VerifiedPart]:
    """Read some files in threads, at most `concurrency` at a time; return the parts in order.

    Threads cannot be stopped: if the caller is cancelled, they are waited for.

    Args:
        read: yields the parts of a file.

    Raises:
        Exception: the first one that `read` has raised; none of the parts is kept then.
    """
    semaphore = asyncio.Semaphore(concurrency)
    verified: list[list[VerifiedPart]] = [[] for _ in files]

    async def one(file: _File, own: list[VerifiedPart]) -> None:
        async with semaphore:
            await asyncio.to_thread(lambda: own.extend(read(file)))

    reading = asyncio.gather(*map(one, files, verified), return_exceptions=True)
    try:
        failures = [result for result in await asyncio.shield(reading) if result is not None]
        if failures:
            raise failures[0]
    except BaseException:
        await reading
        for part in itertools.chain(*verified):
            part.remove()
        raise
    return list(itertools.chain(*verified))


def list_names(folder: Path, roots: Sequence[str]) -> list[str]:
    """Return the names in a folder, given by its real path.

    Raises:
        PathForbidden, MalformedPart: see `open_file`.
    """
    descriptor = _open_below(folder, roots, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _root_of(path: Path, roots: Sequence[str]) -> str:
    for root in roots:
        if path.is_relative_to(root):
            return root
    raise PathForbidden("the path is not below a --delta-root")


def _open_below(path: Path, roots: Sequence[str], flags: int) -> int:
    """Return a descriptor of a real path, opened from its root without following a link."""
    root = _root_of(path, roots)
    names = path.relative_to(root).parts
    descriptor = _open(root, os.O_PATH | os.O_DIRECTORY if names else flags, None, path)
    for number, name in enumerate(names, 1):
        step = flags if number == len(names) else os.O_PATH | os.O_DIRECTORY
        try:
            inner = _open(name, step | os.O_NOFOLLOW, descriptor, path)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def _open(name: str, flags: int, folder: int | None, path: Path) -> int:
    try:
        return os.open(name, flags | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, folder):
            raise PathForbidden("a link was created on the path after it was checked") from None
        message = f"cannot read {path.name}: {error.strerror}"
        raise MalformedPart(message, file=path.name) from error


def _is_link(name: str, folder: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False
