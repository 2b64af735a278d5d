"""What a sync returns, and what it raises.

Besides `SyncError`, that is `ValueError` if the tensors are not the base's, so that no engine
commits anything, and `OSError` if changes could not be kept in ``TMPDIR`` or the state file could
not be written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal


@dataclass(frozen=True)
class SyncReport:
    """One sync of one engine. Tensors that the engine ignores do not count.

    Attributes:
        version: The version that the engine is at now.
        base_version: The version that it was at, as it says itself if it does.
        nnz: Elements sent; a dense param counts with all its elements.
        numel: Elements of the model.
        full_bytes: Bytes of the model.
        wire_bytes: Bytes of the request bodies, each counted once.
        parts: Number of parts.
        encode_ms: Milliseconds of reading tensors, comparing, hashing and encoding; all but waiting
            for posts.
        post_ms: Milliseconds of posting, with retries and waits; most of it overlaps `encode_ms`.
        status: ``committed`` or ``already_applied``.
        full: Whether the whole model was sent.
        reason: Why it was; None for a delta. The first word is one of ``requested``, ``first``,
            ``restarted``, ``uncertain``, ``changed``, ``behind`` and ``lost_track``.
        run: The sender's run; a version is named by run and number.
        digest: The model's digest now, as 32 hex digits; None if no digest is kept.
        engine: The engine's last answer.
        picked: Number of params by how they travelled: ``gap8_exp``, ``gap8_exp, dense``,
            ``gap8_ulp, stored`` (not compressed), ...
        link_bytes_per_s: Link speed in bytes/s, measured on the posts so far; None if none was
            large enough.
        unchanged_in_a_row: Number of syncs, up to this one, in which no tensor has changed; 0 if
            one has.
        nonfinite: Number of values that have become NaN or infinite.
        rounded: Elements of tensors that were given in a wider dtype than the checkpoint's, and so
            rounded, as far as this package has cast them (`named_tensors`, plug-ins).
    """

    version: int
    base_version: int
    nnz: int
    numel: int
    full_bytes: int
    wire_bytes: int
    parts: int
    encode_ms: float
    post_ms: float
    status: str
    full: bool
    reason: str | None
    run: str
    digest: str | None
    engine: dict[str, Any]
    picked: dict[str, int]
    link_bytes_per_s: float | None
    unchanged_in_a_row: int = 0
    nonfinite: int = 0
    rounded: int = 0

    @property
    def density(self) -> float:
        """Share of the model's elements that were sent."""
        return self.nnz / max(1, self.numel)


def figures(reports: Collection[SyncReport]) -> dict[str, float]:
    """Return what trainers log of a sync; of several engines, the largest of each figure."""
    pauses = [report.engine.get("timings_ms", {}).get("pause_ms", 0.0) for report in reports]
    return {
        "version": max(report.version for report in reports),
        "bytes": max(report.wire_bytes for report in reports),
        "density": max(report.density for report in reports),
        "pause_ms": max(pauses),
    }


class SyncError(Exception):
    """The sync did not commit, as far as is known; the version is as before it.

    If no answer to the last part came, the engine might have committed; the next sync finds out and
    sends what is missing. If the engine did commit and its digest differs from the sender's, the
    message says so, and the next sync is a full one.

    Attributes:
        status: HTTP status of the last answer; None if none came.
        error: The engine's ``error`` object; {} if the answer was not the engine's.
        unanswered: An earlier post of the same part got no answer, so the engine might have it.
    """

    def __init__(
        self, message: str, status: int | None = None, error: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = error or {}
        self.unanswered = False

    @classmethod
    def of(cls, message: str, status: int | None, error: dict[str, Any] | None) -> SyncError:
        """Return the error for an answer, of the class that its "type" names."""
        kind = (error or {}).get("type")
        named: dict[Any, type[SyncError]] = {one.__name__: one for one in _BY_TYPE}
        return named.get(kind, SyncError)(message, status, error)

    @property
    def is_refusal(self) -> bool:
        """Whether the engine itself has answered, to every post, that it did not commit."""
        answered = self.error.get("engine_state") in ("unchanged", "uncertain")
        return answered and not self.unanswered and not self.is_held

    @property
    def is_held(self) -> bool:
        """Whether the engine holds the sync and commits it later, as its group has decided."""
        return bool(self.error.get("held"))


class EngineUnreachable(SyncError):
    """No answer came from the engine, or only a proxy's, though the request was repeated."""


class EngineBusy(SyncError):
    """Another sync has parts staged, or too many arrive; ``error["retry_after"]`` is in seconds."""


class FullSyncRefused(SyncError):
    """Only the whole model would help, and it would replace weights that are not this sender's.

    The engine is unchanged. `error` has its "version", "run", "owner" and "digest", and the
    "base_digest" of what the sender takes it to hold; the message says what can be done.
    """


class RunConflict(SyncError):
    """The engine belongs to another run, whose owner is in ``error["owner"]``; it is unchanged.

    The owner is an object with "run", "epoch", "host", "pid" and "since" (Unix time).
    """


class RunFenced(RunConflict):
    """Another run, or a later opening of this one, has taken the engine over for good."""


_BY_TYPE: Final = (FullSyncRefused, RunConflict, RunFenced)


class PartialSyncError(SyncError):
    """Some engines did not commit. The others have committed and stay at the new version.

    If engines commit as one, and none has answered in `commit_window`, there are no others: all
    might still commit, and `late_outcomes` of `MultiSender` has how they ended.

    Attributes:
        failures: The errors of the engines that did not commit, by url.
        reports: The reports of those that have committed, by url.
    """

    def __init__(self, failures: dict[str, SyncError], reports: dict[str, SyncReport]) -> None:
        super().__init__("; ".join(f"{url}: {failed}" for url, failed in failures.items()))
        self.failures = failures
        self.reports = reports

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failures, self.reports)


@dataclass(frozen=True)
class FleetOutcome:
    """What has become of one engine in a sync of all engines or none.

    Attributes:
        state: ``committed``. ``aborted``: it had prepared, and dropped the sync as others could
            not. ``refused``: it could not prepare, and therefore none has committed. ``left out``:
            it could not prepare, and the others have committed. ``failed``: it had prepared, the
            others commit, and it could not. ``prepared``: it has not said yet how it has ended; it
            settles that with the other engines.
        error: Why it has not committed, if it has answered that; None if it has, or was aborted.
    """

    state: Literal["committed", "aborted", "refused", "left out", "failed", "prepared"]
    error: SyncError | None


class GroupAborted(PartialSyncError):
    """The sync was aborted: not all, or not as many as `quorum`, could prepare and record it.

    So it is if the delta log could not be written. `reports` is empty. The engines are at the
    version before; only one whose outcome is ``prepared`` has not said so yet: it settles that with
    the others, and the next sync finds out.
    """


@contextlib.contextmanager
def raising_as_one(engines: int) -> Iterator[None]:
    """Let a sync with a single engine raise that engine's error, not a `PartialSyncError`."""
    try:
        yield
    except PartialSyncError as failed:
        if engines > 1:
            raise
        [error] = failed.failures.values()
        raise error from None


class RankError(SyncError):
    """Ranks of a `ShardedSender` disagree, or one has failed or died; `message` says which.

    The engine has not committed; only if a rank dies while the last part is under way it might
    have, and the message says so.

    Attributes:
        ranks: Numbers of the ranks that have failed or disagree, as far as known.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks)


@dataclass(frozen=True)
class ShardedReport(SyncReport):
    """One sync of a `ShardedSender`: sums over all ranks; times are this rank's.

    Attributes:
        rank_bytes: Bytes of the request bodies that each rank posted.
        rank_nnz: Elements that each rank sent.
    """

    rank_bytes: tuple[int, ...] = ()
    rank_nnz: tuple[int, ...] = ()
