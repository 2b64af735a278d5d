"""Bringing an engine up to a delta log: at start-up, and when it is asked for.

Each version is staged and committed as if its parts had come by HTTP, so the same checks hold.
One that is damaged, missing or not for these weights ends the replay at the last good version,
unless another way leads around it (a folded delta, a later full version).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from delta_server.commit import EngineCommitter, call
from delta_server.engine import Engine
from delta_server.process_identity import is_alive, new_name
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from engine_ext.delta_log.catalog import Entry, Listing, list_log, route, why_not_newer
from engine_ext.errors import (
    CommitFailed,
    DeltaError,
    LogDamaged,
    PublishFailed,
    SpoolFull,
    SyncInProgress,
    VersionConflict,
    WeightsAsleep,
    WriteUndone,
)

logger = logging.getLogger(__name__)

ApplyFiles = Callable[
    [Sequence[Path], Options, RequestRecord, Sequence[str]], Awaitable[dict[str, Any]]
]

_TELL_EVERY_S = 2.0
_WAIT_S = 0.2
# Another version, or another way to this one, would meet the same.
_NOT_THE_LOGS_FAULT = (
    CommitFailed, PublishFailed, SpoolFull, SyncInProgress, WeightsAsleep, WriteUndone,
)  # fmt: skip


class LogReplay:
    """Replay a delta log into one engine.

    Args:
        committer: commits on the engine, and knows its state.
        apply_files: stages the parts in some files and commits them, as a disk request does
            (see `delta_server.service.DeltaService.apply_files`).
        engine: its adapter.
        folder: the log; its real path.
    """

    def __init__(
        self, committer: EngineCommitter, apply_files: ApplyFiles, engine: Engine, folder: Path
    ) -> None:
        self._committer = committer
        self._apply_files = apply_files
        self._engine = engine
        self._folder = folder
        self._name = new_name()
        self._lock = asyncio.Lock()
        self._newest: int | None = None
        self._problem: dict[str, Any] | None = None

    def describe(self, version: int) -> dict[str, Any]:
        """What the last replay found, as JSON: the newest version, and what keeps the engine from
        it, as long as it is at an older one.
        """
        overtaken = self._newest is not None and version >= self._newest
        problem = None if overtaken else self._problem
        return {"folder": str(self._folder), "newest": self._newest, "problem": problem}

    async def at_start(self) -> None:
        """Publish the engine's version, and replay before it serves. What goes wrong with that is
        reported, not raised.

        Raises:
            Exception: the engine itself failed.
        """
        try:
            async with self._lock, self._alone():
                await self._committer.publish()
                await self._run(Options())
        except DeltaError as error:
            self._problem = self._problem or error.to_wire()
            logger.error(
                "delta log: not caught up; the engine serves what it has: %s: %s",
                type(error).__name__,
                error.message,
            )

    async def run(self, options: Options) -> dict[str, Any]:
        """Replay what the engine lacks.

        Args:
            options: pause mode, and whether cached KV is dropped, at each commit.

        Returns:
            JSON: the version, which ones were applied, and the newest one in the log.

        Raises:
            LogDamaged: the log has a newer version, but no sound way to it. The engine is at the
                last good one.
            DeltaError: the engine could not take a version, for reasons of its own.
        """
        async with self._lock, self._alone():
            return await self._run(options)

    async def _run(self, options: Options) -> dict[str, Any]:
        applied: list[int] = []
        bad: dict[str, DeltaError] = {}
        begun = time.monotonic()
        while True:
            listing = await asyncio.to_thread(list_log, self._folder)
            self._newest = listing.newest
            version, known = await self._version()
            usable = [entry for entry in listing.entries if entry.folder.name not in bad]
            way = route(usable, version if known else None)
            if not way:
                break
            await self._follow(way, options, applied, bad)
        if applied:
            seconds = time.monotonic() - begun
            logger.info("delta log: %d versions replayed in %.1f s", len(applied), seconds)
        self._report(listing, version if known else None, bad)
        logger.info("delta log: at version %d, the newest in %s", version, self._folder)
        return {
            "status": "caught_up",
            "version": version,
            "applied": applied,
            "newest": listing.newest,
        }

    async def _follow(
        self,
        way: Sequence[Entry],
        options: Options,
        applied: list[int],
        bad: dict[str, DeltaError],
    ) -> None:
        """Apply one version after another, up to one that is of no use or was overtaken.

        Args:
            way: from the engine's version on.
            options: as of `run`.
            applied: gets the versions that were.
            bad: gets the folder that is of no use, and why.

        Raises:
            DeltaError: the engine could not take a version, for reasons of its own.
        """
        told = time.monotonic()
        for entry in way:
            before = await self._version()
            try:
                await self._apply(entry, options)
            except VersionConflict:
                if await self._version() == before:
                    raise
                return  # a sender was faster
            except _NOT_THE_LOGS_FAULT:
                raise
            except DeltaError as error:
                bad[entry.folder.name] = error
                logger.error("delta log: %s is of no use: %s", entry.folder.name, error.message)
                return
            applied.append(entry.version)
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                logger.info("delta log: at version %d of %d", entry.version, way[-1].version)

    def _report(self, listing: Listing, version: int | None, bad: Mapping[str, DeltaError]) -> None:
        """Say what keeps the engine from the newest version.

        Raises:
            LogDamaged: something does.
        """
        self._problem = None
        why = why_not_newer(listing, version, bad)
        if why is None:
            return
        reasons = {**listing.damaged, **{name: error.message for name, error in bad.items()}}
        error = LogDamaged(why, version=version, newest=listing.newest, damaged=reasons)
        self._problem = error.to_wire()
        raise error

    async def _apply(self, entry: Entry, options: Options) -> None:
        """Stage and commit one version.

        Raises:
            DeltaError: it was not committed.
        """
        await asyncio.to_thread(entry.require_files)
        at = Options(
            weight_version=entry.version,
            base_version=entry.base_version,
            pause_mode=options.pause_mode,
            flush_cache=options.flush_cache,
        )
        real = [Path(os.path.realpath(path)) for path in entry.paths]
        answer = await self._apply_files(real, at, RequestRecord(), [str(self._folder)])
        if answer["status"] != "committed":
            if answer["status"] == "staged":
                await call(self._engine, "drop", {})
            raise entry.damaged(f"its parts are not all of a sync ({answer['status']})")

    async def _version(self) -> tuple[int, bool]:
        """The engine's version, and whether its weights are known to be of it.

        Raises:
            WeightsAsleep: nothing can be written now.
        """
        [state, *_] = await self._committer.status()
        if state["asleep"]:
            raise WeightsAsleep("the engine has released its weights; wake it up first")
        known = not self._committer.uncertain and state["foreign"] is None
        return int(state["version"]), known

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Keep every other HTTP process of this engine from replaying."""
        dead: str | None = None
        while True:
            arguments = {"holder": self._name, "instead_of": dead}
            [taken, *_] = await call(self._engine, "hold_log", arguments)
            if taken["granted"]:
                break
            dead = None if is_alive(taken["holder"]) else taken["holder"]
            await asyncio.sleep(0 if dead else _WAIT_S)
        try:
            yield
        finally:
            await call(self._engine, "release_log", {"holder": self._name})
