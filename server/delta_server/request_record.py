"""What one request for an update brought, how long its steps took, and what became of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from delta_server.spool import Spooled
from engine_ext.errors import (
    CommitFailed,
    DeltaError,
    EngineUncertain,
    PublishFailed,
    WriteUndone,
)
from engine_ext.wire.identity import PartId

_LONGEST_TEXT = 200


class RequestRecord:
    """One request, from its first byte to its answer.

    Attributes:
        spooled: the parts that it brought, as far as they have arrived whole.
        parts: what they say they are.
        admissions: what the ranks said to them.
        timings: milliseconds by phase, with ``_ms`` added to its name.
        phase: what is being done now.
        received: bytes of the body so far.
        expected: bytes of the body, if it is known.
        staged: how many of the parts are staged.
        told: somebody has told what became of it.
        ticking: somebody tells how far it is.
    """

    def __init__(self) -> None:
        self.spooled: list[Spooled] = []
        self.parts: list[PartId] = []
        self.admissions: set[str] = set()
        self.timings: dict[str, float] = {}
        self.phase = "receive"
        self.received = 0
        self.expected: int | None = None
        self.staged = 0
        self.told = False
        self.ticking = False
        self.began = time.time()
        self._start = time.perf_counter()
        self._done: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Since its first byte."""
        return time.perf_counter() - self._start

    async def counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The chunks of its body; `received` follows them."""
        async for chunk in chunks:
            self.received += len(chunk)
            yield chunk

    def brought(self, parts: Sequence[PartId], spooled: Sequence[Spooled]) -> None:
        """Note which parts came; some of a disk request's may be left out later."""
        self.parts, self.spooled = list(parts), list(spooled)

    def answer(self, status: str, facts: dict[str, Any]) -> dict[str, Any]:
        """The JSON object of a successful answer.

        Args:
            status: what became of the request.
            facts: what the ranks say of the version that the engine is at now.
        """
        entries = [entry for s in self.spooled for entry in s.header.manifest.params]
        answer = {
            "status": status,
            "version": facts["version"],
            "base_version": facts.get("base_version"),
            "nnz": facts.get("nnz", sum(entry.nnz for entry in entries)),
            "tensors": facts.get("tensors", len({entry.name for entry in entries})),
            "bytes": sum(s.wire_bytes for s in self.spooled),
            "apply": facts.get("apply"),
            "rollback": facts.get("rollback"),
            "timings_ms": {name: round(value, 3) for name, value in self.timings.items()},
            "digest": facts.get("digest"),
        }
        self.ended(status, {**facts, **answer})
        return answer

    def ended(self, status: str, facts: dict[str, Any]) -> None:
        """Note that the request has succeeded, and with what."""
        self._done = {"outcome": status, **facts}

    def record(self, error: DeltaError | None) -> dict[str, Any]:
        """What became of the request, as JSON of a bounded size.

        Args:
            error: what it was refused with, or None.
        """
        first = self.parts[0] if self.parts else None
        done = self._done if error is None else {}
        record = {
            "at": round(self.began, 3),
            "outcome": done.get("outcome") if error is None else name_of(error),
            "error": None if error is None else type(error).__name__,
            "message": None if error is None else str(error),
            "version": done.get("version", first and first.version),
            "base_version": done.get("base_version", first and first.base_version),
            "sync_id": first and first.sync_id,
            "full": bool(first and first.full),
            "parts": len(self.spooled),
            "nnz": done.get("nnz"),
            "elements": done.get("elements"),
            "tensors": done.get("tensors"),
            "bytes": sum(s.wire_bytes for s in self.spooled),
            "apply": done.get("apply"),
            "timings_ms": {name: round(value, 3) for name, value in self.timings.items()},
        }
        return {k: v[:_LONGEST_TEXT] if isinstance(v, str) else v for k, v in record.items()}

    def progress(self) -> dict[str, Any]:
        """How far the request is, for the log."""
        found: dict[str, Any] = {"phase": self.phase}
        if self.parts:
            found["version"] = self.parts[0].version
            found["sync_id"] = self.parts[0].sync_id
            found["parts"] = f"{self.staged}/{len(self.parts)}"
        found["bytes"] = sum(s.wire_bytes for s in self.spooled) or self.received
        found["of_bytes"] = self.expected
        found["seconds"] = round(self.seconds, 1)
        return {key: value for key, value in found.items() if value is not None}


def name_of(error: DeltaError) -> str:
    """What has become of a request that was answered with this error."""
    if isinstance(error, CommitFailed) and not isinstance(error, EngineUncertain):
        return "uncertain"
    if isinstance(error, PublishFailed):
        return "unpublished"
    if isinstance(error, WriteUndone):
        return "undone"
    # The tree's root itself stands for a fault of this program.
    return "failed" if type(error) is DeltaError else "refused"
