"""Names of tied tensors that only the trainer knows: compared, if the loader drops them."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from engine_ext.conformance import toy_models
from engine_ext.conformance.receivers import Project
from engine_ext.conformance.sending import Refused
from engine_ext.conformance.subject import Delta, Rank
from engine_ext.conformance.toy_models import ToyModel, Weights, parameter
from engine_ext.model import StorageIndex
from engine_ext.startup.trace import LoaderDryRun, LoadingTrace, dropped_aliases


class TiedHeadSkipped(toy_models.Tied):
    """The loader takes a head, too, and drops it."""

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name != "head":
            super().load_one(name, weight)


class TiedHeadWanted(toy_models.Tied):
    """The loader takes the embedding for a head only if it is given none."""

    def load_weights(self, weights: Weights) -> None:
        given = dict(weights)
        if "embed" in given:
            self.embed.data.copy_(given.get("head", given["embed"]))


BASE = {"embed": torch.arange(20.0).reshape(5, 4).bfloat16()}


def dropped(model: ToyModel) -> set[str]:
    index = StorageIndex(model)
    placement = LoaderDryRun(model, model.load_weights, index).trace(model.specs())
    return set(dropped_aliases(LoaderDryRun(model, model.load_weights, index), placement))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (TiedHeadSkipped, {"head"}),
        (toy_models.Tied, set[str]()),  # the engine would have used it
        (TiedHeadWanted, {"lm_head.weight"}),  # it wants `head`, with the others
        (toy_models.PlainCopy, set[str]()),
    ],
)
def test_a_name_that_the_loader_drops(model: type[ToyModel], expected: set[str]) -> None:
    assert dropped(model()) == expected


def test_what_was_traced_before_processing() -> None:
    model, loading = TiedHeadSkipped(), LoadingTrace()
    loading.trace(model, model.load_weights, BASE.items)
    spec = loading.dropped["head"]
    assert (spec.name, spec.shape, spec.dtype) == ("embed", (5, 4), torch.bfloat16)
    loading.trace(model, model.load_weights, BASE.items, path="draft")
    assert loading.dropped == {}  # another loader can use it


def project(model: ToyModel) -> Project:
    found = Project("scatter")
    rank = Rank(model, BASE, lambda: model.load_weights(BASE.items()), lambda: None)
    with torch.no_grad():
        found.serve([rank])
    return found


def delta(name: str, value: float) -> Delta:
    values = torch.tensor([value]).bfloat16()
    return Delta(name, (5, 4), torch.bfloat16, torch.tensor([7]), values)


def test_what_the_engine_would_not_use_is_skipped_if_it_is_equal() -> None:
    model = TiedHeadSkipped()
    project(model).apply([delta("embed", 40.0), delta("head", 40.0)])
    assert model.embed.data.view(-1)[7] == 40.0
    assert model.head is model.embed


def test_a_name_that_the_checkpoint_lacks_need_not_be_sent() -> None:
    model = TiedHeadSkipped()
    project(model).apply([delta("embed", 40.0)])
    assert model.embed.data.view(-1)[7] == 40.0


@pytest.mark.parametrize("sent", [[("embed", 40.0), ("head", 41.0)], [("head", 41.0)]])
def test_a_trained_head_is_not_lost(sent: list[tuple[str, float]]) -> None:
    model = TiedHeadSkipped()
    served = project(model)
    with pytest.raises(Refused, match="head and embed would differ"):
        served.apply([delta(*one) for one in sent])
    assert torch.equal(model.embed.data.cpu(), BASE["embed"])


def test_what_the_engine_would_use_is_refused() -> None:
    model = toy_models.Tied()
    served = project(model)
    with pytest.raises(Refused, match="head"):
        served.apply([delta("embed", 40.0), delta("head", 40.0)])
    assert torch.equal(model.embed.data.cpu(), BASE["embed"])


class TiedGates(TiedHeadSkipped):
    """Each layer's gate has another name, too, which no trainer sends."""

    shapes: ClassVar = {"gates.0.weight": (2, 4), "gates.1.weight": (2, 4), "embed": (5, 4)}
    routers: ClassVar = "dropped"

    def build(self) -> None:
        super().build()
        self.gates = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for gate in self.gates:
            gate.weight = gate.router = parameter(2, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if not name.startswith("gates"):
            super().load_one(name, weight)
        elif name.endswith("weight") or self.routers == "used":
            self.get_parameter(name).copy_(weight)


class UsedRouters(TiedGates):
    """The loader takes these names as well."""

    routers: ClassVar = "used"


def test_every_tied_tensor_has_its_other_names() -> None:
    assert dropped(TiedGates()) == {"head", "gates.0.router", "gates.1.router"}


def test_names_that_the_loader_uses_are_not_dropped() -> None:
    assert dropped(UsedRouters()) == {"head"}
