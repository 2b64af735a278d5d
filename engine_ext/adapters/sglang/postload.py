"""What SGLang computes from the weights after loading them: repacked and derived tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine_ext.derived import Recomputation
from engine_ext.repacks import Processing, RepackLearner


def repack_learner(before: Callable[[torch.nn.Module], None] | None = None) -> RepackLearner:
    """Return what learns SGLang's post-load processing; use it around the loading."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return RepackLearner(DefaultModelLoader, "postprocess_weights", _processings, before)


def recomputations(model: torch.nn.Module) -> list[Recomputation]:
    """Return SGLang's own function for every layer with latent attention (MLA); runs nothing.

    Only models that load as DeepSeek-V2 does have one.
    """
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin

    found = []
    for path, loader in model.named_modules():
        if not isinstance(loader, DeepseekV2WeightLoaderMixin):
            continue
        for name, _ in loader.named_modules():
            if name.endswith(".self_attn.kv_b_proj"):
                # The loader finds the layer by the name of the weight.
                run = functools.partial(loader.post_load_weights, weight_names=[f"{name}.weight"])
                attention = f"{path}.{name.removesuffix('.kv_b_proj')}".lstrip(".")
                found.append(Recomputation((attention,), run))
    return found


def _processings(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[Processing]:
    from sglang.srt.model_loader.loader import _modules_with_quant_method

    for module, method in _modules_with_quant_method(model):
        yield Processing(
            module, method, lambda copy: copy.quant_method.process_weights_after_loading(copy)
        )
