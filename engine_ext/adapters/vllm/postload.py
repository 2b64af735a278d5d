"""What vLLM calls for each module of a model that it has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from engine_ext.repacks.load_hook import Processing, RepackLearner


def repack_learner() -> RepackLearner:
    """What learns vLLM's post-load processing; use it around `load_model`."""
    from vllm.model_executor.model_loader import base_loader

    return RepackLearner(base_loader, "process_weights_after_loading", _processings)


def _processings(
    model: torch.nn.Module, model_config: Any, *args: Any, **kwargs: Any
) -> Iterator[Processing]:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            yield Processing(
                module, method, lambda twin: twin.quant_method.process_weights_after_loading(twin)
            )
        if is_deferred_attention_layer(module):
            # What an attention layer makes for itself may be recomputed (`recomputations`).
            yield Processing(
                module,
                module,
                lambda twin: twin.process_weights_after_loading(model_config.dtype),
                recomputed=True,
            )
