"""Tensors that might have been computed from weights are found, wherever they are attached."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.conformance.toy_models import UNTOUCHED, ToyModel, Weights, parameter
from engine_ext.conformance.toy_models.base import OpenModule
from engine_ext.model.constants import Constants, is_constant
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.certify import certify_placement
from engine_ext.placement.segments import Placement, Status
from engine_ext.startup import LoaderDryRun
from engine_ext.startup.derived.find import find_derived, refuse_derived
from tests.support.served_models import base_checkpoint, load


class Projection(OpenModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4, 6)


class Attention(OpenModule):
    """Holds the projection; its backend has no weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = Projection()
        self.backend = nn.Module()
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("window", torch.tensor(3.5))
        self.cos_sin_cache = torch.rand(8, 2)
        self.table = torch.arange(5)
        self.kv_cache = [torch.rand(2, 3)]


class Latent(ToyModel):
    """Two layers whose projections can be absorbed, and a norm outside them."""

    shapes: ClassVar = {"layers.0.kv_b_proj": (4, 6), "layers.1.kv_b_proj": (4, 6), "norm": (6,)}

    def build(self) -> None:
        self.layers: Any = nn.ModuleList([Attention(), Attention()])
        self.norm = parameter(6)

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "norm":
                self.norm.copy_(weight)
            else:
                self.projection(int(name[7])).data.copy_(weight)

    def projection(self, number: int) -> nn.Parameter:
        found: Any = self.layers[number]
        weight: nn.Parameter = found.kv_b_proj.weight
        return weight


@dataclass(slots=True)
class Slotted:
    tensor: torch.Tensor


class Mangled:
    __slots__ = ("__tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__tensor = tensor


class NamedDict(dict[str, int]):
    """A dict with an attribute."""


class NamedList(list[int]):
    """A list with an attribute."""


def named(container: Any, tensor: torch.Tensor) -> Any:
    container.tensor = tensor
    return container


class Plain:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def method(self) -> None: ...


def closure(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def on_tensor(tensor: torch.Tensor) -> torch.Tensor:
    empty: Any = torch.empty(0)
    empty.kept = tensor
    return empty


HANGS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "attribute": (lambda t: t, ""),
    "parameter": (lambda t: nn.Parameter(t, requires_grad=False), ""),
    "list": (lambda t: [1, [t]], "[1][0]"),
    "dict": (lambda t: {"a": {"b": t}}, "['a']['b']"),
    "tuple": (lambda t: (t, None), "[0]"),
    "object": (lambda t: SimpleNamespace(x=Plain(t)), ".x.tensor"),
    "slots": (Slotted, ".tensor"),
    "private slots": (Mangled, "._Mangled__tensor"),
    "deque": (lambda t: deque([t]), "[0]"),
    "attribute of a dict": (lambda t: named(NamedDict(a=1), t), ".tensor"),
    "attribute of a list": (lambda t: named(NamedList(), t), ".tensor"),
    "method": (lambda t: Plain(t).method, ".__self__.tensor"),
    "closure": (closure, ".tensor"),
    "tensor": (on_tensor, ".kept"),
    "partial": (lambda t: functools.partial(print, t), ".args[0]"),
}


def served(absorb: Callable[[Latent], None] = lambda model: None) -> tuple[Latent, Placement]:
    base = base_checkpoint(Latent)
    model = load(Latent, base)
    assert isinstance(model, Latent)
    absorb(model)
    placement = LoaderDryRun(model, model.load_weights, StorageIndex(model)).trace(model.specs())
    certify_placement(placement, base.items())
    return model, placement


def known(path: str, tensor: torch.Tensor) -> bool:
    return is_constant(path, tensor) or path.endswith((".scale", ".window", "serving_state"))


@pytest.mark.parametrize("hang", HANGS)
def test_a_derived_tensor_is_found(hang: str) -> None:
    make, attribute = HANGS[hang]

    def absorb(model: Latent) -> None:
        model.layers[1].W_UV = make(model.projection(1).data * 2)

    model, placement = served(absorb)
    [derived] = find_derived(model, placement, known)
    assert (derived.module, derived.attribute) == ("layers.1", f"W_UV{attribute}")
    assert (derived.shape, derived.dtype) == ((4, 6), torch.bfloat16)
    assert derived.weights == {"layers.1.kv_b_proj.weight"}
    refuse_derived(placement, [derived])
    assert "layers.1.W_UV" in placement["layers.1.kv_b_proj"].reason
    assert {n for n, p in placement.items() if p.status is Status.EXACT} == {
        "layers.0.kv_b_proj",
        "norm",
    }


def test_all_are_named() -> None:
    def absorb(model: Latent) -> None:
        model.layers[0].W_UV, model.layers[0].W_UK_T = torch.rand(4, 6), torch.rand(6, 4)

    model, placement = served(absorb)
    refuse_derived(placement, find_derived(model, placement, known))
    assert "layers.0.W_UV, layers.0.W_UK_T" in placement["layers.0.kv_b_proj"].reason


def test_attribute_of_weightless_module_counts_for_parent() -> None:
    def absorb(model: Latent) -> None:
        backend: Any = model.layers[0].backend
        backend.packed = torch.rand(3)

    model, placement = served(absorb)
    [derived] = find_derived(model, placement, known)
    assert derived.path == "layers.0.backend.packed"
    assert derived.weights == {"layers.0.kv_b_proj.weight"}


def test_a_tensor_counts_for_every_module_that_it_hangs_on() -> None:
    def absorb(model: Latent) -> None:
        model.layers[0].both = model.layers[1].both = torch.rand(3)

    model, placement = served(absorb)
    refuse_derived(placement, find_derived(model, placement, known))
    assert [p.status for p in placement.values()] == [
        Status.UNCERTIFIED,
        Status.UNCERTIFIED,
        Status.EXACT,
    ]


def test_views_and_constants_are_none() -> None:
    def absorb(model: Latent) -> None:
        model.layers[0].view = [model.projection(0).data.t()]
        model.layers[0].config = {"norm": model.norm}
        # As vLLM registers W_UV: a view that is a parameter of its own.
        model.layers[1].upper = nn.Parameter(model.projection(1).data[:2].t(), requires_grad=False)

    model, placement = served(absorb)
    assert find_derived(model, placement, known) == []


class Fused(ToyModel):
    """Its parameters are views of one tensor, which is a plain attribute."""

    shapes: ClassVar = {"query": (4, 6), "key": (2, 6), "norm": (6,)}
    rows: ClassVar = 6

    def build(self) -> None:
        self.fused = torch.full((self.rows, 6), 7.0, dtype=torch.bfloat16)
        self.query = nn.Parameter(self.fused[:4], requires_grad=False)
        self.key = nn.Parameter(self.fused[4:6], requires_grad=False)
        self.norm = parameter(6)


class FusedWithMore(Fused):
    """The attribute has another row, which might be computed from the weights."""

    rows = 7


class FusedColumns(Fused):
    """Between the elements of a parameter are those of nothing that is loaded."""

    def build(self) -> None:
        self.fused = torch.full((6, 8), 7.0, dtype=torch.bfloat16)
        self.query = nn.Parameter(self.fused[:4, :6], requires_grad=False)
        self.key = nn.Parameter(self.fused[4:, :6], requires_grad=False)
        self.norm = parameter(6)


@pytest.mark.parametrize(
    ("kind", "paths"), [(Fused, []), (FusedWithMore, ["fused"]), (FusedColumns, ["fused"])]
)
def test_what_parameters_are_views_of_follows(kind: type[Fused], paths: list[str]) -> None:
    base = base_checkpoint(kind)
    model = load(kind, base)
    placement = LoaderDryRun(model, model.load_weights, StorageIndex(model)).trace(kind.specs())
    certify_placement(placement, base.items())
    found = [derived.path for derived in find_derived(model, placement)]
    assert [path for path in found if path != UNTOUCHED] == paths


@pytest.mark.parametrize(
    ("path", "tensor", "constant"),
    [
        ("a.scale", torch.tensor(1.0), False),
        ("a.scale", torch.tensor([0.0]), False),
        ("a.count", torch.tensor([0]), True),
        ("a.scale", torch.ones(2), False),
        ("a.expert_map", torch.arange(4, dtype=torch.int32), True),
        ("a.qweight", torch.zeros(2, 2, dtype=torch.int32), False),
        ("a.packed", torch.zeros(4, dtype=torch.uint8), False),
        ("a.b.cos_sin_cache", torch.rand(3, 2), True),
        ("cos_sin_cache", torch.rand(3, 2), True),
        ("a.my_cos_sin_cache_copy", torch.rand(3, 2), False),
        ("a.kv_cache[0]", torch.rand(3, 2), True),
        ("a.kv_cache_scales", torch.rand(3, 2), False),
        ("a.nothing", torch.empty(0, 3), True),
    ],
)
def test_kinds_of_constants(path: str, tensor: torch.Tensor, constant: bool) -> None:
    assert is_constant(path, tensor) is constant


def test_a_number_that_is_kept_of_a_weight() -> None:
    """A kernel that takes the number would not see the weight change."""

    def absorb(model: Latent) -> None:
        model.layers[0].kv_b_proj.weight_float = 1.5
        model.layers[1].kv_b_proj.other_float = 1.5
        model.layers[1].kv_b_proj.weight_float = None

    model, placement = served(absorb)
    [derived] = find_derived(model, placement, known)
    assert derived.path == "layers.0.kv_b_proj.weight_float"
    assert derived.weights == {"layers.0.kv_b_proj.weight"}


def test_what_was_there_before_the_weights_is_a_constant() -> None:
    """With the same bits; what was filled in later is not."""
    base = base_checkpoint(Latent)
    model = Latent()
    model.layers[0].filled = torch.zeros(3)
    model.layers[0].one, model.layers[0].zero = torch.ones(()), torch.zeros(1)
    constants = Constants(model)
    model.load_weights(base.items())
    model.layers[0].filled.add_(1)
    model.layers[0].later = torch.ones(3)
    model.layers[0].one = torch.ones(())
    model.layers[0].top = model.projection(0).abs().max().clamp(max=1.0)
    placement = LoaderDryRun(model, model.load_weights, StorageIndex(model)).trace(model.specs())
    found = find_derived(model, placement, constants)
    assert [one.path for one in found] == ["layers.0.filled", "layers.0.later", "layers.0.top"]


# --- modules that are rebuilt ---


def rebuilt_paths(rebuilt: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """The derived tensors of a model with one of them on each module, by path."""
    live: Any = load(Latent, base_checkpoint(Latent))
    for path in ("", "layers.0", "layers.0.kv_b_proj", "layers.1.backend"):
        live.get_submodule(path).made = torch.rand(3, 2) + 2
    index = StorageIndex(live)
    placement = LoaderDryRun(live, live.load_weights, index).trace(Latent.specs())
    for name in [n for n in placement if n.startswith("layers.0") and rebuilt]:
        del placement[name]
    found = find_derived(live, placement, rebuilt=rebuilt)
    return {one.path: one.weights for one in found if one.attribute == "made"}


def test_what_a_rebuilt_module_holds_is_left_out() -> None:
    weights = frozenset(["layers.0.kv_b_proj.weight"])
    found = rebuilt_paths({"layers.0.kv_b_proj": weights})
    assert "layers.0.kv_b_proj.made" not in found
    assert found["layers.0.made"] == weights
    assert found["layers.1.backend.made"] == {"layers.1.kv_b_proj.weight"}
    assert weights < found["made"]


def test_unprocessed_weights_count_by_their_own_name() -> None:
    weights = frozenset(["loading layers.0.kv_b_proj.tensor"])
    found = rebuilt_paths({"layers.0.kv_b_proj.weight": weights})
    assert found["layers.0.kv_b_proj.made"] >= weights
    assert weights < found["made"]
