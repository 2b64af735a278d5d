"""What a delta log holds: its versions, and the routes between them.

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

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec

from engine_ext.answers import some_of
from engine_ext.errors import DeltaError, LogDamaged
from engine_ext.files import INDEX
from engine_ext.structs import prepare

DONE: Final = "DONE"
REFUSED: Final = "REFUSED"
MARKS: Final = (DONE, INDEX)  # one of them makes a version visible
PART_SUFFIX: Final = ".safetensors"
MAX_DONE_BYTES: Final = 16 << 20
MAX_VERSION: Final = 2**63 - 1  # as in the parts

_FOLDER: Final = re.compile(r"weight_v([0-9]{1,19})(?:_from_v([0-9]{1,19}))?")


class CannotFold(Exception):
    """These versions cannot be folded into one; the message says why."""


class FileFacts(msgspec.Struct, frozen=True):
    """A part's entry in ``DONE``: its length in bytes, and the xxh3_128 of these in hex."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    xxh3_128: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """Who has written a version of a log, and what it leads to, as its sender says.

    Digests are of the whole model, 32 hex digits; None if no part declares one.
    """

    at: float  # Unix time on the sender's clock
    run: str | None = None
    epoch: int | None = None  # which opening of the run this is
    owner: str | None = None  # HOST:PID
    digest_before: str | None = None
    digest_after: str | None = None
    signature: str | None = None  # see `engine_ext.log.publication`


class Done(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of ``DONE``."""

    version: int  # that the delta leads to
    base_version: int | None  # that it starts from; None if it is full
    files: dict[str, FileFacts]  # the parts, by file name
    refused: bool = False  # its number is used up; written where a folder cannot be renamed
    publication: Publication | None = None  # None: its writer did not say


prepare(Done)


@dataclass(frozen=True, slots=True)
class Entry:
    """A delta in the log.

    `folder` holds the files while they are on this host, see `engine_ext.log.DeltaLog.fetched`.
    """

    folder: Path
    version: int  # that it leads to
    base_version: int | None  # that it starts from; None if it is full
    files: dict[str, FileFacts | None]  # by file name; None if ``DONE`` does not have the facts
    nbytes: int  # of all parts
    foreign: bool = False  # a folder with an index, which is applied as a whole
    written_at: float = 0.0  # Unix time by the clock of where the log is
    publication: Publication | None = None

    @property
    def full(self) -> bool:
        """Whether it holds the whole model, and so starts from any version."""
        return self.base_version is None

    @property
    def is_fold(self) -> bool:
        """Whether it leads over other versions."""
        return "_from_" in self.folder.name

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
            with self.reading(name):
                size = (self.folder / name).stat().st_size
            if facts is not None and size != facts.bytes:
                raise self.damaged(f"{name} has {size} bytes of {facts.bytes}", file=name)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Raise what fails inside the block as LogDamaged, which names the file."""
        try:
            yield
        except OSError as error:
            raise self.damaged(f"{name}: {error.strerror}", file=name) from error
        except DeltaError as error:
            raise self.damaged(f"{name}: {error.message}", file=name) from error

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
    entries: Sequence[Entry], candidates: Iterable[Entry], starts: Iterable[int | None], newest: int
) -> tuple[list[Entry], list[int | None]]:
    """Return which deltas can be deleted.

    Args:
        entries: the deltas in the log.
        candidates: those that could be deleted.
        starts: versions from which the newest one must stay reachable; None: from any, by a full
            delta.

    Returns:
        The candidates that are on no needed route, and the starts from which the newest version
        cannot be reached even now.
    """
    needed: set[Path] = set()
    stranded: list[int | None] = []
    for start in dict.fromkeys(starts):
        steps = route(entries, start)
        is_there = start is not None and start >= newest
        if not is_there and (not steps or steps[-1].version != newest):
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
    broken = {*listing.damaged, *bad}
    behind = f"the delta log has version {newest}, but nothing in it leads on from "
    behind += "here" if version is None else f"version {version}"
    return behind + (f"; damaged: {some_of(broken)}" if broken else "")


def parse_done(text: bytes) -> Done:
    """Return the content of a ``DONE`` that is not empty; LogDamaged if it is not valid."""
    try:
        return msgspec.json.decode(text, type=Done)
    except (ValueError, RecursionError) as error:
        raise LogDamaged(f"its {DONE} cannot be read: {error}") from error
