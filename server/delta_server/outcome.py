"""What a request that was taken is answered."""

from __future__ import annotations

from typing import Any

from delta_server.spool import Spooled


class Outcome:
    """What one request brought and how long its steps took.

    Args:
        spooled: its parts.
        receive_ms: how long they took to arrive.

    Attributes:
        admissions: what became of each part; see `engine_ext.syncs.SyncState.admit`.
        timings: milliseconds, by step.
    """

    def __init__(self, spooled: list[Spooled], receive_ms: float) -> None:
        self.spooled = spooled
        self.admissions: set[str] = set()
        self.timings = {"receive_ms": receive_ms}

    def answer(self, status: str, facts: dict[str, Any]) -> dict[str, Any]:
        """The JSON object of a successful answer."""
        entries = [entry for s in self.spooled for entry in s.header.manifest.params]
        return {
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
