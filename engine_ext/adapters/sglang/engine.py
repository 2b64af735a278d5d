"""Pause, flush and resume one SGLang server, for the delta service."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from typing import Any

from engine_ext.adapters.sglang.prefix_cache import SaltCache
from engine_ext.adapters.sglang.rpc import Channel
from engine_ext.errors import DeltaError
from engine_ext.ranks.operations import Operation, ReplyT

_IDLE_POLL_S = 0.05


class SglangEngine:
    """The engine as the endpoints see it, see `delta_server.engine.Engine`.

    It keeps the current methods of SGLang's tokenizer manager. The caller's are replaced later, see
    `delta_server.commit.serialize_with_commits`.
    """

    name = "sglang"
    shared = False

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.address = _own_address(manager.server_args)
        self._pause_generation = manager.pause_generation
        self._continue_generation = manager.continue_generation
        self._channel = Channel(manager)

    @property
    def model(self) -> str | None:
        return str(self._manager.server_args.model_path)

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        """Return every rank's reply or error, in rank order; RuntimeError if the engine died."""
        return await self._channel.call(request)

    async def is_paused(self) -> bool:
        return bool(self._manager.is_pause)

    async def pause(self, mode: str, *, flush_cache: bool) -> float:
        """Stop scheduling. With `flush_cache` all KV is dropped; kept requests are recomputed.

        Return the milliseconds that dropping took.

        Raises:
            RuntimeError: the cache could not be flushed.
        """
        if mode == "keep":
            await self._pause("retract" if flush_cache else "in_place")
        elif mode == "abort":
            await self._pause("abort")
        else:
            await self._wait_for_requests()
        start = time.perf_counter()
        if flush_cache:
            await self._flush()
        return (time.perf_counter() - start) * 1e3

    async def flush_cache(self) -> None:
        """Drop all KV of a paused engine; the requests in flight are recomputed. See `pause`."""
        await self._pause("retract")
        await self._flush()

    async def salt_cache(self) -> None:
        """See `delta_server.engine.Engine`. All ranks use the same salt."""
        for answer in await self.call(SaltCache(salt=uuid.uuid4().hex)):
            if isinstance(answer, DeltaError):
                raise answer

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
        """Hold new requests back, as SGLang's mode ``abort`` does, and wait for those in flight."""
        async with self._manager.is_pause_cond:
            self._manager.is_pause = True
        while await self._manager.model_update_lock.is_locked():
            await asyncio.sleep(_IDLE_POLL_S)

    async def _flush(self) -> None:
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        # The manager's own method returns the first replica's answer alone.
        for result in await self._manager.flush_cache_communicator(FlushCacheReqInput()):
            if not result.success:
                raise RuntimeError(f"SGLang did not flush its cache: {result.message}")


def _own_address(server_args: Any) -> str | None:
    """Return the address by which other hosts reach this one, the first; None if there are none."""
    if server_args.nnodes == 1:
        return None
    host, _, _port = server_args.dist_init_addr.rpartition(":")
    [(*_, address), *_] = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return str(address[0])
