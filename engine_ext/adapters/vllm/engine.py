"""Pause, flush and resume one vLLM server, for the delta service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from engine_ext.adapters.vllm import prefix_cache
from engine_ext.adapters.vllm.features import may_span_hosts
from engine_ext.errors import Conflict, DeltaError, SaltUnavailable
from engine_ext.ranks import replicas
from engine_ext.ranks.operations import Operation, ReplyT, decode_answers, encode_request

_DEATH_POLL_S = 0.5
_HELD_KV = "Failed to reset KV cache even when all the running requests are preempted"  # vLLM's


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
        self._pause, self._resume = client.pause_generation, client.resume_generation
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
        arguments = encode_request(request)
        if self._replicas == 1:
            call = self._client.collective_rpc(method, args=arguments)
            return decode_answers(request, await self._unless_dead(call))
        # vLLM's own `collective_rpc` returns the first replica's answers alone. All replicas must
        # get the calls in the same order, because they vote in some.
        async with self._calling:
            client = self._client.engine_core
            rpc = ("collective_rpc", method, None, arguments, dict[str, Any]())
            answers = await self._unless_dead(client.call_utility_all_async(*rpc))
        return decode_answers(request, [answer for replica in answers for answer in replica])

    async def is_paused(self) -> bool:
        return bool(await self._unless_dead(self._client.is_paused()))

    async def pause(self, mode: str, *, flush_cache: bool) -> float:
        """Stop scheduling; with `flush_cache`, then do as the method of that name does.

        Return the milliseconds of the latter.

        Raises:
            RuntimeError: the cache could not be reset.
        """
        # Not with `clear_cache`, which also clears the caches of processed images. These do not
        # depend on the weights, and a request that arrives meanwhile would fail: the front end
        # expects its image in the engine's cache.
        pause = self._pause
        if mode == "keep":
            # The client's method is this call and a sleep of 20 ms, in which requests that have
            # just ended can be answered. The other modes end all, so that there the order counts.
            pause = self._client.engine_core.pause_scheduler_async
        await self._unless_dead(pause(mode=mode, clear_cache=False))
        start = time.perf_counter()
        if flush_cache:
            await self.flush_cache()
        return (time.perf_counter() - start) * 1e3

    async def flush_cache(self) -> None:
        """Drop all KV and image embeddings of a paused engine; kept requests are recomputed.

        Raises:
            Conflict: a request holds KV that vLLM does not take from it.
            RuntimeError: the cache could not be reset.
        """
        reset = self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        try:
            done = await self._unless_dead(reset)
        except Exception as error:
            if _HELD_KV not in str(error):
                raise
            raise Conflict(
                "a request holds KV that vLLM does not drop, such as one that waits for more input "
                "(a realtime session); send the sync again when it has ended, or with "
                "flush_cache=salt"
            ) from error
        if not done:
            raise RuntimeError("vLLM did not reset its prefix cache")
        await self._unless_dead(self._client.reset_encoder_cache())

    async def salt_cache(self) -> None:
        """See `delta_server.engine.Engine`. All replicas do it."""
        await self._salt()

    async def check_salt(self) -> None:
        """See `delta_server.engine.Engine`."""
        await self._salt(True)

    async def _salt(self, *only_checks: bool) -> None:
        core = self._client.engine_core
        call = core.call_utility_async(prefix_cache.METHOD, *only_checks)
        try:
            await self._unless_dead(call)
        except Exception as error:
            if "no attribute" not in str(error):
                raise
            raise SaltUnavailable(
                "flush_cache=salt needs the plugin in vLLM's engine core, which has loaded none; "
                "the source patches do not reach it"
            ) from error

    async def resume(self) -> None:
        await self._unless_dead(self._resume())

    async def set_weight_version(self, version: str) -> None:
        await self._unless_dead(self._client.update_weight_version(version))

    async def get_weight_version(self) -> str:
        return str(await self._unless_dead(self._client.get_weight_version()))

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
