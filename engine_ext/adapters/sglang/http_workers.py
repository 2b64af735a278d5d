"""One of several HTTP processes of SGLang (``--tokenizer-worker-num``), as the endpoints see it.

SGLang's router tells every process of a pause and its end. What else one process knows, its
requests in flight and the weight version that it answers with, the others do not: the ranks do.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from engine_ext.adapters.sglang.engine import SglangEngine

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.05


def is_one_of_several(manager: Any) -> bool:
    """Whether other processes serve HTTP too."""
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    return isinstance(manager, TokenizerWorker)


class OneOfSeveral(SglangEngine):
    """The engine behind one of several HTTP processes.

    Args:
        manager: the process's `TokenizerWorker`.
    """

    shared = True

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self._in_order = asyncio.Lock()
        self._apply_theirs = manager._apply_pause_continue_broadcast
        manager._apply_pause_continue_broadcast = self._apply_broadcast

    async def is_paused(self) -> bool:
        """Whether it is, once what this process was told of that is applied."""
        # The end of another process's pause waits for the ranks' weight version here. Taken for
        # the caller's, that pause would be renewed by a commit, and never end.
        async with self._in_order:
            return await super().is_paused()

    async def get_weight_version(self) -> str:
        """The ranks' weight version; this process answers with it from now on."""
        version = str((await self._serving())["weight_version"])
        self._manager._update_weight_version_if_provided(version)
        return version

    async def _apply_broadcast(self, broadcast: Any) -> None:
        """Learn the weight version before requests go on: another process may have set it."""
        async with self._in_order:
            if not broadcast.is_pause:
                try:
                    await self.get_weight_version()
                except Exception:
                    logger.exception("delta updates: the weight version is not known")
            await self._apply_theirs(broadcast)

    async def _pause(self, mode: str) -> None:
        await super()._pause(mode)
        if mode == "abort":
            await self._wait_until_idle()

    async def _wait_for_requests(self) -> None:
        """Let no process send a new request, and wait for those in flight."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        manager = self._manager
        told = asyncio.get_running_loop().create_future()
        manager._pause_continue_future = told
        # The router tells every process, and does not pass this mode on to the ranks.
        manager._dispatch_to_scheduler(PauseGenerationReqInput(mode="abort"))
        await told
        await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        """Wait until the ranks have no request, and let them begin none that is still under way."""
        while not (await self._serving())["idle"]:
            await asyncio.sleep(_IDLE_POLL_S)
        await super()._pause("retract")

    async def _serving(self) -> dict[str, Any]:
        [answer, *_] = await self.call("serving", {})
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
        found: dict[str, Any] = answer["ok"]
        return found
