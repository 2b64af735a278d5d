"""Define where parts go: to an engine, into a delta log, or nowhere (a dry run)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from delta_sender.bandwidth import LinkSpeed


class Part(NamedTuple):
    """An encoded part: the body to post, its version, its number from 0, whether it is the last."""

    body: bytes
    version: int
    number: int
    last: bool


class Destination(Protocol):
    """A receiver of parts. The defaults here are those of one that has no plan and no status.

    Attributes:
        speed: Speed of the link to it, estimated from the deliveries.
        highest_posted: Highest version whose last part was delivered, whether or not an answer
            came.
    """

    speed: LinkSpeed
    highest_posted: int

    def close(self) -> None:
        return None

    def plan(self) -> Any:
        return None

    def status(self) -> dict[str, Any]:
        return {}

    def catch_up(self) -> int | None:
        return None

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]: ...
