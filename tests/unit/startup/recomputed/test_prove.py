"""Only what comes out the same, and depends on the unprocessed weights, is rebuilt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.model import StorageIndex
from engine_ext.placement import Placement, Status, TensorSpec, certify_placement
from engine_ext.ranks import SingleRank
from engine_ext.startup import LoaderDryRun
from engine_ext.startup.recomputed import (
    ModuleRebuild,
    UnprocessedModules,
    make_unprocessed_model,
    prove_rebuilds,
)
from tests.support import quantised_engine, toy_quantised
from tests.support.quantised_engine import copied, process, processing, served
from tests.support.toy_quantised import (
    Int8,
    Layer,
    Method,
    Model,
    Packed,
    SecondCopy,
    ZeroPoints,
    one_layer,
)


def proven(
    kind: type[Model], probe: Callable[[nn.Module], torch.Tensor | None] = quantised_engine.probe
) -> tuple[Placement, int]:
    """The placement after the proof, and how many modules are rebuilt."""
    checkpoint, model = kind.checkpoint(), kind()
    model.load_weights(copied(checkpoint))
    states = UnprocessedModules(1 << 20)
    lin: Any = model.get_submodule("lin")
    states.keep(processing(lin), False)
    process(model)
    unprocessed: Any = make_unprocessed_model(model, states.states)
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in checkpoint.items()]
    index = StorageIndex(unprocessed)
    placement = LoaderDryRun(unprocessed, unprocessed.load_weights, index).trace(specs)
    certify_placement(placement, checkpoint.items())
    before = served(model)
    rebuild = ModuleRebuild("lin", states.states[0], contextlib.nullcontext, no_probe)
    rebuild.bind(index)
    found = prove_rebuilds(model, [rebuild], placement, probe, SingleRank())
    assert served(model) == before
    return placement, len(found)


@pytest.mark.host_memory
@pytest.mark.parametrize("method", [Int8, Packed, SecondCopy, ZeroPoints, Method])
def test_what_is_processed_alike_is_rebuilt(method: type[Method]) -> None:
    placement, number = proven(one_layer(method))
    assert number == 1
    for name, placed in placement.items():
        assert placed.status is (Status.EXACT if name == "norm" else Status.REBUILT), placed.reason


class Counting(Int8):
    """Every run gives something else."""

    runs = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        type(self).runs += 1
        super().process_weights_after_loading(layer)
        layer.weight_scale = toy_quantised.parameter(layer.weight_scale * type(self).runs)


class Once(Int8):
    """The second run fails."""

    runs = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        type(self).runs += 1
        if type(self).runs > 1:
            raise ValueError("packed already")


class Growing(Int8):
    """The second run leaves another attribute."""

    runs = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        type(self).runs += 1
        setattr(layer, f"made_{type(self).runs}", 1)


class Stale(Int8):
    """Quantises a copy that nothing reaches."""

    cached: torch.Tensor | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        if type(self).cached is None:
            type(self).cached = layer.weight.clone()
        cached: Any = type(self).cached
        layer.weight = toy_quantised.parameter(cached.float() * 2)
        layer.weight_scale = toy_quantised.parameter(torch.ones(()))


class OtherHandle(Packed):
    """The handle of the second run computes something else."""

    runs = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        type(self).runs += 1
        layer.handle = toy_quantised.Handle(torch.full((8, 6), float(type(self).runs)))


@pytest.mark.host_memory
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Counting, "processing it again gives other bits in weight_scale"),
        (Once, "ValueError: packed already"),
        (Growing, "other attributes: made_1, made_2"),
        (Stale, "processing reads another copy of weight"),
        (OtherHandle, "with the handles made anew it computes something else"),
    ],
)
def test_what_is_not_processed_alike_is_refused(method: type[Method], reason: str) -> None:
    for name in ("runs", "cached"):
        if name in vars(method):
            setattr(method, name, 0 if name == "runs" else None)
    placement, number = proven(one_layer(method))
    assert number == 0
    assert placement["norm"].status is Status.EXACT
    for name in ("lin.weight", "lin.bias"):
        assert placement[name].status is Status.UNCERTIFIED
        assert reason in placement[name].reason


class Fixed(ZeroPoints):
    """Works with the zero points of its scheme only, and drops them."""

    known: torch.Tensor | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        known = type(self).known = layer.zeros.clone() if self.known is None else self.known
        if not torch.equal(layer.zeros, known):
            raise ValueError("other zero points")
        super().process_weights_after_loading(layer)


class Largest(ZeroPoints):
    """Keeps a number of the zero points, and drops them."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.largest = float(layer.zeros.float().max())
        super().process_weights_after_loading(layer)


def test_a_parameter_that_is_gone_is_tried_with_other_bits() -> None:
    class WithZeros(one_layer(ZeroPoints)):  # type: ignore[misc]
        method: type[Method] = Fixed

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Layer(self.method())

    placement, number = proven(WithZeros)
    assert (number, placement["lin.zeros"].status) == (1, Status.REBUILT)
    WithZeros.method = Largest
    placement, number = proven(WithZeros)
    assert number == 0
    assert "largest would be" in placement["lin.zeros"].reason


def no_probe(module: nn.Module) -> torch.Tensor | None:
    return None


def failing_probe(module: nn.Module) -> torch.Tensor | None:
    raise ValueError("no input fits")


@pytest.mark.host_memory
@pytest.mark.parametrize("probe", [no_probe, failing_probe])
def test_a_handle_that_cannot_be_tried_out_is_refused(probe: Any) -> None:
    placement, number = proven(one_layer(Packed), probe)
    assert number == 0
    assert (
        "it keeps handle, and nothing shows whether that is right" in placement["lin.weight"].reason
    )
    assert proven(one_layer(Int8), probe)[1] == 1


def test_what_no_checkpoint_tensor_is_written_to_is_left_out() -> None:
    states = UnprocessedModules(1 << 20)
    layer = Layer(Int8())
    states.keep(processing(layer), False)
    rebuild = ModuleRebuild("lin", states.states[0], contextlib.nullcontext, no_probe)
    assert prove_rebuilds(layer, [rebuild], {}, no_probe, SingleRank()) == []
