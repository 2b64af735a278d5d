"""The entry point that vLLM loads in every one of its processes, for an unmodified vLLM.

In the API server it adds the flags to the engine's own parser; when they are used, it exports the
settings and puts the endpoints in. In a worker it finds the settings in the environment and gives
the worker its receiver. Without the flag nothing but the parser is touched. vLLM logs and
swallows what a plugin raises, so nothing here relies on raising: the flag itself does not exist
where this module could not be loaded, and `frontend` and `worker` check at start-up that both
sides are in.
"""

from __future__ import annotations

import functools
from typing import Any

from engine_ext import settings
from engine_ext.adapters.vllm import hooks


def register() -> None:
    """Install the hooks; safe to call more than once per process.

    A vLLM that was patched has them in its source: there this does nothing.
    """
    if hooks.in_source():
        return
    _add_flags()
    if settings.from_environment() is not None:
        _install()


def _add_flags() -> None:
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs.add_cli_args, "delta_updates"):
        return
    original_add = EngineArgs.add_cli_args
    original_from = EngineArgs.from_cli_args.__func__

    @functools.wraps(original_add)
    def add_cli_args(parser: Any) -> Any:
        parser = original_add(parser)
        hooks.add_arguments(parser)
        return parser

    @functools.wraps(original_from)
    def from_cli_args(cls: type[Any], args: Any) -> Any:
        if hooks.read_arguments(args):
            _install()
        return original_from(cls, args)

    add_cli_args.delta_updates = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)


def _install() -> None:
    from engine_ext.adapters.vllm import frontend, worker

    worker.install()
    frontend.install()
