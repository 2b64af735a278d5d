"""SGLang's own function for what it keeps beside the weights (MLA's absorbed projections)."""

from __future__ import annotations

import functools

import torch

from engine_ext.derived.recompute import Recomputation


def recomputations(model: torch.nn.Module) -> list[Recomputation]:
    """One for every layer with latent attention, of models that load as DeepSeek-V2 does.

    Args:
        model: the loaded model; nothing is run yet.
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
