"""A full sync after something has discarded all of a model's memory leaves a fresh engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine_ext.conformance.toy_models import ToyModel, every_model
from engine_ext.model import extent, reachable_tensors
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of
from tests.support.served_models import (
    attempt,
    base_checkpoint,
    parts_of,
    serve,
    target_checkpoint,
)
from tests.support.toy_quantised import Everything, Method, one_layer
from tests.unit.sync.applier_cases import assert_freshly_loaded, deltas_for, sync_id
from tests.unit.sync.test_post_load import METHODS, target_of


def discard(model: nn.Module) -> None:
    """Write other bytes to all of a model's memory."""
    random = torch.Generator().manual_seed(7)
    for _, _, _, tensor in reachable_tensors(model):
        if tensor.numel() and not tensor.is_meta:
            data = tensor.detach()
            flat = data.as_strided((extent(data),), (1,), data.storage_offset()).view(torch.uint8)
            flat.copy_(torch.randint(0, 2, flat.shape, generator=random, dtype=torch.uint8))


@pytest.mark.parametrize("model", every_model(), ids=sync_id)
def test_every_loader(model: type[ToyModel]) -> None:
    base = base_checkpoint(model)
    served = serve(model, base, apply="scatter")
    names = sorted(served.applier.plan.held)
    target = target_checkpoint(base, names)
    kept = served.applier.unwritten()
    discard(served.model)
    kept.restore()
    served.applier.forget()
    deltas = deltas_for(base, target, names, True)
    if attempt(served, parts_of(deltas), full=True) is None:
        assert_freshly_loaded(served, target)


def lose_and_return(serving: Serving) -> None:
    for receiver, model in zip(serving.engine.receivers, serving.models, strict=True):
        receiver.weights_released()
        receiver.weights_discarded("a sleep")
        receiver.weights_discarded("another sleep, before the memory is back")
        discard(model)
        receiver.weights_returned()
        receiver.weights_returned()
        receiver.set_asleep(False)


@pytest.mark.host_memory
@pytest.mark.parametrize("method", METHODS)
def test_every_processing(tmp_path: Path, method: type[Method]) -> None:
    serving = Serving(one_layer(method), tmp_path)
    lose_and_return(serving)
    errors_of(serving.sync(target_of(serving), full=True), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving, seed=9)), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_of_them_on_several_ranks(tmp_path: Path, ranks: int) -> None:
    serving = Serving(Everything, tmp_path, ranks=ranks)
    lose_and_return(serving)
    errors_of(serving.sync(target_of(serving), full=True), none=True)
    serving.assert_fresh()
    lose_and_return(serving)
    errors_of(serving.sync(target_of(serving, seed=3), full=True), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
def test_an_engine_without_weights(tmp_path: Path) -> None:
    serving = Serving(Everything, tmp_path, dummy=True)
    lose_and_return(serving)
    errors_of(serving.sync(serving.base, full=True), none=True)
    serving.assert_fresh()
