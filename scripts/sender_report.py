"""What the reference sender says of a sync."""

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
