"""vLLM's own functions for what it keeps beside the weights (MLA's absorbed projections)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from engine_ext.derived.recompute import Recomputation


def recomputations(model: torch.nn.Module, config: Any) -> list[Recomputation]:
    """One for every attention layer that vLLM processes after loading.

    Args:
        model: the loaded model; nothing is run yet.
        config: vLLM's whole configuration.

    Left out are layers whose processing gathers from other ranks (replicated decode queries): not
    every rank would run it as often.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return [
        Recomputation((path,), functools.partial(_process, module, config))
        for path, module in model.named_modules()
        if is_deferred_attention_layer(module) and not getattr(module, "dcp_q_replicate", False)
    ]


def _process(layer: Any, config: Any) -> None:
    """As the engine's loader calls it."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        layer.process_weights_after_loading(dtype)
