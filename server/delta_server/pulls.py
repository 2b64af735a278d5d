"""Pull, then commit: versions fetched from where a trainer publishes them.

slime and miles let an engine pull every version up to a target into a checkpoint on its own disk,
and then load that checkpoint. Here no checkpoint is written: the pull stages the next version on
all ranks, and loading the checkpoint commits it. The ranks remember which checkpoints are such
names.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from delta_server.board import PULLS, Item
from delta_server.empty_syncs import advance
from delta_server.engine import rank_states
from delta_server.published import folder_of
from delta_server.pull_source import PullSource
from delta_server.request_options import DiskRequest, Options, PullRequest
from delta_server.request_record import RequestRecord
from delta_server.scrubbing import mismatched
from delta_server.version_folders import spool_request
from engine_ext.errors import (
    BaseMismatch,
    Conflict,
    DeltaError,
    MalformedPart,
    PartUnavailable,
    SpoolFull,
    VersionConflict,
)
from engine_ext.format import PartId
from engine_ext.ranks.operations import (
    RankState,
)

_MOST_PULLED: Final = 16

if TYPE_CHECKING:
    from delta_server.service import DeltaService


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


async def pull(service: DeltaService, wanted: PullRequest, record: RequestRecord) -> str:
    """Stage the next version that holds something, of those up to the target; return what was done.

    The folders of all of them must be there. The engine continues to serve its version.

    Raises:
        DeltaError: a version is missing, or refused, or the engine is already past the target. The
            engine is unchanged.
    """
    source = await _source(service, wanted.source_dir)
    state = await _state(service)
    if state.version > wanted.target_version:
        raise VersionConflict(
            f"the engine is at version {state.version}, later than {wanted.target_version}",
            expected=wanted.target_version,
            actual=state.version,
        )
    following = await asyncio.to_thread(source.following, state.version, wanted.target_version)
    sync_id = folder = None
    pulls, checkpoint = Item(service.engine, PULLS, Pulls), wanted.local_checkpoint_dir
    earlier = (await pulls.read()).by_checkpoint.get(checkpoint)
    if earlier is not None and earlier.source == source.location:
        if following:
            await _drop_rewritten(service, source, earlier, following[0])
        else:
            await _refuse_rewritten(service, source, earlier.folder)
            folder = earlier.folder
    if following:
        options = Options(weight_version=following[0])
        record.commits = False
        marks = await asyncio.to_thread(source.marks, following[0])  # before the files are read
        async with source.resolved(following[0]) as files:
            answer = await service.apply_resolved(files, options, record)
        identities = sorted(one.identity for one in record.verified)
        folder = PulledFolder(version=following[0], identities=identities, marks=marks)
        sync_id = record.parts[0].sync_id
        version = record.parts[0].version
        if answer["status"] == "staged" and await _staged(service, version, sync_id) is None:
            await _refuse_incomplete(service, record)
    pulled = Pulled(
        source=source.location, target=wanted.target_version, sync_id=sync_id, folder=folder
    )
    await pulls.update(lambda known: known.including(checkpoint, pulled))
    found = f"{len(following)} versions to apply" if following else "nothing to apply"
    return f"version {wanted.target_version} is pulled: {found}"


async def is_pulled(service: DeltaService, checkpoint: object) -> bool:
    """Return whether a path is the name under which versions were pulled."""
    return isinstance(checkpoint, str) and await _find(service, checkpoint) is not None


async def commit_pulled(
    service: DeltaService, disk_request: DiskRequest, options: Options, record: RequestRecord
) -> dict[str, Any]:
    """Commit what was pulled under the name `disk_request.model_path`; return the last answer.

    The staged version is committed as it is, if its folder still holds that. Later versions are
    applied in turn, each in a transaction of its own: if one is refused, the engine is at the
    version before it.

    Raises:
        VersionConflict: another version was pulled.
        Conflict: the folder holds other bytes than were pulled. Nothing of them stays staged.
        DeltaError: see `DeltaService.apply_files`.
    """
    pulled = await _find(service, disk_request.model_path)
    assert pulled is not None
    target = pulled.target if options.weight_version is None else options.weight_version
    if target != pulled.target:
        raise VersionConflict(
            f"version {pulled.target} was pulled, not {target}",
            expected=target,
            actual=pulled.target,
        )
    options = msgspec.structs.replace(options, base_version=None)
    state, source = await _state(service), await _source(service, pulled.source)
    following = await asyncio.to_thread(source.following, state.version, target)
    if not following:
        await _refuse_rewritten(service, source, pulled.folder)
    for version in following:
        # Each version is reported; the request's own record is for the last one.
        own_record = record if version == following[-1] else RequestRecord()
        # Without an id, a staged sync of this version might be another's.
        named = pulled.sync_id is not None
        staged = await _staged(service, version, pulled.sync_id) if named else None
        if await _drop_rewritten(service, source, pulled, version):
            raise _rewritten(version, "were pulled from it; pull it again")
        if staged is not None:
            answer = await service.coordinator.commit_staged(staged, options, own_record)
        else:  # not staged, or dropped since, or not known to be this one
            own = msgspec.structs.replace(options, weight_version=version)
            async with source.resolved(version) as files:
                answer = await service.apply_resolved(files, own, own_record)
        if answer["status"] == "staged":
            await _refuse_incomplete(service, own_record)
        if version == target:
            return answer
    last = RequestRecord() if following else record
    return await advance(service, str(target), options, last)


async def _drop_rewritten(
    service: DeltaService, source: PullSource, pulled: Pulled, version: int
) -> bool:
    """Return whether the folder of a version holds other bytes than were pulled from it.

    The parts that are staged of it are dropped then.
    """
    folder = pulled.folder
    if folder is None or folder.version != version:
        return False
    marks = await asyncio.to_thread(source.marks, version)
    if await _is_unchanged(service, source, folder, marks):
        return False
    staged = await _staged(service, version, pulled.sync_id)
    if staged is not None:
        await service.coordinator.drop_staged(staged)
    return True


async def _refuse_rewritten(
    service: DeltaService, source: PullSource, folder: PulledFolder | None
) -> None:
    """Refuse a folder that holds other bytes than were committed; one that is gone shows none.

    Raises:
        Conflict: it does.
    """
    if folder is None:
        return
    marks: dict[str, str] = {}
    with contextlib.suppress(MalformedPart):
        marks = await asyncio.to_thread(source.marks, folder.version)
    if marks and not await _is_unchanged(service, source, folder, marks):
        raise _rewritten(
            folder.version, "the engine has committed of it; publish them as a later version"
        )


def _rewritten(version: int, than: str) -> Conflict:
    name = folder_of(Path(), version).name
    return Conflict(f"{name} holds other bytes than {than}", version=version, file=name)


async def _is_unchanged(
    service: DeltaService, source: PullSource, folder: PulledFolder, marks: dict[str, str]
) -> bool:
    """Return whether a folder holds what was pulled from it.

    Args:
        marks: of its files now. It is read only if they cannot show it.

    Raises:
        PartUnavailable, SpoolFull: it cannot be read now.
    """
    if marks == folder.marks and all(marks.values()):
        return True
    reads = service.settings.read_workers
    try:
        async with source.resolved(folder.version) as files:
            verified = await spool_request(
                service.intake, files.paths, files.roots, reads, service.engine
            )
    except (PartUnavailable, SpoolFull):
        raise
    except DeltaError:  # it could be read before
        return False
    for one in verified:
        one.remove()
    return sorted(one.identity for one in verified) == folder.identities


async def _refuse_incomplete(service: DeltaService, record: RequestRecord) -> NoReturn:
    """Drop a version that lacks parts.

    Raises:
        MalformedPart: always.
    """
    await service.coordinator.drop_staged(record.parts[0])
    version = record.parts[0].version
    raise MalformedPart(f"the folder of version {version} lacks parts of it")


async def _staged(service: DeltaService, version: int, sync_id: str | None) -> PartId | None:
    """Return what names a sync that is staged completely; None if it is not."""
    [status, *_] = await service.committer.status(service.engine)
    staged = status.staged
    if staged is None or (staged.version, staged.sync_id) != (version, sync_id):
        return None
    if len(staged.parts) != staged.num_parts:
        return None
    base, full = staged.base_version, staged.full
    return PartId(version=version, base_version=base, identity="", sync_id=sync_id, full=full)


async def _state(service: DeltaService) -> RankState:
    """Return the state of the ranks, if deltas can be applied to it."""
    replies = await service.committer.status(service.engine)
    if (by := next((one.foreign for one in replies if one.foreign), None)) is not None:
        raise BaseMismatch(f"{by} changed the weights outside of delta sync; send a full sync")
    if wrong := mismatched(replies):
        raise BaseMismatch.in_memory(wrong)
    [state, *_] = await rank_states(service.engine)
    return state


async def _find(service: DeltaService, checkpoint: str) -> Pulled | None:
    pulls = await Item(service.engine, PULLS, Pulls).read()
    return pulls.by_checkpoint.get(checkpoint)


async def _source(service: DeltaService, location: str) -> PullSource:
    folders = service.settings.folders
    return await asyncio.to_thread(PullSource, location, folders, service.store_files)
