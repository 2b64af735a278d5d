"""The entry point that an unmodified vLLM loads in every one of its processes.

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


def register() -> None:
    """Install the hooks; safe to call more than once per process."""
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
        # Only the HTTP server's parser has this one; vLLM's other commands serve no endpoint,
        # and there the flag must not seem to work.
        if "--uvicorn-log-level" in parser._option_string_actions:
            settings.add_arguments(parser)
        return parser

    @functools.wraps(original_from)
    def from_cli_args(cls: type[Any], args: Any) -> Any:
        chosen = settings.from_namespace(args)
        if chosen is not None:
            _refuse_untested(args)
            chosen.export()
            _install()
        return original_from(cls, args)

    add_cli_args.delta_updates = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)


def _install() -> None:
    from engine_ext.adapters.vllm import frontend, worker

    worker.install()
    frontend.install()


def _refuse_untested(args: Any) -> None:
    """Refuse, before anything is loaded, what the delta endpoints cannot serve.

    Raises:
        ValueError: says which option is in the way.
    """
    from vllm import envs

    def refuse(option: str, why: str) -> None:
        raise ValueError(f"--enable-delta-updates does not work with {option} yet: {why}")

    if getattr(args, "data_parallel_size", None) not in (None, 1):
        refuse("--data-parallel-size above 1", "the replicas' versions are not kept together")
    if getattr(args, "nnodes", None) not in (None, 1) or getattr(args, "headless", False):
        refuse("several hosts", "the spool folder is read by every rank")
    if getattr(args, "distributed_executor_backend", None) not in (None, "mp", "uni"):
        refuse("this --distributed-executor-backend", "only mp and uni are tested")
    if getattr(args, "enable_lora", False):
        refuse("--enable-lora", "LoRA layers rename the weights")
    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False) or getattr(args, "grpc", False):
        refuse("this front end", "it has no delta endpoints; use the Python HTTP server")
