"""The functions that SGLang calls, patched or not.

On an unmodified SGLang the wrappers in `plugin` call them; with ``patches/`` applied, SGLang's own
source does, and imports this module under the name `engine_ext.adapters.entry_point.NAME`. That
name in a module of SGLang shows that the source is patched, so that no hook is installed twice.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from typing import Any

from engine_ext import settings
from engine_ext.adapters.entry_point import is_patched
from engine_ext.adapters.refusals import refuse
from engine_ext.adapters.sglang.features import require_supported_version
from engine_ext.adapters.sglang.names import LOAD_FORMAT
from engine_ext.adapters.sglang.refusals import ARGUMENTS, RESOLVED
from engine_ext.ranks import replicas

# SGLang's namespaces of settings.
_NAMESPACES = ("spec", "memory", "disagg", "exec", "model")

# The modules of SGLang that the patches let import this one.
_PATCHED = (
    "sglang.srt.server_args",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.managers.scheduler_components.weight_updater",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's parser, and ``delta`` to its load formats."""
    settings.add_arguments(parser)
    formats = getattr(parser._option_string_actions.get("--load-format"), "choices", None)
    if isinstance(formats, list) and LOAD_FORMAT not in formats:
        formats.append(LOAD_FORMAT)


def read_arguments(args: argparse.Namespace) -> bool:
    """Return whether delta updates are enabled, and export their settings if they are.

    SGLang calls this before it starts a process. The load format ``delta`` enables them like
    ``--enable-delta-updates``, and is replaced by ``auto``: SGLang uses the format that it was
    started with as the default of later disk updates, which must keep their meaning.

    Raises:
        ValueError: an option or this version is not supported, or SGLang is only partly patched.
    """
    if str(getattr(args, "load_format", "")).lower() == LOAD_FORMAT:
        args.enable_delta_updates = True
        args.load_format = "auto"
    chosen = settings.from_namespace(args)
    if chosen is None:
        return False
    require_supported_version()
    refuse(_set_up(args), ARGUMENTS)
    replicas.host(getattr(args, "dp_size", None) or 1)
    chosen.export()
    return True


async def attach(app: Any, manager: Any) -> None:
    """Add the endpoints to the app of one HTTP process, if delta updates are enabled.

    Called in the app's lifespan, when SGLang's processes are up and nothing is served yet.

    Raises:
        DeltaError: see `frontend.serve`; the server does not start.
    """
    chosen = settings.from_environment()
    if chosen is None:
        return
    from engine_ext.adapters.sglang.frontend import serve

    _log_as_sglang()
    await serve(app, manager, chosen)


def load_model(runner: Any, load: Callable[[], None] | None = None) -> None:
    """Load a runner's model, and make its receiver if delta updates are enabled.

    The runner's own method loads the model if `load` is None.

    Raises:
        ValueError: delta updates do not work with a setting that was given, or that SGLang has
            derived for the model. SGLang does not start then.
        RuntimeError: nothing can be certified, or syncs might not reach a draft model. SGLang does
            not start then.
    """
    load = load or runner.load_model
    chosen = settings.from_environment()
    if chosen is None:
        load()
        return
    if not runner.is_draft_worker:
        refuse(resolved_settings(), RESOLVED)
    from engine_ext.adapters.sglang.scheduler import attach_receiver

    _log_as_sglang()
    attach_receiver(runner, chosen, load)


def resolved_settings() -> argparse.Namespace:
    """Return the settings that `RESOLVED` asks for; those that this release lacks are left out.

    They are more than the command line: SGLang derives some from the model, from other settings and
    from the environment, and publishes the result in every process.
    """
    from sglang.srt import runtime_context

    names = {condition.name for refusal in RESOLVED for condition in refusal.conditions}
    found: dict[str, Any] = {}
    for namespace in _NAMESPACES:
        get = getattr(runtime_context, f"get_{namespace}", None)
        if get is not None:
            _collect(get(), names, found)
    return argparse.Namespace(**found)


def _collect(bag: Any, names: set[str], found: dict[str, Any]) -> None:
    """Add the settings of these names that are in a namespace, or in one inside of it."""
    found.update((name, value) for name, value in vars(bag).items() if name in names)
    for inner in (getattr(bag, "_subs", None) or {}).values():
        _collect(inner, names, found)


def update_weights(updater: Any, request: Any) -> Any:
    """Answer a request whose load format is ``delta``; runs on every rank and never raises.

    The operation is in the request's `manifest`; SGLang sends rank 0's output to the process that
    asked.
    """
    from engine_ext.adapters.sglang.scheduler import answer

    return answer(updater, request)


def _log_as_sglang() -> None:
    """Log from the level INFO on, through the root logger that SGLang configures."""
    logging.getLogger("engine_ext").setLevel(logging.INFO)
    logging.getLogger("delta_server").setLevel(logging.INFO)


def _set_up(args: Any) -> Any:
    """Return the parsed command line and all other settings that delta updates depend on."""
    cpu_engine = bool(os.environ.get("SGLANG_USE_CPU_ENGINE"))
    on_cpu = getattr(args, "device", None) == "cpu" or cpu_engine
    return argparse.Namespace(
        **vars(args),
        on_cpu=on_cpu,
        patched=is_patched("SGLang", _PATCHED),
        vision_graphs=_is_set("SGLANG_VIT_ENABLE_CUDA_GRAPH"),
        rust_server=_is_set("SGLANG_RUST_SERVER"),
    )


def _is_set(variable: str) -> bool:
    """Return whether SGLang takes a variable of the environment for true."""
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")
