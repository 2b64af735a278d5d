"""The reference sender's two classes: for one engine, and for several at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from engine_ext.delta_log_writer import LogWriter
from sender_choice import CHOICES, Manner, sparse_encoding
from sender_http import Options, Place, Server, SyncFailed
from sender_link import Committed, Link
from sender_log import LogServer
from sender_report import SyncReport
from sender_snapshot import NamedTensors, Snapshot
from sender_step import Step
from sender_warm import warm_up

if TYPE_CHECKING:
    from typing_extensions import Self


class SomeFailed(SyncFailed):
    """Some engines did not commit; the others have, and go on.

    Attributes:
        failures: Why, by the engine's url.
        reports: Of the engines that have committed, by url.
    """

    def __init__(self, failures: dict[str, SyncFailed], reports: dict[str, SyncReport]) -> None:
        super().__init__("; ".join(f"{url}: {failed}" for url, failed in failures.items()))
        self.failures = failures
        self.reports = reports


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

    Host memory: as for `DeltaSender`, and for an engine that failed what it missed.

    Args:
        urls: The engines' roots, ``http://host:port``, each once.
        base: What every engine holds now; copied.
        base_version: The version that they are at.
        delta_log: A folder. Every version is written there, durably, before an engine commits it,
            so that an engine that starts with ``--delta-log`` reaches it by itself. Version numbers
            go on from the highest in there. A version that no engine took is marked as refused,
            and its number is not used again.
        options: As of `DeltaSender`.

    Raises:
        ValueError: An option is unknown, or no url is given, or one twice.
        BlockingIOError: Another sender writes into the log.
    """

    def __init__(
        self,
        urls: Sequence[str],
        base: NamedTensors,
        *,
        base_version: int = 0,
        delta_log: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._options = Options(**options)
        if self._options.encoding not in CHOICES:
            known = ", ".join(CHOICES)
            raise ValueError(f"encoding {self._options.encoding!r} is not one of {known}")
        if not urls or len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError("give every engine's url, each once")
        self._urls = list(urls)
        self._digests = self._options.digest or Manner(self._options.encoding).may_differ
        self._snapshot = self._make_snapshot(base)
        warm_up(self._snapshot.dtypes, self._options.encoding)
        self._links = [
            Link(self._make_server(url), self._snapshot, self._options, base_version)
            for url in urls
        ]
        self._log: Link | None = None
        self._writer: LogWriter | None = None
        if delta_log is not None:
            engines = [link.server for link in self._links]
            log = LogServer(Path(delta_log), engines, self._options.hmac_key)
            self._writer = log.writer
            self._log = Link(log, self._snapshot, self._options, base_version, is_log=True)
        self._threads: list[Thread] = []
        self._torn = False  # the snapshot or the links were moving on, and were interrupted

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
        """Close the HTTP clients, if they are own ones, and the log."""
        for link in self._all:
            link.server.close()

    @property
    def _all(self) -> list[Link]:
        return self._links if self._log is None else [*self._links, self._log]

    def sync(self, tensors: NamedTensors) -> dict[str, SyncReport]:
        """Send what changed since the last sync; the reports, by url.

        Raises:
            SomeFailed: Some engines did not commit.
            ValueError: Names, shapes or dtypes are not the base's. No engine commits anything, and
                nothing was sent if `tensors` is a collection and not an iterator.
        """
        return self._sync(tensors, full=False)

    def sync_full(self, tensors: NamedTensors) -> dict[str, SyncReport]:
        """Send every tensor dense, whatever the engines hold. Raises as `sync`."""
        return self._sync(tensors, full=True)

    def _sync(self, tensors: NamedTensors, *, full: bool) -> dict[str, SyncReport]:
        for thread in self._threads:
            thread.join()  # of a sync that was interrupted
        started = time.perf_counter()
        version = max(link.version for link in self._all) + 1
        if self._torn:
            # What an engine has missed is kept beside a snapshot that did not come, and others are
            # at this version already.
            version += 1
            for link in self._all:
                link.suspect = True
            self._torn = False
        if self._writer is not None:
            version = max(version, self._writer.last_number + 1)
        places, unlogged = len(self._all), self._log is None
        step = Step(version, full=full, engines=places, started=started, is_logged=unlogged)
        outcomes: dict[Link, Committed | BaseException] = {}

        def bring(link: Link) -> None:
            try:
                outcomes[link] = link.bring(step)
                if link is self._log:
                    step.note_logged()
            except BaseException as error:
                outcomes[link] = error
                if link is self._log:
                    step.fail(_not_logged(error))

        self._threads = []
        try:
            for link in self._all:
                thread = Thread(target=bring, args=(link,), daemon=True)
                thread.start()
                self._threads.append(thread)
            step.read(self._snapshot.read(tensors, digests=self._digests))
            for thread in self._threads:
                thread.join()
        except BaseException as error:
            step.fail(error)
            if isinstance(error, Exception):  # who interrupts is not kept waiting for an answer
                for thread in self._threads:
                    thread.join()
            raise
        return self._acknowledge(step, outcomes)

    def _acknowledge(
        self, step: Step, outcomes: dict[Link, Committed | BaseException]
    ) -> dict[str, SyncReport]:
        """Let the snapshot and the links move on, as far as the engines have."""
        # An interruption in here makes the next sync a full one. No link is ever ahead of its
        # engine.
        if any(isinstance(outcomes[link], Committed) for link in self._links):
            self._torn = True
            for link, outcome in outcomes.items():
                if not isinstance(outcome, Committed):
                    link.miss(step.changes)
            self._snapshot.advance(step.changes)
            self._acknowledge_log(outcomes)
        elif self._writer is not None and step.is_logged:
            self._writer.refuse(step.version)
        reports: dict[str, SyncReport] = {}
        failures: dict[str, SyncFailed] = {}
        others: list[BaseException] = []
        for url, link in zip(self._urls, self._links, strict=True):
            outcome = outcomes[link]
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                reports[url] = outcome.acknowledge()
            except SyncFailed as failed:
                failures[url] = failed
            except BaseException as error:
                others.append(error)
        self._torn = False
        if others:
            raise others[0]
        if failures:
            raise SomeFailed(failures, reports)
        return reports

    def _acknowledge_log(self, outcomes: Mapping[Link, Committed | BaseException]) -> None:
        if self._log is not None:
            logged = outcomes[self._log]
            assert isinstance(logged, Committed)  # or no engine would have committed
            logged.acknowledge()

    def _make_snapshot(self, base: NamedTensors) -> Snapshot:
        options = self._options
        return Snapshot(base, sparse_encoding(options.encoding), options.snapshot_on)

    def _make_server(self, url: str) -> Place:
        return Server(url, self._options)


def _not_logged(error: BaseException) -> BaseException:
    """What the engines' links fail with when the delta log has not got a version."""
    if isinstance(error, SyncFailed):
        return error
    return SyncFailed(f"not sent, as it could not be written to the delta log: {error}")


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

    Host memory: the snapshot (the model's size), the changes until they are committed (4 bytes
    plus twice the itemsize for each element), about three parts, and 128 MiB of gathered tensors.

    Args:
        url: The engine's root, ``http://host:port``.
        base: What the engine holds now; copied.
        base_version: The version the engine is at.
        delta_log: As of `MultiSender`.
        encoding: One of `ENCODINGS`. With ``gap8_ulp`` full syncs, dense params and those that the
            engine's digest does not cover go as ``gap8_exp``; so does everything once the engine
            has refused differences and taken values. Or ``auto``: for each param the fastest of
            ``gap8_ulp``, ``gap8_exp`` and ``deltas``, sparse or dense, by its density and by the
            speed of the link that the posts have shown; `SyncReport.picked` says which.
        bucket_bytes: Most bytes of positions and values in one part, before compression. A param
            is never split: a larger one travels alone.
        digest: Keep the model's digest, and send digests along if the engine has a plan.
        api_key: Bearer token.
        hmac_key: Sign the parts with it, as an engine with ``DELTA_HMAC_KEY`` asks for.
        pause_mode, flush_cache: As the endpoint takes them.
        timeout: Seconds, for one request and for waiting until another sync is out of the way.
        client: Used in place of an own one, and not closed.
        snapshot_on: What CUDA tensors are compared with: a copy of the snapshot that is kept on
            their ``device``, which takes the model's size there, or the snapshot on the ``host``,
            in pinned memory, brought up in chunks. ``auto``: on the device where that takes at
            most half of the memory that is free there at the first sync.

    Raises:
        ValueError: An option is unknown.
    """

    def __init__(
        self,
        url: str,
        base: NamedTensors,
        *,
        base_version: int = 0,
        delta_log: str | Path | None = None,
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
    ) -> None:
        self._url = url
        self._sender = MultiSender(
            [url],
            base,
            base_version=base_version,
            delta_log=delta_log,
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

        If the engine turns out to hold something else (it was restarted, a digest disagrees, it
        committed a sync whose answer was lost) or to be ``uncertain``, the whole model is sent
        instead, once.

        Raises:
            SyncFailed: The engine refused, could not be reached, or holds other bytes afterwards.
            ValueError: As of `MultiSender.sync`.
        """
        return self._one(tensors, full=False)

    def sync_full(self, tensors: NamedTensors) -> SyncReport:
        """Send every tensor dense, whatever the engine holds. Raises as `sync`."""
        return self._one(tensors, full=True)

    def _one(self, tensors: NamedTensors, *, full: bool) -> SyncReport:
        try:
            return self._sender._sync(tensors, full=full)[self._url]
        except SomeFailed as some:
            raise some.failures[self._url] from None
