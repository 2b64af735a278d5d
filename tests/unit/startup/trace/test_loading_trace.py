"""A tensor is dropped only if the loader drops it before post-load processing, too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import ClassVar

import pytest
import torch

from engine_ext.conformance.models import HalfReplaced, LoaderReplaced
from engine_ext.conformance.toy_models import PackedAway, PlainCopy, Skipped, ToyModel
from engine_ext.model import StorageIndex
from engine_ext.placement import Placement, Status, make_plan
from engine_ext.ranks import SingleRank
from engine_ext.startup import LoaderDryRun, LoadingTrace, compose


def checkpoint(model: type[ToyModel]) -> dict[str, torch.Tensor]:
    return {spec.name: torch.ones(spec.shape, dtype=spec.dtype) for spec in model.specs()}


def processed(model: ToyModel, loading: LoadingTrace | None, *, reads: bool = True) -> Placement:
    """Load, trace, process and trace again, as an engine and its adapter do."""
    tensors = checkpoint(type(model))
    with torch.no_grad():
        model.load_weights(tensors.items())
        if loading is not None:
            loading.trace(model, model.load_weights, tensors.items if reads else None)
        model.after_loading()
        placement = LoaderDryRun(model, model.load_weights, StorageIndex(model)).trace(
            model.specs()
        )
    if loading is not None:
        loading.refuse_lost(placement, reads=reads)
        compose(placement, {}, loading.sharing_changed(model, model, {}))
    return placement


@pytest.mark.parametrize("model", [LoaderReplaced, HalfReplaced])
def test_untraced_replaced_loader_looks_like_dropped_tensor(model: type[ToyModel]) -> None:
    name = next(iter(model.shapes))
    seen = processed(model(), None)[name].status
    assert seen in (Status.NOT_ON_RANK, Status.UNJUDGED)


@pytest.mark.parametrize("model", [LoaderReplaced, HalfReplaced])
def test_what_was_loaded_and_replaced_is_refused(model: type[ToyModel]) -> None:
    name = next(iter(model.shapes))
    placed = processed(model(), LoadingTrace())[name]
    assert placed.status is Status.UNCERTIFIED
    assert "post-load processing replaced" in placed.reason


def test_what_the_loader_always_drops_stays_dropped() -> None:
    placement = processed(Skipped(), LoadingTrace())
    assert placement["rotary"].status is Status.NOT_ON_RANK
    assert placement["weight"].status is Status.UNJUDGED


def test_a_model_that_is_not_processed_stays_as_traced() -> None:
    placement = processed(PlainCopy(), LoadingTrace())
    assert {placed.status for placed in placement.values()} == {Status.UNJUDGED}


def test_a_trace_names_what_the_loader_fills() -> None:
    model, loading = Skipped(), LoadingTrace()
    tensors = checkpoint(Skipped)
    assert loading.trace(model, model.load_weights, tensors.items, path="a") == {"weight"}
    assert loading.trace(model, model.load_weights, None, path="b") == set()


def test_without_a_checkpoint_there_is_nothing_to_compare() -> None:
    loading = LoadingTrace()
    placement = processed(Skipped(), loading, reads=False)
    assert loading.specs is None
    assert placement["rotary"].status is Status.NOT_ON_RANK
    assert not placement["rotary"].used


def test_never_called_it_calls_nothing_dropped() -> None:
    """Another rank might hold it; if none does, the plan refuses it, because it is used."""
    model = Skipped()
    placement = LoaderDryRun(model, model.load_weights, StorageIndex(model)).trace(model.specs())
    LoadingTrace().refuse_lost(placement, reads=True)
    plan = make_plan(placement, SingleRank())
    assert plan.placement["rotary"].status is Status.UNCERTIFIED


class Retied(ToyModel):
    """Processing ties two parameters whose bytes are equal; the loader skips unknown names."""

    shapes: ClassVar = {"head": (4, 3), "embed": (4, 3), "norm": (3,)}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            if name in parameters:
                parameters[name].data.copy_(weight)

    def after_loading(self) -> None:
        self.head = self.embed


def test_parameters_that_share_memory_since_are_refused_both() -> None:
    placement = processed(Retied(), LoadingTrace())
    assert placement["head"].status is placement["embed"].status is Status.UNCERTIFIED
    assert "share memory" in placement["head"].reason + placement["embed"].reason
    assert placement["norm"].status is Status.UNJUDGED


class Collects(ToyModel):
    """The loader keeps what it was given on the parameter, for the processing."""

    shapes: ClassVar = {"weight": (4, 3)}

    def build(self) -> None:
        super().build()
        self.weight.shards = []
        self.weight.counts = {"loaded": []}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.shards.append(weight)
        self.weight.counts["loaded"].append(1)
        self.weight.shard = weight
        self.weight.data.copy_(weight)


def test_what_a_loader_keeps_on_a_parameter_is_put_back() -> None:
    model, loading = Collects(), LoadingTrace()
    tensors = checkpoint(Collects)
    model.load_weights(tensors.items())
    loading.trace(model, model.load_weights, tensors.items)
    assert [shard.device.type for shard in model.weight.shards] == ["cpu"]
    assert model.weight.counts == {"loaded": [1]}
    assert model.weight.shard is tensors["weight"]


def test_a_loader_that_is_wrapped_now_is_not_traced() -> None:
    model, loading = Skipped(), LoadingTrace()
    loading.trace(model, model.load_weights, checkpoint(Skipped).items, lambda _: "it reloads")
    assert loading.specs is None


@pytest.mark.slow
@pytest.mark.usefixtures("quick_collections")
def test_the_specs_are_the_checkpoints_and_no_memory_is_kept() -> None:
    model, loading = PackedAway(), LoadingTrace()
    loading.trace(model, model.load_weights, checkpoint(PackedAway).items)
    assert loading.specs == PackedAway.specs()
    alive = weakref.ref(model.weight)
    model.after_loading()
    gc.collect()
    assert alive() is None


def test_freed_memory_is_not_shared_with_next_model() -> None:
    """vLLM loads a draft model after the target, and it can get the target's old addresses."""
    target, loading = PackedAway(), LoadingTrace()
    tensors = checkpoint(PackedAway)
    loading.trace(target, target.load_weights, tensors.items, path="target")
    old = target.weight
    target.weight = torch.nn.Parameter(torch.empty_like(old), requires_grad=False)
    draft = PackedAway()
    draft.weight = old
    loading.trace(draft, draft.load_weights, tensors.items, path="draft", prefix="draft.")
    both = torch.nn.ModuleDict({"target": target, "draft": draft})
    assert loading.sharing_changed(both, both, {}) == {}
    names = [name for prefix in ("", "draft.") for name in (prefix + n for n in PackedAway.shapes)]
    assert loading.specs is not None
    assert [spec.name for spec in loading.specs] == names
