"""The reference sender's class for several engines at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Condition
from types import TracebackType
from typing import TYPE_CHECKING, Any

from delta_sender.acked_state import without_old
from delta_sender.destination import Destination, Options
from delta_sender.encoding_policy import CHOICES, EncodingPolicy, sparse_encoding
from delta_sender.http_client import EngineClient
from delta_sender.log_destination import LogDestination
from delta_sender.results import PartialSyncError, SyncReport
from delta_sender.session import Committed, Session
from delta_sender.session_thread import SessionThread, latest, outcomes
from delta_sender.snapshot import NamedTensors, Snapshot
from delta_sender.spill import Spill
from delta_sender.state_file import Known, StateFile
from delta_sender.sync_round import SyncRound
from delta_sender.warm_up import warm_up
from engine_ext.wire.digest import Digest

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


class MultiSender:
    """Keeps several engines in step with one trainer, as `DeltaSender` does one. Not thread-safe.

    The trainer's tensors are read and compared once, while parts with those before are encoded and
    posted. Each engine gets the parts on a connection of its own, at the same time as the others,
    and the very same bytes where engines hold the same and want the same. After a sync, every
    engine that committed is at the same version.

    What each engine acknowledged is kept for each: the snapshot moves once some engine has
    committed, and for one that has not, what it missed is kept beside it. Its next sync brings it
    that too; or the whole model, where more than half of that was missed or it holds something
    else by then. A sync returns when the slowest engine is done or has failed.

    It returns at the latest `lag_limit` seconds after the first engine has committed. Those that
    are not done go on by themselves with the parts that they are being sent. They have no report,
    are in `lagging`, are left out of the following syncs until they are done, and get what they
    missed then. An engine that is dead is waited for no longer than that either.

    Host memory: as for `DeltaSender`, and for an engine that failed what it missed; for one that
    lags, twice that and the parts that it has yet to get.

    Args:
        urls: The engines' roots, ``http://host:port``, each once.
        base: What every engine holds now; copied.
        base_version: The version that they are at.
        delta_log: A folder. Every version is written there, durably, before an engine commits it,
            so that an engine that starts with ``--delta-log`` reaches it by itself. Version numbers
            go on from the highest in there. A version that no engine took is marked as refused,
            and its number is not used again.
        state: A file that remembers over a restart of the sender what each engine has
            acknowledged; for one sender at a time. If `base` is what an engine acknowledged, or was
            just being sent, it goes on from there, whatever `base_version` says; otherwise its next
            sync is a full one.
        options: As of `DeltaSender`, and `lag_limit`, 60 seconds; None waits for every engine.

    Raises:
        ValueError: An option is unknown, no url is given, or one twice; or the state is none.
        BlockingIOError: Another sender writes into the log, or uses the state.
    """

    def __init__(
        self,
        urls: Sequence[str],
        base: NamedTensors,
        *,
        base_version: int = 0,
        delta_log: str | Path | None = None,
        state: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._options = Options(**options)
        if self._options.encoding not in CHOICES:
            known = ", ".join(CHOICES)
            raise ValueError(f"encoding {self._options.encoding!r} is not one of {known}")
        if not urls or len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError("give every engine's url, each once")
        self._urls = list(urls)
        self._file = None if state is None else StateFile.taken(Path(state))
        self._digests = self._options.digest or EncodingPolicy(self._options.encoding).may_differ
        self._digests = self._digests or self._file is not None
        self._snapshot = self._make_snapshot(base)
        warm_up(self._snapshot.dtypes, self._options.encoding)
        self._digest = Digest.ZERO if self._file is None else self._snapshot.digest()
        self._known = {} if self._file is None else dict(self._file.state.engines)
        self._links: list[Session] = []
        for url in urls:
            at, suspect = self._start(url, base_version)
            server, logs = self._make_server(url), delta_log is not None
            self._links.append(Session(server, self._snapshot, self._options, at, has_log=logs))
            self._links[-1].suspect = suspect
        self._log: Session | None = None
        if delta_log is not None:
            engines = [link.server for link in self._links]
            self._log_server = LogDestination(Path(delta_log), engines, self._options.hmac_key)
            at, suspect = self._start(None, base_version)
            self._log = Session(self._log_server, self._snapshot, self._options, at, is_log=True)
            self._log.suspect = suspect or not self._log_server.leads_on_from(at)
        self._begun: tuple[SyncRound, list[SessionThread]] | None = (
            None  # a sync that has not ended
        )
        self._torn = False  # the snapshot or the links were moving on, and were interrupted
        self._alone: dict[Session, SessionThread] = {}  # what goes on by itself
        self._news = Condition()

    def _start(self, url: str | None, base_version: int) -> tuple[int, bool]:
        """The version at which an engine holds the base, and whether that is doubtful."""
        if self._file is None:
            return base_version, False
        return self._file.state.standing_of(url, self._digest.hex(), base_version)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def versions(self) -> dict[str, int]:
        """The version that each engine acknowledged last, by url."""
        return {url: link.version for url, link in zip(self._urls, self._links, strict=True)}

    def close(self) -> None:
        """Close own HTTP clients and the log; engines that lag are waited for up to the limit."""
        for run in self._alone.values():
            run.join(self._options.lag_limit)
        for run in self._begun[1] if self._begun is not None else ():
            if run.link is self._log:  # it may still be writing
                run.join()
        self._settle(wait=False)
        self._remember([], "")
        for link in self._all:
            link.server.close()
        if self._file is not None:
            self._file.close()

    @property
    def lagging(self) -> list[str]:
        """Engines that are still being sent a step that the others went on from."""
        return [self._url_of(link) for link, run in self._alone.items() if run.outcome is None]

    @property
    def _all(self) -> list[Session]:
        return self._links if self._log is None else [*self._links, self._log]

    def sync(self, tensors: NamedTensors) -> dict[str, SyncReport]:
        """Send what changed since the last sync; the reports, by url.

        Raises:
            PartialSyncError: Some engines did not commit.
            ValueError: Names, shapes or dtypes are not the base's. No engine commits anything, and
                nothing was sent if `tensors` is a collection and not an iterator.
        """
        return self._sync(tensors, full=False)

    def sync_full(self, tensors: NamedTensors) -> dict[str, SyncReport]:
        """Send every tensor dense, whatever the engines hold. Raises as `sync`."""
        return self._sync(tensors, full=True)

    def _sync(self, tensors: NamedTensors, *, full: bool) -> dict[str, SyncReport]:
        self._pick_up()
        started = time.perf_counter()
        self._settle()
        links = [link for link in self._all if link not in self._alone]
        keepers = (self._log is not None) + (self._file is not None)
        version = self._next_version(full=full)
        step = SyncRound(version, full=full, engines=len(links), started=started, keepers=keepers)
        runs = [SessionThread(link, step, self._news, is_log=link is self._log) for link in links]
        self._begun = step, runs
        try:
            for run in runs:
                run.thread.start()
            spill = Spill(self._changes_in_memory)
            step.read(self._snapshot.read(tensors, digests=self._digests, keep=spill.keep))
            if self._file is not None:
                self._file.begin(step.version, self._digest_after(step).hex())
                step.note_kept()
            self._wait(runs)
            step.release()
        except BaseException as error:
            step.fail(error)
            if isinstance(error, Exception):  # who interrupts is not kept waiting for an answer
                self._pick_up()
            raise
        return self._acknowledge(step, runs)

    def _pick_up(self) -> None:
        """Take in what came of a sync that was interrupted; waits for its last answers."""
        if self._begun is not None:
            step, runs = self._begun
            for run in runs:
                run.join()
                self._alone.pop(run.link, None)
            doubts = [run.link.is_left_in_doubt(step.changes) for run in runs]
            log = next((run.outcome for run in runs if run.link is self._log), None)
            if isinstance(log, Committed) and not self._torn:
                self._drop_from_log(log, step, in_doubt=any(doubts))
            self._begun = None
        if self._torn:
            # What an engine has missed is kept beside a snapshot that did not come.
            for link in self._all:
                link.loses_track()
            self._digest = Digest.ZERO if self._file is None else self._snapshot.digest()
            self._torn = False

    def _next_version(self, *, full: bool) -> int:
        """Above all that some engine may be at: a number stands for one content.

        Where no digest proves what a sync led to, above all that were tried.
        """
        version = max(link.newest for link in self._all)
        for link in self._all:
            if full or link.suspect or not link.is_proven:
                version = max(version, link.server.tried)
        if self._log is not None:
            version = max(version, self._log_server.writer.last_number)
        if self._file is not None:
            version = max(version, self._file.state.highest)
        return version + 1

    def _wait(self, runs: Sequence[SessionThread]) -> None:
        """Until every engine is done, or some have been for as long as the others may lag."""
        deadline: float | None = None
        with self._news:
            while late := [run.link for run in runs if run.outcome is None]:
                if deadline is None and any(run.has_committed for run in runs):
                    limit = self._options.lag_limit
                    deadline = None if limit is None else time.monotonic() + limit
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0 and self._log not in late:
                    return
                self._news.wait(None if self._log in late else left)

    def _settle(self, *, wait: bool = True) -> None:
        """Take in how the steps ended that had gone on alone; waits if all engines have one."""
        with self._news:
            while (
                wait
                and len(self._alone) == len(self._links)
                and all(run.outcome is None for run in self._alone.values())
            ):
                self._news.wait()
            ended = {link: run for link, run in self._alone.items() if run.outcome is not None}
        for link, run in ended.items():
            url = self._url_of(link)
            try:
                assert run.outcome is not None
                link.settle(run.outcome)
            except Exception as failed:
                logger.warning("%s: what had gone on alone has failed: %s", url, failed)
            else:
                logger.info("%s has committed version %d", url, link.version)
                self._known[url] = Known(link.version, run.content)
            del self._alone[link]

    def _acknowledge(self, step: SyncRound, runs: Sequence[SessionThread]) -> dict[str, SyncReport]:
        """Let the snapshot and the links move on, as far as the engines have."""
        content = self._digest_after(step)
        late = [run for run in runs if run.outcome is None]
        done = [run for run in runs if run not in late]
        moves = any(run.has_committed for run in done)
        # An interruption in here makes the next sync a full one. No link is ever ahead of its
        # engine.
        self._torn = moves
        for run in late:
            run.content = content.hex()
            run.link.goes_on_alone(step.changes)
            self._alone[run.link] = run
            logger.warning("%s lags behind; the others go on", self._url_of(run.link))
        failed = [run for run in done if not isinstance(run.outcome, Committed)]
        doubts = [run.link.is_left_in_doubt(step.changes) for run in failed]
        log = next((run.outcome for run in done if run.link is self._log), None)
        if moves:
            for link in self._all:
                if link not in [run.link for run in done if run not in failed]:
                    link.miss(step.changes)
            self._snapshot.advance(step.changes)
            self._digest = content
            for link in self._links:
                link.latest = latest(step, done)
            if isinstance(log, Committed):
                log.acknowledge()
        elif isinstance(log, Committed):
            self._drop_from_log(log, step, in_doubt=any(doubts))
        runs_by_url = {self._url_of(run.link): run for run in done if run.link is not self._log}
        reports, failures, others = outcomes(runs_by_url)
        self._begun = None
        self._torn = False
        self._remember(done, content.hex())
        if others:
            raise others[0]
        if failures:
            raise PartialSyncError(failures, reports)
        return reports

    def _drop_from_log(self, logged: Committed, step: SyncRound, *, in_doubt: bool) -> None:
        """No engine has acknowledged what is in the log."""
        self._begun = None
        if in_doubt:  # some may have it, and must find it there when it starts again
            self._torn = True  # until both are noted
            logged.acknowledge()
            logged.link.behind = without_old(step.changes)
            self._torn = False
        else:
            self._log_server.writer.refuse(step.version)

    def _remember(self, runs: Sequence[SessionThread], content: str) -> None:
        """Write the state file."""
        if self._file is None:
            return
        for run in runs:
            if run.has_committed and not run.link.suspect:
                self._known[self._url_of(run.link)] = Known(run.link.version, content)
        in_doubt = self._begun is not None or any(link.doubt for link in self._links)
        self._file.end(self._known, in_doubt=in_doubt)

    def _digest_after(self, step: SyncRound) -> Digest:
        """Of every tensor of the snapshot, once it has moved; ZERO where nobody asks for it."""
        if self._file is None:
            return Digest.ZERO
        changes = (change.digest or Digest.ZERO for change in step.changes.values())
        return sum(changes, start=self._digest)

    @property
    def _changes_in_memory(self) -> int:
        most = self._options.changes_in_memory
        return self._snapshot.nbytes // 4 if most is None else most

    def _url_of(self, link: Session) -> str:
        return self._urls[self._links.index(link)]

    def _make_snapshot(self, base: NamedTensors) -> Snapshot:
        options = self._options
        return Snapshot(base, sparse_encoding(options.encoding), options.snapshot_on)

    def _make_server(self, url: str) -> Destination:
        return EngineClient(url, self._options)
