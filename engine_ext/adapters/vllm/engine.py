"""One vLLM server, for the delta service: calls of all ranks, stopping and resuming."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from engine_ext.adapters.vllm import engine_core
from engine_ext.adapters.vllm.features import may_span_hosts
from engine_ext.errors import DeltaError
from engine_ext.ranks import replicas
from engine_ext.ranks.operations import (
    Operation,
    ReplyT,
    Stop,
    StoppedCall,
    decode_answers,
    encode_request,
)

_DEATH_POLL_S = 0.5


class VllmEngine:
    """The engine as the endpoints see it, see `delta_server.engine.Engine`.

    It keeps the current methods of vLLM's client. The caller's are replaced later, see
    `delta_server.commit.serialize_with_commits`.
    """

    name = "vllm"

    def __init__(self, client: Any) -> None:
        self._client = client
        self._replicas = replicas.count()
        self._calling = asyncio.Lock()
        self._pause = client.pause_generation
        parallel = client.vllm_config.parallel_config
        self.shared = parallel._api_process_count > 1
        self.address = _own_address() if may_span_hosts(parallel) else None

    @property
    def model(self) -> str | None:
        return str(self._client.vllm_config.model_config.model)

    async def call(
        self, request: Operation[ReplyT], method: str = "delta_updates"
    ) -> list[ReplyT | DeltaError]:
        """Call a method of every worker with an operation.

        Return every rank's reply or error, in rank order; RuntimeError if the engine died.
        """
        rpc = ("collective_rpc", method, None, encode_request(request), dict[str, Any]())
        answers = await self._ask_cores(*rpc)
        return decode_answers(request, [answer for replica in answers for answer in replica])

    async def call_stopped(
        self, request: Operation[ReplyT], flush_cache: bool | str
    ) -> StoppedCall[ReplyT]:
        """See `delta_server.engine.Engine`."""
        call = (engine_core.CALL_STOPPED, flush_cache, *encode_request(request))
        answers = await self._ask_cores(*call)
        stops = [msgspec.convert(answer["stop"], Stop) for answer in answers]
        every = [one for answer in answers for one in answer["answers"]]
        return StoppedCall.of(decode_answers(request, every), stops)

    async def is_paused(self) -> bool:
        return bool(await self._unless_dead(self._client.is_paused()))

    async def end_requests(self, mode: str) -> None:
        """See `delta_server.engine.Engine`.

        The client's method also sleeps 20 ms, in which the requests that have ended are answered.
        """
        await self._unless_dead(self._pause(mode=mode, clear_cache=False))

    async def check_salt(self) -> None:
        """Do nothing: every vLLM can."""

    async def publish(self, version: str | None, *, resumes: bool) -> None:
        """See `delta_server.engine.Engine`."""
        await self._ask_cores(engine_core.PUBLISH, version, resumes)

    async def get_weight_version(self) -> str:
        return str(await self._unless_dead(self._client.get_weight_version()))

    async def _ask_cores(self, method: str, *arguments: Any) -> list[Any]:
        """Return what a method of every replica's engine core returns, in their order.

        vLLM's own calls return the first replica's answer alone. All replicas must get the calls in
        the same order, because they vote in some.
        """
        core = self._client.engine_core
        if self._replicas == 1:
            return [await self._unless_dead(core.call_utility_async(method, *arguments))]
        async with self._calling:
            answers: list[Any] = await self._unless_dead(
                core.call_utility_all_async(method, *arguments)
            )
        return answers

    async def _unless_dead(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a call, but not forever: vLLM never ends one of a dead engine."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=_DEATH_POLL_S))[0]:
                if self._client.errored:
                    raise RuntimeError("the engine died")
            return task.result()
        finally:
            task.cancel()


def _own_address() -> str:
    """Return the address by which vLLM's own processes on other hosts reach this one."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())
