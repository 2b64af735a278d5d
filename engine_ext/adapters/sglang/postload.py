"""What SGLang calls for each module of a model that it has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from engine_ext.repacks.load_hook import Processing, RepackLearner


def repack_learner() -> RepackLearner:
    """What learns SGLang's post-load processing; use it around the loading."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return RepackLearner(DefaultModelLoader, "postprocess_weights", _processings)


def _processings(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[Processing]:
    from sglang.srt.model_loader.loader import _modules_with_quant_method

    for module, method in _modules_with_quant_method(model):
        yield Processing(
            module, method, lambda twin: twin.quant_method.process_weights_after_loading(twin)
        )
