"""Send to several engines at once: the class `MultiSender`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

from delta_sender.acked_state import without_old
from delta_sender.arguments import check_urls, engine_root, named_pairs
from delta_sender.checkpoint import Base, tensors_of
from delta_sender.contact import meet_all, release_all, release_at_exit
from delta_sender.destination import Destination
from delta_sender.encoding_policy import EncodingPolicy, sparse_encoding
from delta_sender.http_client import EngineClient
from delta_sender.log_destination import LogDestination, log_location
from delta_sender.observations import Watch
from delta_sender.options import MultiOptions, check_values, takes_options, with_defaults
from delta_sender.quantize import Quantizer
from delta_sender.results import PartialSyncError, SyncReport
from delta_sender.run import Run
from delta_sender.session import Committed, Session
from delta_sender.session_thread import SessionThread, acknowledge_all, latest_sync, wait_for
from delta_sender.snapshot import NamedTensors, Snapshot
from delta_sender.spill import Spill
from delta_sender.state_file import Known, StateFile, StateTracker
from delta_sender.sync_round import SyncRound
from delta_sender.warm_up import warm_up
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.log import open_log
from engine_ext.resources import no_full_collections

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


@takes_options(MultiOptions)
class MultiSender(AbstractContextManager["MultiSender"]):
    """Keep the weights of several engines equal to a trainer's. Not thread-safe.

    The tensors are read and compared once, while parts with earlier ones are encoded and posted.
    Each engine gets the parts on its own connection, at the same time as the others, and the very
    same bytes if it holds and wants the same. After a sync, every engine that committed is at the
    same version. See `DeltaSender` for the tensors.

    The snapshot advances once some engine has committed. For an engine that has not, the changes
    that it missed are kept; its next sync includes them, or is a full one if that is more than
    half of the model or the engine holds something else by then.

    A sync returns when every engine is done or has failed, at the latest `lag_limit` seconds after
    the first commit. Engines that are not done by then continue on their own with the parts that
    they are being sent. They have no report, are in `lagging`, are left out of later syncs until
    they are done, and then get what they missed; `late_outcomes` has how they ended.

    Host memory: see `DeltaSender`; plus, for an engine that failed, the changes that it missed;
    for one that lags, twice those and the parts that it has yet to get.

    Example:
        >>> import torch
        >>> from delta_sender import MultiSender, PartialSyncError
        >>> weights = {"lm_head.weight": torch.zeros(16, 4, dtype=torch.bfloat16)}
        >>> urls = ["http://engine-0:8000", "http://engine-1:8000"]
        >>> with MultiSender(urls, weights.items(), lag_limit=30) as sender:
        ...     weights["lm_head.weight"][3] += 0.5
        ...     reports = sender.sync(weights.items())
        >>> [(url, report.version, report.nnz) for url, report in sorted(reports.items())]
        [('http://engine-0:8000', 1, 4), ('http://engine-1:8000', 1, 4)]
        >>> sender.versions
        {'http://engine-0:8000': 1, 'http://engine-1:8000': 1}

        If some engines refuse, the others are at the new version:

        >>> urls[1] = "http://broken:8000"
        >>> sender = MultiSender(urls, weights.items(), base_version=1)
        >>> weights["lm_head.weight"][5] += 0.5
        >>> try:
        ...     reports = sender.sync(weights.items())
        ... except PartialSyncError as error:
        ...     reports, failures = error.reports, error.failures
        >>> {url: report.version for url, report in reports.items()}
        {'http://engine-0:8000': 2}
        >>> {url: error.status for url, error in failures.items()}
        {'http://broken:8000': 507}

    Args:
        urls: The engines' roots, ``http://host:port``, each once.
        base: What every engine holds now, as (name, tensor), or the folder of a checkpoint; copied.
        connect: Makes the destination of a url.
        snapshot_type: Makes the snapshot.
        continues: `run` and `epoch` of an earlier sender, which must be closed, to open its run
            again; not with `state`, which has them.
        **options: See `MultiOptions`.

    Raises:
        ValueError: An option has an unknown value, no url is given or one twice, or the state file
            is not one.
        BlockingIOError: Another sender writes into the log, or uses the state file.
    """

    def __init__(
        self,
        urls: Sequence[str],
        base: Base,
        *,
        connect: Callable[[str, MultiOptions], Destination] = EngineClient,
        snapshot_type: type[Snapshot] = Snapshot,
        continues: tuple[str, int] | None = None,
        **options: Unpack[MultiOptions],
    ) -> None:
        self._options = options = with_defaults(options)
        encoding, delta_log = options["encoding"], options["delta_log"]
        check_values(options)
        if options["adapter"] is not None and delta_log is not None:
            raise ValueError("a delta log has versions of the model's weights, not of adapters")
        check_urls(urls)
        if any(log_location(url) is not None for url in urls):
            raise ValueError("a delta log is no engine; DeltaSender(url, base) publishes in it")
        if connect is EngineClient:  # which does so as well, but only once the base is read
            for url in urls:
                engine_root(url)
        if not urls or len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError("give every engine's url, each once")
        self._urls = list(urls)
        file = None if options["state"] is None else StateFile.locked(Path(options["state"]))
        sends_differences = EncodingPolicy(encoding).may_send_differences
        self._digests = options["digest"] or sends_differences or file is not None
        self._snapshot = snapshot_type(
            tensors_of(base), sparse_encoding(encoding), options["snapshot_on"]
        )
        dtypes = self._snapshot.dtypes
        self._watch = Watch(options)
        self._quantizer: Quantizer | None = None
        if options["quantize"] is not None:
            stored = {name: TORCH_DTYPE[dtype] for name, dtype in dtypes.items()}
            self._quantizer = Quantizer(options["quantize"], stored)
        warm_up(dtypes.values(), encoding)
        self._tracker = StateTracker(file, self._snapshot)
        if file is not None:
            self._has_sent_before = frozenset(file.state.engines if file.state.run else ())
            self._run = file.open_run()
        else:
            self._has_sent_before = frozenset()
            self._run = Run.opened(*(continues or ()))
        has_log = delta_log is not None
        self._sessions = [
            self._session(connect(url, options), url, has_log=has_log) for url in urls
        ]
        self._log: Session | None = None
        if delta_log is not None:
            engines = [session.destination for session in self._sessions]
            self._log_destination = LogDestination(
                open_log(delta_log), engines, options["hmac_key"]
            )
            self._log = self._session(self._log_destination, None, is_log=True)
            continues_log = self._log_destination.continues_from(self._log.state.version)
            if not continues_log:
                self._log.state.full_reason = "restarted: the log does not lead to the base"
        self._unfinished: tuple[SyncRound, list[SessionThread]] | None = None
        # Set while the snapshot and the sessions advance; still set if that was interrupted.
        self._is_inconsistent = False
        self._is_released = False
        self._lagging: dict[Session, SessionThread] = {}
        self._late_outcomes: dict[str, SyncReport | Exception] = {}
        self._ended = Condition()
        release_at_exit(self)

    def _session(
        self,
        destination: Destination,
        url: str | None,
        *,
        is_log: bool = False,
        has_log: bool = False,
    ) -> Session:
        version, needs_full = self._options["base_version"], False
        if self._tracker.file is not None:
            base = self._tracker.digest.hex()
            key = None if url is None else self._state_key(url)
            version, needs_full = self._tracker.file.state.version_of(key, base, version)
        session = Session(
            destination,
            self._snapshot,
            self._options,
            version,
            self._run,
            is_log=is_log,
            has_log=has_log,
        )
        if needs_full:
            session.state.full_reason = "restarted: the base is not what the engine took last"
        session.state.is_known = url is not None and self._state_key(url) in self._has_sent_before
        return session

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def run(self) -> str:
        """The run that the sender has opened, or opened again: an id of its lineage of weights."""
        return self._run.name

    @property
    def epoch(self) -> int:
        """Which opening of the run this sender is, from 1."""
        return self._run.epoch

    @property
    def versions(self) -> dict[str, int]:
        """The version that each engine acknowledged last, by url."""
        return {self._url_of(session): session.state.version for session in self._sessions}

    @property
    def lagging(self) -> list[str]:
        """Urls of engines that are still being sent a sync that has returned without them."""
        return [self._url_of(s) for s, thread in self._lagging.items() if thread.outcome is None]

    @property
    def late_outcomes(self) -> dict[str, SyncReport | Exception]:
        """How engines that lagged ended, by url: a report or an error.

        The next sync and `close` note them; an engine's entry is dropped when a later sync of it
        has ended.
        """
        return dict(self._late_outcomes)

    def close(self) -> None:
        """Release the engines, and close own HTTP clients, the log and the state file.

        Engines that lag are waited for, `lag_limit` seconds each at most. The engines drop
        what they have staged of this sender, and other runs can claim them.
        """
        for thread in self._lagging.values():
            thread.join(self._options["lag_limit"])
        for thread in self._unfinished[1] if self._unfinished is not None else ():
            if thread.is_log:  # it may still be writing
                thread.join()
        self.release()
        self._end_lagging(wait=False)
        self._write_state([], "")
        for session in self._all:
            session.destination.close()
        if self._tracker.file is not None:
            self._tracker.file.close()

    def release(self) -> None:
        """Stop sending, drop what is staged in the engines, and let other runs claim them.

        Takes a few seconds at most, and raises nothing; part of `close`, and done for senders that
        are still open when the interpreter ends. The sender cannot be used afterwards.
        """
        if self._is_released:
            return
        self._is_released = True
        for session in self._sessions:
            session.destination.stop()
        threads = [] if self._unfinished is None else [*self._unfinished[1]]
        release_all(
            [session.destination for session in self._sessions if session.is_claimed],
            self._run,
            [thread.thread for thread in (*threads, *self._lagging.values())],
        )

    def sync(self, tensors: NamedTensors) -> dict[str, SyncReport]:
        """Send what changed since the last sync to every engine.

        Args:
            tensors: The base's tensors, with their values now. None may change before the sync
                ends.

        Returns:
            The reports by url, without engines that lag.

        Raises:
            PartialSyncError: Some engines did not commit. Those in its `reports` did.
            ValueError: Names, shapes or dtypes are not the base's, or a weight to quantise is not
                finite. No engine commits anything. Nothing was sent if `tensors` is a collection
                and not an iterator, and `quantize` is not set.
        """
        return self._sync(tensors, full=False)

    def sync_full(self, tensors: NamedTensors) -> dict[str, SyncReport]:
        """Send every tensor dense, whatever the engines hold; a warning says what that is.

        Raises what `sync` raises.
        """
        return self._sync(tensors, full=True)

    @property
    def _all(self) -> list[Session]:
        return self._sessions if self._log is None else [*self._sessions, self._log]

    @no_full_collections()
    def _sync(self, tensors: NamedTensors, *, full: bool) -> dict[str, SyncReport]:
        self._end_unfinished()
        started = time.perf_counter()
        self._end_lagging()
        sessions = [session for session in self._all if session not in self._lagging]
        meet_all([s for s in sessions if s is not self._log], self._options["lag_limit"])
        version, count = self._next_version(full=full), len(sessions)
        writers = (self._log is not None) + (self._tracker.file is not None)
        tensors = named_pairs(tensors)
        if self._quantizer is not None:
            tensors = self._quantizer(tensors)
        sync_round = SyncRound(
            version,
            self._run,
            full=full,
            destinations=count,
            posts_in_flight=self._options["posts_in_flight"],
            started=started,
            writers=writers,
        )
        threads = [
            SessionThread(session, sync_round, self._ended, is_log=session is self._log)
            for session in sessions
        ]
        self._unfinished = sync_round, threads
        try:
            for thread in threads:
                thread.thread.start()
            limit = self._options["changes_in_memory"]
            spill = Spill(self._snapshot.nbytes // 4 if limit is None else limit)
            found = self._snapshot.read(tensors, digests=self._digests, keep=spill.keep)
            self._watch.read(sync_round, found)
            self._tracker.begin(sync_round)
            wait_for(threads, self._ended, self._options["lag_limit"])
            sync_round.release()
        except BaseException as error:
            sync_round.fail(error)
            if isinstance(error, Exception):  # an interruption does not wait for answers
                self._end_unfinished()
            raise
        return self._finish(sync_round, threads)

    def _end_unfinished(self) -> None:
        """Take in what came of a sync that was interrupted; wait for its last answers."""
        if self._unfinished is not None:
            sync_round, threads = self._unfinished
            for thread in threads:
                thread.join()
                self._lagging.pop(thread.session, None)
            unknown = [thread.session.state.note_failed(sync_round.changes) for thread in threads]
            logged = _logged(threads)
            if logged is not None and not self._is_inconsistent:
                self._drop_from_log(logged, sync_round, is_unknown=any(unknown))
            self._unfinished = None
        if self._is_inconsistent:
            # The missed changes of an engine are relative to a snapshot that did not come.
            for session in self._all:
                session.state.lose_track()
            self._tracker.recompute_digest()
            self._is_inconsistent = False

    def _next_version(self, *, full: bool) -> int:
        """Return a version above all that some engine may be at: a number has one content.

        If no digest proves what a sync led to, it is above all that were posted.
        """
        version = max(session.state.highest_version for session in self._all)
        for session in self._all:
            if full or session.state.needs_full or not session.state.is_proven:
                version = max(version, session.destination.highest_posted)
        if self._log is not None:
            version = max(version, self._log_destination.writer.last_number)
        if self._tracker.file is not None:
            version = max(version, self._tracker.file.state.highest)
        return version + 1

    def _end_lagging(self, *, wait: bool = True) -> None:
        """Take in how lagging engines have ended; if all engines lag, wait for one."""
        with self._ended:
            while wait and len(self.lagging) == len(self._sessions):
                self._ended.wait()
            ended = {s: thread for s, thread in self._lagging.items() if thread.outcome is not None}
        for session, thread in ended.items():
            url = self._url_of(session)
            try:
                assert thread.outcome is not None
                self._late_outcomes[url] = session.end_lagging(thread.outcome)
                logger.info("%s has committed version %d", url, session.state.version)
            except Exception as failed:
                self._late_outcomes[url] = failed
                logger.warning("%s: the sync that it lagged with has failed: %s", url, failed)
                thread.content = ""  # of a version that is committed nevertheless
            if thread.has_committed:
                known = Known(session.state.version, thread.content)
                self._tracker.known[self._state_key(url)] = known
            del self._lagging[session]
        if ended:
            self._write_state([], "")

    def _finish(
        self, sync_round: SyncRound, threads: Sequence[SessionThread]
    ) -> dict[str, SyncReport]:
        """Let the snapshot and the sessions advance, as far as the engines have."""
        digest = self._tracker.digest_after(sync_round)
        late = [thread for thread in threads if thread.outcome is None]
        done = [thread for thread in threads if thread not in late]
        advances = any(thread.has_committed for thread in done)
        # An interruption in here makes the next sync full. No session gets ahead of its engine.
        self._is_inconsistent = advances
        for thread in late:
            thread.content = digest.hex()
            thread.session.state.note_lagging(sync_round.changes)
            self._lagging[thread.session] = thread
            logger.warning("%s lags behind; the others continue", self._url_of(thread.session))
        failed = [thread for thread in done if not isinstance(thread.outcome, Committed)]
        unknown = [thread.session.state.note_failed(sync_round.changes) for thread in failed]
        logged = _logged(done)
        if advances:
            for session in set(self._all) - {t.session for t in done if t not in failed}:
                session.state.note_missed(sync_round.changes)
            self._snapshot.advance(sync_round.changes)
            self._tracker.digest = digest
            for session in self._sessions:
                session.state.latest = latest_sync(sync_round, done)
            if self._log is not None and logged is not None:
                self._log.acknowledge(logged)
        elif logged is not None:
            self._drop_from_log(logged, sync_round, is_unknown=any(unknown))
        engines = {self._url_of(thread.session): thread for thread in done if not thread.is_log}
        for url in engines:
            self._late_outcomes.pop(url, None)
        reports, failures, others = acknowledge_all(engines)
        self._unfinished = None
        self._is_inconsistent = False
        self._write_state(done, digest.hex())
        if others:
            raise others[0]
        if failures:
            raise PartialSyncError(failures, reports)
        return reports

    def _drop_from_log(self, logged: Committed, sync_round: SyncRound, *, is_unknown: bool) -> None:
        """Take back a version of the log that no engine has acknowledged, if none can have it."""
        assert self._log is not None
        self._unfinished = None
        if is_unknown:  # an engine that has it must find it there when it restarts
            self._is_inconsistent = True  # until both are noted
            self._log.acknowledge(logged)
            self._log.state.missed = without_old(sync_round.changes)
            self._is_inconsistent = False
        else:
            self._log_destination.writer.refuse(sync_round.version)

    def _write_state(self, threads: Sequence[SessionThread], content: str) -> None:
        for thread in threads:
            state = thread.session.state
            if thread.has_committed:
                known = Known(state.version, "" if state.needs_full else content)
                self._tracker.known[self._state_key(self._url_of(thread.session))] = known
        unknown = any(session.state.unknown_outcome for session in self._sessions)
        self._tracker.write(is_unknown=self._unfinished is not None or unknown)

    def _state_key(self, url: str) -> str:
        """Return what the state file calls an engine, or an adapter in it."""
        adapter = self._options["adapter"]
        return url if adapter is None else f"{url}?adapter={adapter}"

    def _url_of(self, session: Session) -> str:
        return self._urls[self._sessions.index(session)]


def _logged(threads: Sequence[SessionThread]) -> Committed | None:
    """Return what the delta log's thread has ended with, if it has the version."""
    outcome = next((thread.outcome for thread in threads if thread.is_log), None)
    return outcome if isinstance(outcome, Committed) else None
