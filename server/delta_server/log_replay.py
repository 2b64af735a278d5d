"""Replay a delta log into an engine: at start-up, and on request.

Each version is staged and committed as if its parts had arrived by HTTP, with the same checks. A
version that is damaged, missing or not for these weights ends the replay at the last good version,
unless there is a route around it (a folded delta, a later full version). Several versions can be
folded on the way, so that generation pauses once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from delta_server.commit import EngineCommitter, call
from delta_server.engine import Engine
from delta_server.follow_state import FollowState
from delta_server.leases import acquire
from delta_server.process_identity import new_name
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from engine_ext.delta_log import (
    CannotFold,
    DeltaLog,
    Entry,
    FolderLog,
    Listing,
    fold_versions,
    route,
    why_not_newer,
)
from engine_ext.errors import (
    CommitFailed,
    DeltaError,
    LogDamaged,
    PartUnavailable,
    PublishFailed,
    SpoolFull,
    SyncInProgress,
    VersionConflict,
    WeightsAsleep,
    WriteUndone,
)
from engine_ext.object_store import is_store_url
from engine_ext.wire.operations import AcquireLogLease, DropSync, ReleaseLogLease

logger = logging.getLogger(__name__)

ApplyFiles = Callable[
    [Sequence[Path], Options, RequestRecord, Sequence[str]], Awaitable[dict[str, Any]]
]

_PROGRESS_EVERY_S = 2.0
_POLL_S = 0.2
_WAITS_S = (1.0, 2.0, 4.0)  # before a store is read again at start-up
_MOST_FOLDED_BYTES = 256 << 20  # of several versions that are folded; ten times that is decoded
# Errors that another version, or another route to this one, would not avoid.
_ENGINE_ERRORS = (
    CommitFailed, PartUnavailable, PublishFailed, SpoolFull, SyncInProgress, WeightsAsleep,
    WriteUndone,
)  # fmt: skip


class LogReplay:
    """Replay a delta log into one engine.

    Args:
        committer: commits on the engine, and knows its state.
        apply_files: see `delta_server.service.DeltaService.apply_files`.
        engine: the engine's adapter.
        log: the log.
        following: how far versions are applied; None applies all.
        scratch: folder for folded versions; the temporary folder if None.

    Attributes:
        newest: the log's newest version when it was read last; None before, and in an empty log.
    """

    def __init__(
        self,
        committer: EngineCommitter,
        apply_files: ApplyFiles,
        engine: Engine,
        log: DeltaLog,
        following: FollowState | None = None,
        scratch: str | None = None,
    ) -> None:
        self._committer, self._apply_files, self._engine = committer, apply_files, engine
        self.log = log
        self._following, self._scratch = following, scratch
        self._name = new_name()
        self._lock = asyncio.Lock()
        self.newest: int | None = None
        self._versions: list[int] = []
        self._problem: dict[str, Any] | None = None

    @property
    def problem(self) -> dict[str, Any] | None:
        """What kept the engine from the log's newest version when it was replayed last."""
        return self._problem

    def describe(self, version: int) -> dict[str, Any]:
        """Return the log's newest version, and the problem that keeps an older engine from it."""
        newest, problem = self.newest, self._problem
        if self._following is not None and (look := self._following.known.look) is not None:
            # Another process may have looked since this one did.
            newest = max((n for n in (newest, look.newest) if n is not None), default=None)
            problem = look.problem
        reached = newest is not None and version >= newest
        problem = None if reached else problem
        return {"folder": self.log.location, "newest": newest, "problem": problem}

    def behind(self, version: int) -> int:
        """Return how many versions the log had after this one when it was read last."""
        return sum(one > version for one in self._versions)

    async def version(self) -> int:
        """Return the engine's version."""
        [status, *_] = await self._committer.status()
        return status.version

    @contextlib.asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Wait for the replay of any process, and keep others from beginning."""
        async with self._lock, self._lease():
            yield

    async def at_start(self) -> None:
        """Publish the engine's version and replay the log, before the engine serves.

        A `DeltaError` of the replay is logged, not raised; before that, what a store has is read a
        few times more, as it may have failed in passing.
        """
        # An engine that has served nothing has no KV to drop, which takes SGLang half a second of a
        # core per version then. Other processes may be serving already.
        options = Options(flush_cache=self._engine.shared)
        try:
            async with self.idle():
                await self._committer.publish()
                await self._run_again(options)
        except DeltaError as error:
            self._problem = self._problem or error.to_wire()
            message = "delta log: replay failed, the engine serves the version that it has: %s: %s"
            logger.error(message, type(error).__name__, error.message)

    async def _run_again(self, options: Options) -> None:
        waits = iter(_WAITS_S if is_store_url(self.log.location) else ())
        while True:
            try:
                await self._run(options)
                return
            except (LogDamaged, PartUnavailable) as error:
                wait = next(waits, None)
                if wait is None:
                    raise
                logger.warning("delta log: read again in %.0f s: %s", wait, error.message)
                await asyncio.sleep(wait)

    async def run(self, options: Options, *, fold: bool = False) -> dict[str, Any]:
        """Replay the versions that the engine lacks, and return the result as JSON.

        Args:
            options: pause mode, and whether cached KV is dropped, at each commit.
            fold: apply several versions as one where that is possible.

        Raises:
            LogDamaged: the log has a newer version, but no intact route to it. The engine is at
                the last good version.
            DeltaError: the engine could not take a version, whatever its route.
        """
        async with self.idle():
            return await self._run(options, fold=fold)

    async def _run(self, options: Options, *, fold: bool = False) -> dict[str, Any]:
        applied: list[int] = []
        unusable: dict[str, DeltaError] = {}
        start, is_look, anew = time.monotonic(), fold, self._problem is not None
        if self._following is not None:
            await self._following.read()  # no process pins the engine while this one replays
        while True:
            listing = await asyncio.to_thread(self.log.listing, anew=anew)
            self.newest = listing.newest
            self._versions = sorted({entry.version for entry in listing.entries})
            following = self._following
            if following is not None and (last := following.last_version(listing)) is not None:
                listing = listing.up_to(last)
            version, known = await self._version()
            usable = [entry for entry in listing.entries if entry.folder.name not in unusable]
            entries = route(usable, version if known else None)
            if not entries:
                break
            if fold and known and (few := _foldable(entries)):
                fold = await self._apply_folded(few, version, options, applied)
                continue
            await self._follow(entries, options, applied, unusable)
        if applied:
            seconds = time.monotonic() - start
            logger.info("delta log: %d versions replayed in %.1f s", len(applied), seconds)
        self._report(listing, version if known else None, unusable)
        if applied or not is_look:
            message = "delta log: at version %d, the newest in %s is %s"
            logger.info(message, version, self.log.location, self.newest)
        found = {"version": version, "applied": applied, "newest": self.newest}
        return {"status": "caught_up", **found}

    async def _follow(
        self,
        entries: Sequence[Entry],
        options: Options,
        applied: list[int],
        unusable: dict[str, DeltaError],
    ) -> None:
        """Apply one version after another, until one is unusable or a sender commits another.

        The applied versions are added to `applied`, and the folder that cannot be used, with its
        error, to `unusable`. An error that another route would not avoid is raised.
        """
        logged_at = time.monotonic()
        for entry in entries:
            before = await self._version()
            try:
                await self._apply(entry, options)
            except VersionConflict:
                if await self._version() == before:
                    raise
                return  # a sender has committed another version
            except _ENGINE_ERRORS:
                raise
            except DeltaError as error:
                unusable[entry.folder.name] = error
                logger.error("delta log: %s cannot be used: %s", entry.folder.name, error.message)
                return
            applied.append(entry.version)
            if time.monotonic() - logged_at > _PROGRESS_EVERY_S:
                logged_at = time.monotonic()
                logger.info("delta log: at version %d of %d", entry.version, entries[-1].version)

    async def _apply_folded(
        self, entries: Sequence[Entry], version: int, options: Options, applied: list[int]
    ) -> bool:
        """Apply several versions as one; return whether that was possible.

        If not, the engine is as it was. Applied one after another, the versions show why.
        """
        with tempfile.TemporaryDirectory(prefix="delta-fold-", dir=self._scratch) as scratch:
            log = FolderLog(Path(os.path.realpath(scratch)))
            try:
                await asyncio.to_thread(fold_versions, log, entries, version, source=self.log)
                [folded] = (await asyncio.to_thread(log.listing)).entries
                await self._apply(folded, options, log)
            except _ENGINE_ERRORS:
                raise
            except (CannotFold, DeltaError, OSError) as error:
                why = error.message if isinstance(error, DeltaError) else str(error)
                versions = f"{entries[0].version} to {entries[-1].version}"
                logger.info("delta log: versions %s are applied one by one: %s", versions, why)
                return False
        applied.extend(entry.version for entry in entries)
        return True

    def _report(
        self, listing: Listing, version: int | None, unusable: Mapping[str, DeltaError]
    ) -> None:
        """Raise `LogDamaged` if the engine could not be brought to the newest version."""
        self._problem = None
        why = why_not_newer(listing, version, unusable)
        if why is None:
            return
        reasons = {**listing.damaged, **{name: error.message for name, error in unusable.items()}}
        error = LogDamaged(why, version=version, newest=listing.newest, damaged=reasons)
        self._problem = error.to_wire()
        raise error

    async def _apply(self, entry: Entry, options: Options, log: DeltaLog | None = None) -> None:
        """Stage and commit one version of a log, this one by default, or raise a `DeltaError`."""
        versions = {"weight_version": entry.version, "base_version": entry.base_version}
        at = msgspec.structs.replace(options, **versions)
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, (log or self.log).fetched(entry))
            await asyncio.to_thread(entry.require_files)
            real = [Path(os.path.realpath(path)) for path in entry.paths]
            root = os.path.realpath(entry.folder.parent)
            record = RequestRecord(origin="log", reason="from the delta log")
            try:
                answer = await self._apply_files(real, at, record, [root])
            except DeltaError:
                # Other parts of it that stay staged would keep out what leads around it.
                for part in record.parts[:1]:
                    drop = DropSync(version=part.version, sync_id=part.sync_id)
                    with contextlib.suppress(Exception):
                        await call(self._engine, drop)
                raise
        if answer["status"] != "committed":
            if answer["status"] == "staged":
                await call(self._engine, DropSync())
            raise entry.damaged(f"its parts are not all of a sync ({answer['status']})")

    async def _version(self) -> tuple[int, bool]:
        """Return the engine's version, and whether its weights are known to be of it."""
        [status, *_] = await self._committer.status()
        if status.asleep:
            raise WeightsAsleep("the engine has released its weights; wake it up first")
        known = not self._committer.uncertain and status.foreign is None
        return status.version, known

    @contextlib.asynccontextmanager
    async def _lease(self) -> AsyncIterator[None]:
        """Hold the lease of the delta log: no other process of this engine replays it."""

        def request(dead: str | None) -> AcquireLogLease:
            return AcquireLogLease(holder=self._name, instead_of=dead)

        while not await acquire(self._engine, request):
            await asyncio.sleep(_POLL_S)
        try:
            yield
        finally:
            try:
                await call(self._engine, ReleaseLogLease(holder=self._name))
            except Exception:
                # This process may acquire it again, and others if this one is dead.
                logger.exception("the lease of the delta log could not be released")


def _foldable(entries: Sequence[Entry]) -> list[Entry]:
    """Return the first versions of a route that are folded into one; empty if that saves nothing.

    Folding holds them in memory. Folders with an index are changes of old bytes, which only ranks
    have.
    """
    few: list[Entry] = []
    nbytes = 0
    for entry in entries:
        nbytes += entry.nbytes
        if entry.foreign or nbytes > _MOST_FOLDED_BYTES:
            break
        few.append(entry)
    return few if len(few) > 1 else []
