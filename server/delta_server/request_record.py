"""The record of one request for an update: its parts, timings and result."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from engine_ext.errors import (
    CommitFailed,
    CommittedNotResumed,
    DeltaError,
    EngineUncertain,
    WriteUndone,
)
from engine_ext.format import Manifest, Origin, PartId
from engine_ext.ranks.operations import SyncRecord

_MAX_TEXT = 200
_NO_REASON = "sent in full"


@dataclass(eq=False)
class RequestRecord:
    """One request, from its first byte to its answer."""

    adapter: str | None = None  # the LoRA adapter that it is for; None: the model's weights
    commits: bool = True  # whether a sync that its parts complete is committed
    origin: Origin = "sender"  # who brings its parts
    reason: str | None = None  # why its sync is full
    manifests: list[Manifest] = field(default_factory=list)  # of the parts that have arrived whole
    identities: list[str] = field(default_factory=list)  # of these
    wire_bytes: int = 0  # of these, as they were sent
    parts: list[PartId] = field(default_factory=list)  # that are submitted
    admissions: set[str] = field(default_factory=set)  # how the ranks have admitted the parts
    timings: dict[str, float] = field(default_factory=dict)  # milliseconds, by phase and "_ms"
    phase: str = "receive"
    received: int = 0  # bytes of the body so far
    expected: int | None = None  # bytes of the body, if known
    staged: int = 0  # number of staged parts
    rebuilt: int = 0  # number of modules that were rebuilt
    reported: bool = False
    progress_logged: bool = False  # a task logs the progress
    _began_at: float = field(default_factory=time.time)
    _start: float = field(default_factory=time.perf_counter)
    _result: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds since the request's first byte."""
        return time.perf_counter() - self._start

    @property
    def _named_run(self) -> str | None:
        """The run that the parts name, or None."""
        sender = self.parts[0].sender if self.parts else None
        return None if sender is None else sender.run

    async def count_received(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks of the body, and count them in `received`."""
        async for chunk in chunks:
            self.received += len(chunk)
            yield chunk

    def add(self, manifest: Manifest, identity: str, wire_bytes: int) -> None:
        """Add a part that has arrived whole; some of several are not in `parts`."""
        self.manifests.append(manifest)
        self.identities.append(identity)
        self.wire_bytes += wire_bytes

    def answer(self, status: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON object of a successful answer, and set the result.

        The facts are fields of `engine_ext.ranks.operations.CommittedSync`, as far as known.
        """
        entries = [entry for manifest in self.manifests for entry in manifest.params]
        answer = {
            "status": status,
            "version": facts["version"],
            "base_version": facts.get("base_version"),
            "run": facts.get("run"),
            "nnz": facts.get("nnz", sum(entry.nnz for entry in entries)),
            "tensors": facts.get("tensors", len({entry.name for entry in entries})),
            "skipped": facts.get("skipped", {}),
            "bytes": self.wire_bytes,
            "apply": facts.get("apply"),
            "rollback": facts.get("rollback"),
            "timings_ms": self.rounded_timings(),
            "digest": facts.get("digest"),
        }
        self.set_result(status, {**facts, **answer})
        return answer

    def set_result(self, outcome: str, facts: dict[str, Any]) -> None:
        """Set the result of a request that has succeeded; see `answer`."""
        self._result = {"outcome": outcome, **facts}

    def summary(self, error: DeltaError | None) -> SyncRecord:
        """Return the result of a request that is answered with `error` or, if None, successfully.

        Texts are cut to a bounded size.
        """
        first = self.parts[0] if self.parts else None
        sync_id = None if first is None else first.sync_id
        result = self._result if error is None else {}
        return SyncRecord(
            at=round(self._began_at, 3),
            outcome=str(result.get("outcome")) if error is None else outcome_of(error),
            error=None if error is None else type(error).__name__,
            message=None if error is None else str(error)[:_MAX_TEXT],
            version=result.get("version", first and first.version),
            base_version=result.get("base_version", first and first.base_version),
            run=result.get("run", self._named_run),
            sync_id=sync_id and sync_id[:_MAX_TEXT],
            full=bool(first and first.full),
            reason=(self.reason or _NO_REASON) if first and first.full else None,
            parts=len(self.manifests),
            nnz=result.get("nnz"),
            elements=result.get("elements"),
            tensors=result.get("tensors"),
            bytes=self.wire_bytes,
            apply=result.get("apply"),
            rebuilt=self.rebuilt or None,
            adapter=self.adapter and self.adapter[:_MAX_TEXT],
            timings_ms=self.rounded_timings(),
        )

    def progress(self) -> dict[str, Any]:
        """Return the progress of the request, for the log."""
        found: dict[str, Any] = {"phase": self.phase}
        if self.adapter is not None:
            found["adapter"] = self.adapter[:_MAX_TEXT]
        if self.parts:
            found |= {"version": self.parts[0].version, "sync_id": self.parts[0].sync_id}
            found["parts"] = f"{self.staged}/{len(self.parts)}"
        found |= {"bytes": self.wire_bytes or self.received, "of_bytes": self.expected}
        found["seconds"] = round(self.seconds, 1)
        return {key: value for key, value in found.items() if value is not None}

    def rounded_timings(self) -> dict[str, float]:
        return {phase: round(value, 3) for phase, value in self.timings.items()}


def outcome_of(error: DeltaError) -> str:
    """Return the outcome of a request that was answered with this error."""
    if isinstance(error, CommitFailed) and not isinstance(error, EngineUncertain):
        return "uncertain"
    if isinstance(error, CommittedNotResumed):
        return "unpublished"
    if isinstance(error, WriteUndone):
        return "undone"
    # The root of the tree stands for a bug.
    return "failed" if type(error) is DeltaError else "refused"
