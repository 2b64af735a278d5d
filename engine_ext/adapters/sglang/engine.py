"""Pause, flush and resume one SGLang server, for the delta service."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_ext.adapters.sglang.rpc import Channel

_IDLE_POLL_S = 0.05


class SglangEngine:
    """The engine as the endpoints see it (`delta_server.commit.Engine`)."""

    name = "sglang"
    shared = False

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # As they are now: what the caller asks of the manager waits for our commits (`serialize_with_commits`).
        self._pause_generation = manager.pause_generation
        self._continue_generation = manager.continue_generation
        self._channel = Channel(manager)

    async def call(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """One operation of the receiver on every rank; their answers, in rank order.

        Raises:
            RuntimeError: the engine died before all ranks had answered.
        """
        return await self._channel.call(operation, arguments)

    async def is_paused(self) -> bool:
        return bool(self._manager.is_pause)

    async def pause(self, mode: str, *, flush_cache: bool) -> None:
        """Stop scheduling. With `flush_cache` all KV is dropped; kept requests are recomputed.

        Raises:
            RuntimeError: the cache could not be flushed.
        """
        if mode == "keep":
            await self._pause("retract" if flush_cache else "in_place")
        elif mode == "abort":
            await self._pause("abort")
        else:
            await self._wait_for_requests()
        if flush_cache:
            await self._flush()

    async def flush_cache(self) -> None:
        """Drop all KV of a paused engine; the requests in flight are recomputed.

        Raises:
            RuntimeError: the engine did not.
        """
        await self._pause("retract")
        await self._flush()

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def set_weight_version(self, version: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        )

    async def get_weight_version(self) -> str:
        return str(self._manager.config_value("weight_version"))

    async def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._pause_generation(PauseGenerationReqInput(mode=mode))

    async def _wait_for_requests(self) -> None:
        """Let no new request in, and wait for those in flight, as SGLang's mode ``abort`` does."""
        async with self._manager.is_pause_cond:
            self._manager.is_pause = True
        while await self._manager.model_update_lock.is_locked():
            await asyncio.sleep(_IDLE_POLL_S)

    async def _flush(self) -> None:
        result = await self._manager.flush_cache()
        if not result.success:
            raise RuntimeError(f"SGLang did not flush its cache: {result.message}")
