"""An unfinished reload is detected; with vLLM's own functions, without a server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.adapters.vllm.layerwise_reload import active_wrapper

pytestmark = pytest.mark.engine


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    for parameter in made.parameters():
        parameter.weight_loader = lambda param, weight: param.data.copy_(weight)  # type: ignore[attr-defined]
    return made


def test_a_model_that_serves_is_not_wrapped() -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    served = model()
    assert active_wrapper(served) is None
    record_metadata_for_reloading(served)
    assert active_wrapper(served) is None


def test_a_layerwise_reload_is_noticed_until_it_ends() -> None:
    from vllm.model_executor.model_loader import reload

    served = model()
    reload.record_metadata_for_reloading(served)
    reload.initialize_layerwise_reload(served)
    assert "reloaded layer by layer" in (active_wrapper(served) or "")
    for parameter in list(served.parameters()):
        loads: Any = parameter
        loads.weight_loader(parameter, torch.ones(parameter.shape))
    reload.finalize_layerwise_reload(served, None)
    assert active_wrapper(served) is None


def test_online_quantisation_is_noticed() -> None:
    from vllm.model_executor.model_loader.reload.layerwise import (
        get_layerwise_info,
        initialize_online_processing,
    )

    served = model()
    initialize_online_processing(served[0])  # type: ignore[index]
    assert "0 is being" in (active_wrapper(served) or "")
    get_layerwise_info(served[0]).reset()  # type: ignore[index]
    assert "0.weight is still wrapped" in (active_wrapper(served) or "")


def test_torchao_is_noticed() -> None:
    served = model()
    served._do_torchao_reload = True  # type: ignore[assignment]
    assert "torchao" in (active_wrapper(served) or "")


def test_a_stamp_is_noticed() -> None:
    """The wrapper that vLLM's own sharded transfer leaves on loaders during its dry run."""

    def stamp(param: nn.Parameter, weight: torch.Tensor) -> None:
        param.data.copy_(weight)

    served = model()
    stamp._rdt_stamp_inner = None  # type: ignore[attr-defined]
    served[1].bias.weight_loader = stamp  # type: ignore[index]
    assert "1.bias is still wrapped" in (active_wrapper(served) or "")
