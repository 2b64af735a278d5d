"""vLLM's front end: the endpoints, installed through vLLM's own endpoint-plugin protocol.

vLLM loads an endpoint plugin only if ``VLLM_PLUGINS`` names it. A flag on the command line is just
as explicit, so the plugin is handed to vLLM's own wiring directly.
"""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from engine_ext import settings
from engine_ext.adapters.vllm import token_versions, transfer_frontend
from engine_ext.adapters.vllm.engine import VllmEngine
from engine_ext.errors import AdapterNotLoaded, DeltaError
from engine_ext.ranks.operations import AbortSync, RankState

logger = logging.getLogger(__name__)


def _always(*_: Any, **__: Any) -> bool:
    return True


def _pause_waits(
    states: Sequence[RankState],
    *_: Any,
    mode: str = "abort",
    wait_for_inflight_requests: bool | None = None,  # vLLM 0.31 has it, too
    **__: Any,
) -> bool:
    return mode == "wait" or bool(wait_for_inflight_requests)  # those continue to their ends


def _sleep_waits(
    states: Sequence[RankState], level: int = 1, mode: str = "abort", *_: Any, **__: Any
) -> bool:
    return mode == "wait"


def _wakes_all(
    states: Sequence[RankState], tags: Sequence[str] | None = None, *_: Any, **__: Any
) -> bool:
    # vLLM resumes once all memory is back, and the weights fall asleep with the KV cache.
    only_weights = {*(tags or ())} == {"weights"}
    return not (only_weights and states and all(state.asleep for state in states))


# What a caller can ask the client for, but not during a commit, and what says whether requests in
# flight generate then. A wake-up resumes an engine that has not slept. vLLM 0.31's client has no
# method for the last.
_EXCLUDED_BY_COMMITS: dict[str, Callable[..., bool] | None] = {
    "pause_generation": _pause_waits,
    "resume_generation": _always,
    "sleep": _sleep_waits,
    "wake_up": _wakes_all,
    "release_kv_cache_memory": None,
}


class DeltaEndpoints:
    """An ``EndpointPlugin`` of vLLM."""

    name = "delta_updates"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Register the routes. vLLM calls this while it builds the app."""
        from delta_server import attach
        from delta_server.guards import TransferGuard, error_response
        from delta_server.sources.transfer import MAX_REQUEST_BYTES

        async def answer(request: Any, error: DeltaError) -> Any:
            return error_response(error)

        theirs = list(app.router.routes)
        attach(app)
        _replace_routes(app, theirs)
        paths, most = transfer_frontend.PATHS, MAX_REQUEST_BYTES
        app.add_middleware(TransferGuard, state=app.state, paths=paths, max_bytes=most)
        app.add_exception_handler(DeltaError, answer)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect the routes with the engine. vLLM calls this once, before it serves.

        Raises:
            RuntimeError: a worker has no receiver; the server does not start.
        """
        from delta_server import DeltaService, serialize_with_commits

        chosen = settings.from_namespace(args) or settings.from_environment()
        if engine_client is None or chosen is None:
            raise RuntimeError("delta updates need an engine; this server has none")
        engine = VllmEngine(engine_client)
        service = DeltaService(engine, chosen)
        await service.start()
        for name, resumes in _EXCLUDED_BY_COMMITS.items():
            original = getattr(engine_client, name, None)
            if original is not None:
                wrapped = serialize_with_commits(service.committer, original, resumes)
                setattr(engine_client, name, wrapped)
        if engine_client.vllm_config.lora_config is not None:
            _follow_unloading(state.openai_serving_models, engine)
        if transfer_frontend.is_chosen(engine_client.vllm_config.weight_transfer_config):
            state.delta_transfer = transfer_frontend.install(engine_client, service, engine)
        token_versions.install(state)
        state.delta_service = service


def _replace_routes(app: Any, theirs: list[Any]) -> None:
    """Let the added routes answer before `theirs`, without those of the same path and methods.

    vLLM 0.31 asks its own routes first; later releases do this themselves.
    """
    ours = [route for route in app.router.routes if route not in theirs]
    operations = {(route.path, method) for route in ours for method in route.methods}

    def is_replaced(route: Any) -> bool:
        path, methods = getattr(route, "path", None), getattr(route, "methods", None) or ()
        return bool(methods) and all((path, method) in operations for method in methods)

    app.router.routes[:] = [*ours, *(route for route in theirs if not is_replaced(route))]


def _follow_unloading(models: Any, engine: VllmEngine) -> None:
    """Notify the workers when an adapter is unloaded: vLLM only forgets its name here."""
    original = models.unload_lora_adapter

    @functools.wraps(original)
    async def unload_lora_adapter(request: Any) -> Any:
        answer = await original(request)
        if request.lora_name not in models.lora_requests:
            unload = AbortSync(adapter=request.lora_name, unloads=True)
            for error in await engine.call(unload):
                # Engines that take no updates of adapters have nothing to forget.
                if isinstance(error, DeltaError) and not isinstance(error, AdapterNotLoaded):
                    logger.warning(
                        "delta updates: a worker still has %s: %s", request.lora_name, error.message
                    )
        return answer

    models.unload_lora_adapter = unload_lora_adapter
