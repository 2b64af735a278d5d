"""The entry point that vLLM loads in each of its processes, for an unmodified vLLM.

In the API server it adds the flags to vLLM's own parser; if they are used, it exports the settings
and installs the endpoints. In a worker it reads the settings from the environment and gives the
worker its receiver. Without the flag, only the parser is changed. vLLM logs and swallows what a
plugin raises, so nothing here relies on raising: if this module cannot be loaded, the flag does not
exist, and `install_endpoints` and the front end check at start-up that both sides are installed.
"""

from __future__ import annotations

import functools
from typing import Any

from engine_ext import settings
from engine_ext.adapters.entry_point import add_flags, is_in_source
from engine_ext.adapters.vllm import engine_core, hooks

_PATH = "/update_weights_delta"


def register() -> None:
    """Install the hooks; safe to call more than once per process.

    Does nothing if vLLM was patched and has the hooks in its source.
    """
    if is_in_source("vllm.engine.arg_utils"):
        return
    from vllm.engine.arg_utils import EngineArgs

    add_flags(EngineArgs, hooks.add_arguments, hooks.read_arguments, _install)
    if settings.from_environment() is not None:
        _install()


def _install() -> None:
    install_checks()
    install_workers()
    install_endpoints()
    engine_core.install()


def install_checks() -> None:
    """Check vLLM's configuration where it is made, before a process starts; safe to call again."""
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs.create_engine_config, "delta_updates"):
        return
    original_config = EngineArgs.create_engine_config

    @functools.wraps(original_config)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original_config(self, *args, **kwargs)
        hooks.check_config(config)
        return config

    create_engine_config.delta_updates = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def install_workers() -> None:
    """Make every worker of this process a receiver; safe to call more than once."""
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase.__init__, "delta_updates"):
        return
    # vLLM loads plugins while it makes a worker, just before it calls the worker's constructor.
    # That calls this one first: what it does itself comes after the hook.
    original = WorkerBase.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hooks.on_worker_created(self)

    init.delta_updates = True  # type: ignore[attr-defined]
    WorkerBase.__init__ = init


def install_endpoints() -> None:
    """Add the endpoints to the next app that vLLM builds; safe to call more than once.

    Raises:
        AttributeError: this version of vLLM has other internals; it must not start with the flag.
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
        if not any(getattr(route, "path", None) == _PATH for route in app.routes):
            raise RuntimeError("delta updates are enabled, but their endpoint is not in the app")
        return await original_serve(app, *args, **kwargs)

    load_endpoint_plugins.delta_updates = True  # type: ignore[attr-defined]
    plugins.load_endpoint_plugins = load_endpoint_plugins
    entry.serve_http = serve_http
