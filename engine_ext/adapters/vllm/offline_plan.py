"""Load a model with vLLM, without its server, to see which tensors can be updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_ext.errors import DeltaError
from engine_ext.ranks.operations import GetPlan, decode_answers, encode_request


def load_plan(model: str, flags: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Load a checkpoint's folder with vLLM, with its own flags, and return every rank's plan.

    Raises:
        Exception: vLLM could not load the model, or nothing could be certified.
        SystemExit: vLLM's parser did not understand a flag.
    """
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="delta-plan"))
    # Only the weights matter here: compile nothing, and keep the KV cache small.
    defaults = ["--model", model, "--enforce-eager", "--max-model-len", "256"]
    engine_args = EngineArgs.from_cli_args(parser.parse_args([*defaults, *flags]))
    llm = LLM.from_engine_args(engine_args)
    try:
        answers = llm.collective_rpc("delta_updates", args=encode_request(GetPlan()))
    finally:
        llm.llm_engine.engine_core.shutdown()  # its log lines must not follow the printed plan
    plans = []
    for reply in decode_answers(GetPlan(), answers):
        if isinstance(reply, DeltaError):
            raise reply
        if reply.tensors is None:
            raise RuntimeError("vLLM has loaded no checkpoint, so there is nothing to plan")
        plans.append(reply.tensors)
    return plans
