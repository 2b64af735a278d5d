"""A plugin of vLLM that lets it generate with pipeline parallelism on the CPU.

On a GPU the warm-up makes the tensors that a later stage receives; vLLM's runner for CPUs has no
such warm-up, and the first completion ends the engine.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make those tensors with the KV cache; vLLM calls this in each of its processes."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = CPUModelRunner.initialize_kv_cache
    if hasattr(original, "makes_intermediate_tensors"):
        return

    def initialize_kv_cache(runner: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(runner, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
        return made

    initialize_kv_cache.makes_intermediate_tensors = True  # type: ignore[attr-defined]
    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
