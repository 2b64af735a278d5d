"""Processing a copy of an experts module, as SGLang would, without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.adapters.sglang.postload import _process_copy


class Dispatcher:
    """Brings tokens to the experts; which format it sends them in depends on the weights'."""

    expert_mask = "mask"

    def __init__(self) -> None:
        self.quant_config: dict[str, Any] = {}

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        self.quant_config = quant_config


class Method:
    def __init__(self, quant_config: dict[str, Any]) -> None:
        self.quant_config = quant_config

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.mask = layer.dispatcher.expert_mask
        layer.dispatcher.set_quant_config(dict(self.quant_config))


FP8 = {"weight_dtype": "fp8"}


@pytest.mark.parametrize("known", [{}, FP8])
def test_live_dispatcher_keeps_its_quant_config(known: dict[str, Any]) -> None:
    dispatcher = Dispatcher()
    dispatcher.quant_config = known
    copy = SimpleNamespace(dispatcher=dispatcher, quant_method=Method(FP8))
    _process_copy(copy)
    assert copy.dispatcher is dispatcher
    assert dispatcher.quant_config is known
    assert copy.mask == "mask"


def test_another_quant_config_than_before_fails() -> None:
    dispatcher = Dispatcher()
    dispatcher.set_quant_config(FP8)
    copy = SimpleNamespace(dispatcher=dispatcher, quant_method=Method({"weight_dtype": "fp4"}))
    with pytest.raises(RuntimeError, match="another quant_config"):
        _process_copy(copy)
    assert dispatcher.quant_config is FP8


def test_a_module_without_one_is_processed() -> None:
    done: list[Any] = []
    copy = SimpleNamespace(quant_method=SimpleNamespace(process_weights_after_loading=done.append))
    _process_copy(copy)
    assert done == [copy]
