"""Processing that keeps what is no tensor, or writes elsewhere: exact, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.startup.permuted.learner import LearningError
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of
from tests.support.served_models import changed
from tests.support.toy_quantised import (
    OUT,
    Layer,
    Method,
    Model,
    Packed,
    empty,
    linear_shapes,
    one_layer,
    parameter,
)


def assert_exact_or_refused(serving: Serving, *refused: str) -> None:
    """These are refused, whatever is staged leaves the model alone, and the others are exact."""
    assert serving.reasons().keys() == set(refused)
    serving.assert_fresh()
    before = serving.served()
    target = {
        name: changed(tensor, 4) for name, tensor in serving.base.items() if name not in refused
    }
    serving.stage(serving.body(target))
    assert serving.served() == before
    serving.engine.call("abort")
    errors_of(serving.sync(target), none=True)
    serving.assert_fresh()


def largest(layer: Any) -> float:
    return float(layer.weight.float().nan_to_num().abs().max())


# --- numbers ---


class Number(Method):
    """Leaves the weight, and keeps its largest magnitude for a kernel that takes no tensor."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.largest = largest(layer)

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.weight.float().t() * layer.largest
        return found


class NumberOfMoved(Number):
    """Moves the weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.largest = largest(layer)
        layer.weight = parameter(layer.weight.t().contiguous())

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.weight.float() * layer.largest
        return found


class NumberOfRemoved(NumberOfMoved):
    """Makes another tensor of it, so that nothing has its name any more."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.largest = largest(layer)
        layer.made = layer.weight.float() * 2
        layer.weight = parameter(torch.empty(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.made.t() * layer.largest
        return found


class OnMethod(Number):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.largest = largest(layer)

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.float().t() * self.largest


class Captured(Number):
    """Compiled code would have the number of the function that it was compiled with."""

    def process_weights_after_loading(self, layer: Any) -> None:
        number = largest(layer)
        layer.scaled = lambda x: x * number

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.scaled(x @ layer.weight.float().t())
        return found


class InHandle(Number):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.handle = SimpleNamespace(scale=largest(layer), weight=layer.weight.float())
        layer.weight = parameter(torch.empty(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.handle.weight.t() * layer.handle.scale
        return found


@pytest.mark.host_memory
@pytest.mark.parametrize(
    "method", [Number, NumberOfMoved, NumberOfRemoved, OnMethod, Captured, InHandle]
)
def test_a_number_that_is_computed_from_weights_is_refused(
    tmp_path: Path, method: type[Method]
) -> None:
    serving = Serving(one_layer(method), tmp_path)
    assert "compiled code" in serving.reasons()["lin.weight"]
    assert_exact_or_refused(serving, "lin.weight", "lin.bias")


class SameNumber(Number):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.largest = float(layer.weight.shape[0])


def test_a_number_that_is_the_same_for_all_weights_stays(tmp_path: Path) -> None:
    assert_exact_or_refused(Serving(one_layer(SameNumber), tmp_path))


# --- objects that show no tensors ---


class Opaque:
    def __init__(self, weight: torch.Tensor) -> None:
        packed = weight.float().numpy().copy()
        self.run = lambda x: torch.from_numpy(x.numpy() @ packed.T)


class OpaqueBeside(Method):
    """Leaves the weight, and computes with a handle that has a copy."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.handle = Opaque(layer.weight)

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.handle.run(x)
        return found


@pytest.mark.host_memory
def test_a_handle_beside_a_weight_that_stays_is_made_anew(tmp_path: Path) -> None:
    serving = Serving(one_layer(OpaqueBeside), tmp_path)
    assert serving.statuses()["lin.weight"] == "rebuilt"
    assert_exact_or_refused(serving)


@pytest.mark.host_memory
def test_a_handle_that_compiled_code_has_used_is_made_anew(tmp_path: Path) -> None:
    """The compiler marks the tensors that it meets, and a new handle's have no marks."""
    serving = Serving(one_layer(Packed), tmp_path)
    handle: Any = serving.models[0].lin.handle
    [cell] = handle.run.__closure__
    torch._dynamo.mark_static_address(cell.cell_contents, guard=False)
    assert vars(cell.cell_contents)
    assert_exact_or_refused(serving)


# --- what is outside of the module ---


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = empty(OUT)
        self.table = torch.full((OUT,), 1.0)


class Elsewhere(Method):
    """Puts what it computes on a module that has weights of its own."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def process_weights_after_loading(self, layer: Any) -> None:
        self.other.table = layer.weight.float().sum(1)


class NumberElsewhere(Elsewhere):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.other.largest = largest(layer)


class QuantisedElsewhere(Elsewhere):
    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.made = layer.weight.float() * 2
        layer.weight = parameter(torch.empty(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.made.t()
        return found


class InPlaceElsewhere(Elsewhere):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.other.table += layer.weight.float().sum(1)


def writing(method: type[Elsewhere]) -> type[Model]:
    class Writing(Model):
        shapes: ClassVar = {**linear_shapes("lin"), "other.gain": (OUT,)}

        def build(self, rank: int, ranks: int) -> None:
            self.other = Other()
            self.lin = Layer(method(self.other))

    return Writing


@pytest.mark.parametrize("method", [Elsewhere, NumberElsewhere, QuantisedElsewhere])
def test_what_is_put_on_another_module_is_refused(tmp_path: Path, method: type[Elsewhere]) -> None:
    """A rebuild would put it there before the commit."""
    serving = Serving(writing(method), tmp_path)
    refused = ["lin.weight", "lin.bias"]
    refused += [] if method is NumberElsewhere else ["other.gain"]  # next to a tensor that changes
    assert_exact_or_refused(serving, *refused)


class InPlaceInStore(Method):
    """Writes to a tensor of a plain object, which no copy of the layer copies."""

    def create_weights(self, layer: Any) -> None:
        layer.store = SimpleNamespace(table=torch.full((OUT,), 1.0))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.store.table += layer.weight.float().sum(1)
        layer.made = layer.weight.float() * 2
        layer.weight = parameter(torch.empty(0))


@pytest.mark.host_memory
@pytest.mark.parametrize("model", [writing(InPlaceElsewhere), one_layer(InPlaceInStore)])
def test_processing_that_writes_shared_values_stops_start(
    tmp_path: Path, model: type[Model]
) -> None:
    """Learning what it moves has already spoilt what is served."""
    with pytest.raises(LearningError, match="table"):
        Serving(model, tmp_path)
