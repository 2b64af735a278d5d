"""Send from all ranks of a trainer at once: the class `ShardedSender`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx
import msgspec

from delta_sender.arguments import check_urls
from delta_sender.diff.observations import Observed, Watch
from delta_sender.diff.refills import StableGenerator
from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode.sync_round import SyncRound
from delta_sender.encode.warm_up import warm_up
from delta_sender.models import Checkpoint, read_base
from delta_sender.options import Flush, SenderOptions
from delta_sender.publish.contact import release_all, release_at_exit
from delta_sender.publish.http_client import EngineClient
from delta_sender.results import FleetOutcome, ShardedReport, SyncError
from delta_sender.run import Run
from delta_sender.sharded.fleet import ShardedFleet
from delta_sender.sharded.owned import OwnedShards
from delta_sender.sharded.ranks import Ranks
from delta_sender.sharded.session import ShardedSession, SharedEngine
from delta_sender.sharded.shards import Shards
from engine_ext.resources import RateLimit, no_full_collections


class ShardedSender(AbstractContextManager["ShardedSender"]):
    """Keep the weights of engines equal to those of a trainer whose ranks hold shards of them.

    Each rank keeps a snapshot of the shards that it owns, compares and encodes them, and posts its
    own parts; nothing is gathered. An element that several ranks hold is sent by one of them. The
    parts of all ranks are one sync, which the engine commits when rank 0 posts the last one: after
    all others of all ranks were taken. Every rank then learns the outcome, and only then do the
    snapshots move.

    Made, synced and closed on all ranks, at the same step. Ranks exchange small messages over a
    gloo group of their own; in a full sync, each tensor is assembled on one of its owners, one
    tensor at a time.

    If a rank fails or disagrees with the others, all ranks raise the same `RankError`, and the
    engine is unchanged; the next sync can succeed. If one dies, or meets an error that the others
    do not learn of (memory, a disk), they raise as soon as they notice, at the latest after
    `rank_timeout` seconds, and the sender cannot be used any more; make a new one.

    With ``commit="all_or_none"`` there can be several engines, which commit as one; see
    `MultiSender`. Each rank encodes its share for each of them. Rank 0 decides, and its `evict` is
    called. A sync ends when all engines have: one that does not answer keeps no other from
    committing, but the sync from returning, for one `timeout` after the decision.

    Host memory of a rank: its share of the snapshot and of the changes, see `DeltaSender`; in a
    full sync, the parts that it is sending.

    Args:
        url: The engine's root. Ranks can give those of different HTTP processes of one engine. Or
            several engines' roots, each once, in the same order on every rank; those of rank 0 are
            what the engines reach each other at.
        shards: What this rank holds, see `model_shards`; or (name, local tensor, global shape,
            slices). Without `base`, it is what the engine holds.
        base: The weights that the engine holds now: a checkpoint's folder, or its tensors by name.
            Each rank reads its part.
        group: The ranks, as a torch.distributed group; None: all.
        rank_timeout: Seconds after which a rank counts as dead that does not answer the others.
            Ranks wait for each other while they post, so it must exceed a sync, and a request's
            `timeout`.
        continues: `run` and `epoch` of an earlier sender, which must be closed, to open its run
            again; rank 0's counts.

    The other keyword arguments are documented in `SenderOptions`.

    Attributes:
        reports: The reports of all engines that have committed the last sync, by url.

    Raises:
        RankError: The shards do not make up the tensors, copies of one on several ranks differ, or
            a rank has failed; on all ranks.
        ValueError: An option has an unknown value, a url is given twice, there are fewer engines
            than `quorum`, or several do not commit as one.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        shards: Shards,
        base: Checkpoint | None = None,
        *,
        group: Any = None,
        rank_timeout: float = 1800.0,
        continues: tuple[str, int] | None = None,
        base_version: int = 0,
        encoding: str = "deltas_zstd",
        bucket_bytes: int = 64 << 20,
        posts_in_flight: int = 4,
        digest: bool = True,
        api_key: str | None = None,
        hmac_key: str | None = None,
        pause_mode: str = "keep",
        flush_cache: Flush = True,
        bandwidth_limit: float | RateLimit | None = None,
        timeout: float = 600.0,
        client: httpx.Client | None = None,
        snapshot_on: str = "auto",
        changes_in_memory: int | None = None,
        refuse_nonfinite: bool = False,
        unchanged_warning: int = 3,
        takeover: bool = False,
        full: str = "own",
        lag_limit: float | None = 60.0,
        commit: str = "each",
        commit_window: float = 10.0,
        quorum: int | None = None,
        evict: Callable[[str, SyncError], object] | None = None,
    ) -> None:
        self._options = SenderOptions.among(locals())
        urls = [url] if isinstance(url, str) else list(url)
        check_urls(urls)
        self._options.check_engines(urls)
        if len(urls) > 1 and commit == "each":
            raise ValueError("several engines take commit='all_or_none'")
        shards = list(shards)
        self._count, self._is_released = 0, False
        self._watch = Watch(refuses_nonfinite=refuse_nonfinite, warns_after=unchanged_warning)
        self._group, self._rank_timeout = group, rank_timeout
        self._ranks = Ranks(group, rank_timeout)
        self.reports: dict[str, ShardedReport] = {}
        try:
            self._owned = OwnedShards(self._ranks, shards)
            opened = self._ranks.from_leader(
                lambda: msgspec.to_builtins(Run.opened(*(continues or ())))
            )
            run = msgspec.convert(opened, Run)
            sessions = self._make_sessions(urls, shards, base, run)
        except BaseException:
            self._ranks.leave()
            raise
        self._sessions = sessions
        self._session = next(iter(sessions.values()))
        self._fleet: ShardedFleet | None = None
        if commit == "all_or_none":
            self._fleet = ShardedFleet(sessions, self._ranks, self._snapshot, self._options)
        release_at_exit(self)

    def _make_sessions(
        self, urls: Sequence[str], shards: Shards, base: Checkpoint | None, run: Run
    ) -> dict[str, ShardedSession]:
        options, failure = self._options, None
        clients = {url: EngineClient(url, options) for url in urls}
        try:
            tensors = read_base(base)
            held = (
                self._owned.of(shards, (), {}) if tensors is None else self._owned.of_base(tensors)
            )
            # Sizes decide what is kept dense; gap streams would be those of local indices.
            self._snapshot = Snapshot(held, "deltas", options.snapshot_on)
            warm_up(self._snapshot.dtypes.values(), options.encoding)
        except Exception as error:
            failure = error
        # What decides which messages ranks exchange.
        facts = {
            "encoding": options.encoding,
            "digest": options.digest,
            "full": options.full,
            "commit": options.commit,
            "version": options.base_version,
            "number of engines": len(urls),
        }
        self._ranks.agree(facts, failure)
        sessions = {}
        for url, client in clients.items():
            ranks = self._ranks  # one engine needs no others: nothing is done at the same time
            if options.commit == "all_or_none":
                ranks = Ranks(self._group, self._rank_timeout)
            engine, common = SharedEngine(client, ranks), (self._snapshot, options, run)
            sessions[url] = ShardedSession(engine, *common, self._owned, ranks)
        return sessions

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def run(self) -> str:
        """The run that the sender has opened: an id of its lineage of weights."""
        return self._session.run.name

    @property
    def epoch(self) -> int:
        """Which opening of the run this sender is, from 1."""
        return self._session.run.epoch

    @property
    def version(self) -> int:
        """The version that the engine acknowledged last; the highest one of several engines."""
        return max(self.versions.values())

    @property
    def versions(self) -> dict[str, int]:
        """The version that each engine acknowledged last, by url."""
        return {url: session.state.version for url, session in self._sessions.items()}

    @property
    def outcomes(self) -> dict[str, FleetOutcome]:
        """What has become of each engine in the last sync, by url, if they commit as one."""
        return {} if self._fleet is None else dict(self._fleet.outcomes)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of this rank's snapshot."""
        return self._snapshot.nbytes

    def close(self) -> None:
        """Close this rank's HTTP client and its connections to the others; release the engine."""
        self.release()
        for session in self._sessions.values():
            session.destination.close()
        (self._fleet or self._ranks).leave("the sender is closed")
        self._snapshot.close()

    def release(self) -> None:
        """Stop sending, drop what is staged in the engine, and let other runs claim it.

        Takes a few seconds at most, and raises nothing; part of `close`, and done for senders that
        are still open when the interpreter ends. The sender cannot be used afterwards.
        """
        sessions = self._sessions.values()
        for session in sessions:
            session.destination.stop()
        claimed = [session.destination for session in sessions if session.is_claimed]
        if claimed and not self._is_released:
            release_all(claimed, self._session.run, [])
        self._is_released = True

    def sync(self, shards: Shards, *, step: int | None = None) -> ShardedReport:
        """Send what changed since the last sync, from all ranks.

        A refusal is followed by values in place of differences, or by one full sync, as with
        `DeltaSender`.

        Args:
            shards: The shards that the sender was made with, with their values now. None must
                change before the sync ends.
            step: The trainer's step, if ranks are to check that they are at the same one.

        Returns:
            The report of the whole sync, on every rank; of several engines, that of the first one
            that has committed.

        Raises:
            GroupAborted, PartialSyncError: With ``commit="all_or_none"``: see `MultiSender.sync`.
                On every rank.
            SyncError: The engine refused, could not be reached, or holds other bytes afterwards; on
                every rank. See `SyncError` for its state then.
            RankError: A rank has failed, died, or disagrees about the step, the version, the
                shards or the bits of one that several hold; on every rank that is alive. The engine
                has not committed, unless the message says that it might have.
        """
        return self._sync(shards, step, full=False)

    def sync_full(self, shards: Shards, *, step: int | None = None) -> ShardedReport:
        """Send every tensor whole, whatever the engine holds; a warning says what that is.

        Raises what `sync` raises.
        """
        return self._sync(shards, step, full=True)

    @no_full_collections()
    def _sync(self, shards: Shards, step: int | None, *, full: bool) -> ShardedReport:
        started = time.perf_counter()
        self._count += 1
        self.reports = {}
        try:
            if self._fleet is None:
                self._session.meet()
            else:
                self._fleet.meet()
            facts = {
                "step": step,
                "version": self.version,
                "number of syncs": self._count,
                "kind of sync (full)": full,
            }
            sync_round = self._read(shards, facts, started, full=full)
            return self._finish(sync_round)
        except SyncError:  # the same on every rank
            raise
        except Exception:  # on this one alone: the others must not wait for it
            (self._fleet or self._ranks).leave("a rank has failed")
            raise
        except BaseException:  # an interruption leaves the ranks at different steps
            self._ranks.leave("interrupted")
            raise
        finally:
            self._snapshot.let_go()

    def _read(
        self, shards: Shards, facts: dict[str, Any], started: float, *, full: bool
    ) -> SyncRound:
        """Compare this rank's shards with its snapshot; agree that every rank has."""
        sessions, failure, own_id = self._sessions.values(), None, uuid.uuid4()
        highest = max(session.state.highest_version for session in sessions)
        posted = max(session.destination.highest_posted for session in sessions)
        ids = [own_id]
        sync_round = SyncRound(
            max(highest, posted) + 1,
            self._session.run,
            full=full,
            destinations=len(sessions),
            posts_in_flight=self._options.posts_in_flight,
            started=started,
            # Alike on all ranks, whose sessions do not ask each other.
            new_id=lambda attempt: uuid.uuid5(ids[0], attempt).hex,
            shares=False,
        )
        digests: dict[str, str] = {}
        try:
            of_rank = self._owned.of(shards, self._owned.copies.following(), digests)
            tensors = StableGenerator(of_rank) if isinstance(shards, (list, tuple)) else of_rank
            found = self._snapshot.read(
                tensors, digests=False, changes_in_memory=self._options.changes_in_memory
            )
            self._watch.read(sync_round, found, is_share=True)
        except Exception as error:
            failure = error
        try:
            self._ranks.agree(facts, failure, digests)
            ranks = self._ranks.exchange([sync_round.observed, own_id.hex])
            ids[:] = [uuid.UUID(one) for _, one in ranks]
            total = Observed.total([msgspec.convert(one, Observed) for one, _ in ranks])
            sync_round.observed = self._watch.note(total, logs=self._ranks.is_leader)
        except BaseException:
            for _ in sessions:
                sync_round.leave()
            raise
        return sync_round

    def _finish(self, sync_round: SyncRound) -> ShardedReport:
        if self._fleet is not None:
            self.reports = self._fleet.sync(sync_round)
            return next(iter(self.reports.values()))
        [url], session = self._sessions, self._session
        session.state.posted = None
        try:
            committed = session.sync(sync_round)
            self._snapshot.advance(sync_round.changes)
        except SyncError:
            session.state.note_failed(sync_round.changes)
            raise
        finally:
            sync_round.leave()
        report = session.acknowledge(committed)
        assert isinstance(report, ShardedReport)
        self.reports = {url: report}
        return report
