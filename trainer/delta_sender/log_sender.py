"""Publish versions in a delta log that engines follow: the class `LogSender`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from delta_sender.arguments import named_pairs
from delta_sender.checkpoint import Base, tensors_of
from delta_sender.encoding_policy import sparse_encoding
from delta_sender.log_destination import LogDestination
from delta_sender.notify import Notifier, Told
from delta_sender.observations import Watch
from delta_sender.options import LogOptions, check_values, takes_options, with_defaults
from delta_sender.results import SyncReport
from delta_sender.run import Run
from delta_sender.session import Session
from delta_sender.snapshot import NamedTensors, Snapshot
from delta_sender.spill import Spill
from delta_sender.sync_round import SyncRound
from delta_sender.warm_up import warm_up
from engine_ext.errors import LogDamaged
from engine_ext.log import digests_of, open_log, read_version
from engine_ext.resources import no_full_collections

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


@takes_options(LogOptions)
class LogSender(AbstractContextManager["LogSender"]):
    """Publish a trainer's weights in a delta log, whoever follows it. Not thread-safe.

    Its versions are of a run of their own; if a digest shows that the base is what the newest
    version leads to, of that version's run.

    Nothing is posted to engines, so that the trainer's work and bytes do not grow with their
    number: those that were started with ``--delta-follow`` take each version from the log. The
    snapshot is what the log's newest version leads to; it advances once that version is on disk,
    whole. See `DeltaSender` for the tensors and the memory.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from delta_sender import LogSender
        >>> weights = {"lm_head.weight": torch.zeros(16, 4, dtype=torch.bfloat16)}
        >>> with LogSender(tempfile.mkdtemp(), weights.items()) as sender:
        ...     weights["lm_head.weight"][3] += 0.5
        ...     report = sender.sync(weights.items())
        >>> report.version, report.nnz
        (1, 4)

    Args:
        log: The log's folder, or its URL in an object store (``s3://BUCKET/PREFIX``); created if it
            is missing.
        base: What the log's newest version leads to, or what engines start with if it is empty: as
            (name, tensor), or the folder of a checkpoint; copied.
        notify: Roots of engines that are asked to look at the log after each version, at once and
            without waiting for them; `told` has what they answered. Others look by themselves. The
            first one that answers says which tensors engines ignore, and what their digest covers;
            without any, versions are sent without digests of the model.
        **options: See `LogOptions`.

    Raises:
        ValueError: An option has an unknown value, or the base is not what the log's newest version
            leads to. If no digest shows whether it is, the first version is a full one.
        LogDamaged, PartUnavailable: The log's newest version cannot be read.
        SyncError: The log has versions, and no engine of `notify` has answered in 30 seconds.
        BlockingIOError: Another sender writes into the log.
    """

    def __init__(
        self,
        log: str | Path,
        base: Base,
        *,
        notify: Sequence[str] = (),
        **options: Unpack[LogOptions],
    ) -> None:
        self._options = given = with_defaults(options, LogOptions)
        check_values(given)
        self._watch = Watch(given)
        self._snapshot = Snapshot(
            tensors_of(base), sparse_encoding(given["encoding"]), given["snapshot_on"]
        )
        warm_up(self._snapshot.dtypes.values(), given["encoding"])
        self._notifier = Notifier(notify, given)
        engines = self._notifier.clients
        self._destination = LogDestination(open_log(log), engines, given["hmac_key"])
        try:
            newest = self._destination.log.listing().newest
            version = given["base_version"] if newest is None else newest
            self._run = Run.opened()
            self._session = Session(
                self._destination, self._snapshot, given, version, self._run, is_log=True
            )
            if newest is not None:
                self._resume(newest)
        except BaseException:
            self.close()
            raise

    def _resume(self, newest: int) -> None:
        """Check that the base is what the log's newest version leads to."""
        state, log = self._session.state, self._destination.log
        last = [entry for entry in log.listing().entries if entry.version == newest]
        if not last:
            raise LogDamaged(f"version {newest} in {log.location} cannot be read")
        led_to, run, epoch = None, None, 0
        if not last[0].foreign:
            with log.fetched(last[0]):
                parts = read_version(last[0])
                led_to = digests_of(parts).after
                run, epoch = parts[0].manifest.run, parts[0].manifest.run_epoch or 0
        plan = self._destination.plan()
        state.read_plan(plan, keep_digest=True, full=False)
        if led_to is None or state.digest is None:
            message = "no digest shows whether the base is of version %d: a full version follows"
            logger.warning(message, newest)
            state.full_reason = "restarted: no digest shows whether the base is the newest version"
        elif state.digest.hex() != led_to:
            raise ValueError(
                f"the base is not what version {newest} in {log.location} leads to: its digest is "
                f"{state.digest}, not {led_to}; give the weights of that version, or a new folder"
            )
        elif run is not None:  # the same weights: the versions that follow are of their run
            self._run = Run.opened(run, epoch)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def run(self) -> str:
        """The run of the versions; see `MultiSender.run`."""
        return self._run.name

    @property
    def epoch(self) -> int:
        """Which opening of the run this sender is, from 1."""
        return self._run.epoch

    @property
    def version(self) -> int:
        """The log's newest version."""
        return self._session.state.version

    @property
    def told(self) -> Mapping[str, Told]:
        """By url of `notify`: the version that the engine was at after its last look, or an error.

        Engines that have not answered yet are left out.
        """
        return self._notifier.told

    def wait(self, timeout: float | None = None) -> Mapping[str, Told]:
        """Wait until every engine of `notify` has answered, or some seconds; return `told`."""
        return self._notifier.wait(timeout)

    def close(self) -> None:
        """Let another sender write into the log; answers of engines are not waited for."""
        self._notifier.close()
        self._destination.close()

    def sync(self, tensors: NamedTensors) -> SyncReport:
        """Publish what changed since the last version; if nothing did, an empty version.

        Args:
            tensors: The base's tensors, with their values now. None may change before this returns.

        Raises:
            OSError: The version cannot be written. The log and the snapshot are as before; if the
                answer to the last write was lost, the version may be there, and the next is full.
            ValueError: Names, shapes or dtypes are not the base's. Likewise.
            SyncError: No engine of `notify` has ever answered. Likewise.
        """
        return self._sync(tensors, full=False)

    def sync_full(self, tensors: NamedTensors) -> SyncReport:
        """Publish every tensor whole, from which an engine may start. Raises what `sync` raises."""
        return self._sync(tensors, full=True)

    @no_full_collections()
    def _sync(self, tensors: NamedTensors, *, full: bool) -> SyncReport:
        state, writer = self._session.state, self._destination.writer
        limit = self._options["changes_in_memory"]
        spill = Spill(self._snapshot.nbytes // 4 if limit is None else limit)
        sync_round = SyncRound(
            max(state.version, writer.last_number) + 1,
            self._run,
            full=full,
            destinations=1,
            posts_in_flight=self._options["posts_in_flight"],
            started=time.perf_counter(),
        )
        try:
            found = self._snapshot.read(named_pairs(tensors), digests=True, keep=spill.keep)
            self._watch.read(sync_round, found)
            committed = self._session.sync(sync_round)
            self._snapshot.advance(sync_round.changes)
        except BaseException:
            # It is or may be there, and the snapshot is not.
            may_be_there = True
            with contextlib.suppress(OSError):
                unsure = self._destination.is_unsure
                may_be_there = unsure or writer.last_number >= sync_round.version
            if may_be_there:
                state.lose_track()
            raise
        finally:
            sync_round.leave()
        report = self._session.acknowledge(committed)
        self._notifier.poke(report.version)
        return report
