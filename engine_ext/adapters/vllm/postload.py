"""What vLLM computes from the weights after it has loaded them: repacked and derived tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine_ext.derived import Recomputation
from engine_ext.repacks import Processing, RepackLearner


def repack_learner(before: Callable[[torch.nn.Module], None] | None = None) -> RepackLearner:
    """Return what learns vLLM's post-load processing; use it around `load_model`."""
    from vllm.model_executor.model_loader import base_loader

    return RepackLearner(base_loader, "process_weights_after_loading", _processings, before)


def recomputations(model: torch.nn.Module, config: Any) -> list[Recomputation]:
    """Return vLLM's own function for every attention layer that it processes after loading.

    Layers whose processing gathers from other ranks (replicated decode queries) are left out:
    not every rank would run it equally often. Nothing is run yet.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return [
        Recomputation((path,), functools.partial(_process, module, config))
        for path, module in model.named_modules()
        if is_deferred_attention_layer(module) and not getattr(module, "dcp_q_replicate", False)
    ]


def _processings(
    model: torch.nn.Module, model_config: Any, *args: Any, **kwargs: Any
) -> Iterator[Processing]:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            yield Processing(
                module, method, lambda copy: copy.quant_method.process_weights_after_loading(copy)
            )
        if is_deferred_attention_layer(module):
            # What an attention layer makes for itself may be recomputed, see `recomputations`.
            yield Processing(
                module,
                module,
                lambda copy: copy.process_weights_after_loading(model_config.dtype),
                recomputed=True,
            )


def _process(layer: Any, config: Any) -> None:
    """Process one attention layer as vLLM's loader does."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        layer.process_weights_after_loading(dtype)
