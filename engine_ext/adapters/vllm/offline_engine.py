"""A vLLM without its server, for commands that look at a model as vLLM loads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from engine_ext.adapters.vllm import plugin
from engine_ext.errors import DeltaError
from engine_ext.model import hash_tensor, is_cache, layout, reachable_tensors
from engine_ext.ranks.operations import GetPlan, Operation, ReplyT, decode_answers, encode_request

_POSITIONS = 256


class OfflineEngine:
    """One vLLM with its workers, each in a process of its own.

    Workers have receivers if settings are exported (`engine_ext.settings.Settings.export`).
    """

    def __init__(self, model: str, flags: Sequence[str], *, prog: str) -> None:
        """Load a checkpoint's folder, with vLLM's own flags.

        Args:
            prog: the command that is named if vLLM's parser does not understand a flag.

        Raises:
            Exception: vLLM could not load the model, or nothing could be certified.
            SystemExit: vLLM's parser did not understand a flag.
        """
        # `live_hashes` is given as a function to the workers, which are processes of this one.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        # vLLM calls the plugin once per process, which can have been before the settings.
        plugin.register()
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=prog))
        # Only the weights matter here: compile nothing, and keep the KV cache small.
        defaults = ["--model", model, "--enforce-eager"]
        engine_args = EngineArgs.from_cli_args(parser.parse_args([*defaults, *flags]))
        if engine_args.max_model_len is None:
            own = engine_args.create_model_config().max_model_len
            engine_args.max_model_len = min(own, _POSITIONS)
        self._llm: Any = LLM.from_engine_args(engine_args)

    def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        """Return every rank's reply to an operation, or its error, in rank order."""
        answers = self._llm.collective_rpc("delta_updates", args=encode_request(request))
        return decode_answers(request, answers)

    def hashes(self) -> dict[str, str]:
        """Return a hash of every tensor that a rank's model reaches, by rank and path."""
        ranks: list[dict[str, str]] = self._llm.collective_rpc(live_hashes)
        return {
            f"rank {rank}: {path}": found
            for rank, every in enumerate(ranks)
            for path, found in every.items()
        }

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.llm_engine.engine_core.shutdown()


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


def live_hashes(worker: Any) -> dict[str, str]:
    """Return layout and hash of every tensor that a worker's models reach, by path.

    The key-value cache is left out: it holds what was asked of the engine.
    """
    found: dict[str, str] = {}
    models = {"": worker.model_runner.get_model(), "draft.": worker.get_draft_model()}
    for prefix, model in models.items():
        if model is None:
            continue
        for path, _, attribute, tensor in reachable_tensors(model):
            name = f"{prefix}{path}.{attribute}"
            if not is_cache(name):
                found[name] = f"{layout(tensor)} {hash_tensor(tensor)}"
    return found
