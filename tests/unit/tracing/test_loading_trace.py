"""A tensor is dropped only if the loader drops it before post-load processing, too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from engine_ext.model import StorageIndex
from engine_ext.placement import Placement, Status
from engine_ext.tracing import LoadingTrace, trace_placement
from tests.conformance.models import HalfReplaced, LoaderReplaced
from tests.support.toy_models import PackedAway, PlainCopy, Skipped, ToyModel


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
        placement = trace_placement(model, model.load_weights, model.specs(), StorageIndex(model))
    if loading is not None:
        loading.refuse_lost(model, placement)
    return placement


@pytest.mark.parametrize("model", [LoaderReplaced, HalfReplaced])
def test_without_it_a_replaced_loader_looks_like_a_dropped_tensor(model: type[ToyModel]) -> None:
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


@pytest.mark.parametrize(("model", "lost"), [(Skipped, False), (LoaderReplaced, True)])
def test_without_a_checkpoint_only_unchanged_parameters_prove_it(
    model: type[ToyModel], lost: bool
) -> None:
    loading = LoadingTrace()
    placement = processed(model(), loading, reads=False)
    name = "qweight" if lost else "rotary"
    assert loading.specs is None
    assert (placement[name].status is Status.UNCERTIFIED) == lost


def test_never_called_it_refuses_all_that_seems_dropped() -> None:
    model = Skipped()
    placement = trace_placement(model, model.load_weights, model.specs(), StorageIndex(model))
    LoadingTrace().refuse_lost(model, placement)
    assert placement["rotary"].status is Status.UNCERTIFIED


def test_a_loader_that_is_wrapped_now_is_not_traced() -> None:
    model, loading = Skipped(), LoadingTrace()
    loading.trace(model, model.load_weights, checkpoint(Skipped).items, lambda _: "it reloads")
    assert loading.specs is None


def test_the_specs_are_the_checkpoints_and_no_memory_is_kept() -> None:
    model, loading = PackedAway(), LoadingTrace()
    loading.trace(model, model.load_weights, checkpoint(PackedAway).items)
    assert loading.specs == PackedAway.specs()
    alive = weakref.ref(model.weight)
    model.after_loading()
    gc.collect()
    assert alive() is None
