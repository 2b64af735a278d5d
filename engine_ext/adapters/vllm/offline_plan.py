"""Load a model with vLLM, without its server, to see which tensors can be updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_ext.adapters.vllm.offline_engine import OfflineEngine
from engine_ext.errors import DeltaError
from engine_ext.ranks.operations import GetPlan


def load_plan(model: str, flags: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Load a checkpoint's folder with vLLM, with its own flags, and return every rank's plan.

    Raises:
        Exception: vLLM could not load the model, or nothing could be certified.
        SystemExit: vLLM's parser did not understand a flag.
    """
    engine = OfflineEngine(model, flags, prog="delta-plan")
    try:
        answers = engine.call(GetPlan())
    finally:
        engine.close()  # its log lines must not follow the printed plan
    plans = []
    for reply in answers:
        if isinstance(reply, DeltaError):
            raise reply
        if reply.tensors is None:
            raise RuntimeError("vLLM has loaded no checkpoint, so there is nothing to plan")
        plans.append(reply.tensors)
    return plans
