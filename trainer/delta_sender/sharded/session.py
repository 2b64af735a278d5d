"""All ranks send one sync together: the parts of each, then one that commits.

Every rank runs the same steps, with the same view of the engine: all ranks get the answers that the
leader, rank 0, gets. So all ranks choose the same attempts, and end with the same report or error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode.acked_state import PostedSync
from delta_sender.encode.part_builder import Bucket, PartBuilder
from delta_sender.encode.sync_round import Attempt, SyncRound
from delta_sender.options import SenderOptions
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Destination
from delta_sender.publish.fleet import FleetRound
from delta_sender.publish.http_client import EngineClient
from delta_sender.publish.post_queue import PostQueue
from delta_sender.publish.session import Committed, Session, base_version
from delta_sender.results import RankError, ShardedReport, SyncError
from delta_sender.run import Run
from delta_sender.sharded.owned import OwnedShards, ShardedState
from delta_sender.sharded.parts import OwnedChanges, ShardParam
from delta_sender.sharded.ranks import Ranks, described, first_cause, raise_first
from engine_ext.format import Digest, encode_part
from engine_ext.ranks.status import EngineStatus

# What a rank has posted: "parts", "wire_bytes", "nnz", "digest", "picked"; and not: "lost".
Report = dict[str, Any]


class SharedEngine(Destination):
    """The engine, as all ranks see it: the leader asks, and all get the answer.

    `deliver` takes a part of this rank's own.
    """

    def __init__(self, client: EngineClient, ranks: Ranks) -> None:
        self.client, self._ranks = client, ranks
        self.name, self.highest_posted = client.name, 0

    @property
    def speed(self) -> LinkSpeed:  # type: ignore[override]
        """Speed of this rank's own link."""
        return self.client.speed

    def close(self) -> None:
        """Close this rank's HTTP client."""
        self.client.close()

    def claim(self, run: Run, *, takeover: bool) -> dict[str, Any]:
        """See `Destination.claim`."""
        return self._ranks.from_leader(lambda: self.client.claim(run, takeover=takeover))

    def release(self, run: Run) -> None:
        """See `Destination.release`; done by the leader, which waits for no other rank."""
        if self._ranks.is_leader:
            self.client.release(run)

    def stop(self) -> None:
        """See `Destination.stop`; this rank's parts only."""
        self.client.stop()

    def announce(self, reason: str | None) -> None:
        """See `Destination.announce`."""
        self.client.announce(reason)

    def plan(self) -> Any:
        """See `Destination.plan`."""
        return self._ranks.from_leader(self.client.plan)

    def status(self) -> EngineStatus | None:
        """See `Destination.status`."""
        found = self._ranks.from_leader(self.client.status)  # as JSON
        return msgspec.convert(found, EngineStatus | None)

    def take_step(self, action: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Destination.take_step`; the leader takes it, and no other rank calls this."""
        return self.client.take_step(action, fields)

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        """See `Destination.deliver`."""
        return self.client.deliver(body, version, part, last)

    def commit(self, body: bytes, version: int, number: int) -> dict[str, Any]:
        """Let the leader post the last part.

        Raises:
            SyncError: See `Destination.deliver`.
        """
        self.highest_posted = max(self.highest_posted, version)
        return self._ranks.from_leader(
            lambda: self.client.deliver(body, version, number, last=True)
        )


class ShardedSession(Session):
    """The syncs of one engine, sent by all ranks.

    Args:
        engine: The engine.
        snapshot: What this rank owns.
        owned: Which tensors that is part of.

    Attributes:
        ranks: Those that agree on this engine's syncs.
    """

    destination: SharedEngine
    state: ShardedState

    def __init__(
        self,
        engine: SharedEngine,
        snapshot: Snapshot,
        options: SenderOptions,
        run: Run,
        owned: OwnedShards,
        ranks: Ranks,
    ) -> None:
        version = options.base_version
        state = ShardedState(snapshot, version, owned, ranks)
        super().__init__(engine, snapshot, options, version, run, state=state)
        self._owned, self.ranks = owned, ranks

    @property
    def _is_in_fleet(self) -> bool:
        """Whether the engine commits together with others; the leader has the `_fleet`."""
        return self._options.commit == "all_or_none"

    def sync(self, sync_round: SyncRound, fleet: FleetRound | None = None) -> Committed:
        """See `Session.sync`. The other ranks do not wait for one on which something else fails."""
        try:
            return super().sync(sync_round, fleet)
        except SyncError:
            raise
        except BaseException:
            self.ranks.leave("a rank has failed")
            raise

    def _settle(self) -> None:
        if self._is_in_fleet:
            self.ranks.from_leader(super()._settle)

    def _has_prepared(self) -> bool:
        return self._is_in_fleet and self.ranks.from_leader(super()._has_prepared)

    def _send(self, sync_round: SyncRound, attempt: Attempt) -> Committed:
        """Post this rank's parts; once those of all ranks are taken, let the leader commit."""
        state = self.state
        if self._is_in_fleet:
            self._check_version(sync_round, attempt)
        if attempt.full or not state.plan_is_current:
            plan = self.destination.plan()
            state.read_plan(plan, keep_digest=self._options.digest, full=attempt.full)
        self.destination.announce(attempt.reason)
        try:
            return self._commit(sync_round, attempt)
        except BaseException:
            if attempt.full:  # the digest of what is held was not computed
                state.plan_is_current = False
            raise

    def _commit(self, sync_round: SyncRound, attempt: Attempt) -> Committed:
        state, started = self.state, time.perf_counter()
        source = OwnedChanges(
            self.ranks,
            self._owned,
            state,
            sync_round,
            attempt,
            self.destination.client.speed.bytes_per_s,
        )
        builder = PartBuilder(
            sync_round,
            attempt,
            source,
            base_version=state.version,
            bucket_bytes=self._options.bucket_bytes,
        )
        metadata = builder.common_metadata | source.metadata([], "", last=True)
        reports = self._post_share(sync_round, builder, source)
        digest = state.digest
        if digest is not None:
            digest = sum((Digest.parse(one["digest"]) for one in reports), start=digest)
        number = sum(one["parts"] for one in reports)
        body = _last_part(attempt, digest, number, metadata)
        state.posted = PostedSync(attempt.version, sync_round.sync_ids(), digest, state.is_proven)
        try:
            answer = self.destination.commit(body, attempt.version, number)
            if self._is_in_fleet:
                self._check_applied(answer)
                sync_id, posted = sync_round.sync_id(attempt), answer
                answer = self.ranks.from_leader(lambda: self._commit_in_fleet(posted, sync_id))
        except RankError as error:
            raise RankError(f"the engine might have committed; {error}", error.ranks) from error
        except SyncError as error:
            if error.is_refusal:
                state.posted = None
            raise
        self._check_applied(answer)
        lost = sorted({name for one in reports for name in one["lost"]})
        self._warn_of_lost_changes(lost, logs=self.ranks.is_leader)
        tensors = [self._owned.ownership[name] for name in state.plan.names]
        wire = [one["wire_bytes"] for one in reports]
        wire[0] += len(body)
        report = ShardedReport(
            version=attempt.version,
            base_version=base_version(answer, attempt, state),
            nnz=sum(one["nnz"] for one in reports),
            numel=sum(tensor.numel for tensor in tensors),
            full_bytes=sum(tensor.nbytes for tensor in tensors),
            wire_bytes=sum(wire),
            parts=number + 1,
            encode_ms=(started - sync_round.started) * 1e3,
            post_ms=(time.perf_counter() - started) * 1e3,
            status=answer["status"],
            full=attempt.full,
            reason=attempt.reason,
            run=self.run.name,
            digest=None if digest is None else digest.hex(),
            engine=answer,
            picked=dict(sum((Counter(one["picked"]) for one in reports), start=Counter())),
            link_bytes_per_s=self.destination.speed.measured,
            **sync_round.observed.in_report(),
            rank_bytes=tuple(wire),
            rank_nnz=tuple(one["nnz"] for one in reports),
        )
        return Committed(report, digest, attempt.next_policy)

    def _post_share(
        self, sync_round: SyncRound, builder: PartBuilder[ShardParam], source: OwnedChanges
    ) -> list[Report]:
        """Post this rank's parts, and return what each rank has posted.

        Raises:
            SyncError: The engine has refused a part of some rank; the same on every rank.
            RankError: A rank has failed; the same on every rank.
        """
        buckets, first = self._numbered(builder)
        client, failure = self.destination.client, None
        client.at_once = self._options.posts_in_flight
        queue = PostQueue(client, sync_round, waits=False)
        try:
            with queue.encoding():
                self._put_all(queue, builder, source, buckets, first)
            queue.finish()
        except BaseException as raised:
            queue.abandon()
            if isinstance(raised, RankError) or not isinstance(raised, Exception):
                raise
            reason = queue.reason(raised)
            failure = reason if isinstance(reason, Exception) else raised
        sent = source.sent
        report = {
            "parts": len(buckets),
            "wire_bytes": queue.wire_bytes,
            "nnz": sent.nnz,
            "digest": sent.digest.hex(),
            "picked": sent.picked,
            "lost": self._lost_changes(sync_round),
            "failed": None if failure is None else described(failure),
        }
        reports: list[Report] = self.ranks.exchange(report)
        failures = {n: one["failed"] for n, one in enumerate(reports) if one["failed"] is not None}
        if failures:
            # The engine might have dropped the sync, and begun it anew with a later part.
            if self.ranks.rank == first_cause(failures):
                queue.repeat_refused()
            raise_first(failures, failure)
        return reports

    def _numbered(self, builder: PartBuilder[ShardParam]) -> tuple[list[Bucket[ShardParam]], int]:
        """Return this rank's parts, and the number of the first of them."""
        buckets, failure = list[Bucket[ShardParam]](), None
        try:
            buckets = builder.buckets()
        except Exception as error:
            failure = error
        failed = None if failure is None else described(failure)
        said = self.ranks.exchange([len(buckets), failed])
        failures = {rank: failed for rank, (_, failed) in enumerate(said) if failed is not None}
        if failures:
            raise_first(failures, failure)
        return buckets, sum(count for count, _ in said[: self.ranks.rank])

    def _put_all(
        self,
        queue: PostQueue,
        builder: PartBuilder[ShardParam],
        source: OwnedChanges,
        buckets: list[Bucket[ShardParam]],
        first: int,
    ) -> None:
        failure: Exception | None = None
        for number, bucket in source.assembled(buckets):
            if failure is not None:  # other ranks take part in assembling what follows
                bucket.params.clear()
                continue
            try:
                queue.put(builder.part(bucket, first + number))
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure


def _last_part(
    attempt: Attempt, digest: Digest | None, number: int, metadata: Mapping[str, Any]
) -> bytes:
    """Return a part without params that says how many there are: it makes the engine commit."""
    return encode_part(
        [],
        encoding=attempt.policy.empty,
        part=number,
        num_parts=number + 1,
        digest_part=Digest.ZERO.hex() if "digest_before" in metadata else None,
        digest_after=None if digest is None else digest.hex(),
        **metadata,
    )
