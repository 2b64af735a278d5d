"""What processing keeps in an unusual place: on a parameter, as a number, in a shared object."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_ext.startup.permuted.learner import LearningError
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of
from tests.support.served_models import changed
from tests.support.toy_quantised import Int8, Method, one_layer, parameter
from tests.unit.sync.test_rebuild_numbers import Number, OnMethod, largest


class ScaleOnParameter(Int8):
    """The scale is an attribute of the weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.weight.scale = layer.weight_scale.detach().clone()
        layer.weight_scale = None

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ (layer.weight.float() * layer.weight.scale).t()


class SumOnParameter(Method):
    """Leaves the weight, and keeps a sum on it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.row_sum = [layer.weight.float().nan_to_num().sum(1)]

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().apply(layer, x) - layer.weight.row_sum[0]
        return found


class NumberOnParameter(Method):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.largest = largest(layer)

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().apply(layer, x) - layer.weight.largest
        return found


class Integer(Method):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.top = int(layer.weight.float().nan_to_num().argmax())

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().apply(layer, x) - layer.top
        return found


class InObject(Int8):
    """Makes an object that holds the scale."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.kept = SimpleNamespace(scale=layer.weight_scale.detach().clone())
        layer.weight_scale = None

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ (layer.weight.float() * layer.kept.scale).t()


@pytest.mark.host_memory
@pytest.mark.parametrize("method", [ScaleOnParameter, SumOnParameter, InObject])
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_follows(tmp_path: Path, method: type[Method], ranks: int) -> None:
    serving = Serving(one_layer(method), tmp_path, ranks=ranks)
    assert serving.statuses()["lin.weight"] == "rebuilt"
    before = dict(serving.current)
    for seed in (1, 2):
        target = {n: changed(t, seed) for n, t in serving.current.items()}
        before = dict(serving.current)
        errors_of(serving.sync(target), none=True)
        serving.assert_fresh()
    errors_of(serving.rollback(before), none=True)
    serving.assert_fresh()


@pytest.mark.parametrize("method", [NumberOnParameter, Number, OnMethod, Integer])
def test_a_number_is_refused(tmp_path: Path, method: type[Method]) -> None:
    """At start-up, or by the first sync that would change it: compiled code might have kept it."""
    serving = Serving(one_layer(method), tmp_path, ranks=2)
    before = serving.served()
    refusal(serving.sync({n: changed(t, 1) for n, t in serving.current.items()}))
    assert serving.served() == before
    serving.assert_fresh()


class IntoSharedTensor(Int8):
    """Writes to a tensor that the layer has from its construction, in an object of its own."""

    dtype = torch.float32

    def create_weights(self, layer: Any) -> None:
        rows = len(layer.weight)
        layer.workspace = SimpleNamespace(sums=torch.zeros(rows, dtype=self.dtype))

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.workspace.sums.copy_(layer.weight.sum(1, dtype=torch.int32))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return super().apply(layer, x) - layer.workspace.sums.float()


class IntoSharedTable(IntoSharedTensor):
    """It looks like a table, which is no weight's."""

    dtype = torch.int32


class IntoSharedTableOnly(IntoSharedTable):
    """No parameter is left that would differ."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.codes = parameter(layer.weight.detach() * 1)
        layer.scales = parameter(layer.weight_scale.detach() * 1)
        del layer.weight, layer.weight_scale

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ (layer.codes.float() * layer.scales).t()
        return found - layer.workspace.sums.float()


@pytest.mark.parametrize("method", [IntoSharedTensor, IntoSharedTable, IntoSharedTableOnly])
def test_processing_that_writes_shared_values_stops_start(
    tmp_path: Path, method: type[Method]
) -> None:
    """Probing has changed the live model through it."""
    with pytest.raises(LearningError, match=r"lin\.workspace\.sums"):
        Serving(one_layer(method), tmp_path)
