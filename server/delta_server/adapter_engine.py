"""An engine as the syncs of one LoRA adapter's own tensors see it."""

from __future__ import annotations

import msgspec

from delta_server.engine import Engine
from engine_ext.errors import DeltaError
from engine_ext.ranks.operations import Operation, ReplyT


class AdapterEngine:
    """Sends every operation to the receivers of one adapter; see `delta_server.engine.Engine`.

    It publishes no version: the engine's weight version is that of the model.
    """

    def __init__(self, engine: Engine, adapter: str) -> None:
        self.name, self.shared, self.address = engine.name, engine.shared, engine.address
        self._engine, self._adapter = engine, adapter
        self.is_paused, self.pause, self.resume = engine.is_paused, engine.pause, engine.resume
        self.flush_cache, self.get_weight_version = engine.flush_cache, engine.get_weight_version

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        """Carry out one operation for the adapter on every rank."""
        return await self._engine.call(msgspec.structs.replace(request, adapter=self._adapter))

    async def set_weight_version(self, version: str) -> None:
        """Publish nothing."""
