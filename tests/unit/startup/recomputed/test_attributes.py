"""Numbers that processing gives a parameter as attributes must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.quantised_engine import Serving, refusal
from tests.support.served_models import target_checkpoint
from tests.support.toy_quantised import Int8, Layer, Transpose, one_layer


class FlagOnParameter(Transpose):
    """Moves, and gives the parameter a flag that is the same for almost all weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.weight.powers_of_two = bool((torch.frexp(layer.weight.float())[0].abs() == 0.5).all())

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return super().apply(layer, x) * (2.0 if layer.weight.powers_of_two else 1.0)


def test_a_flag_that_would_change_is_refused(tmp_path: Path) -> None:
    """No probe at the start has shown that it depends on the weights."""
    serving = Serving(one_layer(FlagOnParameter), tmp_path)
    assert serving.statuses()["lin.weight"] == "rebuilt"
    before = serving.served()
    weight = torch.full_like(serving.base["lin.weight"], 0.5)
    assert refusal(serving.sync({"lin.weight": weight}, dense=True))
    assert serving.served() == before


class Sometimes(Int8):
    """Gives the parameter an attribute only where all weights are equal."""

    def process_weights_after_loading(self, layer: Any) -> None:
        equal = bool((layer.weight == layer.weight.flatten()[0]).all())
        super().process_weights_after_loading(layer)
        if equal:
            layer.weight.equal = True


def test_an_attribute_that_comes_and_goes_is_refused(tmp_path: Path) -> None:
    serving = Serving(one_layer(Sometimes), tmp_path)
    before = serving.served()
    weight = torch.full_like(serving.base["lin.weight"], 0.5)
    answers = serving.sync({"lin.weight": weight}, dense=True)
    assert "weight has other attributes: equal" in refusal(answers)
    assert serving.served() == before


def test_what_the_compiler_marks_later_is_not_compared(tmp_path: Path) -> None:
    serving = Serving(one_layer(Int8), tmp_path)
    layer = serving.models[0].get_submodule("lin")
    assert isinstance(layer, Layer)
    torch._dynamo.mark_static_address(layer.weight)
    target = target_checkpoint(serving.base, ["lin.weight"])
    assert "ok" in serving.sync({"lin.weight": target["lin.weight"]})[0]
    serving.assert_fresh()
