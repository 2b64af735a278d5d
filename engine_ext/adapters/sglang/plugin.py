"""The entry point that SGLang loads in its launcher and schedulers, for an unmodified SGLang.

In the launcher it adds the flags to SGLang's own parser; if they are used, it exports the settings
and installs the endpoints. In a scheduler it reads the settings from the environment and hooks the
loading of the model and the disk updates. Without the flag, only the parser is changed. SGLang logs
and swallows what a plugin raises, so nothing here relies on raising: if this module cannot be
loaded, the flag does not exist, and the endpoints ask every rank for its receiver before the server
serves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

from engine_ext import settings
from engine_ext.adapters.entry_point import add_flags, is_in_source
from engine_ext.adapters.sglang import hooks, names


def register() -> None:
    """Install the hooks; safe to call more than once per process.

    Does nothing if SGLang was patched and has the hooks in its source.
    """
    if is_in_source("sglang.srt.server_args"):
        return
    from sglang.srt.server_args import ServerArgs

    add_flags(ServerArgs, hooks.add_arguments, hooks.read_arguments, _hook_server)
    if settings.from_environment() is not None:
        _hook_schedulers()


def _hook_server() -> None:
    """Attach the endpoints when the app of this process starts."""
    from sglang.srt.entrypoints import http_server

    app = http_server.app
    original = app.router.lifespan_context
    if hasattr(original, "delta_updates"):
        return

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        await hooks.attach(app, http_server.get_global_state().tokenizer_manager)
        async with original(app) as state:
            yield state

    lifespan.delta_updates = True  # type: ignore[attr-defined]
    app.router.lifespan_context = lifespan


def _hook_schedulers() -> None:
    """Make this process's receiver when its model is loaded, and route requests to it."""
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.model_executor.model_runner import ModelRunner

    if hasattr(ModelRunner.load_model, "delta_updates"):
        return
    updater_type = weight_updater.SchedulerWeightUpdaterManager
    original_load = ModelRunner.load_model
    original_update = updater_type.update_weights_from_disk

    @functools.wraps(original_load)
    def load_model(runner: Any) -> None:
        hooks.load_model(runner, functools.partial(original_load, runner))

    @functools.wraps(original_update)
    def update_weights_from_disk(updater: Any, request: Any) -> Any:
        if request.load_format == names.LOAD_FORMAT:
            return hooks.update_weights(updater, request)
        return original_update(updater, request)

    load_model.delta_updates = True  # type: ignore[attr-defined]
    ModelRunner.load_model = load_model
    updater_type.update_weights_from_disk = update_weights_from_disk
