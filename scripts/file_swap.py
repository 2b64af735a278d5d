"""Several files replaced together: all of them, or none.

A journal comes first, with everything that is needed to finish. Then the new files are written
beside the old ones, and when all of them are there they are renamed over the old ones. A run that
fails takes back what it did. One that is killed leaves the journal, and the next run finishes from
it. Files are never written in place: a package manager may have linked them into its cache.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

_JOURNAL: Final = ".apply_patches.journal"
_STAGED: Final = ".apply_patches.new"


class SwapError(Exception):
    """Nothing was changed; the message says why."""


class SwapBroken(Exception):
    """Some files may be changed and others not; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A file's content before and after."""

    before: bytes
    after: bytes


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder while this one works there.

    Raises:
        SwapError: another run is at work.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SwapError(f"another run is at work in {folder}; wait for it to end") from None
        yield
    finally:
        os.close(handle)


def is_pending(folder: Path) -> bool:
    """Whether a killed run left a journal."""
    return (folder / _JOURNAL).exists()


def finish(folder: Path) -> list[str]:
    """Finish what a killed run began; the files it was about, none if there is nothing to finish.

    Raises:
        SwapBroken: a file is neither the one before nor the one after, or cannot be written.
    """
    journal = folder / _JOURNAL
    if not journal.exists():
        _unfinished(journal).unlink(missing_ok=True)
        return []
    try:
        entries = json.loads(journal.read_text(encoding="utf-8"))
        for path, entry in entries.items():
            found = sha256((folder / path).read_bytes())
            if found not in (entry["before"], entry["after"]):
                raise ValueError(f"{path} was changed since")
        for path, entry in entries.items():
            if sha256((folder / path).read_bytes()) == entry["before"]:
                _stage(folder / path, base64.b64decode(entry["content"]))
                _replace(folder / path)
        _clean(folder, entries)
    except (OSError, ValueError, KeyError) as error:
        raise SwapBroken(
            f"an earlier run was killed halfway and cannot be finished: {error}. Reinstall the "
            f"engine and remove {journal}"
        ) from error
    return list(entries)


def swap(folder: Path, changes: Mapping[str, Change]) -> None:
    """Replace files; all or none.

    Args:
        folder: where the paths begin, and the journal lies.
        changes: by path relative to `folder`.

    Raises:
        SwapError: nothing was changed.
        SwapBroken: it went wrong halfway and could not be taken back.
    """
    replaced: list[str] = []
    try:
        for path, change in changes.items():
            if (folder / path).read_bytes() != change.before:
                raise OSError(f"{path} was changed just now")
        _write_journal(folder, changes)
        for path, change in changes.items():
            _stage(folder / path, change.after)
        for path in changes:
            replaced.append(path)
            _replace(folder / path)
    except BaseException as error:
        _take_back(folder, changes, replaced, error)
        if isinstance(error, OSError):
            raise SwapError(str(error)) from error
        raise
    try:
        _clean(folder, changes)
    except OSError as error:
        raise SwapBroken(
            f"all files are changed, but the run could not tidy up: {error}. Run it again"
        ) from error


def _take_back(
    folder: Path, changes: Mapping[str, Change], replaced: Iterable[str], cause: BaseException
) -> None:
    try:
        for path in replaced:
            _stage(folder / path, changes[path].before)
            _replace(folder / path)
        _clean(folder, changes)
    except OSError as error:
        if is_pending(folder):
            raise SwapBroken(
                f"{cause}; then {error}. Some files are changed and others not: run this again "
                "when the cause is gone, and it is finished"
            ) from cause
        # Without a journal nothing was written.


def _write_journal(folder: Path, changes: Mapping[str, Change]) -> None:
    entries = {
        path: {
            "before": sha256(change.before),
            "after": sha256(change.after),
            "content": base64.b64encode(change.after).decode(),
        }
        for path, change in changes.items()
    }
    journal = folder / _JOURNAL
    _write(_unfinished(journal), json.dumps(entries).encode(), 0o644)
    _unfinished(journal).replace(journal)
    _sync_folder(folder)


def _unfinished(journal: Path) -> Path:
    return journal.with_name(journal.name + ".tmp")


def _clean(folder: Path, paths: Iterable[str]) -> None:
    """Remove what a run leaves: the journal last."""
    for path in paths:
        _staged(folder / path).unlink(missing_ok=True)
    journal = folder / _JOURNAL
    _unfinished(journal).unlink(missing_ok=True)
    journal.unlink(missing_ok=True)
    _sync_folder(folder)


def _staged(file: Path) -> Path:
    return file.with_name(file.name + _STAGED)


def _stage(file: Path, content: bytes) -> None:
    status = file.stat()
    _write(_staged(file), content, status.st_mode & 0o7777)
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):  # only root may give files away
            os.chown(_staged(file), status.st_uid, status.st_gid)


def _write(file: Path, content: bytes, mode: int) -> None:
    with file.open("wb") as handle:
        os.fchmod(handle.fileno(), mode)
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def _replace(file: Path) -> None:
    _staged(file).replace(file)
    _sync_folder(file.parent)
    # Compiled files follow the source's time by themselves, but not those of a build that told
    # Python never to look at it.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
