"""What the reference sender tells of a sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SyncReport:
    """One sync. The model is what is sent when all is sent, so without the ignored tensors."""

    version: int
    base_version: int
    nnz: int  # elements sent; a dense param counts with all of its elements
    numel: int  # elements of the model
    full_bytes: int  # bytes of the model
    wire_bytes: int  # bytes of the request bodies, each counted once
    parts: int
    encode_ms: float  # reading tensors, comparing, hashing, encoding; all but waiting for posts
    post_ms: float  # posting the parts, with retries and waits; most of it beside the encoding
    status: str  # "committed" or "already_applied"
    full: bool
    digest: str | None  # of the model, now; None where no digest is kept
    engine: dict[str, Any]  # the engine's last answer
    picked: dict[str, int]  # params by how they travelled: "gap8_exp" or "gap8_exp, dense", ...
    link_bytes_per_s: float | None  # as the posts so far have shown it

    @property
    def density(self) -> float:
        return self.nnz / max(1, self.numel)


class SyncError(Exception):
    """The sync did not commit, as far as is known; the version is as before it.

    Or else it did commit, and the message says that the engine's digest then was another than the
    sender's; the next sync is a full one.

    Attributes:
        status: HTTP status of the last answer, None if none came. Where no answer to the last
            part came, the engine may have committed; the next sync finds out and sets it right.
        error: The engine's ``error`` object, {} if the answer was not the engine's.
        unanswered: The part had been posted before, and that had no answer.
    """

    def __init__(
        self, message: str, status: int | None = None, error: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = error or {}
        self.unanswered = False

    @property
    def is_refusal(self) -> bool:
        """Whether the engine itself has said that it did not commit, whenever it was posted."""
        told = self.error.get("engine_state") in ("unchanged", "uncertain")
        return told and not self.unanswered

    @property
    def is_of_old_values(self) -> bool:
        """Whether a digest has shown that the engine's old values are not the snapshot's."""
        return self.error.get("type") == "BaseMismatch" and "actual" in self.error

    @property
    def calls_for_full(self) -> bool:
        """Whether a sync of the whole model can help: the engine's bytes are not the snapshot's."""
        conflict = self.error.get("type") in ("VersionConflict", "BaseMismatch")
        return conflict or self.error.get("engine_state") == "uncertain"


class PartialSyncError(SyncError):
    """Some engines did not commit; the others have, and go on.

    Attributes:
        failures: Why, by the engine's url.
        reports: Of the engines that have committed, by url.
    """

    def __init__(self, failures: dict[str, SyncError], reports: dict[str, SyncReport]) -> None:
        super().__init__("; ".join(f"{url}: {failed}" for url, failed in failures.items()))
        self.failures = failures
        self.reports = reports
