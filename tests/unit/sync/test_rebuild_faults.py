"""Rebuilds that go wrong on one rank, or after start-up: refused, or found by a scan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.conformance.toy_models import Weights
from engine_ext.kernels import bits_of
from engine_ext.startup import Recomputation
from engine_ext.sync import post_load
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of, part_id
from tests.support.toy_collective import Meeting, OneScale, Together, all_ranks
from tests.support.toy_quantised import (
    OUT,
    Everything,
    Handle,
    Int8,
    Layer,
    Method,
    Model,
    Packed,
    linear_shapes,
    one_layer,
    parameter,
)
from tests.unit.sync.test_post_load import Drifting, target_of

pytestmark = pytest.mark.slow


def corrupted(serving: Serving) -> list[str]:
    """What a scan names on any rank."""
    answers = serving.engine.call("digest", scan=True)
    return sorted({name for answer in answers for name in answer["ok"]["corrupted"]})


# --- one rank of several ---


@pytest.mark.parametrize("rank", [0, 1])
def test_processing_that_raises_before_the_ranks_meet(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others must not wait for that rank, nor meet it in the next module."""
    serving = Serving(Meeting, tmp_path, ranks=2)
    before = serving.served()

    def fail(layer: Any) -> None:
        if layer.rank == rank:
            raise ValueError("no memory left")

    with all_ranks(2):
        errors_of(serving.sync(target_of(serving)), none=True)
        assert corrupted(serving) == []
        after = serving.served()
        assert after != before
        with monkeypatch.context() as patch:
            patch.setattr(Together, "first", staticmethod(fail))
            answers = serving.sync(target_of(serving, seed=5))
            assert len({str(answer["error"]) for answer in answers}) == 1
            assert "no memory left" in refusal(answers)
            assert corrupted(serving) == ["one.bias", "one.weight", "two.bias", "two.weight"]
        assert serving.served() == after
        assert corrupted(serving) == []
        errors_of(serving.sync(target_of(serving, seed=7), full=True), none=True)
    serving.assert_fresh()


def test_what_raises_on_one_rank_may_be_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are at the same module then, though some had rebuilt it."""
    monkeypatch.setattr(post_load, "_BATCH", 1)
    serving = Serving(Meeting, tmp_path, ranks=2)
    target = target_of(serving)
    body = serving.body(target)
    part = part_id(body)
    runs: list[int] = []

    def fail_once(layer: Any) -> None:
        runs.append(layer.rank)
        if runs.count(1) == 4 and layer.rank == 1:  # in the second module
            raise ValueError("no memory left")

    with all_ranks(2):
        with monkeypatch.context() as patch:
            patch.setattr(Together, "first", staticmethod(fail_once))
            assert "no memory left" in refusal(serving.engine.stage(part, body))
        while not all(answer["ok"]["done"] for answer in serving.engine.prepare(part)):
            pass
        errors_of(serving.engine.commit(part), none=True)
    serving.version, serving.current = 1, serving.current | target
    serving.assert_fresh()


class Stages(Model):
    """Two stages of a pipeline, each with a layer that communicates within its stage."""

    shapes: ClassVar = linear_shapes("one", "two")

    def build(self, rank: int, ranks: int) -> None:
        setattr(self, ("one", "two")[rank], Layer(Together(), rank=rank))

    def load_weights(self, weights: Weights) -> None:
        own = dict(self.named_parameters())
        super().load_weights((name, weight) for name, weight in weights if name in own)


def test_modules_that_one_stage_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other stage takes part in the votes of their processing."""
    serving = Serving(Stages, tmp_path, ranks=2)
    for rank, (own, other) in enumerate((("one", "two"), ("two", "one"))):
        statuses = serving.statuses(rank)
        assert (statuses[f"{own}.weight"], statuses[f"{other}.weight"]) == (
            "rebuilt",
            "not on this rank",
        )
    for names in ((), ("one.weight",), ("two.weight",)):
        errors_of(serving.sync(target_of(serving, *names, seed=3)), none=True)
        serving.assert_fresh()
    assert corrupted(serving) == []
    before = serving.served()

    def fail(layer: Any) -> None:
        if layer.rank == 1:
            raise ValueError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(Together, "first", staticmethod(fail))
        assert "no memory left" in refusal(serving.sync(target_of(serving, seed=5)))
    assert serving.served() == before
    errors_of(serving.sync(target_of(serving, seed=5)), none=True)
    serving.assert_fresh()


class OneStage(Stages):
    """Only the first stage has a layer that is processed."""

    def build(self, rank: int, ranks: int) -> None:
        if rank == 0:
            super().build(rank, ranks)
        else:
            self.two = Layer(Method(), rank=rank)


@pytest.mark.parametrize("dummy", [False, True])
def test_one_stage_alone_has_modules_that_are_rebuilt(tmp_path: Path, dummy: bool) -> None:
    serving = Serving(OneStage, tmp_path, ranks=2, dummy=dummy)
    if dummy:
        errors_of(serving.sync(serving.base, full=True), none=True)
    else:
        assert serving.statuses(0)["one.weight"] == "rebuilt"
        assert serving.statuses(1)["two.weight"] == "exact"
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving)), none=True)
    serving.assert_fresh()
    assert corrupted(serving) == []


class Absorbing(Model):
    """Keeps a product of what the engine has made of a weight, as latent attention does."""

    shapes: ClassVar = linear_shapes("group.lin", bias=False)

    def build(self, rank: int, ranks: int) -> None:
        self.group = nn.Module()
        self.group.lin = Layer(OneScale(), bias=False, rank=rank, ranks=ranks)

    def absorb(self) -> None:
        lin: Any = self.group.lin
        self.group.absorbed = lin.weight.float() * lin.weight_scale

    after_processing = absorb


def test_derived_tensor_follows_module_changed_by_other_rank(tmp_path: Path) -> None:
    """Nothing of the weight that this rank holds was sent, but its scale is another one."""
    checkpoint = Absorbing.checkpoint()
    weight = checkpoint["group.lin.weight"]
    weight[0, 0] = weight[OUT // 2, 0] = 5.0  # so that each rank alone finds the same scale
    serving = Serving(
        Absorbing,
        tmp_path,
        ranks=2,
        checkpoint=checkpoint,
        recomputations=lambda model: [Recomputation(("group",), model.absorb)],
    )
    assert serving.statuses()["group.lin.weight"] == "rebuilt"
    target = weight.clone()
    target[0, 0] = 8.0
    with all_ranks(2):
        errors_of(serving.sync({"group.lin.weight": target}), none=True)
    for model in serving.models:
        group: Any = model.group
        assert group.lin.weight_scale == 8.0
        assert torch.equal(group.absorbed, group.lin.weight.float() * group.lin.weight_scale)


# --- processing that is not what it was at start-up ---


class DriftingHandle(Packed):
    drift: ClassVar[Callable[[Any], None] | None] = None

    def process_weights_after_loading(self, layer: Any) -> None:
        drift = type(self).drift
        if drift is not None:
            drift(layer)
        super().process_weights_after_loading(layer)


def other_bit(layer: Any) -> None:
    bits_of(layer.weight).view(-1)[0] ^= 1


def other_scale(layer: Any) -> None:
    layer.weight_scale *= 2


DRIFTS = [(Drifting, other_bit), (Drifting, other_scale), (DriftingHandle, other_bit)]


@pytest.mark.host_memory
@pytest.mark.parametrize(("method", "drift"), DRIFTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_processing_that_drifts_is_refused_and_found(
    tmp_path: Path,
    method: Any,
    drift: Callable[[Any], None],
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the last rank only; before and after a sync."""
    serving = Serving(one_layer(method), tmp_path, ranks=ranks)

    def drift_there(layer: Any) -> None:
        if layer.rank == ranks - 1:
            drift(layer)

    for seed in (1, 20):
        before = serving.served()
        with monkeypatch.context() as patch:
            patch.setattr(method, "drift", staticmethod(drift_there))
            for full in (False, True):
                message = refusal(serving.sync(target_of(serving, seed=seed), full=full))
                assert "than before; restart the engine" in message, full
            assert corrupted(serving) == ["lin.bias", "lin.weight"]
        assert serving.served() == before
        assert corrupted(serving) == []
        target = target_of(serving, seed=seed + 5)
        assert "than the syncs have written" in refusal(serving.sync(target))
        errors_of(serving.sync(target, full=True), none=True)
        serving.assert_fresh()


@pytest.mark.host_memory
@pytest.mark.parametrize(("method", "drift"), DRIFTS)
@pytest.mark.parametrize("scans", [False, True])
def test_a_result_that_is_wrong_once_is_found(
    tmp_path: Path,
    method: Any,
    drift: Callable[[Any], None],
    scans: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is committed, and the next sync sees it; a rollback ends it, unless a scan was first."""
    serving = Serving(one_layer(method), tmp_path, ranks=2)
    runs: list[int] = []

    def drift_once(layer: Any) -> None:
        runs.append(layer.rank)
        if layer.rank == 1 and runs.count(1) == 2:  # not when the old weights are tried
            drift(layer)

    with monkeypatch.context() as patch:
        patch.setattr(method, "drift", staticmethod(drift_once))
        before = dict(serving.current)
        errors_of(serving.sync(target_of(serving)), none=True)
    assert "than before" in refusal(serving.sync(target_of(serving, seed=4)))
    if scans:
        assert corrupted(serving) == ["lin.bias", "lin.weight"]
        other_bits = "than the syncs have written"
        assert other_bits in refusal(serving.sync(target_of(serving, seed=4)))
        assert other_bits in refusal(serving.rollback(before))
        full = serving.sync(target_of(serving, seed=4), full=True)
        assert "restart the engine" in refusal(full)
        return
    errors_of(serving.rollback(before), none=True)
    serving.assert_fresh()
    assert corrupted(serving) == []
    errors_of(serving.sync(target_of(serving, seed=4)), none=True)
    serving.assert_fresh()


def test_a_rebuilt_tensor_that_something_else_has_changed(tmp_path: Path) -> None:
    """Processing is as it was, so that a full sync heals it."""
    serving = Serving(one_layer(Int8), tmp_path)
    lin: Any = serving.models[0].lin
    lin.weight.view(-1)[3] ^= 1
    assert corrupted(serving) == ["lin.bias", "lin.weight"]
    errors_of(serving.sync(target_of(serving), full=True), none=True)
    serving.assert_fresh()
    assert corrupted(serving) == []


@pytest.mark.host_memory
@pytest.mark.parametrize("method", [Packed, DriftingHandle])
def test_a_handle_that_something_else_has_changed(tmp_path: Path, method: type[Method]) -> None:
    """Nothing of it can be compared but what it computes."""
    serving = Serving(one_layer(method), tmp_path)
    lin: Any = serving.models[0].lin
    lin.handle = Handle(torch.zeros(8, 6))
    assert corrupted(serving) == ["lin.bias", "lin.weight"]
    errors_of(serving.sync(target_of(serving), full=True), none=True)
    serving.assert_fresh()
    assert corrupted(serving) == []


@pytest.mark.host_memory
@pytest.mark.parametrize("ranks", [1, 2])
def test_full_sync_ignores_old_weights_after_own_reload(tmp_path: Path, ranks: int) -> None:
    """The reload wrote through memory that is unprocessed weights', too, as Mamba's view does."""
    serving = Serving(Everything, tmp_path, ranks=ranks)
    for receiver, model in zip(serving.engine.receivers, serving.models, strict=True):
        receiver.weights_replaced("a reload")
        for state in serving.states[model.rank].states:
            for _, tensor in state.weights():
                tensor.zero_()
    assert corrupted(serving) != []
    target = target_of(serving)
    assert "outside of delta sync" in refusal(serving.sync(target))
    errors_of(serving.sync(target, full=True), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving, seed=9)), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
@pytest.mark.parametrize("ranks", [1, 2])
def test_full_sync_ignores_old_weights_after_failed_undo(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank the unprocessed weights have some of the new weights."""
    serving = Serving(Everything, tmp_path, ranks=ranks)
    applier = serving.applier(ranks - 1)
    write = applier.write

    def write_and_fail(staged: Any, given_up: Any) -> None:
        write(staged, given_up)
        raise OSError("no more")

    def fail(staged: Any) -> None:
        raise OSError("no way back")

    with monkeypatch.context() as patch:
        patch.setattr(applier, "write", write_and_fail)
        patch.setattr(applier, "undo", fail)
        answers = serving.sync(target_of(serving))
        assert {error["type"] for error in errors_of(answers)} == {"CommitFailed"}
    errors_of(serving.sync(target_of(serving, seed=9), full=True), none=True)
    serving.assert_fresh()
    assert corrupted(serving) == []


def test_ranks_that_do_not_know_the_same_meet_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One could not record what all have written, and is uncertain: a full sync heals that."""
    serving = Serving(Meeting, tmp_path, ranks=2)

    def fail(staged: Any) -> None:
        raise OSError("no more")

    with all_ranks(2):
        with monkeypatch.context() as patch:
            patch.setattr(serving.applier(1), "finish", fail)
            answers = serving.sync(target_of(serving))
            assert ["ok" in answer for answer in answers] == [True, False]
        serving.version = 1
        errors_of(serving.sync(target_of(serving, seed=9), full=True), none=True)
        errors_of(serving.sync(target_of(serving, seed=20)), none=True)
    serving.assert_fresh()


# --- the engine changes its objects ---


class InDict(Packed):
    """Keeps its handle in a dict."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.handles = {"gemm": Handle(layer.weight.float())}
        layer.weight = parameter(torch.empty(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.handles["gemm"].run(x)
        return found


@pytest.mark.host_memory
def test_container_replaced_before_first_sync_is_followed(tmp_path: Path) -> None:
    """The handle is put where it is read, not where it was at start-up."""
    serving = Serving(one_layer(InDict), tmp_path)
    lin: Any = serving.models[0].lin
    lin.handles = dict(lin.handles)
    errors_of(serving.sync(target_of(serving)), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
def test_a_module_that_the_engine_has_replaced(tmp_path: Path) -> None:
    """Another object with the same parameters, and a handle of its own."""
    serving = Serving(one_layer(Packed), tmp_path)
    other: Any = object.__new__(Layer)
    vars(other).update(vars(serving.models[0].lin))
    serving.models[0]._modules["lin"] = other
    before = serving.served()
    moved = "moved these after start-up: ['lin.bias', 'lin.weight']"
    assert moved in refusal(serving.sync(target_of(serving)))
    assert "restart the engine" in refusal(serving.sync(target_of(serving), full=True))
    assert serving.served() == before
