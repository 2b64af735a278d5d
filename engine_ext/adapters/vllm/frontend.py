"""vLLM's front end: the endpoints, put in through the engine's own endpoint-plugin protocol.

vLLM loads endpoint plugins only where ``VLLM_PLUGINS`` names them. A flag on the command line is
an explicit wish of the same kind, so the plugin is handed to vLLM's own wiring directly.
"""

from __future__ import annotations

import asyncio
import functools
from argparse import Namespace
from collections.abc import Coroutine
from typing import Any

from engine_ext import settings
from engine_ext.adapters.vllm import hooks

PATH = "/update_weights_delta"
_DEATH_POLL_S = 0.5


def install() -> None:
    """Put the endpoints into the next app that vLLM builds; safe to call more than once.

    Raises:
        AttributeError: this vLLM is wired differently; it must not start with the flag.
    """
    from vllm import plugins
    from vllm.entrypoints.launchers.api_server import entry

    if hasattr(plugins.load_endpoint_plugins, "delta_updates"):
        return
    original_load = plugins.load_endpoint_plugins
    original_serve = entry.serve_http

    @functools.wraps(original_load)
    def load_endpoint_plugins(supported_tasks: Any = None) -> list[Any]:
        return [*original_load(supported_tasks), *hooks.endpoint_plugins()]

    @functools.wraps(original_serve)
    async def serve_http(app: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(getattr(route, "path", None) == PATH for route in app.routes):
            raise RuntimeError("delta updates were asked for, but the endpoint is not in the app")
        return await original_serve(app, *args, **kwargs)

    load_endpoint_plugins.delta_updates = True  # type: ignore[attr-defined]
    plugins.load_endpoint_plugins = load_endpoint_plugins
    entry.serve_http = serve_http


class DeltaEndpoints:
    """An ``EndpointPlugin`` of vLLM."""

    name = "delta_updates"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Register the routes. vLLM calls this while it builds the app."""
        from delta_server.routes import attach

        self._app = app
        attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect the routes with the engine. vLLM calls this once, before it serves.

        Raises:
            RuntimeError: a worker has no receiver; the server does not start.
        """
        from delta_server.commit import heeded
        from delta_server.service import DeltaService

        chosen = settings.from_namespace(args) or settings.from_environment()
        if engine_client is None or chosen is None:
            raise RuntimeError("delta updates need an engine; this server has none")
        service = DeltaService(VllmEngine(engine_client), chosen)
        await service.start()
        for name in ("pause_generation", "resume_generation"):
            setattr(engine_client, name, heeded(service.commits, getattr(engine_client, name)))
        state.delta_service = service


class VllmEngine:
    """The engine as the endpoints see it (`delta_server.service.Engine`)."""

    name = "vllm"

    def __init__(self, client: Any) -> None:
        self._client = client
        # As they are now: what the caller asks of the client waits for our commits (`heeded`).
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
