"""Make one architecture's checkpoint and plan it, as ``delta-plan`` does for a folder."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from scripts.survey.processes import Ended, run_each
from scripts.survey.results import Result, from_plan

# Modules that every process would import. numba is left out: vLLM fails on it in a new worker.
_PRELOADED: Final = (
    "transformers",
    "vllm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "engine_ext.adapters.vllm.offline_engine",
    "engine_ext.adapters.vllm.worker",
    "engine_ext.cli.plan",
    "scripts.live_engine.tiny_models",
)
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process has nothing else to do
    "OMP_NUM_THREADS": "1",
}
_FLAGS: Final = ("--kv-cache-memory-bytes", "64M")
_RESULT: Final = "result.json"
_LONGEST: Final = 400  # characters of a failure


def plan_all(
    names: Sequence[str], folder: Path, flags: Sequence[str], *, jobs: int, timeout: float
) -> Generator[Result, None, None]:
    """Yield the result of each architecture as it is known; see `run_each`.

    Args:
        folder: for the checkpoints and logs.
        flags: of vLLM.
    """
    os.environ.update(_ENVIRONMENT)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the flag
    plan = functools.partial(_plan, flags=tuple(flags))
    for ended in run_each(names, plan, folder, preload=_PRELOADED, jobs=jobs, timeout=timeout):
        yield read(ended)


def read(ended: Ended) -> Result:
    """Return the results of a process."""
    path = ended.folder / _RESULT
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Result)
    if ended.code is None:
        return Result(ended.name, failure="it takes too long")
    return Result(ended.name, failure=f"its process ended with {ended.code}")


def _plan(name: str, folder: Path, *, flags: Sequence[str]) -> None:
    """Plan an architecture in this process; the result goes to its folder."""
    try:
        result = _planned(name, folder / "model", flags)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        result = Result(name, failure=text[:_LONGEST])
    part = folder / "part"
    part.write_bytes(msgspec.json.encode(result))
    part.rename(folder / _RESULT)


def _planned(name: str, model: Path, flags: Sequence[str]) -> Result:
    from vllm import ModelRegistry

    from engine_ext.adapters.vllm.offline_engine import load_plan
    from engine_ext.cli import plan as delta_plan
    from engine_ext.settings import Settings
    from scripts.live_engine.tiny_models import write
    from scripts.survey.architectures import ARCHITECTURES

    one = ARCHITECTURES[name]
    write(one.config, one.fields, model, architecture=name)
    implementation = "TransformersForCausalLM"
    known = ModelRegistry.models.get(name)
    if known is not None:
        # Else vLLM would import it in another process first, which takes 20 s.
        found = known.load_model_cls()
        ModelRegistry.register_model(name, found)
        implementation = found.__name__
    Settings(keep_plain=True).export()
    return from_plan(
        name, implementation, delta_plan.merge(load_plan(str(model), [*_FLAGS, *flags]))
    )
