"""The functions that vLLM calls, patched or not.

On an unmodified vLLM the wrappers in `plugin` call them; with ``patches/`` applied, vLLM's own
source does, and imports this module under the name `engine_ext.adapters.entry_point.NAME`. That
name in a module of vLLM shows that the source is patched, so that no hook is installed twice.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from engine_ext import settings
from engine_ext.adapters.entry_point import is_patched
from engine_ext.adapters.refusals import refuse
from engine_ext.adapters.vllm.features import replicas_answer_together, require_supported_version
from engine_ext.adapters.vllm.refusals import ARGUMENTS, FREEZING, RESOLVED
from engine_ext.ranks import replicas

LOAD_FORMAT = "delta"
_SHARED_MEMORY = "ipc_cache"

# The modules of vLLM that the patches let import this one.
_PATCHED = (
    "vllm.engine.arg_utils",
    "vllm.plugins.endpoint_plugins.interface",
    "vllm.v1.engine.core",
    "vllm.v1.worker.worker_base",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of vLLM's HTTP server; leave other parsers unchanged.

    vLLM's other commands serve no endpoint, so the flag must not seem to work there.
    """
    if "--uvicorn-log-level" in parser._option_string_actions:
        settings.add_arguments(parser)


def read_arguments(args: argparse.Namespace) -> bool:
    """Return whether delta updates are enabled, and export their settings if they are.

    vLLM calls this before it starts a process. The load format ``delta`` enables them like
    ``--enable-delta-updates``.

    Raises:
        ValueError: an option or this version is not supported, or vLLM is only partly patched.
    """
    if hasattr(args, "enable_delta_updates") and _is_delta(getattr(args, "load_format", "")):
        args.enable_delta_updates = True
    chosen = settings.from_namespace(args)
    if chosen is None:
        return False
    require_supported_version()
    is_patched("vLLM", _PATCHED)  # refuses one that is so only in part
    refuse(_set_up(args), ARGUMENTS)
    replicas.host(args.data_parallel_size or 1)
    chosen.export()
    _log_as_vllm()
    return True


def check_config(config: Any) -> None:
    """Refuse a `VllmConfig` that delta updates do not work with.

    vLLM derives some settings from others, the model or the environment, so this is not known from
    the command line.

    Raises:
        ValueError: it is refused. Nothing is loaded yet, and the engine must not start.
    """
    from vllm import envs

    transfer = getattr(config, "kv_transfer_config", None)
    connector = getattr(transfer, "kv_connector", None)
    formats = {str(one.load_format).lower() for one in _load_configs(config)}
    offload = getattr(config, "offload_config", None)
    backend = getattr(offload, "offload_backend", None)
    group_size = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    has_server = settings.from_environment() is not None
    cache = getattr(config, "cache_config", None)
    resolved = argparse.Namespace(
        keeps_queries=_keeps_queries(getattr(config, "model_config", None)),
        caches_without_server=not has_server and bool(cache and cache.enable_prefix_caching),
        kv_connector=connector,
        kv_role=getattr(transfer, "kv_role", None) if connector else None,
        load_format=_SHARED_MEMORY if _SHARED_MEMORY in formats else None,
        prefetches_layers=backend == "prefetch" or (group_size > 0 and backend != "uva"),
        startup_plan=getattr(envs, "VLLM_ENABLE_STARTUP_PLAN", False),
        freezes_weights=freezes_weights(getattr(config, "compilation_config", None)),
    )
    refuse(resolved, (FREEZING, *RESOLVED))


def _keeps_queries(model: Any) -> bool:
    """Return whether the engine keeps an encoded query until its documents are scored."""
    pooler = getattr(model, "pooler_config", None)
    if getattr(model, "runner_type", None) != "pooling" or pooler is None:
        return False
    flash = getattr(pooler, "enable_flash_late_interaction", True)
    return bool(flash) and getattr(model, "score_type", None) == "late-interaction"


def _load_configs(config: Any) -> list[Any]:
    """Return the load configuration of the model, and of the draft model if it has its own."""
    draft = getattr(getattr(config, "speculative_config", None), "draft_load_config", None)
    return [one for one in (config.load_config, draft) if one is not None]


def endpoint_plugins() -> list[Any]:
    """Return the endpoints as endpoint plugins of vLLM; none unless delta updates are enabled."""
    if settings.from_environment() is None:
        return []
    from engine_ext.adapters.vllm.frontend import DeltaEndpoints

    # If there are several HTTP processes, this one has not called `read_arguments` itself.
    _log_as_vllm()
    return [DeltaEndpoints()]


def on_core_created() -> None:
    """Give the engine cores of this process their methods, if delta updates are enabled."""
    if settings.from_environment() is None:
        return
    from engine_ext.adapters.vllm import engine_core

    engine_core.install()


def on_worker_created(worker: Any) -> None:
    """Attach a receiver if delta updates are enabled; called in a worker's constructor.

    That is at the end of the constructor of its base class, before the body of its own.

    Without the HTTP server, the load format ``delta`` enables them with the default settings;
    deltas then arrive through vLLM's ``collective_rpc``.

    Raises:
        ValueError: this version of vLLM or its configuration is not supported.
    """
    chosen = settings.from_environment()
    if chosen is None and _is_delta(worker.load_config.load_format):
        chosen = settings.Settings()
    if chosen is None:
        return
    require_supported_version()
    check_config(worker.vllm_config)
    from engine_ext.adapters.vllm.worker import attach_receiver

    _log_as_vllm()
    if _is_delta(worker.load_config.load_format):
        from engine_ext.adapters.vllm.checkpoint import register_load_format

        register_load_format(LOAD_FORMAT)
    attach_receiver(worker, chosen)


def _log_as_vllm() -> None:
    """Send this package's log to the handlers of vLLM's own."""
    engine_logger = logging.getLogger("vllm")
    for logger in (logging.getLogger("engine_ext"), logging.getLogger("delta_server")):
        logger.handlers, logger.propagate = list(engine_logger.handlers), False
        logger.setLevel(engine_logger.level)


def _is_delta(load_format: Any) -> bool:
    return str(load_format).lower() == LOAD_FORMAT


def _set_up(args: Any) -> Any:
    """Return the parsed command line and all other settings that delta updates depend on."""
    from vllm import envs

    local = getattr(args, "data_parallel_size_local", None)
    return argparse.Namespace(
        **vars(args),
        headless_alone=getattr(args, "headless", False) and (args.nnodes or 1) == 1,
        replicas_elsewhere=local not in (None, args.data_parallel_size),
        one_replica_answers=(args.data_parallel_size or 1) > 1 and not replicas_answer_together(),
        encoder_learns_scales=getattr(args, "mm_encoder_attn_dtype", None) == "fp8"
        and args.mm_encoder_fp8_scale_path is None,
        freezes_weights=freezes_weights(getattr(args, "compilation_config", None)),
        rust_frontend=getattr(envs, "VLLM_USE_RUST_FRONTEND", False),
        on_ray=_is_on_ray(args),
        # From 0.33 on there is no other executor, and no such variable.
        ray_executor_v1=not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True),
    )


def freezes_weights(compilation: Any) -> bool:
    """Return whether the user lets torch's inductor make constants of weights.

    Takes vLLM's configuration of compilation, parsed or not, or None.
    """
    name = "inductor_compile_config"
    given = (
        compilation.get(name) if isinstance(compilation, dict) else getattr(compilation, name, {})
    )
    by_variable = os.environ.get("TORCHINDUCTOR_FREEZING") == "1"
    return by_variable or bool((given or {}).get("freezing"))


def _is_on_ray(args: Any) -> bool:
    """Return whether vLLM's ranks are workers of Ray. In two cases vLLM chooses Ray unasked."""
    executor = getattr(args, "distributed_executor_backend", None)
    if executor is not None:
        return str(executor).lower() == "ray"
    if str(getattr(args, "data_parallel_backend", "")).lower() == "ray":
        return True
    ray = sys.modules.get("ray")  # a server in a Ray actor has imported it
    if ray is None or not ray.is_initialized():
        return False
    from ray.util import get_current_placement_group

    return get_current_placement_group() is not None
