"""Rehearsals: what the loader does in company, and with one tensor alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import pytest
import torch
from torch import nn

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import ToyModel, parameter
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.segments import TensorSpec
from engine_ext.startup import LoaderDryRun
from tests.support.served_models import Served, base_checkpoint, memory, serve
from tests.unit.startup.trace.traced import COPY, MODELS, identities, loaded

# --- rehearsal ---


def rehearsed(served: Served, names: Iterable[str]) -> dict[str, str]:
    return LoaderDryRun(served.model, served.model.load_weights, served.index).rehearse(
        list(names), served.placement
    )


@MODELS
def test_a_rehearsal_tells_whether_the_loader_needs_company(model: type[ToyModel]) -> None:
    """And leaves the model as it was, also with tensors that are refused."""
    served = serve(model, base_checkpoint(model))
    bits, objects = memory(served.model), identities(served.model)
    for name in model.shapes:
        alone = rehearsed(served, [name])
        if name not in model.refused:
            needs = model.needs.get(name, frozenset())
            assert set(alone) == ({name} if needs else set()), name
            assert rehearsed(served, {name, *needs}) == {}, name
    assert memory(served.model) == bits
    assert identities(served.model) == objects
    assert torch.Tensor.copy_ is COPY


@pytest.mark.parametrize(
    ("model", "name", "fragment"),
    [
        (toy_models.PairsTogether, "gate", "differently"),
        (toy_models.FallsBackToEmbedding, "embed", "differently"),
        (toy_models.PairsOrFailure, "gate", "KeyError"),
        (toy_models.WantsAll, "bias", "not loaded"),
        (toy_models.DefaultsWhatIsMissing, "weight", "writes over bias"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_rehearsal_gives_the_reason(model: type[ToyModel], name: str, fragment: str) -> None:
    served = serve(model, base_checkpoint(model))
    assert fragment in rehearsed(served, [name])[name]


# --- what the loader does with one tensor alone ---


class Habits(ToyModel):
    """Writes a tensor to one parameter, to two, to a replaced one, and elsewhere."""

    names = ("plain", "exp", "both", "replaced", "kept", "buffer", "fails", "dropped", "memory")
    shapes: ClassVar = dict.fromkeys(names, (3,))

    def build(self) -> None:
        super().build()
        self.other = parameter(3)
        self.tied = self.plain
        self.others = nn.Parameter(self.memory.data, requires_grad=False)
        self.register_buffer("table", torch.zeros(3))

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "exp":
            self.exp.data.copy_(-weight.float().exp())
        elif name == "both":
            self.both.data.copy_(weight)
            self.other.data.copy_(weight * 2)
        elif name == "replaced":
            self.replaced = nn.Parameter(weight, requires_grad=False)
        elif name == "kept":
            self.kept.data.copy_(weight)
            self.elsewhere = weight * 2
        elif name == "buffer":
            self.table.copy_(weight)
        elif name == "fails":
            self.fails.data.fill_(float(weight.sum()))
        elif name in ("plain", "memory"):
            self.get_parameter(name).data.copy_(weight)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("exp", {"exp"}),
        ("both", {"both", "other"}),
        ("replaced", {"replaced"}),
        ("kept", set()),
        ("buffer", set()),
        ("fails", set()),
        ("dropped", set()),
        ("plain", {"plain", "tied"}),
        ("memory", set()),
    ],
)
def test_what_is_written_for_one_tensor_alone(name: str, names: set[str]) -> None:
    live = loaded(Habits) if name == "fails" else Habits()
    before, objects = memory(live), identities(live)
    spec = TensorSpec(name, (3,), torch.bfloat16)
    assert LoaderDryRun(live, live.load_weights, StorageIndex(live)).written_alone(spec) == names
    assert memory(live) == before
    assert identities(live) == objects
