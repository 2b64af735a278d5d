"""Read a delta log: a folder that keeps every version a sender has published, for replay.

::

    LOG/weight_v000012/rank0_flush000.safetensors   part 0 of the sync to version 12, as it is sent
    LOG/weight_v000012/rank0_flush001.safetensors   part 1
    LOG/weight_v000012/DONE                         all parts are there
    LOG/weight_v000012_from_v000003/                versions 4 to 12 folded into one delta
    LOG/weight_v000013/REFUSED                      no engine took it; its number stays used

A folder gets its name once everything in it is on disk, so a reader sees a whole version or none.
``DONE`` holds JSON (`Done`) with the versions and the files. An empty one, as other senders write
it, means that the version follows the previous number.

A folder in the newer format of other trainers (see `engine_ext.version_folders`) has an index in
place of ``DONE``, which is written last as well. Its files have no parts.

A version number stands for one content forever: a sync that every engine refused is marked, and the
next one gets another number. So the version shows if an engine has replayed a refused one. Which
version leads where is read from ``DONE`` alone. Whether the parts agree with it, and whether their
bytes are the sender's, is checked when they are applied, by the code that also serves HTTP.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Protocol

import msgspec

from engine_ext.errors import DeltaError, LogDamaged

DONE: Final = "DONE"
REFUSED: Final = "REFUSED"
PART_SUFFIX: Final = ".safetensors"
MAX_DONE_BYTES: Final = 16 << 20

_MAX_VERSION: Final = 2**63 - 1  # as in the parts
_GONE: Final = (errno.ENOENT, errno.ESTALE)  # pruned meanwhile, by another host too
_FOLDER: Final = re.compile(r"weight_v([0-9]{1,19})(?:_from_v([0-9]{1,19}))?")


class FileFacts(msgspec.Struct, frozen=True):
    """A part's entry in ``DONE``: its length in bytes, and the xxh3_128 of these in hex."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    xxh3_128: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Done(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of ``DONE``."""

    version: int  # that the delta leads to
    base_version: int | None  # that it starts from; None if it is full
    files: dict[str, FileFacts]  # the parts, by file name
    refused: bool = False  # its number is used up; written where a folder cannot be renamed


class VersionFiles(Protocol):
    """The files of a version, wherever they are."""

    def names(self) -> Collection[str]:
        """Return the names of the files."""
        ...

    def size(self, name: str) -> int:
        """Return a file's length in bytes; OSError if it is gone."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file; OSError if it cannot be read, LogDamaged if it is not a file."""
        ...


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The files in a folder."""

    folder: Path

    def names(self) -> list[str]:
        """Return the names in the folder."""
        return [path.name for path in self.folder.iterdir()]

    def size(self, name: str) -> int:
        """Return a file's length in bytes."""
        return (self.folder / name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        """Open a regular file."""
        return open_regular(self.folder / name)


@dataclass(frozen=True, slots=True)
class Entry:
    """A delta in the log.

    `folder` holds the files while they are on this host, see `engine_ext.log.DeltaLog`.
    """

    folder: Path
    version: int  # that it leads to
    base_version: int | None  # that it starts from; None if it is full
    files: dict[str, FileFacts | None]  # by file name; None if ``DONE`` does not have the facts
    nbytes: int  # of all parts
    foreign: bool = False  # a folder with an index, which is applied as a whole
    written_at: float = 0.0  # Unix time by the clock of where the log is

    @property
    def full(self) -> bool:
        """Whether it holds the whole model, and so starts from any version."""
        return self.base_version is None

    @property
    def paths(self) -> list[Path]:
        """The paths of its parts, in order; of a folder with an index, its own."""
        if self.foreign:
            return [self.folder]
        return [self.folder / name for name in sorted(self.files)]

    def require_files(self) -> None:
        """Check that there are parts, all at their full length; LogDamaged if not."""
        if not self.files and not self.foreign:
            raise self.damaged("it has no parts")
        for name, facts in self.files.items():
            try:
                size = (self.folder / name).stat().st_size
            except OSError as error:
                raise self.damaged(f"{name}: {error.strerror}", file=name) from error
            if facts is not None and size != facts.bytes:
                raise self.damaged(f"{name} has {size} bytes of {facts.bytes}", file=name)

    def damaged(self, why: str, **operands: object) -> LogDamaged:
        """Return the error for a damage of this version."""
        message = f"version {self.version} of the delta log is damaged: {why}"
        return LogDamaged(message, version=self.version, folder=self.folder.name, **operands)


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a log: by version what can be replayed, folded deltas after the others."""

    entries: list[Entry] = field(default_factory=list)
    refused: list[Path] = field(default_factory=list)  # folders of versions that no engine took
    damaged: dict[str, str] = field(default_factory=dict)  # folder's name -> why it is unusable

    @property
    def newest(self) -> int | None:
        """The newest version, damaged or not; None in an empty log."""
        known = [entry.version for entry in self.entries]
        known += [version for name in self.damaged if (version := version_of(name)) is not None]
        return max(known, default=None)

    def add(self, folder: Path, files: VersionFiles, written_at: float) -> None:
        """Add a version; OSError if its files are gone meanwhile."""
        try:
            self.entries.append(_read_entry(folder, files, written_at))
        except LogDamaged as damaged:
            self.damaged[folder.name] = damaged.message

    def sorted(self) -> Listing:
        """Return the listing with its entries in order."""
        entries = sorted(self.entries, key=lambda entry: (entry.version, entry.folder.name))
        return Listing(entries, self.refused, self.damaged)

    def up_to(self, version: int) -> Listing:
        """Return the listing without what leads past a version."""
        damaged = {k: why for k, why in self.damaged.items() if (version_of(k) or 0) <= version}
        entries = [entry for entry in self.entries if entry.version <= version]
        return Listing(entries, self.refused, damaged)


def version_of(name: str) -> int | None:
    """Return the version of a folder with this name; None if it is not a version's folder."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def folder_name(version: int, folded_from: int | None = None) -> str:
    """Return the name of a version's folder; of a folded delta's, with its base."""
    name = f"weight_v{version:06d}"
    return name if folded_from is None else f"{name}_from_v{folded_from:06d}"


def list_log(folder: Path) -> Listing:
    """List the content of a log, without reading the parts; LogDamaged if it is unreadable."""
    listing = Listing()
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise LogDamaged(f"cannot read the delta log: {error.strerror}") from error
    for name in (name for name in names if version_of(name) is not None):
        try:
            if (folder / name / REFUSED).exists():
                listing.refused.append(folder / name)
                continue
            written_at = (folder / name).stat().st_mtime
            listing.add(folder / name, FolderFiles(folder / name), written_at)
        except OSError as error:
            if error.errno not in _GONE:
                listing.damaged[name] = f"it cannot be read: {error.strerror}"
    return listing.sorted()


def route(entries: Iterable[Entry], version: int | None) -> list[Entry]:
    """Return the deltas with the fewest bytes that lead to the newest reachable version, in order.

    The list is empty if nothing newer than `version` can be reached. With None, if the weights have
    no known version, only a full delta can be the first.
    """
    costs: dict[int, int] = {} if version is None else {version: 0}
    steps: dict[int, Entry] = {}  # the last delta of the route to a version
    for entry in sorted(entries, key=lambda entry: entry.version):
        if version is not None and entry.version <= version:
            continue
        before = 0 if entry.base_version is None else costs.get(entry.base_version)
        if before is None or (entry.base_version or 0) > entry.version:
            continue
        if entry.version not in costs or before + entry.nbytes < costs[entry.version]:
            costs[entry.version], steps[entry.version] = before + entry.nbytes, entry
    found: list[Entry] = []
    at = max(steps, default=None)
    while at is not None and at in steps:
        found.append(steps[at])
        at = steps[at].base_version
    return found[::-1]


def removable(
    entries: Sequence[Entry], candidates: Iterable[Entry], starts: Iterable[int], newest: int
) -> tuple[list[Entry], list[int]]:
    """Return which deltas can be deleted.

    Args:
        entries: the deltas in the log.
        candidates: those that may be deleted.
        starts: versions from which the newest one must stay reachable.

    Returns:
        The candidates that are on no needed route, and the starts from which the newest version
        cannot be reached even now.
    """
    needed: set[Path] = set()
    stranded = []
    for start in sorted(set(starts)):
        steps = route(entries, start)
        if start < newest and (not steps or steps[-1].version != newest):
            stranded.append(start)
        needed.update(entry.folder for entry in steps)
    return [entry for entry in candidates if entry.folder not in needed], stranded


def why_not_newer(listing: Listing, version: int | None, bad: Collection[str] = ()) -> str | None:
    """Return why the log leads to nothing newer than a version; None if it has nothing newer.

    `version` is the newest one that can be reached, and `bad` names further damaged folders.
    """
    newest = listing.newest
    if newest is None or (version is not None and newest <= version):
        return None
    broken = sorted({*listing.damaged, *bad})
    behind = f"the delta log has version {newest}, but nothing in it leads on from "
    behind += "here" if version is None else f"version {version}"
    return behind + (f"; damaged: {', '.join(broken)}" if broken else "")


def _read_entry(folder: Path, files: VersionFiles, written_at: float) -> Entry:
    version = version_of(folder.name)
    assert version is not None
    text = _read_done(files)
    names = files.names()
    if not text:
        from engine_ext.version_folders import INDEX

        if INDEX in names:
            return _read_foreign(folder, version, files, written_at)
    if text is None:
        raise LogDamaged(f"it has no {DONE}: it was not written completely")
    if not text:
        parts = sorted(name for name in names if name.endswith(PART_SUFFIX))
        facts: dict[str, FileFacts | None] = dict.fromkeys(parts)
        nbytes = sum(files.size(name) for name in parts)
        return Entry(folder, version, version - 1, facts, nbytes, written_at=written_at)
    done = parse_done(text)
    base = done.base_version
    if done.version != version or version > _MAX_VERSION or (base is not None and base >= version):
        raise LogDamaged(f"its {DONE} declares that it leads from {base} to {done.version}")
    if any(name in ("", "..") or "\0" in name or Path(name).name != name for name in done.files):
        raise LogDamaged(f"its {DONE} names a file outside the folder")
    nbytes = sum(facts.bytes for facts in done.files.values())
    return Entry(folder, version, base, {**done.files}, nbytes, written_at=written_at)


def parse_done(text: bytes) -> Done:
    """Return the content of a ``DONE`` that is not empty; LogDamaged if it is not valid."""
    try:
        return msgspec.json.decode(text, type=Done)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LogDamaged(f"its {DONE} cannot be read: {error}") from error


def _read_foreign(folder: Path, version: int, files: VersionFiles, written_at: float) -> Entry:
    """Read a folder with an index; its files are read when it is applied or verified."""
    from engine_ext.format import Limits
    from engine_ext.version_folders import INDEX, read_version_folder

    names = files.names()
    try:
        found = read_version_folder(folder.name, names, files.open, Limits())
    except DeltaError as error:
        raise LogDamaged(error.message) from error
    except OSError as error:
        raise LogDamaged(f"its {INDEX} cannot be read: {error.strerror}") from error
    facts: dict[str, FileFacts | None] = dict.fromkeys(found.index.files)
    nbytes = sum(files.size(name) for name in facts if name in names)
    return Entry(
        folder, version, found.base_version, facts, nbytes, foreign=True, written_at=written_at
    )


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file of a log, unbuffered; LogDamaged if it is another thing."""
    # A FIFO that nobody writes to must not block the reader; links are not followed.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LogDamaged(f"its {path.name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _read_done(files: VersionFiles) -> bytes | None:
    """Return the content of ``DONE``, stripped; None if there is none."""
    try:
        with files.open(DONE) as file:
            text = file.read(MAX_DONE_BYTES + 1)
    except FileNotFoundError:
        files.names()  # FileNotFoundError if the folder itself is gone
        return None
    except OSError as error:
        raise LogDamaged(f"its {DONE} cannot be read: {error.strerror}") from error
    if len(text) > MAX_DONE_BYTES:
        raise LogDamaged(f"its {DONE} has over {MAX_DONE_BYTES} bytes")
    return text.strip()
