"""vLLM without its server: a model is loaded only to see what can be updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def load_plan(model: str, flags: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Load a model with vLLM and return every rank's plan.

    Args:
        model: the checkpoint's folder.
        flags: of vLLM's own command line.

    Raises:
        Exception: vLLM's own; it did not load the model, or nothing could be certified.
        SystemExit: vLLM's parser did not understand a flag.
    """
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="delta-plan"))
    # Only the weights matter here: nothing is compiled, and little room is taken for the cache.
    defaults = ["--model", model, "--enforce-eager", "--max-model-len", "256"]
    engine_args = EngineArgs.from_cli_args(parser.parse_args([*defaults, *flags]))
    llm = LLM.from_engine_args(engine_args)
    answers = llm.collective_rpc("delta_updates", args=("plan", {}))
    return [answer["ok"]["tensors"] for answer in answers]
