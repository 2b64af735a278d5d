"""A full sync after something has discarded all of a model's memory leaves a fresh engine's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.conformance.toy_models import ToyModel, every_model
from engine_ext.errors import NotUpdatable
from engine_ext.model import extent, reachable_tensors
from engine_ext.sync import unwritten as unwritten_module
from engine_ext.sync.unwritten import Unwritten
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import Engine, RecordingApplier, errors_of
from tests.support.served_models import (
    attempt,
    base_checkpoint,
    memory,
    parts_of,
    serve,
    target_checkpoint,
)
from tests.support.toy_quantised import Everything, Method, Model, TableAway, one_layer
from tests.unit.sync.applier_cases import assert_freshly_loaded, deltas_for, sync_id
from tests.unit.sync.test_appliers import is_updatable
from tests.unit.sync.test_post_load import METHODS, target_of


def discard(model: nn.Module, apart_from: Iterable[torch.Tensor] = ()) -> None:
    """Write other bytes to all of a model's memory."""
    random = torch.Generator().manual_seed(7)
    kept = {id(tensor) for tensor in apart_from}
    for _, _, _, tensor in reachable_tensors(model):
        if tensor.numel() and not tensor.is_meta and id(tensor) not in kept:
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
    refusal = attempt(served, parts_of(deltas), full=True)
    if refusal is None:
        assert_freshly_loaded(served, target)
    assert (refusal is None) == is_updatable(model, names, True, "scatter")


def lose_and_return(serving: Serving) -> None:
    """Unprocessed modules lose all but their weights, too, which are kept in host memory."""
    ranks = zip(serving.engine.receivers, serving.models, serving.states, strict=True)
    for receiver, model, kept in ranks:
        receiver.weights_released()
        receiver.weights_discarded("a sleep")
        receiver.weights_discarded("another sleep, before the memory is back")
        discard(model)
        for state in kept.states:
            discard(state.before, [*state.before.parameters(), *state.before.buffers()])
        receiver.weights_returned()
        receiver.weights_returned()
        receiver.set_asleep(False)


def assert_restored(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys' tensors are all small, and kept; others are left out if a rebuild makes them."""
    for seed, small in enumerate((1 << 16, 0)):
        monkeypatch.setattr(unwritten_module, "_SMALL", small)
        lose_and_return(serving)
        errors_of(serving.sync(target_of(serving, seed=1 + seed), full=True), none=True)
        serving.assert_fresh()
        errors_of(serving.sync(target_of(serving, seed=9 + seed)), none=True)
        serving.assert_fresh()


@pytest.mark.host_memory
@pytest.mark.parametrize("method", METHODS)
def test_every_processing(
    tmp_path: Path, method: type[Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_restored(Serving(one_layer(method), tmp_path), monkeypatch)


@pytest.mark.slow
@pytest.mark.host_memory
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_of_them_on_several_ranks(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_restored(Serving(Everything, tmp_path, ranks=ranks), monkeypatch)


@pytest.mark.slow
@pytest.mark.host_memory
@pytest.mark.parametrize("model", [Everything, one_layer(TableAway)])
def test_an_engine_without_weights(tmp_path: Path, model: type[Model]) -> None:
    serving = Serving(model, tmp_path, dummy=True)
    lose_and_return(serving)
    errors_of(serving.sync(serving.base, full=True), none=True)
    serving.assert_fresh()


class Broken:
    """A tensor whose memory cannot be read, or not be written."""

    def unwritten(self) -> Unwritten:
        raise RuntimeError("no memory")

    def restore(self) -> None:
        raise RuntimeError("no memory")


@pytest.mark.slow
@pytest.mark.host_memory
@pytest.mark.parametrize("when", ["unwritten", "restore"])
def test_what_cannot_be_kept_refuses_every_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The engine itself goes to sleep and wakes up as it does without delta updates."""
    serving = Serving(Everything, tmp_path)
    owner: Any = Unwritten if when == "restore" else type(serving.applier(0))
    monkeypatch.setattr(owner, when, getattr(Broken, when))
    lose_and_return(serving)
    for full in (True, False):
        [error] = errors_of(serving.sync(target_of(serving), full=full))
        assert (error["type"], error["engine_state"]) == (NotUpdatable.__name__, "unchanged")
        assert "no memory" in error["message"]


@pytest.mark.host_memory
def test_a_sleep_that_failed_keeps_nothing_for_later(tmp_path: Path) -> None:
    """Something has loaded other weights since: they are not overwritten at the next wake-up."""
    serving = Serving(Everything, tmp_path)
    [receiver] = serving.engine.receivers
    receiver.weights_released()
    receiver.weights_discarded("a sleep that fails")
    receiver.set_asleep(False)
    receiver.weights_replaced("a reload")
    discard(serving.models[0])
    before = memory(serving.models[0])
    receiver.weights_returned()
    assert memory(serving.models[0]) == before


class KeepsOne(RecordingApplier):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(2)

    def unwritten(self) -> Unwritten:
        return Unwritten([self.kept])


def test_next_sleep_keeps_what_there_is_by_then(tmp_path: Path) -> None:
    """A sleep has failed, and the engine has served and changed since."""
    applier = KeepsOne()
    [receiver] = Engine([applier], tmp_path).receivers
    receiver.weights_released()
    receiver.weights_discarded("a sleep that fails")
    receiver.set_asleep(False)
    applier.kept.fill_(7)
    receiver.weights_released()
    receiver.weights_discarded("a sleep")
    applier.kept.fill_(-1)
    receiver.weights_returned()
    assert applier.kept.tolist() == [7, 7]


def test_caches_are_not_kept_under_any_name() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv_cache = torch.zeros(4, 8)
            self.view_of_it = self.kv_cache[:2]
            self.scale = torch.ones(1)

    kept = [*unwritten_module.unloaded(Attention())]
    assert [tensor.tolist() for tensor in kept] == [[1.0]]
