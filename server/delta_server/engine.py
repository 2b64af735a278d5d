"""The protocol that an engine adapter implements for the delta service."""

from __future__ import annotations

from typing import Any, Protocol


class Engine(Protocol):
    """What an engine adapter gives the service. Every method may raise; none is retried.

    What the caller itself asks of the engine, to pause or to resume, does not come this way; the
    adapter makes it `serialize_with_commits`.

    Attributes:
        name: the engine's.
        shared: other HTTP processes serve the same engine.
    """

    name: str
    shared: bool

    async def call(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """`engine_ext.receiver.receiver.Receiver.handle` on every rank, in rank order."""

    async def is_paused(self) -> bool: ...

    async def pause(self, mode: str, *, flush_cache: bool) -> None: ...

    async def flush_cache(self) -> None: ...

    async def resume(self) -> None: ...

    async def set_weight_version(self, version: str) -> None: ...

    async def get_weight_version(self) -> str: ...
