"""One update from its parts to its commit, over every rank of the engine.

The truth about versions and staged parts is in the engine's workers; this side only carries
messages, so that several API-server processes may do it at once: stage on every rank
(`delta_server.staging`), then commit (`delta_server.commit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from delta_server import metrics
from delta_server.commit import EngineCommitter, call, sum_by_name, total_digest
from delta_server.disk_files import spool_files
from delta_server.engine import Engine
from delta_server.log_replay import LogReplay
from delta_server.reporting import SyncReporter
from delta_server.request_options import Options, part_id
from delta_server.request_record import RequestRecord
from delta_server.spool import Spool, Spooled
from delta_server.staging import Staging
from delta_server.upload_limits import MinimumRate, UploadSlots
from engine_ext.errors import CommitFailed, Conflict, DeltaError, MalformedPart
from engine_ext.settings import Settings
from engine_ext.wire import Limits
from engine_ext.wire.digest import Digest
from engine_ext.wire.identity import PartId


class DeltaService:
    """Applies parts to one engine.

    Args:
        engine: the engine's adapter.
        settings: the user's flags.

    Attributes:
        commits: what pauses the engine; knows whether generation may be served.
        ledger: tells of every update.
        spool: where bodies are kept.
        pace: how slowly bodies may come.
        slots: how many updates are taken at once.
        log: brings the engine up to the delta log; None without ``--delta-log``.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.settings = settings
        self.commits = EngineCommitter(engine)
        self.ledger = SyncReporter(engine)
        self._engine = engine
        self._staging = Staging(engine)
        self.spool = Spool(settings.spool_dir, Limits(max_part_bytes=settings.max_body_bytes))
        self.pace = MinimumRate(settings.stage_timeout, settings.min_upload_rate)
        self.slots = UploadSlots(settings.max_uploads)
        self.log = (
            None
            if settings.log is None
            else LogReplay(self.commits, self.apply_files, engine, Path(settings.log))
        )
        self._handling: weakref.WeakValueDictionary[str, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    async def start(self) -> None:
        """Make sure that every rank has a receiver, publish the base version, replay the log.

        The server does not serve before the end. What is wrong with the log is reported, and then
        the engine serves the last good version.

        Raises:
            DeltaError: some rank has none, or they disagree. The server must not start.
        """
        versions = [answer["version"] for answer in await self._call("status")]
        if len(set(versions)) != 1:
            raise DeltaError(f"the ranks are at different versions: {versions}")
        metrics.set_version(versions[0])
        if self.log is None:
            await self._engine.set_weight_version(str(versions[0]))
        else:  # another process may be replaying, so that the version moves
            await self.log.at_start()

    async def status(self) -> dict[str, Any]:
        """The state of the engine's receivers, as JSON."""
        answers = await self.commits.status()
        return {
            "engine": self._engine.name,
            "ranks": len(answers),
            **answers[0],
            "engine_state": "uncertain" if self.commits.uncertain else "certain",
            "certification": [answer["certification"] for answer in answers],
            "uncertified": {k: v for answer in answers for k, v in answer["uncertified"].items()},
            "weight_version": await self._engine.get_weight_version(),
            "digest": total_digest(answers),
            "delta_log": None
            if self.log is None
            else self.log.describe(int(answers[0]["version"])),
        }

    async def plan(self) -> list[list[dict[str, Any]]] | None:
        """What each rank knows of every checkpoint tensor, in rank order; None while nothing is.

        An engine that was started without a checkpoint's weights has no plan before its first
        ``full`` sync.
        """
        plans = [answer["tensors"] for answer in await self._call("plan")]
        return None if None in plans else plans

    async def digest(self, scan: bool) -> dict[str, Any]:
        """The digest of the model and of every covered tensor, summed over the ranks.

        Args:
            scan: compute it from live memory, rather than telling what the syncs add up to.

        Returns:
            JSON; with `scan`, ``corrupted`` names the tensors whose live bytes are not what the
            syncs have made of them.
        """
        answers = await self._call("digest", scan=scan)
        tensors = sum_by_name(answer["tensors"] for answer in answers)
        tracked = sum_by_name(answer["tracked"] for answer in answers)
        total = sum(tensors.values(), start=Digest.ZERO)
        found: dict[str, Any] = {
            "version": answers[0]["version"],
            "digest": total.hex(),
            "scanned": scan,
            "tensors": {name: digest.hex() for name, digest in sorted(tensors.items())},
        }
        if scan:
            found["corrupted"] = sorted(n for n in tracked if tracked[n] != tensors.get(n))
            if found["corrupted"]:
                metrics.count_mismatch()
        return found

    async def roll_back(self, options: Options) -> dict[str, Any]:
        """Restore the version before the last one, weights and weight version.

        Raises:
            Conflict: the old values were not kept. The engine is unchanged.
            CommitFailed: the rollback failed half-way.
        """
        outcome = RequestRecord()
        async with self.ledger.follow(outcome):
            outcome.phase = "rollback"
            restored, pause_ms = await self.commits.run("rollback", {}, options)
            outcome.timings |= {"pause_ms": pause_ms, "commit_ms": restored["commit_ms"]}
            outcome.ended("rolled_back", {**restored, "base_version": restored["rolled_back"]})
            return {
                "status": "rolled_back",
                "version": restored["version"],
                "rolled_back": restored["rolled_back"],
                "digest": restored["digest"],
                "timings_ms": {k: round(value, 3) for k, value in outcome.timings.items()},
            }

    async def apply_body(self, spooled: Spooled, options: Options, outcome: RequestRecord) -> Any:
        """Stage one part, and commit if it completes its sync.

        Args:
            spooled: the part; removed from the spool afterwards.
            options: the request's query parameters.
            outcome: the request's; it has the time that the body took to arrive.

        Returns:
            The JSON object of a successful answer.

        Raises:
            DeltaError: as its class says.
        """
        try:
            async with self.ledger.follow(outcome):
                outcome.brought([], [spooled])
                part = part_id(spooled.header.manifest, spooled.identity, options)
                outcome.brought([part], [spooled])
                async with self._one_by_one([spooled]):
                    return await self._apply([(part, spooled)], options, outcome)
        finally:
            spooled.remove()

    async def apply_files(
        self,
        paths: Sequence[Path],
        options: Options,
        outcome: RequestRecord,
        roots: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Stage the parts in some files, and commit if they complete their sync.

        Args:
            paths: real paths, below `roots`.
            options: the request's.
            outcome: the request's.
            roots: folders below which files may be read; those of disk requests if None.

        Files whose metadata number no parts are one transaction of their own. If they name the
        version the engine is at, those not seen before are applied as its continuation.
        """
        try:
            async with self.ledger.follow(outcome):
                start = time.perf_counter()
                allowed = self.settings.roots if roots is None else roots
                spooled = await spool_files(self.spool, paths, allowed, self.settings.read_workers)
                outcome.brought([], spooled)
                outcome.timings["receive_ms"] = _ms_since(start)
                return await self._apply_spooled(spooled, options, outcome)
        finally:
            for part_file in outcome.spooled:
                part_file.remove()

    async def _apply_spooled(
        self, spooled: list[Spooled], options: Options, outcome: RequestRecord
    ) -> dict[str, Any]:
        parts = [part_id(s.header.manifest, s.identity, options) for s in spooled]
        outcome.brought(parts, spooled)
        versions = sorted({part.version for part in parts})
        if len(versions) > 1:
            raise MalformedPart(f"the files of one request lead to versions {versions}")
        whole = all(s.header.manifest.part is None for s in spooled)
        async with self._one_by_one(spooled):
            if whole:
                parts, spooled = await self._as_transaction(parts, spooled)
                outcome.parts = parts
            pairs = list(zip(parts, spooled, strict=True))
            return await self._apply(pairs, options, outcome, whole=whole)

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
        outcome: RequestRecord,
        *,
        whole: bool = False,
    ) -> dict[str, Any]:
        """Stage some parts and commit; `whole` says that they are all of their sync."""
        last = pairs[-1][0]
        try:
            if await self._staging.stage(pairs, outcome, whole=whole):
                outcome.phase = "commit"
                return outcome.answer("committed", await self._commit(last, options, outcome))
        except Conflict:
            # Another HTTP process, to which they came too, may have committed them meanwhile. Of a
            # full sync that would not be certain: another one may have led to its version.
            asked = {"version": last.version, "identities": [part.identity for part, _ in pairs]}
            answers = await self._call("unseen", **asked)
            if last.full or any(answer["unseen"] for answer in answers):
                raise
            outcome.admissions = {"already_applied"}
        facts: dict[str, Any] = {"version": last.version, "base_version": last.base_version}
        if outcome.admissions != {"already_applied"}:
            return outcome.answer("staged", facts)
        # A sender that sends less again than was committed sees by it that more was.
        facts["digest"] = await self.commits.publish()
        return outcome.answer("already_applied", facts)

    async def _commit(
        self, part: PartId, options: Options, outcome: RequestRecord
    ) -> dict[str, Any]:
        try:
            committed, outcome.timings["pause_ms"] = await self.commits.run(
                "commit", {"version": part.version, "sync_id": part.sync_id}, options
            )
        except CommitFailed:
            raise
        except Exception:
            # Nothing was written. What stays staged would keep the next sync out.
            with contextlib.suppress(Exception):
                await self._staging.drop(part)
            raise
        outcome.timings["commit_ms"] = committed["commit_ms"]
        return committed

    async def _call(self, operation: str, **arguments: Any) -> list[dict[str, Any]]:
        return await call(self._engine, operation, arguments)


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
