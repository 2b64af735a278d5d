"""The reference sender's class for one engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from delta_sender.multi_sender import MultiSender
from delta_sender.results import PartialSyncError, SyncReport
from delta_sender.snapshot import NamedTensors

if TYPE_CHECKING:
    from typing_extensions import Self


class DeltaSender:
    """Keeps an engine's weights in step with a trainer's. Not thread-safe.

    Tensors come as (name, tensor) in checkpoint coordinates: unsharded, and named as in the
    Hugging Face checkpoint. They are taken one by one, so a generator that gathers each when asked
    will do; some are compared while others are posted, and none may change before the sync ends.
    CUDA tensors are compared where they lie (`snapshot_on`); only what differs is brought here.
    Of tied tensors (one storage, several names) one copy is kept; if they ever differ, that is a
    ValueError. So do not yield views of a buffer that is refilled in between. They are sent under
    every name that the engine holds; if it has no plan, under the first.

    Where numba is installed, making the first one compiles the loops of a sync: seconds once on a
    machine, then half a second to load them.

    Host memory: the snapshot (the model's size); of the changes, until they are committed, at most
    a quarter of that (`changes_in_memory`); about three parts, with up to 17 bytes for each element
    while one is made; and what 128 MiB of gathered tensors and their comparison take. A change of
    2 % takes a tenth of the snapshot (5 bytes plus twice the itemsize for each element).

    Args:
        url: The engine's root, ``http://host:port``.
        base: What the engine holds now; copied.
        base_version: The version the engine is at.
        delta_log: See `MultiSender`.
        state: See `MultiSender`.
        encoding: One of `ENCODINGS`. With ``gap8_ulp`` full syncs, dense params and those that the
            engine's digest does not cover go as ``gap8_exp``; so does everything once the engine
            has refused differences and taken values, and one sync where its old values are not
            the snapshot's. Or ``auto``: for each param the fastest of
            ``gap8_ulp``, ``gap8_exp`` and ``deltas``, sparse or dense, by its density and by the
            speed of the link that the posts have shown; `SyncReport.picked` says which.
        bucket_bytes: Most bytes of positions and values in one part, before compression. A param
            is never split: a larger one travels alone.
        digest: Keep the model's digest, and send digests along if the engine has a plan.
        api_key: Bearer token.
        hmac_key: Sign the parts with it, as an engine with ``DELTA_HMAC_KEY`` asks for.
        pause_mode: What happens to requests in flight: ``keep``, ``wait`` or ``abort``.
        flush_cache: Whether the engine drops cached KV entries of the old weights.
        timeout: Seconds, for one request and for waiting until another sync is out of the way. A
            connection is tried for 10 seconds at most.
        client: Used in place of an own one, and not closed.
        snapshot_on: What CUDA tensors are compared with: a copy of the snapshot that is kept on
            their ``device``, which takes the model's size there, or the snapshot on the ``host``,
            in pinned memory, brought up in chunks. ``auto``: on the device where that takes at
            most half of the memory that is free there at the first sync.
        changes_in_memory: Most bytes of a step's changes that are kept in memory until they are
            committed; the others are in a temporary file below ``TMPDIR``. A quarter of the
            snapshot's, if not given.

    Raises:
        ValueError: As of `MultiSender`.
    """

    def __init__(
        self,
        url: str,
        base: NamedTensors,
        *,
        base_version: int = 0,
        delta_log: str | Path | None = None,
        state: str | Path | None = None,
        encoding: str = "deltas_zstd",
        bucket_bytes: int = 256 << 20,
        digest: bool = True,
        api_key: str | None = None,
        hmac_key: str | None = None,
        pause_mode: str = "keep",
        flush_cache: bool = True,
        timeout: float = 600.0,
        client: httpx.Client | None = None,
        snapshot_on: str = "auto",
        changes_in_memory: int | None = None,
    ) -> None:
        self._url = url
        self._sender = MultiSender(
            [url],
            base,
            base_version=base_version,
            delta_log=delta_log,
            state=state,
            encoding=encoding,
            bucket_bytes=bucket_bytes,
            digest=digest,
            api_key=api_key,
            hmac_key=hmac_key,
            pause_mode=pause_mode,
            flush_cache=flush_cache,
            timeout=timeout,
            client=client,
            snapshot_on=snapshot_on,
            changes_in_memory=changes_in_memory,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The version that the engine acknowledged last."""
        return self._sender.versions[self._url]

    def close(self) -> None:
        """Close the HTTP client, if it is an own one."""
        self._sender.close()

    def sync(self, tensors: NamedTensors) -> SyncReport:
        """Send what changed since the last sync; if nothing did, one empty part.

        If the engine turns out to hold something else (it was restarted, a digest disagrees) or to
        be ``uncertain``, the whole model is sent instead, once; in place of differences the new
        values go first, if a digest proves all that they lead to.

        Raises:
            SyncError: The engine refused, could not be reached, or holds other bytes afterwards.
            ValueError: As of `MultiSender.sync`.
        """
        return self._one(tensors, full=False)

    def sync_full(self, tensors: NamedTensors) -> SyncReport:
        """Send every tensor dense, whatever the engine holds. Raises as `sync`."""
        return self._one(tensors, full=True)

    def _one(self, tensors: NamedTensors, *, full: bool) -> SyncReport:
        try:
            return self._sender._sync(tensors, full=full)[self._url]
        except PartialSyncError as some:
            raise some.failures[self._url] from None
