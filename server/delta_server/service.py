"""The service: what an engine's endpoints work with, and what is known of the engine.

The engine's workers keep the versions and the staged parts. This side keeps no state of its own, so
that several HTTP processes can serve one engine; see `delta_server.coordinator`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import msgspec

from delta_server import metrics, pauses
from delta_server.audit import Audit
from delta_server.commit import EngineCommitter
from delta_server.coordinator import Coordinator
from delta_server.engine import (
    AdapterEngine,
    Engine,
    Held,
    call_all_ranks,
    rank_statuses,
    server_status,
)
from delta_server.fleet import FleetCommits
from delta_server.follow_state import FollowState
from delta_server.intake import Intake
from delta_server.part_server import PartReads, PartServer
from delta_server.readiness import Readiness
from delta_server.reporting import SyncReporter
from delta_server.request_options import (
    RunRequest,
)
from delta_server.scrubbing import combined, count_findings
from delta_server.sources import Inlet
from delta_server.sources.folders import is_complete
from delta_server.sources.log import LogReplay
from delta_server.sources.log_follower import LogFollower
from delta_server.sources.store_files import StoreFiles
from delta_server.staging import Staging
from delta_server.upload_limits import MinimumRate, UploadSlots
from delta_server.version_requests import VersionRequests
from engine_ext.audit import AuditFile
from engine_ext.errors import (
    CommittedNotResumed,
    Conflict,
    DeltaError,
    EngineUncertain,
    SyncInProgress,
)
from engine_ext.format import DIGEST_ALGORITHM, Limits, signing_key
from engine_ext.log import DeltaLog, GroupMarks, PeerStore, SharedParts, open_log
from engine_ext.ranks.operations import (
    GetPlan,
    RankState,
)
from engine_ext.ranks.status import EngineStatus, HealthState, HealthStatus, VersionStatus
from engine_ext.remote_parts import PartCache, Peers
from engine_ext.resources import RateLimit
from engine_ext.settings import Settings, api_key
from engine_ext.store_urls import is_store_url

logger = logging.getLogger(__name__)

_START_TRIES, _START_WAIT_S = 5, 1.0  # to publish the version


def no_log() -> Conflict:
    """Return what to raise if an engine without a log is asked for what it has of one."""
    return Conflict("the engine was started without --delta-log; start it with --delta-log")


class DeltaService:
    """The sources of one engine, its coordinator, and its state.

    `log_replay` is None without ``--delta-log``, `follower` without ``--delta-follow``.

    `adapter` is the LoRA adapter whose own tensors are updated; None means the model's weights.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.settings, self.engine = settings, engine
        self.adapter: str | None = None
        audit = None
        if settings.audit_file is not None:
            audit = Audit(engine, AuditFile(Path(settings.audit_file), signing_key()))
        self.committer, self.reporter = EngineCommitter(engine, audit), SyncReporter(engine)
        # The delta log's folders, too: what a replay has left incomplete shows there.
        logs = [] if settings.log is None or is_store_url(settings.log) else [settings.log]
        self._folders = [*settings.folders, *logs]
        rate = None if settings.fetch_rate is None else RateLimit(settings.fetch_rate)
        cache: PartCache | None = None
        joins = settings.log is None and settings.peers  # by the log of a peer
        if joins or any(is_store_url(location) for location in (settings.log, *settings.roots)):
            cache = PartCache(settings.cache_dir, settings.cache_bytes)
        store_files = StoreFiles(settings, self._folders, rate, cache)
        self._list_names = store_files.list_names
        self._part_server: PartServer | None = None
        if engine.address is not None:
            self._part_server = PartServer(engine.address, settings.part_port)
        self.coordinator = Coordinator(
            engine, self.committer, self.reporter, self._make_staging(engine)
        )
        self.intake = Intake(settings.spool_dir, Limits(max_part_bytes=settings.max_body_bytes))
        self.inlet = Inlet(
            engine=engine,
            settings=settings,
            coordinator=self.coordinator,
            intake=self.intake,
            store_files=store_files,
            minimum_rate=MinimumRate(settings.stage_timeout, settings.min_upload_rate),
            upload_slots=UploadSlots(settings.max_uploads),
            follows=settings.log is not None and settings.follow,
        )
        self.fleet = FleetCommits(engine, self.coordinator)
        self.coordinator.describe_staged = self.fleet.describe
        self.log_replay: LogReplay | None = None
        self.peers: Peers | None = None
        self.shared_parts: SharedParts | None = None
        self.part_reads: PartReads | None = None
        self.follower: LogFollower | None = None
        if settings.log is not None:
            options: dict[str, Any] = {"cache": cache, "streams": settings.streams, "limit": rate}
            self.peers = Peers(settings.peers, settings.own_url, api_key())
            log = open_log(settings.log, peers=self.peers, **options)
            self.shared_parts = SharedParts(open_log(settings.log, **options))
            self.part_reads = PartReads(self.shared_parts)
            following = None
            if settings.follow:
                group = settings.follow_group
                marks = None if group is None else GroupMarks(log, group)
                following = FollowState(engine, settings.follow_hold, marks)
            self.log_replay = LogReplay(self.inlet, log, following)
            if following is not None:
                self.follower = LogFollower(self.log_replay, following, self.peers)
        elif settings.peers and cache is not None:
            self.peers = Peers(settings.peers, settings.own_url, api_key())
            theirs = DeltaLog(PeerStore(self.peers, cache))
            self.log_replay = LogReplay(self.inlet, theirs)
        self.readiness = Readiness(
            self.committer, self.log_replay, self.follower, settings.min_version
        )
        self.versions = VersionRequests(self.committer.served)
        self._scrubbing: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._ending_pauses: asyncio.Task[None] | None = None

    def for_adapter(self, name: str) -> DeltaService:
        """Return the service of an adapter of the same engine; all share everything but the state.

        The ranks keep that; see `engine_ext.sync.adapter_receivers`.
        """
        service = copy.copy(self)
        service.adapter, service.log_replay, service.follower = name, None, None
        service.engine = AdapterEngine(self.engine, name)
        service.coordinator = self.coordinator.for_adapter(
            name, service.engine, self._make_staging(service.engine)
        )
        service.fleet = self.fleet.for_adapter(name, service.engine, service.coordinator)
        service.coordinator.describe_staged = service.fleet.describe
        service.inlet = dataclasses.replace(
            self.inlet, engine=service.engine, coordinator=service.coordinator, follows=False
        )
        return service

    def _make_staging(self, engine: Engine) -> Staging:
        workers = self.settings.read_workers
        return Staging(engine, workers, self._list_names, self._part_server)

    async def _publish_at_start(self) -> None:
        """Publish what the ranks hold; replicas that are just being paused do not agree at once."""
        for left in reversed(range(_START_TRIES)):
            try:
                await self.coordinator.publish()
            except (EngineUncertain, CommittedNotResumed):  # in the status
                return
            except Exception:
                if not left:
                    raise
                logger.warning("delta updates: the version could not be published", exc_info=True)
                await asyncio.sleep(_START_WAIT_S)
            else:
                return

    async def start(self) -> None:
        """Check that every rank has a receiver, publish the base version, replay the log.

        The engine must not serve before this returns. A damaged log is reported, and the engine
        serves the last good version then. This process takes over what a dead one has left: it
        ends the pause of that one's commit, and settles the sync that it held. An engine whose
        weights are uncertain stays paused.

        Raises:
            DeltaError: some rank has no receiver, or the ranks are at different versions. The
                server must not start.
        """
        self.intake.warm_up()
        replies = await rank_statuses(self.engine)
        versions = [reply.version for reply in replies]
        if len(set(versions)) != 1:
            raise DeltaError(f"the ranks are at different versions: {versions}")
        held = Held.of(replies)
        await self.committer.served.share(self.engine, held.version, held.digest)
        self.committer.awaits_full_sync = replies[0].awaits is not msgspec.UNSET
        metrics.VERSION.set(held.version)
        metrics.show_run(held.run)
        await self.committer.record_start()
        if self.log_replay is None:
            # Not the version that was read: another process might have committed since. This also
            # resumes what a dead one has paused.
            await self._publish_at_start()
        else:  # another process might be replaying, which changes the version
            await (self.follower or self.log_replay).at_start()
        await self.coordinator.describe_staged((await self.coordinator.held()).staged)
        interval = self.settings.scrub_interval
        if interval is not None:
            self._scrubbing = asyncio.ensure_future(count_findings(self.engine, interval))
        if (most := self.settings.max_pause) is not None:
            watch = pauses.end_long_pauses(self.committer.end_long_pause, most)
            self._ending_pauses = asyncio.ensure_future(watch)
        if self.follower is not None:
            self._following = asyncio.ensure_future(self.follower.run())

    async def status(self, *, plan: bool = False, history: bool = False) -> EngineStatus:
        """Return the state of the engine's receivers.

        Args:
            plan: whether every tensor is listed.
            history: whether the last syncs are.
        """
        replies, replay = await self.committer.status(self.engine), self.log_replay
        following = None if self.follower is None else await self.follower.describe()
        log = None
        if replay is not None:
            received = 0 if self.peers is None else self.peers.received
            log = msgspec.structs.replace(
                replay.describe(replies[0].version), follow=following, from_peers=received
            )
        complete = await asyncio.to_thread(is_complete, replies[0].delivery, self._folders)
        first = replies[0]
        # The ranks keep what is of the engine, not of an adapter, with the model.
        whole: RankState = first
        if self.adapter is not None:
            [whole, *_] = await self.committer.states()
        held = Held.of(replies)
        version = VersionStatus(
            number=held.version,
            published=await self.engine.get_weight_version(),
            run=held.run,
            by_rank=[reply.version for reply in replies],
            digest=held.digest,
            digest_algorithm=DIGEST_ALGORITHM,
            complete=complete,
            loaded=held.loaded,
            can_roll_back=all(reply.can_roll_back for reply in replies),
        )
        health = HealthStatus(
            state=self._engine_state(held),
            mismatched=held.mismatched,
            asleep=held.asleep,
            changed_externally=held.changed_by,
            paused=await self.committer.describe_pause(whole),
            resume_owed=whole.resume_owed,
            awaits_full_sync=first.awaits is not msgspec.UNSET,
            certification=[reply.certification for reply in replies],
            uncertified={k: v for reply in replies for k, v in reply.uncertified.items()},
        )
        return EngineStatus(
            engine=self.engine.name,
            adapter=self.adapter,
            ranks=len(replies),
            server=server_status(self.engine),
            apply=first.apply,
            version=version,
            health=health,
            owner=first.owner,
            staged=await self.coordinator.describe_staged(first.staged),
            last_sync=first.last_sync,
            scrub=combined(replies),
            log=log,
            audit=await self.committer.describe_audit(),
            adapters=None if first.adapters is msgspec.UNSET else first.adapters,
            plan=await self.plan() if plan else msgspec.UNSET,
            history=await self.reporter.history(self.adapter) if history else msgspec.UNSET,
        )

    async def offer(self) -> dict[str, Any]:
        """Return what another engine needs to reach this one's version, as JSON.

        Raises:
            Conflict: the engine has no log, or its weights are not known to be of its version.
        """
        if self.shared_parts is None:
            raise no_log()
        held = await self.coordinator.held()
        if held.uncertain or held.changed_by is not None or held.mismatched:
            raise Conflict("the weights are not known to be those of the engine's version")
        offer = await asyncio.to_thread(self.shared_parts.offer, held.version, held.digest)
        answer: dict[str, Any] = msgspec.to_builtins(offer)
        return answer

    def _engine_state(self, held: Held) -> HealthState:
        """Return what is known of the weights, the worst first."""
        if held.uncertain:
            return "uncertain"
        if held.mismatched:
            return "mismatched"
        waits = self.follower is not None and self.follower.waits_for_log
        return "waiting_for_log" if waits else "certain"

    async def change_owner(self, request: RunRequest) -> dict[str, Any]:
        """Let the process of a run alone change the weights, or give that up; return JSON.

        Raises:
            RunConflict, SyncInProgress: see `Coordinator.claim`.
        """
        sender = request.sender
        if request.action == "release":
            released = await self.coordinator.release(sender)
            return {"status": "released" if released else "not_owner", "released": released}
        try:
            claimed = await self.coordinator.claim(sender, takeover=request.takeover)
        except SyncInProgress:  # the one who holds a sync is about to be fenced: not waited for
            with contextlib.suppress(DeltaError):
                await self.fleet.settle()
            claimed = await self.coordinator.claim(sender, takeover=request.takeover)
        held = await self.coordinator.held()
        return {
            "status": "claimed",
            "owner": msgspec.to_builtins(claimed.owner),
            "run": held.run,
            "version": held.version,
            "highest": claimed.highest,
            "loaded": held.loaded,
            "engine_state": self._engine_state(held),
            "digest": held.digest,
            "digest_algorithm": DIGEST_ALGORITHM,
        }

    async def plan(self) -> list[list[dict[str, Any]]] | None:
        """Return each rank's plan, one row per checkpoint tensor; None if there is no plan yet.

        An engine that was started without a checkpoint has no plan before its first ``full`` sync.
        """
        replies = await call_all_ranks(self.engine, GetPlan())
        plans = [reply.tensors for reply in replies if reply.tensors is not None]
        return plans if len(plans) == len(replies) else None
