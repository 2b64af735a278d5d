"""What the reference sender tells of a sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delta_sender.http_client import SyncFailed


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
