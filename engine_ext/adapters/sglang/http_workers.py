"""One of several HTTP processes of SGLang (``--tokenizer-worker-num``), as the endpoints see it.

SGLang's router notifies every process of a pause and of its end. Each process knows only its own
requests in flight and the weight version that it answers with; the ranks know them for all.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from engine_ext.adapters.sglang.engine import SglangEngine
from engine_ext.errors import DeltaError
from engine_ext.ranks.operations import GetStatus, Serving

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.05


def has_several_workers(manager: Any) -> bool:
    """Return whether other processes serve HTTP too."""
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    return isinstance(manager, TokenizerWorker)


class SglangHttpWorker(SglangEngine):
    """The engine behind one of several HTTP processes; its manager is a `TokenizerWorker`."""

    shared = True

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self._broadcast_lock = asyncio.Lock()
        self._continue_generation = manager.continue_generation
        self._original_apply = manager._apply_pause_continue_broadcast
        manager._apply_pause_continue_broadcast = self._apply_broadcast

    async def is_paused(self) -> bool:
        """Return whether the engine is paused, once all earlier broadcasts are applied."""
        # The end of another process's pause waits for the ranks' weight version. A commit that
        # mistook that pause for the caller's would renew it, and it would never end.
        async with self._broadcast_lock:
            return await super().is_paused()

    async def get_weight_version(self) -> str:
        """Return the ranks' weight version, and let this process answer with it from now on."""
        version = (await self._serving()).weight_version
        self._manager._update_weight_version_if_provided(version)
        return version

    async def publish(self, version: str | None, *, resumes: bool) -> None:
        """See `delta_server.engine.Engine`. The other processes get the version first."""
        await super().publish(version, resumes=False)
        if resumes:
            await self._release()

    async def _apply_broadcast(self, broadcast: Any) -> None:
        """Read the weight version before generation resumes: another process might have set it."""
        async with self._broadcast_lock:
            if not broadcast.is_pause:
                try:
                    await self.get_weight_version()
                except Exception:
                    logger.exception("delta updates: the weight version could not be read")
            await self._original_apply(broadcast)

    async def _hold(self) -> None:
        """Stop all processes from sending new requests."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        manager = self._manager
        confirmed = asyncio.get_running_loop().create_future()
        manager._pause_continue_future = confirmed
        # The router notifies every process, and does not forward this mode to the ranks.
        manager._dispatch_to_scheduler(PauseGenerationReqInput(mode="abort"))
        await confirmed

    async def _release(self) -> None:
        """Let all processes send requests again, then the ranks resume."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        # The router notifies every process, and then forwards this to the ranks.
        await self._continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def _pause(self, mode: str) -> None:
        await super()._pause(mode)
        if mode == "abort":
            await self._wait_until_idle()

    async def _wait_for_requests(self) -> None:
        """Stop all processes from sending new requests, and wait for those in flight."""
        await self._hold()
        await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        """Wait until the ranks run no request, then stop them from starting one in transit."""
        while not (await self._serving()).idle:
            await asyncio.sleep(_IDLE_POLL_S)
        await super()._pause("retract")

    async def _serving(self) -> Serving:
        [reply, *_] = await self.call(GetStatus(details=False))
        if isinstance(reply, DeltaError):
            raise RuntimeError(reply.message)
        assert reply.serving is not None
        return reply.serving
