"""Differences between a live module and one that was processed anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.startup.recomputed.compare import Pair, RebuildError, pairs
from tests.support.toy_quantised import Int8, parameter


def module(**attributes: Any) -> Any:
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def found(live: nn.Module, new: nn.Module) -> dict[str, Pair]:
    return {pair.path: pair for pair in pairs(live, new) if not pair.is_same}


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (2, 3))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: module(weight=parameter(ones())), "weight"),
        (lambda: module(made=ones()), "made"),
        (lambda: module(made=[1, ones()]), "made[1]"),
        (lambda: module(made=(ones(), "a")), "made[0]"),
        (lambda: module(made={"a": {"b": ones()}}), "made.a.b"),
        (lambda: module(child=module(weight=parameter(ones()))), "child.weight"),
        (lambda: module(made=object()), "made"),
        (lambda: module(made=lambda: 1), "made"),
    ],
)
def test_tensors_and_handles_are_paired(make: Callable[[], nn.Module], path: str) -> None:
    live, new = make(), make()
    pair = found(live, new)[path]
    assert found(live, new).keys() == {path}
    assert pair.live is not pair.new
    assert pair.container[pair.key] is pair.live
    assert pair.place.unchanged()


@pytest.mark.parametrize("value", [1, 2.5, math.nan, "a", None, torch.int8, True, (1, "a"), {1, 2}])
def test_equal_values_are_left_out(value: Any) -> None:
    assert not found(module(value=value), module(value=value))
    assert not found(module(value=[value]), module(value=[value]))


@pytest.mark.parametrize(("one", "other"), [(1, 2), (2.5, math.nan), (math.nan, 2.5), ("a", "b")])
def test_other_values_are_paired(one: Any, other: Any) -> None:
    assert found(module(value=one), module(value=other)).keys() == {"value"}


def test_a_bound_method_of_the_counterpart_is_the_same() -> None:
    live, new = module(quant_method=Int8()), module(quant_method=Int8())
    for one in (live, new):
        one.run = one.quant_method.apply
    assert not found(live, new)
    new.run = live.quant_method.apply
    assert found(live, new).keys() == {"run"}


@pytest.mark.parametrize(
    ("live", "new", "reason"),
    [
        (module(a=ones()), module(a=ones(3, 2)), "comes out as"),
        (module(a=ones()), module(a=ones(3, 2).t()), "strides"),
        (module(a=ones()), module(a=ones().half()), "float16"),
        (module(a=ones()), module(a=None), "a tensor on one of them only"),
        (module(a=3), module(a=ones()), "a tensor on one of them only"),
        (module(a=1), module(a=1.0), "is a int, or a float"),
        (module(a=[1]), module(a=[1, 2]), "another length"),
        (module(a=1), module(), "other attributes: a"),
        (module(), module(a=1), "the module has other attributes: a"),
        (module(a={"b": 1}), module(a={"c": 1}), "a has other attributes: b, c"),
    ],
)
def test_what_cannot_be_written_is_an_error(live: nn.Module, new: nn.Module, reason: str) -> None:
    with pytest.raises(RebuildError, match=reason):
        found(live, new)


@dataclass
class Scales:
    """A plain object of the engine, as a kernel has for its quantisation."""

    weight: torch.Tensor
    group: tuple[int, int] = (1, -1)
    inner: Any = None


class Finalized(Scales):
    def __del__(self) -> None:
        """Free something outside of Python."""


class Slotted:
    __slots__ = ("__dict__", "hidden")


class Exceptional(Exception):
    """It keeps its arguments outside of its attributes."""


def slotted() -> Slotted:
    made = Slotted()
    made.weight = ones()  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (lambda: Scales(ones()), {"made.weight"}),
        (lambda: Scales(ones(), inner=[Scales(ones())]), {"made.weight", "made.inner[0].weight"}),
        (lambda: (Scales(ones()), None), {"made[0].weight"}),
        (lambda: Scales(ones(), inner={"a": {1, 2}}), {"made.weight"}),
        # Whole, as a handle: a part of it shows nothing.
        (lambda: Scales(ones(), inner=lambda: 1), {"made"}),
        (lambda: Scales(ones(), inner=[object()]), {"made"}),
        (lambda: Finalized(ones()), {"made"}),
        (slotted, {"made"}),
        (lambda: Exceptional(ones()), {"made"}),
    ],
)
def test_plain_objects_are_entered(make: Callable[[], Any], paths: set[str]) -> None:
    assert found(module(made=make()), module(made=make())).keys() == paths


def test_a_plain_object_that_both_share_is_left_out() -> None:
    shared = Scales(ones(), inner=lambda: 1)
    assert not found(module(made=shared), module(made=shared))
    live, new = module(made=Scales(ones(), inner=shared)), module(made=Scales(ones(), inner=shared))
    assert found(live, new).keys() == {"made.weight"}


def test_plain_objects_in_a_cycle_are_entered() -> None:
    def make() -> nn.Module:
        scales = Scales(ones())
        scales.inner = scales
        return module(made=scales)

    assert found(make(), make()).keys() == {"made.weight"}


def test_a_plain_objects_own_method_is_the_same() -> None:
    def make() -> nn.Module:
        scales = Scales(ones())
        scales.inner = scales.__repr__
        return module(made=scales)

    assert found(make(), make()).keys() == {"made.weight"}


def test_an_object_in_two_places_on_one_of_them_only_is_an_error() -> None:
    shared = [ones()]
    live, new = module(a=[ones()], b=[ones()]), module(a=shared, b=shared)
    with pytest.raises(RebuildError, match="elsewhere, too"):
        found(live, new)
    both = [ones()]
    assert found(module(a=both, b=both), new).keys() == {"a[0]"}


def test_cycles_end() -> None:
    live, new = module(a=ones()), module(a=ones())
    for one in (live, new):
        vars(one)["itself"] = one
    assert found(live, new).keys() == {"a"}


def test_the_training_flag_does_not_count() -> None:
    assert not found(module().eval(), module().train())


def test_place_is_lost_with_container_tensor_or_memory() -> None:
    live, new = module(a={"b": [ones()]}), module(a={"b": [ones()]})
    place = found(live, new)["a.b[0]"].place
    held: Any = live.a
    original = held["b"]
    held["b"] = list(original)
    assert not place.unchanged()
    held["b"] = original
    assert place.unchanged()
    original[0].data = ones()
    assert not place.unchanged()
    held.clear()
    assert not place.unchanged()


def test_a_cache_that_the_engine_makes_later_is_left_out() -> None:
    live, new = module(kv_cache=ones(4, 2)), module(kv_cache=ones(0))
    assert not found(live, new)
    live.kv_cache, new.kv_cache = [ones(4)], [ones(0)]
    assert not found(live, new)
    with pytest.raises(RebuildError, match="cached comes out as"):
        found(module(cached=ones(4, 2)), module(cached=ones(0)))


def test_a_view_of_the_same_memory_is_in_place() -> None:
    def held(values: torch.Tensor) -> Any:
        return module(scales=[values])

    live = held(torch.zeros(4, 2, dtype=torch.uint8))
    [pair] = [p for p in pairs(live, held(torch.ones(4, 2, dtype=torch.uint8))) if p.is_tensor]
    scales = live.scales
    kept = scales[0]
    scales[0] = kept.view(torch.uint8)
    assert scales[0] is not kept
    assert pair.place.unchanged()
    for moved in (kept.t(), kept[:2], kept.view(8), kept.clone(), None):
        scales[0] = moved
        assert not pair.place.unchanged()
