"""Modules that vLLM quantises while it loads are kept before that, or refused; it starts anyway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.adapters.vllm.postload import online_processing
from engine_ext.startup import UnprocessedModules


class Method:
    """Quantises, as vLLM's online methods do."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.data.to(torch.int8), requires_grad=False)


class Layer(nn.Linear):
    quant_method: Any

    def __init__(self) -> None:
        super().__init__(4, 3, bias=False, dtype=torch.bfloat16)
        self.quant_method = Method()


@pytest.mark.parametrize("way", ["_layerwise_process", "_process_online_quant_layer"])
def test_a_module_that_does_not_fit_stops_no_start(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.reload import layerwise

    owner: Any = layerwise if way == "_layerwise_process" else DummyModelLoader
    arguments: tuple[Any, ...] = () if owner is layerwise else (None,)

    def process(*given: Any) -> None:
        given[-2].quant_method.process_weights_after_loading(given[-2])

    monkeypatch.setattr(owner, way, process)
    model = nn.ModuleDict({"one": Layer(), "two": Layer()})
    before = [parameter for _, parameter in model.named_parameters()]
    states = UnprocessedModules(24)
    with online_processing(states):
        for layer in model.values():
            getattr(owner, way)(*arguments, layer, None)
    assert all(layer.weight.dtype == torch.int8 for layer in model.values())
    assert [one.refused is None for one in states.states] == [True, False]
    assert torch.equal(dict(states.states[0].weights())["weight"], before[0])
    refused = states.refusals(model)
    assert refused.keys() == {"two.weight"}
    assert "24 bytes more than 24: raise --delta-shadow-bytes" in refused["two.weight"]
    assert states.refused_names(model) == {"two": frozenset({"two.weight"})}
