"""The draft model of speculative decoding with its target, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.adapters.target_and_draft import ModelRole, TargetAndDraft, outside, read
from engine_ext.model import StorageIndex
from engine_ext.placement import Status, TensorSpec, certify_placement, make_plan
from engine_ext.ranks import SingleRank
from engine_ext.startup import LoaderDryRun, LoadingTrace
from tests.support.served_models import (
    APPLIES,
    Served,
    attempt,
    delta_between,
    make_applier,
    parts_of,
)

Tensors = dict[str, torch.Tensor]


class Layered(nn.Module):
    """A model with an embedding and some layers; it skips names that it does not know."""

    def __init__(self, *layers: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, dtype=torch.bfloat16)
        self.layers = nn.ModuleDict(
            {name: nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for name in layers}
        )
        self.given: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            self.given.append(name)
            if name in parameters:
                parameters[name].data.copy_(tensor)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def checkpoint(*layers: str) -> Tensors:
    return {"embed.weight": normal(6, 4), **{f"layers.{n}.weight": normal(4, 4) for n in layers}}


PARTS = [ModelRole("target", "", True), ModelRole("draft", "draft.", True)]


def test_both_checkpoints_are_read_as_one() -> None:
    one = torch.zeros(1)
    found = read(PARTS, [[("a", one)], [("a", one), ("b", one)]])
    assert [name for name, _ in found] == ["a", "draft.a", "draft.b"]
    same = [PARTS[0], ModelRole("draft", "", False)]
    assert [name for name, _ in read(same, [[("a", one)], [("a", one)]])] == ["a"]


def test_a_target_whose_names_look_like_the_drafts_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"draft\.a of the target"):
        list(read(PARTS, [[("draft.a", torch.zeros(1))], []]))


def test_each_tensor_goes_to_its_model() -> None:
    both = TargetAndDraft(Layered("0"), Layered("0"), "draft.")
    tensors = checkpoint("0")
    both.load_weights([*tensors.items(), ("draft.layers.0.weight", normal(4, 4))])
    assert both.target.given == ["embed.weight", "layers.0.weight"]
    assert both.draft.given == ["layers.0.weight"]
    both.load_weights([("embed.weight", normal(6, 4))])
    assert both.draft.given == ["layers.0.weight"]


def test_without_a_prefix_both_get_all_but_what_is_dropped() -> None:
    both = TargetAndDraft(Layered("0"), Layered("mtp"), "")
    both.dropped = {"embed.weight"}
    both.load_weights(checkpoint("0", "mtp").items())
    assert both.target.given == ["embed.weight", "layers.0.weight", "layers.mtp.weight"]
    assert both.draft.given == ["layers.0.weight", "layers.mtp.weight"]


def test_paths_outside_of_modules() -> None:
    found = {"draft.embed.weight": 1, "draft.embedding": 2, "target.embed.weight": 3}
    assert outside(["draft.embed"], found) == {"draft.embedding": 2, "target.embed.weight": 3}
    assert outside([], found) == found


class Loaded:
    """Both models, loaded and traced as the adapter does, before the draft shares the target's."""

    def __init__(self, prefix: str, target: Tensors, own: Tensors) -> None:
        self.loading = LoadingTrace()
        layers = [[n.split(".")[1] for n in one if n.startswith("layers")] for one in (target, own)]
        models = [Layered(*[n for n in layers[0] if n != "mtp"]), Layered(*layers[1])]
        checkpoints = [target, own if prefix else target]
        for model, tensors, path in zip(models, checkpoints, ("target", "draft"), strict=True):
            model.load_weights(tensors.items())
            before = prefix if path == "draft" else ""
            load = model.load_weights
            self.loading.trace(model, load, tensors.items, path=path, prefix=before)
        self.both = TargetAndDraft(models[0], models[1], prefix)
        self.tensors = {**target, **({prefix + n: t for n, t in own.items()} if prefix else {})}

    def share(self, *, module: bool = True) -> None:
        """Let the draft model have the target's embedding: the module, or its parameter alone."""
        both: Any = self.both
        if module:
            both.draft.embed = both.target.embed
        else:
            both.draft.embed.weight = both.target.embed.weight
        both.dropped = self.loading.forget(both.shared())

    def plan(self) -> Any:
        assert self.loading.specs == [
            TensorSpec(n, tuple(t.shape), t.dtype) for n, t in self.tensors.items()
        ]
        index = StorageIndex(self.both)
        load = self.both.load_weights
        placement = LoaderDryRun(self.both, load, index).trace(self.loading.specs)
        self.loading.refuse_lost(placement, reads=True)
        assert self.loading.sharing_changed(self.both, self.both, {}) == {}
        certify_placement(placement, self.tensors.items())
        return index, make_plan(placement, SingleRank())


def statuses(plan: Any) -> dict[str, str]:
    return {name: placed.status.value for name, placed in plan.placement.items()}


def test_both_models_are_certified_by_their_names() -> None:
    loaded = Loaded("draft.", checkpoint("0", "1"), checkpoint("0"))
    _, plan = loaded.plan()
    assert {*statuses(plan).values()} == {"exact"}
    (segment,) = plan.placement["draft.layers.0.weight"].segments
    assert segment.live.name == "draft.layers.0.weight"


@pytest.mark.parametrize("module", [True, False])
def test_tensors_shared_with_target_have_only_its_names(module: bool) -> None:
    """A copy in the checkpoint that no engine uses is ignored, and refuses nothing."""
    target = checkpoint("0", "mtp")
    own = {"layers.mtp.weight": target["layers.mtp.weight"]}
    loaded = Loaded("", target, own)
    loaded.share(module=module)
    assert loaded.both.shared() == ["draft.embed"]
    assert loaded.both.dropped == {"embed.weight"}
    _, plan = loaded.plan()
    assert {*statuses(plan).values()} == {"exact"}
    prefixed = Loaded("draft.", checkpoint("0"), checkpoint("mtp"))
    prefixed.share(module=module)
    _, plan = prefixed.plan()
    assert statuses(plan) == {
        "embed.weight": "exact",
        "layers.0.weight": "exact",
        "draft.embed.weight": "ignored",
        "draft.layers.mtp.weight": "exact",
    }


def test_tensor_that_both_write_is_refused_under_both_names() -> None:
    target, own = checkpoint("0"), checkpoint("0")
    own["embed.weight"] = target["embed.weight"].clone()
    loaded = Loaded("draft.", target, own)
    loaded.share()
    loaded.both.dropped = set()
    _, plan = loaded.plan()
    refused = {n: p.reason for n, p in plan.placement.items() if p.status is Status.UNCERTIFIED}
    assert refused.keys() == {"embed.weight", "draft.embed.weight"}
    assert "shares the memory" in refused["embed.weight"]


def test_a_module_with_parameters_of_its_own_is_not_the_targets() -> None:
    both: Any = TargetAndDraft(Layered("0"), Layered("0"), "draft.")
    both.draft.embed.weight = both.target.embed.weight
    both.draft.embed.scale = nn.Parameter(torch.ones(1))
    assert both.shared() == []


@pytest.mark.parametrize("apply", APPLIES)
@pytest.mark.parametrize("prefix", ["draft.", ""])
def test_one_transaction_writes_both_and_undoes_both(apply: str, prefix: str) -> None:
    target = checkpoint("0", "mtp")
    own = checkpoint("mtp") if prefix else {"layers.mtp.weight": target["layers.mtp.weight"]}
    loaded = Loaded(prefix, target, own)
    if not prefix:
        loaded.share()
    both: Any = loaded.both
    index, plan = loaded.plan()
    served = Served(both, index, make_applier(both, index, plan, apply=apply))
    changes = {name: -loaded.tensors[name] for name, p in plan.placement.items() if p.segments}
    deltas = [delta_between(name, loaded.tensors[name], new) for name, new in changes.items()]
    assert attempt(served, parts_of(deltas)) is None
    assert torch.equal(both.target.layers["0"].weight, changes["layers.0.weight"])
    assert torch.equal(both.draft.layers["mtp"].weight, changes[f"{prefix}layers.mtp.weight"])


def test_the_paths_of_a_part() -> None:
    draft, alone = PARTS[1], ModelRole("", "", True)
    assert draft.by_path({"embed.weight": 1}) == {"draft.embed.weight": 1}
    assert draft.inside("draft.embed.weight") == "embed.weight"
    assert alone.by_path({"embed.weight": 1}) == {"embed.weight": 1}
    assert alone.inside("draft.weight") == "draft.weight"
