"""The base model of a vLLM that serves LoRA adapters."""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from engine_ext.adapters.vllm.refusals import LORA_WITH_DEFERRED_ATTENTION
from engine_ext.model import Known
from engine_ext.startup import with_modules

_ADAPTERS: Final = re.compile(r"(^|\.)lora_manager\._registered_adapters\b")


def without_lora(model: torch.nn.Module) -> Any:
    """Return a model as its loader knows it, without vLLM's wrappers around layers for adapters.

    The modules that contain wrapped layers are shallow copies, all others are the live ones, so
    that the tensors are those that generation uses.

    Raises:
        RuntimeError: post-load processing keeps tensors on a module that contains wrapped layers.
            The copy would not get later ones. vLLM does not start then.
    """
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    wrapped = {id(m): m.base_layer for m in model.modules() if isinstance(m, BaseLayerWithLoRA)}
    base = with_modules(model, wrapped)
    live = {id(module) for module in model.modules()}
    for path, module in base.named_modules():
        if is_deferred_attention_layer(module) and id(module) not in live:
            raise RuntimeError(f"{LORA_WITH_DEFERRED_ATTENTION.message} ({path})")
    return base


def with_adapters(known: Known) -> Known:
    """Return a function that also knows the weights of adapters, which come from other files."""
    return lambda path, tensor: bool(_ADAPTERS.search(path)) or known(path, tensor)
