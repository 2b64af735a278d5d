"""Pull, then commit: versions fetched from where a trainer publishes them.

slime and miles let an engine pull every version up to a target into a checkpoint on its own disk,
and then load that checkpoint. Here no checkpoint is written: the pull stages the next version on
all ranks, and loading the checkpoint commits it. The ranks remember which checkpoints are such
names.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from delta_server.board import PULLS, Item
from delta_server.engine import Held
from delta_server.request_options import (
    DiskRequest,
    Options,
    PullRequest,
    parse_adapter,
    parse_commit,
)
from delta_server.request_record import RequestRecord
from delta_server.sources import Inlet, deliver
from delta_server.sources.disk_files import list_names, marks
from delta_server.sources.files import Files
from delta_server.sources.folders import folder_of, holds_nothing, spool_request
from delta_server.sources.push import advance
from delta_server.sources.store_files import ResolvedFiles, StoreFiles
from engine_ext.errors import (
    Conflict,
    DeltaError,
    MalformedPart,
    PartUnavailable,
    PathForbidden,
    SpoolFull,
    VersionConflict,
)
from engine_ext.format import PartId
from engine_ext.store_urls import is_store_url
from engine_ext.structs import prepare

PULLED: Final = "delta_updates.pulled"
"""Key of an ASGI scope: what `find_pulled` has returned for the request, if it was called."""

_MOST_PULLED: Final = 16


class PulledFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of the version that a pull has staged, as it was read."""

    version: int
    identities: list[str]  # of its parts, sorted
    marks: dict[str, str]  # by file name: changes with the file; empty if it cannot show a change


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that were pulled under the name of a checkpoint."""

    source: str  # the folder that they are published in
    target: int  # the last of them
    sync_id: str | None = None  # of the staged sync
    folder: PulledFolder | None = None  # the folder of its version


class Pulls(msgspec.Struct, frozen=True):
    """The versions that were pulled, by the name of a checkpoint; the oldest name gives way."""

    by_checkpoint: dict[str, Pulled] = {}

    def including(self, checkpoint: str, pulled: Pulled) -> Pulls:
        """Return these with another one, in place of an earlier one of its name."""
        kept = [(name, one) for name, one in self.by_checkpoint.items() if name != checkpoint]
        return Pulls(dict([*kept, (checkpoint, pulled)][-_MOST_PULLED:]))


prepare(Pulls)


async def pull(inlet: Inlet, wanted: PullRequest, record: RequestRecord) -> str:
    """Stage the next version that holds something, of those up to the target; return what was done.

    The folders of all of them must be there. The engine continues to serve its version.

    Raises:
        DeltaError: a version is missing, or refused, or the engine is already past the target. The
            engine is unchanged.
    """
    source = await _source(inlet, wanted.source_dir)
    held = await _held(inlet)
    if held.version > wanted.target_version:
        raise VersionConflict(
            f"the engine is at version {held.version}, later than {wanted.target_version}",
            expected=wanted.target_version,
            actual=held.version,
        )
    following = await asyncio.to_thread(source.following, held.version, wanted.target_version)
    sync_id = folder = None
    pulls, checkpoint = Item(inlet.engine, PULLS, Pulls), wanted.local_checkpoint_dir
    earlier = (await pulls.read()).by_checkpoint.get(checkpoint)
    if earlier is not None and earlier.source == source.location:
        if following:
            await _drop_rewritten(inlet, source, earlier, following[0])
        else:
            await _refuse_rewritten(inlet, source, earlier.folder)
            folder = earlier.folder
    if following:
        options = Options(weight_version=following[0])
        record.commits = False
        marks = await asyncio.to_thread(source.marks, following[0])  # before the files are read
        files = source.resolved(following[0])
        answer = await deliver(Files(inlet, files, options, record))
        identities = sorted(record.identities)
        folder = PulledFolder(version=following[0], identities=identities, marks=marks)
        sync_id = record.parts[0].sync_id
        version = record.parts[0].version
        if answer["status"] == "staged" and await _staged(inlet, version, sync_id) is None:
            await _refuse_incomplete(inlet, record)
    pulled = Pulled(
        source=source.location, target=wanted.target_version, sync_id=sync_id, folder=folder
    )
    await pulls.update(lambda known: known.including(checkpoint, pulled))
    found = f"{len(following)} versions to apply" if following else "nothing to apply"
    return f"version {wanted.target_version} is pulled: {found}"


async def find_pulled(inlet: Inlet, checkpoint: object) -> Pulled | None:
    """Return the versions that were pulled under the name of a checkpoint; None if none were."""
    if not isinstance(checkpoint, str):
        return None
    pulls = await Item(inlet.engine, PULLS, Pulls).read()
    return pulls.by_checkpoint.get(checkpoint)


def check_pulled_request(disk_request: DiskRequest, query: Mapping[str, str]) -> None:
    """Refuse what `commit_pulled` could only ignore.

    Raises:
        MalformedPart: the request is for an adapter, names a base or files, or is not to commit.
    """
    named: dict[str, object] = {
        "adapter": parse_adapter(query, disk_request.adapter),
        "base_version": query.get("base_version", disk_request.base_version),
        "files": disk_request.files,
        "commit=hold": None if parse_commit(query, disk_request.commit) else True,
    }
    ignored = [key for key, value in named.items() if value is not None]
    if ignored:
        raise MalformedPart(
            f"{', '.join(ignored)}: not for versions that were pulled, which are committed as they "
            "are, for the model's weights"
        )


async def commit_pulled(
    inlet: Inlet, pulled: Pulled, options: Options, record: RequestRecord
) -> dict[str, Any]:
    """Commit versions that were pulled; return the last answer.

    The staged version is committed as it is, if its folder still holds that. Later versions are
    applied in turn, each in a transaction of its own: if one is refused, the engine is at the
    version before it.

    Raises:
        VersionConflict: another version was pulled.
        Conflict: the folder holds other bytes than were pulled. Nothing of them stays staged.
        DeltaError: see `delta_server.sources.deliver`.
    """
    target = pulled.target if options.weight_version is None else options.weight_version
    if target != pulled.target:
        raise VersionConflict(
            f"version {pulled.target} was pulled, not {target}",
            expected=target,
            actual=pulled.target,
        )
    held, source = await _held(inlet), await _source(inlet, pulled.source)
    following = await asyncio.to_thread(source.following, held.version, target)
    if not following:
        await _refuse_rewritten(inlet, source, pulled.folder)
    for version in following:
        # Each version is reported; the request's own record is for the last one.
        own_record = record if version == following[-1] else RequestRecord()
        # Without an id, a staged sync of this version might be another's.
        named = pulled.sync_id is not None
        staged = await _staged(inlet, version, pulled.sync_id) if named else None
        if await _drop_rewritten(inlet, source, pulled, version):
            raise _rewritten(version, "were pulled from it; pull it again")
        if staged is not None:
            answer = await inlet.coordinator.commit_staged(staged, options, own_record)
        else:  # not staged, or dropped since, or not known to be this one
            own = msgspec.structs.replace(options, weight_version=version)
            answer = await deliver(Files(inlet, source.resolved(version), own, own_record))
        if answer["status"] == "staged":
            await _refuse_incomplete(inlet, own_record)
        if version == target:
            return answer
    last = RequestRecord() if following else record
    return await advance(inlet, str(target), options, last)


async def _drop_rewritten(inlet: Inlet, source: PullSource, pulled: Pulled, version: int) -> bool:
    """Return whether the folder of a version holds other bytes than were pulled from it.

    The parts that are staged of it are dropped then.
    """
    folder = pulled.folder
    if folder is None or folder.version != version:
        return False
    marks = await asyncio.to_thread(source.marks, version)
    if await _is_unchanged(inlet, source, folder, marks):
        return False
    staged = await _staged(inlet, version, pulled.sync_id)
    if staged is not None:
        await inlet.coordinator.drop_staged(staged)
    return True


async def _refuse_rewritten(inlet: Inlet, source: PullSource, folder: PulledFolder | None) -> None:
    """Refuse a folder that holds other bytes than were committed; one that is gone shows none.

    Raises:
        Conflict: it does.
    """
    if folder is None:
        return
    marks: dict[str, str] = {}
    with contextlib.suppress(MalformedPart):
        marks = await asyncio.to_thread(source.marks, folder.version)
    if marks and not await _is_unchanged(inlet, source, folder, marks):
        raise _rewritten(
            folder.version, "the engine has committed of it; publish them as a later version"
        )


def _rewritten(version: int, than: str) -> Conflict:
    name = folder_of(Path(), version).name
    return Conflict(f"{name} holds other bytes than {than}", version=version, file=name)


async def _is_unchanged(
    inlet: Inlet, source: PullSource, folder: PulledFolder, marks: dict[str, str]
) -> bool:
    """Return whether a folder holds what was pulled from it.

    Args:
        marks: of its files now. It is read only if they cannot show it.

    Raises:
        PartUnavailable, SpoolFull: it cannot be read now.
    """
    if marks == folder.marks and all(marks.values()):
        return True
    try:
        async with source.resolved(folder.version) as files:
            verified = await spool_request(inlet, files)
    except (PartUnavailable, SpoolFull):
        raise
    except DeltaError:  # it could be read before
        return False
    for one in verified:
        one.remove()
    return sorted(one.identity for one in verified) == folder.identities


async def _refuse_incomplete(inlet: Inlet, record: RequestRecord) -> NoReturn:
    """Drop a version that lacks parts.

    Raises:
        MalformedPart: always.
    """
    await inlet.coordinator.drop_staged(record.parts[0])
    version = record.parts[0].version
    raise MalformedPart(f"the folder of version {version} lacks parts of it")


async def _staged(inlet: Inlet, version: int, sync_id: str | None) -> PartId | None:
    """Return what names a sync that is staged completely; None if it is not."""
    return (await inlet.coordinator.held()).complete_sync(version, sync_id)


async def _held(inlet: Inlet) -> Held:
    """Return what the engine holds, if deltas can be applied to it."""
    held = await inlet.coordinator.held()
    held.require_intact()
    return held


async def _source(inlet: Inlet, location: str) -> PullSource:
    folders = inlet.settings.folders
    return await asyncio.to_thread(PullSource, location, folders, inlet.store_files)


class PullSource:
    """The versions below one location.

    Args:
        location: as a request names it, or `PullSource.location`.
        folders: real paths of the allowed folders.

    Attributes:
        location: with symlinks resolved, if it is a folder; without a trailing slash.

    Raises:
        PathForbidden: no folder is allowed, or it is a URL that is not.
        MalformedPart, PartUnavailable: it is no path; see `StoreFiles.allowed`.
    """

    def __init__(self, location: str, folders: tuple[str, ...], files: StoreFiles) -> None:
        self._in_store = is_store_url(location)
        if not self._in_store and not folders:
            raise PathForbidden("pulls are refused: the engine has no --delta-root")
        if "\0" in location:
            raise MalformedPart("a path contains a NUL character")
        self.location = files.allowed(location) if self._in_store else os.path.realpath(location)
        self._folders, self._files = folders, files

    def following(self, current: int, target: int) -> list[int]:
        """Return the versions after `current` up to `target`, of those that hold something.

        Raises:
            PathForbidden, MalformedPart: one cannot be listed.
            PartUnavailable, SpoolFull: see `StoreFiles.resolved`.
        """
        if self._in_store:
            return self._following_in_store(current, target)
        found = []
        for version in range(current + 1, target + 1):
            folder = Path(os.path.realpath(folder_of(Path(self.location), version)))
            list_names(folder, self._folders)
            if not holds_nothing(folder, self._folders):
                found.append(version)
        return found

    def _following_in_store(self, current: int, target: int) -> list[int]:
        found = []
        with self._files.scratch() as scratch:
            for version in range(current + 1, target + 1):
                folder = folder_of(scratch.path, version)
                if not self._files.bring_index(f"{self.location}/{folder.name}", folder):
                    message = f"cannot read {folder.name}: there is nothing below its URL"
                    raise MalformedPart(message, file=folder.name)
                if not holds_nothing(folder, [str(scratch.path)]):
                    found.append(version)
        return found

    def marks(self, version: int) -> dict[str, str]:
        """Return a mark per file of a version, which changes when the file is written.

        Raises:
            PathForbidden, MalformedPart, PartUnavailable: see `following`.
        """
        name = folder_of(Path(), version).name
        if self._in_store:
            return self._files.marks(f"{self.location}/{name}")
        return marks(Path(os.path.realpath(Path(self.location) / name)), self._folders)

    def resolved(self, version: int) -> AbstractAsyncContextManager[ResolvedFiles]:
        """Have the files of a version; see `StoreFiles.resolved`."""
        name = folder_of(Path(), version).name
        return self._files.resolved(DiskRequest(model_path=f"{self.location}/{name}"))
