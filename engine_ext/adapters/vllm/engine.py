"""Pause, flush and resume one vLLM server, for the delta service."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_DEATH_POLL_S = 0.5


class VllmEngine:
    """The engine as the endpoints see it (`delta_server.service.Engine`)."""

    name = "vllm"

    def __init__(self, client: Any) -> None:
        self._client = client
        # As they are now: what the caller asks of the client waits for our commits (`serialize_with_commits`).
        self._pause, self._resume = client.pause_generation, client.resume_generation
        self.shared = client.vllm_config.parallel_config._api_process_count > 1

    async def call(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """One operation of the receiver on every rank; their answers, in rank order.

        Raises:
            RuntimeError: the engine died before all ranks had answered.
        """
        answers: list[dict[str, Any]] = await self._answered(
            self._client.collective_rpc("delta_updates", args=(operation, arguments))
        )
        return answers

    async def _answered(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a call of the engine, but not for a dead one's: vLLM never ends that."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=_DEATH_POLL_S))[0]:
                if self._client.errored:
                    raise RuntimeError("the engine died")
            return task.result()
        finally:
            task.cancel()

    async def is_paused(self) -> bool:
        return bool(await self._answered(self._client.is_paused()))

    async def pause(self, mode: str, *, flush_cache: bool) -> None:
        """Stop scheduling. With `flush_cache` all KV is dropped; kept requests are recomputed."""
        await self._answered(self._pause(mode=mode, clear_cache=flush_cache))

    async def flush_cache(self) -> None:
        """Drop all KV of a paused engine.

        Raises:
            RuntimeError: the engine did not.
        """
        if not await self._answered(
            self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        ):
            raise RuntimeError("vLLM did not reset its prefix cache")
        await self._answered(self._client.reset_mm_cache())
        await self._answered(self._client.reset_encoder_cache())

    async def resume(self) -> None:
        await self._answered(self._resume())

    async def set_weight_version(self, version: str) -> None:
        await self._answered(self._client.update_weight_version(version))

    async def get_weight_version(self) -> str:
        return str(await self._answered(self._client.get_weight_version()))
