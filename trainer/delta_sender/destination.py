"""Define where parts go: to an engine, into a delta log, or nowhere (a dry run)."""

from __future__ import annotations

from typing import Any, Protocol

from delta_sender.bandwidth import LinkSpeed


class Destination(Protocol):
    """A receiver of parts.

    Attributes:
        speed: Speed of the link to it, estimated from the deliveries.
        highest_posted: Highest version whose last part was delivered, whether or not an answer
            came.
    """

    speed: LinkSpeed
    highest_posted: int

    def close(self) -> None: ...

    def plan(self) -> Any: ...

    def status(self) -> dict[str, Any]: ...

    def catch_up(self) -> int | None: ...

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]: ...
