"""Publish versions in a delta log that engines follow: the class `LogSender`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from delta_sender.arguments import Base, Tensors
from delta_sender.locations import log_of
from delta_sender.options import Flush, SenderOptions
from delta_sender.publish.log_destination import LogDestination
from delta_sender.publish.notify import Notifier
from delta_sender.publish.publisher import Publisher
from delta_sender.publish.senders import SingleSender
from delta_sender.results import SyncReport
from engine_ext.errors import LogDamaged
from engine_ext.log import Entry, declared_digests, open_log, read_manifests
from engine_ext.resources import RateLimit

logger = logging.getLogger(__name__)

_AGAIN_S: Final = 1.0


class LogSender(SingleSender):
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
        flush_cache: Flush = True,
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

    def sync(self, tensors: Tensors) -> SyncReport:
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
        return self._publisher.sync_one(tensors, full=False)

    def sync_full(self, tensors: Tensors) -> SyncReport:
        """Publish every tensor whole, from which an engine can start. Raises what `sync` raises."""
        return self._publisher.sync_one(tensors, full=True)


def log_publisher(
    log: str | Path, base: Base, options: SenderOptions, notify: Sequence[str]
) -> Publisher:
    """Return the publisher of a log that engines follow; see `LogSender`."""
    opened_log = open_log(log)
    with contextlib.ExitStack() as opened:
        notifier = Notifier(notify, options)
        opened.callback(notifier.close)
        destination = LogDestination(opened_log, notifier.clients, options.hmac_key)
        opened.callback(destination.close)
        publisher = Publisher(
            [str(log)],
            base,
            options,
            connect=lambda url, options: destination,
            is_log=True,
            notifier=notifier,
        )
        destination.warn_unproven(digest=options.digest)
        _resume(publisher, destination)
        opened.pop_all()
    return publisher


def _resume(publisher: Publisher, destination: LogDestination) -> None:
    """Check that the base is what the log's newest version leads to, and take the turn to write.

    The checks come first: in a store, the turn is taken from a sender that is at work.
    """
    try:
        newest = _check_newest(publisher, destination)
    except LogDamaged:
        if destination.log.store.drafts_are_hidden:
            raise
        # A store can list what it does not find yet, of a version that another sender writes.
        time.sleep(_AGAIN_S)
        newest = _check_newest(publisher, destination)
    destination.require_newest(newest)
    destination.take_turn()
    destination.require_newest(newest)


def _check_newest(publisher: Publisher, destination: LogDestination) -> int | None:
    """Return the log's newest version, which the base is; None if the log has none."""
    listing = destination.listing()
    newest = listing.newest
    if newest is not None:
        last = [entry for entry in listing.entries if entry.version == newest]
        if not last:
            raise LogDamaged(f"version {newest} in {destination.log.location} cannot be read")
        _check_base(publisher, destination, last[0])
    return newest


def _check_base(publisher: Publisher, destination: LogDestination, last: Entry) -> None:
    """Check that the base is what a version leads to; the next version follows it."""
    if not is_led_to(publisher, destination, last):
        message = "no digest shows whether the base is of version %d: a full version follows"
        logger.warning(message, last.version)
        why = "restarted: no digest shows whether the base is the newest version"
        publisher.sessions[0].state.full_reason = why


def is_led_to(publisher: Publisher, destination: LogDestination, last: Entry) -> bool:
    """Return whether a digest shows that the base is what a version leads to; False: none does.

    Tensors that the digest does not cover are not known to be that version's: the next one has them
    whole.

    Raises:
        ValueError: The base is something else.
        LogDamaged, PartUnavailable: The version cannot be read.
        SyncError: No engine that is asked has answered.
    """
    [session], log = publisher.sessions, destination.log
    state = session.state
    state.version = last.version
    led_to, run, epoch = None, None, 0
    if not last.foreign:
        with log.fetched(last):
            manifests = read_manifests(last)
        led_to = declared_digests(manifests).after
        run, epoch = manifests[0].run, manifests[0].run_epoch or 0
    state.read_plan(destination.plan(), keep_digest=True, full=False)
    digest = state.digest
    if not publisher.options.digest:
        state.digest, state.proves_parts = None, False
    if led_to is None or digest is None or not state.plan.digested:
        return False
    if digest.hex() != led_to:
        raise ValueError(
            f"the base is not what version {last.version} in {log.location} leads to: its digest "
            f"is {digest}, not {led_to}; give the weights of that version, or a new folder"
        )
    state.unproven = frozenset(state.plan.names).difference(state.plan.digested)
    if run is not None:  # the same weights: the versions that follow are of their run
        publisher.open_run(run, epoch)
    return True
