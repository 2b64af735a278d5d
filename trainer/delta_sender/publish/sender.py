"""Send to one engine, or publish for engines that follow a log: the class `DeltaSender`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from delta_sender.arguments import Base, Tensors
from delta_sender.locations import engine_root, log_location
from delta_sender.options import Flush, SenderOptions
from delta_sender.publish.http_client import EngineClient
from delta_sender.publish.log_sender import log_publisher
from delta_sender.publish.publisher import Publisher
from delta_sender.publish.senders import SingleSender
from delta_sender.results import SyncReport
from engine_ext.resources import RateLimit


class DeltaSender(SingleSender):
    """Keep the weights of an engine, or of all that follow a delta log, equal to a trainer's.

    Not thread-safe.

    A sender opens a run: an id of its lineage of weights, kept in the file of `state`. From the
    first sync until `close` the engine belongs to that run, and refuses others.

    If `url` names a delta log, versions are published there, and posted to no engine: the work and
    the bytes do not grow with the number of engines. `LogSender` is the same for logs alone.

    Tensors are given as (name, tensor) in checkpoint coordinates: unsharded, with the names, shapes
    and dtypes of the Hugging Face checkpoint; every dtype is sent bit by bit. They are taken one by
    one, so a generator that gathers each when asked will do. Some are compared while others are
    posted. None must change before the sync ends, but a generator can yield views of a buffer that
    it refills for the next tensor. CUDA tensors are compared on their device (see `snapshot_on`),
    and only what differs is copied to the host.

    Tied tensors (one storage, several names) are kept once, and sent under every name that the
    engine holds; if it has no plan, under the first.

    If numba is installed, making the first sender compiles the loops of a sync: seconds once on a
    machine, then half a second to load them from numba's cache.

    Host memory: the snapshot, of the model's size; changes until they are committed, at most a
    quarter of that (see `changes_in_memory`); a part per core, up to eight, and `posts_in_flight`
    more, with up to 17 bytes per element while one is encoded; and 128 MiB of gathered tensors with
    their comparison. A change of 2 % takes a tenth of the snapshot (5 bytes plus twice the itemsize
    per element).

    Example:
        >>> import torch
        >>> from delta_sender import DeltaSender, SyncError
        >>> weights = {"lm_head.weight": torch.zeros(16, 4, dtype=torch.bfloat16)}
        >>> with DeltaSender("http://engine:8000", weights.items(), encoding="auto") as sender:
        ...     weights["lm_head.weight"][3] += 0.5
        ...     report = sender.sync(weights.items())
        >>> report.status, report.version, report.nnz, report.numel
        ('committed', 1, 4, 64)

        A refusal leaves the engine as it was, and the next sync sends what this one did not:

        >>> sender = DeltaSender("http://broken:8000", weights.items())
        >>> weights["lm_head.weight"][5] += 0.5
        >>> try:
        ...     sender.sync(weights.items())
        ... except SyncError as error:
        ...     print(error.status, error.error["type"], sender.version)
        507 SpoolFull 0

        For engines that follow a log, however many:

        >>> import tempfile
        >>> with DeltaSender(f"file://{tempfile.mkdtemp()}", weights.items()) as sender:
        ...     weights["lm_head.weight"][7] += 0.5
        ...     report = sender.sync(weights.items())
        >>> report.version, report.nnz
        (1, 4)

    Args:
        url: The engine's root, ``http://host:port``; or a delta log that engines follow: its URL in
            an object store (``s3://BUCKET/PREFIX``), or its folder as a `Path` or a ``file://``
            URL. `LogSender` also takes the folder as a plain path.
        base: What the engine holds now, or what the log's newest version leads to, as (name,
            tensor), a dict of them, or the folder of a checkpoint; copied.
        notify: Roots of engines that are asked to look at the log after each version; see
            `LogSender`.
        continues: See `MultiSender`; not with a log.

    The other keyword arguments are documented in `SenderOptions`. With a log, those of `LogSender`.

    Raises:
        ValueError: The url names neither an engine nor a log, an option has an unknown value or is
            not for this kind of url, or the state file is not one. With a log also: the base is
            not what it leads to.
        BlockingIOError: Another sender writes into the log, or uses the state file.
        LogDamaged, PartUnavailable: The log's newest version cannot be read.
        SyncError: The log has versions, and no engine of `notify` has answered in 30 seconds.
    """

    def __init__(
        self,
        url: str | Path,
        base: Base,
        *,
        notify: Sequence[str] = (),
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
        adapter: str | None = None,
        delta_log: str | Path | None = None,
        log_differences: bool = False,
        state: str | Path | None = None,
        quantize: str | None = None,
    ) -> None:
        if not isinstance(url, str | Path):
            raise TypeError(
                f"DeltaSender takes one url, and not {url!r}; MultiSender takes several"
            )
        options = SenderOptions.among(locals())
        log = log_location(url)
        if log is not None:
            if continues is not None:
                raise ValueError("continues= is for engines; a log's digests show whose it is")
            options.refuse_engine_options()
            self._publisher = log_publisher(log, base, options, notify)
            return
        if notify:
            raise ValueError("notify= is for engines that follow a delta log; give the log's url")
        engine_root(str(url))  # before the base is read
        self._publisher = Publisher(
            [str(url)], base, options, connect=EngineClient, continues=continues
        )

    def sync(self, tensors: Tensors) -> SyncReport:
        """Send what changed since the last sync; if nothing did, one empty part.

        Before the first one the engine is claimed for the sender's run. If its digest is the
        base's, the changes are sent whatever its version is.

        If the engine turns out to hold something else (it has restarted, or a digest differs) or
        to be ``uncertain``, the whole model is sent instead, once, if what it replaces is this
        run's own; see the option `full`. If only old values differ and digests prove the outcome,
        the new values are sent first.

        Args:
            tensors: The base's tensors, with their values now, as (name, tensor) or a dict.

        Raises:
            TypeError: They are something else. Nothing was sent if it is a collection.
            FullSyncRefused: Only the whole model would help, and it would replace weights that are
                not this run's. The engine is unchanged.
            RunConflict: The engine belongs to another run, or has been taken over by one. It is
                unchanged.
            SyncError: The engine refused, could not be reached, or holds other bytes afterwards.
                See `SyncError` for its state then.
            OSError: The version cannot be written into the log; see `LogSender.sync`.
            ValueError: Names, shapes or dtypes are not the base's, or a weight to quantise is not
                finite. The engine commits nothing. Nothing was sent if `tensors` is a collection
                and not an iterator, and `quantize` is not set.
        """
        return self._publisher.sync_one(tensors, full=False)

    def sync_full(self, tensors: Tensors) -> SyncReport:
        """Send every tensor dense, whatever the engine holds; a warning says what that is.

        Raises what `sync` raises.
        """
        return self._publisher.sync_one(tensors, full=True)
