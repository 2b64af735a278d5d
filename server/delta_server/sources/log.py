"""Replay a delta log into an engine: at start-up, and on request.

Each version is staged and committed as if its parts had arrived by HTTP, with the same checks. A
version that is damaged, missing or not for these weights ends the replay at the last good version,
unless there is a route around it (a folded delta, a later full version). Several versions are
folded on the way, at start-up and by an engine that follows, so that generation pauses once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from delta_server import metrics
from delta_server.board import LOG, Item, Nothing
from delta_server.follow_state import FollowState
from delta_server.held_version import HeldVersion
from delta_server.intake import VerifiedPart
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from delta_server.sources import Inlet, deliver
from delta_server.sources.files import Files
from delta_server.sources.log_history import Comparison, LogHistory
from delta_server.sources.store_files import ResolvedFiles
from delta_server.staging import NumberedPart
from delta_server.waiting import held_by_thread
from engine_ext.answers import in_one_line
from engine_ext.errors import (
    AuditUnavailable,
    BaseMismatch,
    CommitFailed,
    CommittedNotResumed,
    Conflict,
    DeltaError,
    LogDamaged,
    LogDiverged,
    PartUnavailable,
    SaltUnavailable,
    SpoolFull,
    SyncInProgress,
    VersionConflict,
    WeightsAsleep,
    WriteUndone,
)
from engine_ext.log import (
    CannotFold,
    DeltaLog,
    Entry,
    Listing,
    content_key,
    fold_versions,
    open_log,
    read_digests,
    read_record,
    route,
    why_not_newer,
)
from engine_ext.ranks.status import LogStatus
from engine_ext.store_urls import is_store_url

logger = logging.getLogger(__name__)


_PROGRESS_EVERY_S = 2.0
_POLL_S = 0.2
_WAITS_S = (1.0, 2.0, 4.0)  # before a store is read again at start-up
_MOST_SHOWN = 500  # characters of an error, in the log
_MOST_FOLDED_BYTES = 256 << 20  # of several versions that are folded; ten times that is decoded
# Errors that another version, or another route to this one, would not avoid.
ENGINE_ERRORS = (
    AuditUnavailable, CommitFailed, PartUnavailable, CommittedNotResumed, SaltUnavailable,
    SpoolFull, SyncInProgress, WeightsAsleep, WriteUndone,
)  # fmt: skip


class LogVersion(Files):
    """A source of one version of a log.

    Args:
        records: what the log has of it, for the ranks to keep; see `engine_ext.log.records`.
        holds: whether it stays staged.
    """

    def __init__(
        self,
        inlet: Inlet,
        files: ResolvedFiles,
        options: Options,
        record: RequestRecord,
        records: Mapping[str, str],
        *,
        holds: bool = False,
    ) -> None:
        super().__init__(inlet, contextlib.nullcontext(files), options, record)
        self._records, self._holds = dict(records), holds
        self._numbered: list[NumberedPart] = []

    async def complete(self, verified: Sequence[VerifiedPart]) -> list[NumberedPart]:
        """Return the parts with their ids and the records; raises what `Files.complete` raises."""
        self._numbered = [
            (msgspec.structs.replace(part, log_records=self._records), one)
            for part, one in await super().complete(verified)
        ]
        return self._numbered

    async def settled(self, status: str | None) -> None:
        """Drop what stays staged of the version: it would keep out what leads around it."""
        if status not in ("committed", "already_applied", *(["staged"] if self._holds else [])):
            for part, _ in self._numbered[:1]:
                with contextlib.suppress(Exception):
                    await self.inlet.coordinator.drop_staged(part)
        await super().settled(status)


class LogReplay:
    """Replay a delta log into one engine.

    Args:
        inlet: brings versions to the engine.
        log: the log.
        following: how far versions are applied; None applies all.

    Attributes:
        inlet: as given.
        held: what the ranks hold of it until the engine's group has decided.
        listing: the log as it was read last; an empty one before.
        problem: what kept the engine from it at the last replay; None if nothing did.
        newest_at_start: the newest that this engine takes, when the log was first read; -1 in an
            empty log, None before.
    """

    def __init__(self, inlet: Inlet, log: DeltaLog, following: FollowState | None = None) -> None:
        self.inlet, self._coordinator = inlet, inlet.coordinator
        self.log = log
        self._following = following
        self.held = HeldVersion(self._coordinator, following)
        self._history = LogHistory(inlet.engine, log)
        self._turn = Item(inlet.engine, LOG, Nothing)
        self._lock = asyncio.Lock()
        self.listing = Listing()
        self.newest_at_start: int | None = None
        self._has_caught_up = False
        self._is_gone = False  # the engine's version, from the log
        self._has_warned = False  # of a version without a digest
        self.problem: dict[str, Any] | None = None
        self._read_at = 0.0

    def describe(self, version: int) -> LogStatus:
        """Return the log's newest version, and the problem that keeps an older engine from it."""
        newest, problem = self.listing.newest, self.problem
        if self._following is not None and (look := self._following.known.look) is not None:
            # Another process might have looked since this one did.
            if look.at > self._read_at and (look.newest is not None or look.error is None):
                newest = look.newest
            problem = look.problem
        if problem is not None and problem["type"] == LogDiverged.__name__:
            holds = problem["version"] == version  # no other has come since, by request
        else:
            holds = newest is None or version < newest
        problem = problem if holds else None
        return LogStatus(folder=self.log.location, newest=newest, problem=problem)

    def has_caught_up(self, version: int) -> bool:
        """Return whether the engine, now at `version`, has once had the newest one at its start.

        From then on it has, also while it is behind later ones.
        """
        first, following = self.newest_at_start, self._following
        if not self._has_caught_up and first is not None:
            if following is not None and following.known.pin is not None:
                first = min(first, following.known.pin)
            problem = self.describe(version).problem or {}
            diverged = problem.get("type") == LogDiverged.__name__
            self._has_caught_up = version >= first and not diverged
        return self._has_caught_up

    async def read_newest(self) -> None:
        """Look for the newest version again, if the log could not be read at the start.

        Nothing is done during a replay, which reads the log, too.
        """
        if self._lock.locked():
            return
        async with self._lock:
            try:
                await self._read_marks()
                self._note_first(await asyncio.to_thread(self.log.listing))
            except (DeltaError, OSError) as error:
                logger.debug("delta log: not read: %s", error)

    def behind(self, version: int) -> int:
        """Return how many versions the log had after this one when it was read last."""
        return len({one.version for one in self.listing.entries if one.version > version})

    @contextlib.asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Wait for the replay of any process, and keep others from beginning."""
        async with self._lock:
            try:
                while not await self._turn.acquire():
                    await asyncio.sleep(_POLL_S)
                yield
            finally:
                try:  # also if the answer to the last request for the lease was lost
                    await self._turn.release()
                except Exception:
                    # This process can acquire it again, and others can if this one is dead.
                    logger.exception("the lease of the delta log could not be released")

    async def at_start(self) -> None:
        """Publish the engine's version and replay the log, before the engine serves.

        A `DeltaError` of either is logged, not raised. A store is read a few times more before
        that, as it might have failed in passing.
        """
        # An engine that has served nothing has no KV to drop, which takes SGLang half a second of a
        # core per version then. Other processes might be serving already.
        options = Options(flush_cache=self.inlet.engine.shared)
        try:
            async with self.idle():
                await self._coordinator.publish()
                await self._run_again(options)
        except DeltaError as error:
            self.problem = self.problem or error.to_wire()
            why = shown(f"{type(error).__name__}: {error.message}")
            message = "delta log: replay failed, the engine serves the version that it has: %s"
            if not self._read_at:
                message = "delta log: the engine waits for its log and serves what it has loaded: "
                message += f"{self.log.location} was not read: %s"
            logger.error(message, why)

    async def _run_again(self, options: Options) -> None:
        waits = iter(_WAITS_S if is_store_url(self.log.location) else ())
        while True:
            try:
                await self._run(options, fold=True)
                return
            except LogDiverged:  # what was read is sound
                raise
            except (LogDamaged, PartUnavailable) as error:
                wait = next(waits, None)
                if wait is None:
                    raise
                logger.warning("delta log: read again in %.0f s: %s", wait, shown(error.message))
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
            return await self._run(options, fold=fold, is_look=fold)

    async def _run(self, options: Options, *, fold: bool, is_look: bool = False) -> dict[str, Any]:
        applied: list[int] = []
        unusable: dict[str, DeltaError] = {}
        other: LogDiverged | None = None
        start, anew = time.monotonic(), self.problem is not None
        if self._following is not None:
            await self._following.read()  # no process pins the engine while this one replays
        while True:
            await self._read_marks()  # first: what they name is in the listing
            listing = await asyncio.to_thread(self.log.listing, anew=anew)
            await self._note_read()
            self.listing = listing
            version, known, digest = await self._state()
            compared = Comparison()
            if known:
                compared = await self._history.compare(listing, version, digest)
            self._is_gone = compared.is_gone
            self._note_first(listing)
            listing = self._taken(listing)
            usable = [entry for entry in listing.entries if entry.folder.name not in unusable]
            other = compared.other or _refused_here(unusable, version)
            if other is not None:
                usable = [entry for entry in usable if entry.version >= version]
            entries = route(usable, version if known and other is None else None)
            if not entries:
                break
            target = entries[-1].version
            if not known or other is not None:
                await self.held.drop()
            elif await self.held.take(target, content_key(self.listing, target), options):
                applied.append(target)
                continue
            if other is not None:
                message = "delta log: version %d, a full one, is taken instead of version %d: %s"
                logger.warning(message, entries[0].version, version, shown(other.message))
            if compared.is_gone:  # the first one is to show that it starts from here
                await self._follow(entries[:1], options, applied, unusable, proves=True)
                continue
            # A sender that posts might repeat the newest version, which ranks know by its parts.
            whole = entries if self._following is not None else entries[:-1]
            if fold and known and (few := _foldable(whole)):
                fold = await self._apply_folded(few, version, digest, options, applied)
                continue
            await self._follow(entries, options, applied, unusable)
        if applied:
            seconds = time.monotonic() - start
            logger.info("delta log: %d versions replayed in %.1f s", len(applied), seconds)
        self._report(listing, version if known else None, unusable, other)
        if applied or not is_look:
            message = "delta log: at version %d, the newest in %s is %s"
            logger.info(message, version, self.log.location, self.listing.newest)
        found = {"version": version, "applied": applied, "newest": self.listing.newest}
        return {"status": "caught_up", **found}

    def _taken(self, listing: Listing) -> Listing:
        """Return the part of a listing that this engine takes."""
        following = self._following
        last = None if following is None else following.last_complete(listing)
        return listing if last is None else listing.up_to(last)

    def _note_first(self, listing: Listing) -> None:
        """Note which version makes the engine ready, unless that is known.

        The first version of a group is not complete before its engines have taken it, and none is
        ready before.
        """
        if self.newest_at_start is None:
            newest = self._taken(listing).newest
            if newest is None:
                newest = self.awaited(listing).newest
            self.newest_at_start = -1 if newest is None else newest

    def awaited(self, listing: Listing) -> Listing:
        """Return what `_taken` does, and what is not complete for the engine's group."""
        following = self._following
        last = None if following is None else following.last_version(listing)
        return listing if last is None else listing.up_to(last)

    async def _read_marks(self) -> None:
        if self._following is not None and self._following.marks is not None:
            await asyncio.to_thread(self._following.marks.read)

    async def next_step(self, cannot: Collection[int], *, folds: bool) -> int:
        """Return the version that one sync can lead to from the engine's, or else its own.

        Args:
            cannot: versions that are not to be tried.
            folds: whether several versions can become one.

        Raises:
            Conflict: no delta can be taken before the engine is mended.
            WeightsAsleep: the engine has released its weights.
        """
        version, known, _ = await self._state()
        if not known:
            raise Conflict("the weights are not known to be those of the engine's version")
        steps = self._route_to(None, version, cannot)
        return _end((_foldable(steps) if folds else []) or steps[:1], version)

    async def hold(self, target: int, cannot: Collection[int]) -> None:
        """Stage a version, let all ranks vote on it, and hold it until the log leads there.

        Args:
            target, cannot: of `next_step`.

        Raises:
            CannotFold: several versions lead there that cannot be one sync.
            DeltaError: the log does not lead there, or the engine cannot take it. Nothing of it
                stays staged.
        """
        async with self.idle():
            if self._following is not None:
                await self._following.read()  # no process pins the engine from here on
            await self.held.drop()
            version, known, digest = await self._state()
            steps = self._route_to(target, version, cannot) if known else []
            if _end(steps, version) != target:
                raise LogDamaged(f"the delta log does not lead from {version} to {target}")
            if len(steps) == 1:
                before = digest if steps[0].base_version == version else None
                await self._apply(*(steps[0], before, Options()), proves=self._is_gone, holds=True)
            elif not await self._apply_folded(steps, version, digest, Options(), [], holds=True):
                raise CannotFold(f"versions {version} to {target} cannot be one sync")

    def _route_to(self, target: int | None, version: int, cannot: Collection[int]) -> list[Entry]:
        listing = self.awaited(self.listing)
        usable = [entry for entry in listing.entries if entry.version not in cannot]
        return route([e for e in usable if target is None or e.version <= target], version)

    async def _note_read(self) -> None:
        """Let every process of an engine that follows know that its log could be read."""
        self._read_at = time.time()
        if self._following is not None and not self._following.known.was_read:
            await self._following.record(was_read=True)
            logger.info("delta log: %s is read", self.log.location)

    async def _follow(
        self,
        entries: Sequence[Entry],
        options: Options,
        applied: list[int],
        unusable: dict[str, DeltaError],
        *,
        proves: bool = False,
    ) -> None:
        """Apply one version after another, until one is unusable or a sender commits another.

        With `proves`, a delta must declare the digest of the weights that it starts from. The
        applied versions are added to `applied`, and the folder that cannot be used, with its
        error, to `unusable`. An error that another route would not avoid is raised.
        """
        logged_at = time.monotonic()
        for entry in entries:
            before = await self._state()
            try:
                digest = before[2] if before[0] == entry.base_version else None
                await self._apply(entry, digest, options, proves=proves)
            except VersionConflict:
                if await self._state() == before:
                    raise
                return  # a sender has committed another version
            except ENGINE_ERRORS:
                raise
            except DeltaError as error:
                unusable[entry.folder.name] = error
                why = shown(error.message)
                logger.error("delta log: %s cannot be used: %s", entry.folder.name, why)
                return
            applied.append(entry.version)
            if time.monotonic() - logged_at > _PROGRESS_EVERY_S:
                logged_at = time.monotonic()
                logger.info("delta log: at version %d of %d", entry.version, entries[-1].version)

    async def _apply_folded(
        self,
        entries: Sequence[Entry],
        version: int,
        digest: str,
        options: Options,
        applied: list[int],
        *,
        holds: bool = False,
    ) -> bool:
        """Apply several versions as one, or hold it; return whether that was possible.

        If not, the engine is as it was. Applied one after another, the versions show why.
        """
        try:
            size = sum(entry.nbytes for entry in entries)
            make = partial(self.inlet.intake.scratch, "delta-fold-", size)
            async with held_by_thread(make) as scratch:
                log = open_log(Path(await asyncio.to_thread(os.path.realpath, scratch)))
                record = await self._history.record(entries[-1])
                await asyncio.to_thread(fold_versions, log, entries, version, source=self.log)
                [folded] = (await asyncio.to_thread(log.listing)).entries
                records = {} if record is None else {entries[-1].folder.name: record}
                await self._apply(folded, digest, options, log, records=records, holds=holds)
        except (CannotFold, DeltaError, OSError) as error:
            # A single version can have room where a fold next to its parts has none.
            if isinstance(error, ENGINE_ERRORS) and not isinstance(error, SpoolFull):
                raise
            why = error.message if isinstance(error, DeltaError) else str(error)
            versions = f"{entries[0].version} to {entries[-1].version}"
            logger.info("delta log: versions %s are applied one by one: %s", versions, shown(why))
            return False
        applied.extend(entry.version for entry in entries)
        return True

    def _report(
        self,
        listing: Listing,
        version: int | None,
        unusable: Mapping[str, DeltaError],
        other: LogDiverged | None,
    ) -> None:
        """Raise `LogDamaged` if the engine could not be brought to the newest version."""
        before, self.problem = self.problem, None
        metrics.LOG_DIVERGED.set(other is not None)
        if other is not None:
            self.problem = other.to_wire()
            if before is None or before["message"] != other.message:
                logger.error("delta log: %s", shown(other.message))
            raise other
        why = why_not_newer(listing, version, unusable)
        if why is None:
            return
        reasons = {**listing.damaged, **{name: error.message for name, error in unusable.items()}}
        error = LogDamaged(why, version=version, newest=listing.newest, damaged=reasons)
        self.problem = error.to_wire()
        raise error

    async def _apply(
        self,
        entry: Entry,
        digest: str | None,
        options: Options,
        log: DeltaLog | None = None,
        *,
        records: Mapping[str, str] | None = None,
        proves: bool = False,
        holds: bool = False,
    ) -> None:
        """Stage and commit one version of a log, this one by default, or raise a `DeltaError`.

        Args:
            digest: of the engine's weights, if these are of the version that it starts from.
            records: what the ranks keep of it; None takes it from its files.
            proves: whether a delta must declare the digest of the weights that it starts from.
            holds: whether it is held in place of being committed.
        """
        versions = {"weight_version": entry.version, "base_version": entry.base_version}
        at = msgspec.structs.replace(options, **versions)
        async with held_by_thread(partial((log or self.log).fetched, entry)):
            if records is None:
                record = self._history.keep(entry, await asyncio.to_thread(read_record, entry))
                records = {entry.folder.name: record}
            declared = await asyncio.to_thread(read_digests, entry)
            if not (entry.full or entry.foreign):
                if declared.before is None:
                    if proves:
                        raise _unproven(entry)
                    self._warn_unproven(entry)
                if None not in (declared.before, digest) and declared.before != digest:
                    raise _starts_elsewhere(entry, f"{declared.before}, the engine has {digest}")
            files = await asyncio.to_thread(_resolved, entry)
            reason = "from the delta log"
            request = RequestRecord(origin="log", reason=reason, commits=not holds)
            source = LogVersion(self.inlet, files, at, request, records, holds=holds)
            try:
                answer = await deliver(source)
            except BaseMismatch as error:
                if declared.before is None and not (entry.full or entry.foreign):
                    raise _starts_elsewhere(entry, error.message) from error
                raise
        if holds and answer["status"] == "staged":
            await self.held.keep(entry)
        elif answer["status"] != "committed":
            raise entry.damaged(f"its parts are not all of a sync ({answer['status']})")

    def _warn_unproven(self, entry: Entry) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "delta log: %s has no digest, so nothing shows whether the engine's weights are "
                "those that it starts from; let the sender ask an engine (notify=, --notify)",
                entry.folder.name,
            )

    async def _state(self) -> tuple[int, bool, str]:
        """Return the engine's version, whether its weights are known to be of it, and their digest.

        Raises:
            WeightsAsleep: the engine has released its weights.
        """
        held = await self._coordinator.held()
        if held.asleep:
            raise WeightsAsleep("the engine has released its weights; wake it up first")
        known = not (held.uncertain or held.changed_by or held.mismatched)
        return held.version, known, held.digest


def shown(why: str) -> str:
    """Return why a version is not taken, for the log: a sender might have chosen some of it."""
    return in_one_line(why, _MOST_SHOWN)


def _resolved(entry: Entry) -> ResolvedFiles:
    real = [Path(os.path.realpath(path)) for path in entry.paths]
    return ResolvedFiles(real, [os.path.realpath(entry.folder.parent)])


def _refused_here(unusable: Mapping[str, DeltaError], version: int) -> LogDiverged | None:
    """Return why a delta of the log does not start from the engine's version, if one did not."""
    for error in unusable.values():
        if isinstance(error, LogDiverged) and error.operands["version"] == version:
            return error
    return None


def _starts_elsewhere(entry: Entry, why: str) -> LogDiverged:
    version = entry.base_version
    return LogDiverged(
        f"the delta log holds another history than the one that led to the engine's version "
        f"{version}: {entry.folder.name} starts from other weights ({why})",
        version=version,
        newest=entry.version,
        changed=[entry.folder.name],
    )


def _unproven(entry: Entry) -> LogDiverged:
    version = entry.base_version
    return LogDiverged(
        f"the engine's version {version} is no longer in the delta log, and {entry.folder.name} "
        "does not declare the digest of the weights that it starts from: nothing shows that it "
        "continues the engine's history",
        version=version,
        newest=entry.version,
        changed=[],
    )


def _end(steps: Sequence[Entry], version: int) -> int:
    """Return where a route from a version leads to."""
    return steps[-1].version if steps else version


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
