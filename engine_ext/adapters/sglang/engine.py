"""One SGLang server, for the delta service: calls of all ranks, stopping and resuming."""

from __future__ import annotations

import asyncio
import socket
import uuid
from typing import Any

from engine_ext.adapters.sglang import prefix_cache
from engine_ext.adapters.sglang.rpc import Channel, HowToStop, Publish
from engine_ext.errors import DeltaError
from engine_ext.ranks.operations import Operation, ReplyT, StoppedCall

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
        self._channel = Channel(manager)

    @property
    def model(self) -> str | None:
        return str(self._manager.server_args.model_path)

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        """Return every rank's reply or error, in rank order; RuntimeError if the engine died."""
        return await self._channel.call(request)

    async def call_stopped(
        self, request: Operation[ReplyT], flush_cache: bool | str
    ) -> StoppedCall[ReplyT]:
        """See `delta_server.engine.Engine`. All ranks use the same salt."""
        salt = uuid.uuid4().hex if flush_cache == "salt" else None
        await self._hold()
        stop = HowToStop(flushes=flush_cache is True, salt=salt)
        return await self._channel.call_stopped(request, stop)

    async def is_paused(self) -> bool:
        return bool(self._manager.is_pause)

    async def end_requests(self, mode: str) -> None:
        """See `delta_server.engine.Engine`."""
        if mode == "abort":
            await self._pause("abort")
        else:
            await self._wait_for_requests()

    async def check_salt(self) -> None:
        """See `delta_server.engine.Engine`."""
        prefix_cache.check_salt()

    async def publish(self, version: str | None, *, resumes: bool) -> None:
        """See `delta_server.engine.Engine`."""
        # Before a token of the new weights can be answered.
        self._manager._update_weight_version_if_provided(version)
        for answer in await self.call(Publish(version=version, resumes=resumes)):
            if isinstance(answer, DeltaError):
                raise answer
        if resumes:
            await self._release()

    async def get_weight_version(self) -> str:
        return str(self._manager.config_value("weight_version"))

    async def _hold(self) -> None:
        """Hold new requests back, as SGLang's own pause does."""
        async with self._manager.is_pause_cond:
            self._manager.is_pause = True

    async def _release(self) -> None:
        """Let requests through that were held back; generation has resumed."""
        async with self._manager.is_pause_cond:
            self._manager.is_pause = False
            self._manager.is_pause_cond.notify_all()

    async def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._pause_generation(PauseGenerationReqInput(mode=mode))

    async def _wait_for_requests(self) -> None:
        """Hold new requests back, and wait for those in flight."""
        await self._hold()
        while await self._manager.model_update_lock.is_locked():
            await asyncio.sleep(_IDLE_POLL_S)


def _own_address(server_args: Any) -> str | None:
    """Return the address by which other hosts reach this one, the first; None if there are none."""
    if server_args.nnodes == 1:
        return None
    host, _, _port = server_args.dist_init_addr.rpartition(":")
    [(*_, address), *_] = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return str(address[0])
