"""What vLLM calls, whichever way delta updates got in.

On an unmodified vLLM the wrappers of `plugin`, `frontend` and `worker` call these functions; with
``patches/`` applied, vLLM's own source does, and knows this module by the name `NAME`. That name
in a module of vLLM is how one tells a patched source, and why there is never a second hook.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from typing import Any

from engine_ext import settings

NAME = "delta_hooks"
LOAD_FORMAT = "delta"

# The modules of vLLM that the patches let import this one.
_PATCHED = (
    "vllm.engine.arg_utils",
    "vllm.plugins.endpoint_plugins.interface",
    "vllm.v1.worker.worker_base",
)


def in_source() -> bool:
    """Whether vLLM's own source has the flags; then the plugin has nothing to do."""
    from vllm.engine import arg_utils

    return hasattr(arg_utils, NAME)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of vLLM's HTTP server; leave other parsers alone.

    vLLM's other commands serve no endpoint, and there the flag must not seem to work.
    """
    if "--uvicorn-log-level" in parser._option_string_actions:
        settings.add_arguments(parser)


def read_arguments(args: argparse.Namespace) -> bool:
    """Export the settings, before vLLM starts a process, if delta updates are asked for.

    The load format ``delta`` asks for them as ``--enable-delta-updates`` does.

    Returns:
        Whether they are.

    Raises:
        ValueError: names the option that is in the way, or the files of vLLM that are not
            patched although others are.
    """
    if hasattr(args, "enable_delta_updates") and _is_delta(getattr(args, "load_format", "")):
        args.enable_delta_updates = True
    chosen = settings.from_namespace(args)
    if chosen is None:
        return False
    _refuse_half_patched()
    _refuse_untested(args)
    chosen.export()
    _log_as_vllm()
    return True


def endpoint_plugins() -> list[Any]:
    """The endpoints, as vLLM's own kind of plugin; none unless they are asked for."""
    if settings.from_environment() is None:
        return []
    from engine_ext.adapters.vllm.frontend import DeltaEndpoints

    # One of several HTTP processes has not read the arguments itself.
    _log_as_vllm()
    return [DeltaEndpoints()]


def on_worker_created(worker: Any) -> None:
    """Let a worker take deltas, if they are asked for; called at the end of its constructor.

    Without the HTTP server, the load format ``delta`` asks for them with the default settings;
    deltas then come in through vLLM's ``collective_rpc``.

    Raises:
        RuntimeError: the worker serves LoRA adapters.
    """
    chosen = settings.from_environment()
    if chosen is None and _is_delta(worker.load_config.load_format):
        chosen = settings.Settings()
    if chosen is None:
        return
    if worker.lora_config is not None:
        raise RuntimeError("delta updates do not work with LoRA yet: its layers rename the weights")
    from engine_ext.adapters.vllm.worker import attach_receiver

    _log_as_vllm()
    attach_receiver(worker, chosen)


def _log_as_vllm() -> None:
    """Let what this package logs come out where vLLM's own log does."""
    theirs = logging.getLogger("vllm")
    for ours in (logging.getLogger("engine_ext"), logging.getLogger("delta_server")):
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)


def _is_delta(load_format: Any) -> bool:
    return str(load_format).lower() == LOAD_FORMAT


def _refuse_half_patched() -> None:
    """Refuse a source of which only some files are patched: a part of the hooks would be missing.

    Raises:
        ValueError: names the modules that are not patched.
    """
    bare = [name for name in _PATCHED if not hasattr(importlib.import_module(name), NAME)]
    if bare and len(bare) < len(_PATCHED):
        raise ValueError(
            f"this vLLM is patched only in part, {', '.join(bare)} not at all; "
            "scripts/apply_patches.py vllm --status says more"
        )


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
    if getattr(args, "pipeline_parallel_size", None) not in (None, 1):
        refuse("--pipeline-parallel-size above 1", "it is not tested")
    for name in ("enable_eplb", "enable_elastic_ep"):
        if getattr(args, name, False):
            refuse("--" + name.replace("_", "-"), "experts move between the ranks")
    if getattr(args, "nnodes", None) not in (None, 1) or getattr(args, "headless", False):
        refuse("several hosts", "the spool folder is read by every rank")
    if getattr(args, "distributed_executor_backend", None) not in (None, "mp", "uni"):
        refuse("this --distributed-executor-backend", "only mp and uni are tested")
    if getattr(args, "enable_lora", False):
        refuse("--enable-lora", "LoRA layers rename the weights")
    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False) or getattr(args, "grpc", False):
        refuse("this front end", "it has no delta endpoints; use the Python HTTP server")
