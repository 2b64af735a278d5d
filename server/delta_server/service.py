"""One update from its parts to its commit, over every rank of the engine.

The truth about versions and staged parts is in the engine's workers; this side only carries
messages, so that several API-server processes may do it at once. The order is always: stage on
every rank, pause generation, commit on every rank in one call, set the engine's weight version,
resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from delta_server.requests import Options, part_id
from delta_server.spool import Spool, Spooled
from engine_ext.errors import (
    CommitFailed,
    DeltaError,
    EngineUncertain,
    MalformedPart,
    NotUpdatable,
    from_wire,
)
from engine_ext.settings import Settings
from engine_ext.syncs import PartId
from engine_ext.wire import Limits

# Polling costs the engine one message between two steps: short at first, then seldom.
_POLL_FIRST_S = 0.001
_POLL_MOST_S = 0.05


class Engine(Protocol):
    """What an engine adapter gives the service. Every method may raise; none is retried."""

    name: str

    async def call(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """`engine_ext.receiver.Receiver.handle` on every rank, in rank order."""

    async def is_paused(self) -> bool: ...

    async def pause(self, mode: str, *, flush_cache: bool) -> None: ...

    async def flush_cache(self) -> None: ...

    async def resume(self) -> None: ...

    async def set_weight_version(self, version: str) -> None: ...

    async def get_weight_version(self) -> str: ...


class DeltaService:
    """Applies parts to one engine.

    Args:
        engine: the engine's adapter.
        settings: the user's flags.

    Attributes:
        uncertain: a write failed half-way; generation must not be served.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.settings = settings
        self.uncertain = False
        self._engine = engine
        self.spool = Spool(settings.spool_dir, Limits(max_part_bytes=settings.max_body_bytes))
        self._committing = asyncio.Lock()
        self._handling: weakref.WeakValueDictionary[str, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._owes_resume = False

    async def start(self) -> None:
        """Make sure that every rank has a receiver, and publish the base version.

        Raises:
            DeltaError: some rank has none, or they disagree. The server must not start.
        """
        versions = [answer["version"] for answer in await self._call("status")]
        if len(set(versions)) != 1:
            raise DeltaError(f"the ranks are at different versions: {versions}")
        await self._engine.set_weight_version(str(versions[0]))

    async def status(self) -> dict[str, Any]:
        """The state of the engine's receivers, as JSON."""
        answers = await self._call("status")
        versions = {(answer["version"], answer["engine_state"]) for answer in answers}
        state = dict(answers[0])
        if len(versions) > 1:
            state["engine_state"] = "uncertain"
        self.uncertain = state["engine_state"] == "uncertain"
        return {
            "engine": self._engine.name,
            "ranks": len(answers),
            **state,
            "certification": [answer["certification"] for answer in answers],
            "weight_version": await self._engine.get_weight_version(),
            "digest": None,
        }

    async def apply_body(self, spooled: Spooled, options: Options, receive_ms: float) -> Any:
        """Stage one part, and commit if it completes its sync.

        Args:
            spooled: the part; removed from the spool afterwards.
            options: the request's query parameters.
            receive_ms: how long the body took to arrive.

        Returns:
            The JSON object of a successful answer.

        Raises:
            DeltaError: as its class says.
        """
        try:
            part = part_id(spooled.header.manifest, spooled.identity, options)
            outcome = _Outcome([spooled])
            outcome.timings["receive_ms"] = receive_ms
            async with self._one_by_one([spooled]):
                return await self._apply([(part, spooled)], options, outcome)
        finally:
            spooled.remove()

    async def apply_files(self, paths: Sequence[Path], options: Options) -> Any:
        """Stage the parts in some files, and commit if they complete their sync.

        Files whose metadata number no parts are one transaction of their own. If they name the
        version the engine is at, those not seen before are applied as its continuation.
        """
        start = time.perf_counter()
        spooled = await self._read_files(paths)
        try:
            outcome = _Outcome(spooled)
            outcome.timings["receive_ms"] = _ms_since(start)
            parts = [part_id(s.header.manifest, s.identity, options) for s in spooled]
            versions = sorted({part.version for part in parts})
            if len(versions) > 1:
                raise MalformedPart(f"the files of one request lead to versions {versions}")
            whole = all(s.header.manifest.part is None for s in spooled)
            async with self._one_by_one(spooled):
                if whole:
                    parts, spooled = await self._as_transaction(parts, spooled)
                pairs = list(zip(parts, spooled, strict=True))
                return await self._apply(pairs, options, outcome, whole=whole)
        finally:
            for part_file in outcome.spooled:
                part_file.remove()

    async def _read_files(self, paths: Sequence[Path]) -> list[Spooled]:
        gate = asyncio.Semaphore(self.settings.read_workers)

        async def read(path: Path) -> Spooled:
            async with gate:
                return await asyncio.to_thread(self.spool.read, path)

        results = await asyncio.gather(*map(read, paths), return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException)]
        spooled = [r for r in results if isinstance(r, Spooled)]
        if failures:
            for part_file in spooled:
                part_file.remove()
            raise failures[0]
        return spooled

    async def _as_transaction(
        self, parts: list[PartId], spooled: list[Spooled]
    ) -> tuple[list[PartId], list[Spooled]]:
        """Number the files of one request as the parts of one sync, without those seen before."""
        by_identity = {part.identity: (part, s) for part, s in zip(parts, spooled, strict=True)}
        version = parts[0].version
        [answer, *_] = await self._call("unseen", version=version, identities=list(by_identity))
        fresh = answer["unseen"] or list(by_identity)[:1]
        sync_id = "files:" + xxhash.xxh3_128_hexdigest("".join(sorted(fresh)).encode())
        chosen = [by_identity[identity] for identity in fresh]
        numbered = [
            msgspec.structs.replace(
                part,
                sync_id=part.sync_id or sync_id,
                part=number,
                num_parts=len(fresh),
                continues=not part.full,
            )
            for number, (part, _) in enumerate(chosen)
        ]
        return numbered, [s for _, s in chosen]

    @contextlib.asynccontextmanager
    async def _one_by_one(self, spooled: Sequence[Spooled]) -> AsyncIterator[None]:
        """Let a repeat wait until the request that it repeats is answered."""
        async with contextlib.AsyncExitStack() as stack:
            for identity in sorted({s.identity for s in spooled}):
                lock = self._handling.setdefault(identity, asyncio.Lock())
                await stack.enter_async_context(lock)
            yield

    async def _apply(
        self,
        pairs: list[tuple[PartId, Spooled]],
        options: Options,
        outcome: _Outcome,
        *,
        whole: bool = False,
    ) -> Any:
        """Stage some parts and commit; `whole` says that they are all of their sync."""
        start = time.perf_counter()
        complete = False
        for part, spooled in pairs:
            try:
                admission, complete = await self._stage(part, spooled)
            except DeltaError:
                # Nobody else sends the rest; what is staged would only keep other syncs out.
                if whole and outcome.admissions - {"already_applied"}:
                    await self._call("drop")
                raise
            outcome.admissions.add(admission)
        outcome.timings["stage_ms"] = _ms_since(start)
        last = pairs[-1][0]
        if complete:
            committed = await self._commit(last, options, outcome)
            return outcome.answer("committed", committed)
        applied = outcome.admissions == {"already_applied"}
        if applied:
            await self._publish()
        facts = {"version": last.version, "base_version": last.base_version}
        return outcome.answer("already_applied" if applied else "staged", facts)

    async def _stage(self, part: PartId, spooled: Spooled) -> tuple[str, bool]:
        """Stage one part on every rank; returns its admission and whether the sync is complete."""
        answers = await self._call(
            "begin",
            part=msgspec.to_builtins(part),
            path=str(spooled.path),
            now=time.monotonic(),
        )
        admissions = {str(answer["admission"]) for answer in answers}
        if admissions == {"already_applied"}:
            return "already_applied", False
        # A part that is "staged" goes the same way: the request that brought it may have died.
        try:
            await self._staged_everywhere(part.part)
        except NotUpdatable:
            await self._call("drop")
            raise
        except DeltaError:
            await self._call("settle", part=part.part, staged=False)
            raise
        try:
            answers = await self._call("settle", part=part.part, staged=True)
        except DeltaError:
            await self._call("drop")
            raise
        return "new" if "new" in admissions else "staged", bool(answers[0]["complete"])

    async def _publish(self) -> None:
        """Do again what follows a commit, for a sender whose first answer was lost."""
        async with self._committing:
            state = await self.status()
            if self.uncertain:
                raise EngineUncertain("the ranks are not at one version; send a full sync")
            await self._engine.set_weight_version(str(state["version"]))
            if self._owes_resume:
                await self._resume()

    async def _resume(self) -> None:
        """Resume generation; where that fails, the next commit or repeat does it."""
        self._owes_resume = True
        await self._engine.resume()
        self._owes_resume = False

    async def _staged_everywhere(self, part: int) -> None:
        wait = _POLL_FIRST_S
        while not all(answer["done"] for answer in await self._call("poll", part=part)):
            await asyncio.sleep(wait)
            wait = min(wait * 2, _POLL_MOST_S)

    async def _commit(self, part: PartId, options: Options, outcome: _Outcome) -> dict[str, Any]:
        async with self._committing:
            start = time.perf_counter()
            was_paused = await self._engine.is_paused()
            resumes = not was_paused or self._owes_resume
            try:
                if not was_paused:
                    await self._engine.pause(options.pause_mode, flush_cache=options.flush_cache)
                elif options.flush_cache:
                    await self._engine.flush_cache()
                committed = await self._commit_everywhere(part)
                self.uncertain = False
                await self._engine.set_weight_version(str(part.version))
            except CommitFailed:
                # The engine stays paused: nothing may be generated from mixed weights, also not
                # for the other API servers.
                self.uncertain = True
                self._owes_resume = resumes
                raise
            except BaseException:
                if not was_paused or (resumes and not self.uncertain):
                    await self._resume()
                raise
            if resumes:
                await self._resume()
            outcome.timings["pause_ms"] = _ms_since(start)
            outcome.timings["commit_ms"] = committed["commit_ms"]
            return committed

    async def _commit_everywhere(self, part: PartId) -> dict[str, Any]:
        """Commit on every rank.

        Raises:
            CommitFailed: a rank says so, or what the ranks have done is not known.
            DeltaError: every rank refused, and none has written.
        """
        arguments = {"version": part.version, "sync_id": part.sync_id}
        try:
            answers = await self._engine.call("commit", arguments)
        except Exception as error:
            # What may still be staged would keep the sync out that ends this state.
            with contextlib.suppress(Exception):
                await self._call("drop")
            raise CommitFailed(
                f"the ranks did not answer whether they committed: {type(error).__name__}: "
                f"{error}; generation answers 503 until a repeat or a full sync is answered"
            ) from error
        refusals = [from_wire(answer["error"]) for answer in answers if "error" in answer]
        failed = [refusal for refusal in refusals if isinstance(refusal, CommitFailed)]
        if failed:
            raise failed[0]
        if refusals and len(refusals) < len(answers):
            raise CommitFailed(
                f"{len(refusals)} of {len(answers)} ranks did not commit: {refusals[0].message}; "
                "generation answers 503 until a full sync commits"
            )
        if refusals:
            raise refusals[0]
        committed: dict[str, Any] = answers[0]["ok"]
        return committed

    async def _call(self, operation: str, **arguments: Any) -> list[dict[str, Any]]:
        """One operation on every rank.

        Raises:
            DeltaError: the first rank's that has one; ranks that did not fail then have done
                their part, which is harmless for every operation but ``commit``.
        """
        answers = await self._engine.call(operation, arguments)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise from_wire(errors[0])
        return [answer["ok"] for answer in answers]


class _Outcome:
    """What one request brought and how long its steps took."""

    def __init__(self, spooled: list[Spooled]) -> None:
        self.spooled = spooled
        self.admissions: set[str] = set()
        self.timings: dict[str, float] = {}

    def answer(self, status: str, facts: dict[str, Any]) -> dict[str, Any]:
        """The JSON object of a successful answer."""
        entries = [entry for s in self.spooled for entry in s.header.manifest.params]
        return {
            "status": status,
            "version": facts["version"],
            "base_version": facts.get("base_version"),
            "nnz": facts.get("nnz", sum(entry.nnz for entry in entries)),
            "tensors": facts.get("tensors", len({entry.name for entry in entries})),
            "bytes": sum(s.wire_bytes for s in self.spooled),
            "apply": facts.get("apply"),
            "timings_ms": {name: round(value, 3) for name, value in self.timings.items()},
            "digest": None,
        }


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
