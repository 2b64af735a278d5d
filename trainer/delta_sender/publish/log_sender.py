"""Publish versions in a delta log that engines follow: the class `LogSender`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import httpx

from delta_sender.arguments import Base, log_of
from delta_sender.diff.snapshot import NamedTensors
from delta_sender.options import SenderOptions
from delta_sender.publish.log_destination import LogDestination
from delta_sender.publish.notify import Notifier, Told
from delta_sender.publish.publisher import Publisher
from delta_sender.results import SyncReport, raising_as_one
from engine_ext.errors import LogDamaged
from engine_ext.log import digests_of, open_log, read_version
from engine_ext.resources import RateLimit

logger = logging.getLogger(__name__)


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
        base: The weights that the log's newest version leads to, or that engines start with: as
            (name, tensor), or the folder of a checkpoint; copied.
        notify: Roots of engines that are asked to look at the log after each version, at once and
            without waiting for them; `told` has what they answered. Others look by themselves. The
            first one that answers says which tensors engines ignore, and what their digest covers;
            without any, versions are sent without digests of the model.

    The other keyword arguments are documented in `SenderOptions`.

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
        base_version: int = 0,
        encoding: str = "deltas_zstd",
        bucket_bytes: int = 64 << 20,
        posts_in_flight: int = 4,
        digest: bool = True,
        api_key: str | None = None,
        hmac_key: str | None = None,
        pause_mode: str = "keep",
        flush_cache: bool = True,
        bandwidth_limit: float | RateLimit | None = None,
        timeout: float = 600.0,
        client: httpx.Client | None = None,
        snapshot_on: str = "auto",
        changes_in_memory: int | None = None,
        refuse_nonfinite: bool = False,
        unchanged_warning: int = 3,
        log_differences: bool = False,
    ) -> None:
        options = SenderOptions.among(locals())
        self._publisher = log_publisher(log_of(log), base, options, notify)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def run(self) -> str:
        """The run of the versions; see `MultiSender.run`."""
        return self._publisher.run

    @property
    def epoch(self) -> int:
        """Which opening of the run this sender is, from 1."""
        return self._publisher.epoch

    @property
    def version(self) -> int:
        """The log's newest version."""
        return self._publisher.version

    @property
    def told(self) -> Mapping[str, Told]:
        """By url of `notify`: the version that the engine was at after its last look, or an error.

        Engines that have not answered yet are left out.
        """
        return self._publisher.told

    def wait(self, timeout: float | None = None) -> Mapping[str, Told]:
        """Wait until every engine of `notify` has answered, or some seconds; return `told`."""
        return self._publisher.wait(timeout)

    def close(self) -> None:
        """Let another sender write into the log; answers of engines are not waited for."""
        self._publisher.close()

    def sync(self, tensors: NamedTensors) -> SyncReport:
        """Publish what changed since the last version; if nothing did, an empty version.

        Args:
            tensors: The base's tensors, with their values now. None must change before this
                returns.

        Raises:
            OSError: The version cannot be written. The log and the snapshot are as before; if the
                answer to the last write was lost, the version might be there, and the next is full.
            ValueError: Names, shapes or dtypes are not the base's. Likewise.
            SyncError: No engine of `notify` has ever answered. Likewise.
        """
        with raising_as_one(1):
            [report] = self._publisher.sync(tensors, full=False).values()
        return report

    def sync_full(self, tensors: NamedTensors) -> SyncReport:
        """Publish every tensor whole, from which an engine can start. Raises what `sync` raises."""
        with raising_as_one(1):
            [report] = self._publisher.sync(tensors, full=True).values()
        return report


def log_publisher(
    log: str | Path, base: Base, options: SenderOptions, notify: Sequence[str]
) -> Publisher:
    """Return the publisher of a log that engines follow; see `LogSender`."""
    notifier = Notifier(notify, options)
    destination: LogDestination | None = None
    try:
        destination = LogDestination(open_log(log), notifier.clients, options.hmac_key)
        newest = destination.log.listing().newest
        if newest is not None:
            options = replace(options, base_version=newest)
        publisher = Publisher(
            [str(log)],
            base,
            options,
            connect=lambda url, options: destination,
            is_log=True,
            notifier=notifier,
        )
        if newest is not None:
            _resume(publisher, destination, newest)
    except BaseException:
        notifier.close()
        if destination is not None:
            destination.close()
        raise
    return publisher


def _resume(publisher: Publisher, destination: LogDestination, newest: int) -> None:
    """Check that the base is what the log's newest version leads to."""
    [session], log = publisher.sessions, destination.log
    state = session.state
    last = [entry for entry in log.listing().entries if entry.version == newest]
    if not last:
        raise LogDamaged(f"version {newest} in {log.location} cannot be read")
    led_to, run, epoch = None, None, 0
    if not last[0].foreign:
        with log.fetched(last[0]):
            parts = read_version(last[0])
            led_to = digests_of(parts).after
            run, epoch = parts[0].manifest.run, parts[0].manifest.run_epoch or 0
    plan = destination.plan()
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
        publisher.open_run(run, epoch)
