"""Send to several engines at once: the class `MultiSender`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from delta_sender.arguments import Base, Tensors, check_urls
from delta_sender.locations import engine_root, names_log
from delta_sender.options import Flush, SenderOptions
from delta_sender.publish.http_client import EngineClient
from delta_sender.publish.publisher import Connect, Publisher
from delta_sender.publish.senders import Sender
from delta_sender.results import FleetOutcome, SyncError, SyncReport
from engine_ext.resources import RateLimit


class MultiSender(Sender):
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

    With ``commit="all_or_none"`` either all engines commit a sync or none does: each stages and
    checks all of it first, while it serves. If one cannot, `sync` raises `GroupAborted` and all
    stay at the version before; with `quorum` the engines that cannot are left out. `outcomes` says
    what has become of each.

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
        connect: Makes the destination of a url, given the options.
        continues: `run` and `epoch` of an earlier sender, which must be closed, to open its run
            again; not with `state`, which has them.

    The other keyword arguments are documented in `SenderOptions`.

    Raises:
        ValueError: An option has an unknown value, no url is given or one twice, there are fewer
            engines than `quorum`, or the state file is not one.
        BlockingIOError: Another sender writes into the log, or uses the state file.
    """

    def __init__(
        self,
        urls: Sequence[str],
        base: Base,
        *,
        connect: Connect = EngineClient,
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
        lag_limit: float | None = 60.0,
        commit: str = "each",
        commit_window: float = 10.0,
        quorum: int | None = None,
        evict: Callable[[str, SyncError], object] | None = None,
    ) -> None:
        options = SenderOptions.among(locals())
        check_urls(urls)
        if connect is EngineClient:  # which does so as well, but only once the base is read
            for url in urls:
                if names_log(url):
                    raise ValueError(
                        "a delta log is no engine; LogSender(log, base) publishes in it"
                    )
                engine_root(url)
        self._publisher = Publisher(urls, base, options, connect=connect, continues=continues)

    @property
    def versions(self) -> dict[str, int]:
        """The version that each engine acknowledged last, by url."""
        return {session.url: session.state.version for session in self._publisher.sessions}

    @property
    def lagging(self) -> list[str]:
        """Urls of engines that are still being sent a sync that has returned without them."""
        return self._publisher.lagging.urls

    @property
    def late_outcomes(self) -> dict[str, SyncReport | Exception]:
        """How engines that lagged ended, by url: a report or an error.

        The next sync and `close` note them; an engine's entry is dropped when a later sync of it
        has ended.
        """
        return dict(self._publisher.lagging.outcomes)

    @property
    def outcomes(self) -> dict[str, FleetOutcome]:
        """The outcome of the last sync for every engine, by url, if they commit as one.

        An engine whose state is ``prepared`` settles its sync with the others; the next sync asks
        it how.
        """
        fleet = self._publisher.fleet
        return {} if fleet is None else fleet.outcomes()

    def sync(self, tensors: Tensors) -> dict[str, SyncReport]:
        """Send what changed since the last sync to every engine.

        Args:
            tensors: The base's tensors, with their values now. None must change before the sync
                ends.

        Returns:
            The reports by url, without engines that lag.

        Raises:
            GroupAborted: With ``commit="all_or_none"``: no engine commits, as not all, or not as
                many as `quorum`, could prepare, or the delta log could not be written.
            PartialSyncError: Some engines did not commit. Those in its `reports` did. With
                ``commit="all_or_none"``: an engine was lost after all had prepared; or none has
                answered in `commit_window`, so that `reports` is empty and all are `lagging`.
            ValueError: Names, shapes or dtypes are not the base's, or a weight to quantise is not
                finite. No engine commits anything. Nothing was sent if `tensors` is a collection
                and not an iterator, and `quantize` is not set.
        """
        return self._publisher.sync(tensors, full=False)

    def sync_full(self, tensors: Tensors) -> dict[str, SyncReport]:
        """Send every tensor dense, whatever the engines hold; a warning says what that is.

        Raises what `sync` raises.
        """
        return self._publisher.sync(tensors, full=True)
