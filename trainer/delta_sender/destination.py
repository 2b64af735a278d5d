"""Where parts go: an engine, a delta log, or nowhere (a dry run)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from delta_sender.bandwidth import LinkSpeed


@dataclass(frozen=True)
class Options:
    """How parts are made and posted; as of `reference_sender.DeltaSender`."""

    encoding: str = "deltas_zstd"
    bucket_bytes: int = 256 << 20
    digest: bool = True
    api_key: str | None = None
    hmac_key: str | None = None
    pause_mode: str = "keep"
    flush_cache: bool = True
    timeout: float = 600.0
    client: httpx.Client | None = None
    snapshot_on: str = "auto"
    lag_limit: float | None = 60.0
    changes_in_memory: int | None = None


class Destination(Protocol):
    """Where a link's parts go: to an engine, or to what stands for one.

    Attributes:
        speed: as the deliveries show it.
        tried: the highest version of which the last part was delivered, answered or not.
    """

    speed: LinkSpeed
    tried: int

    def close(self) -> None: ...

    def plan(self) -> Any: ...

    def status(self) -> dict[str, Any]: ...

    def catch_up(self) -> int | None: ...

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]: ...
