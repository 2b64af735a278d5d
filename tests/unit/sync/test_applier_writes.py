"""The write of a sync: it must arrive, reaches what changes, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import PlainCopy, ToyModel, every_model
from engine_ext.errors import BaseMismatch
from tests.support.served_models import (
    APPLIES,
    Served,
    attempt,
    base_checkpoint,
    delta_between,
    make_applier,
    parts_of,
    serve,
    target_checkpoint,
)
from tests.unit.sync.applier_cases import DENSE, deltas_for, refused, sync_id


@pytest.fixture
def masked() -> Served:
    return serve(PlainCopy, base_checkpoint(PlainCopy))


@DENSE
def test_a_write_that_does_not_arrive_is_no_success(
    masked: Served, monkeypatch: pytest.MonkeyPatch, dense: bool
) -> None:
    """A loader that works on meta tensors only: the read-back must detect it."""

    def load_one(self: ToyModel, name: str, weight: torch.Tensor) -> None:
        if weight.is_meta:
            getattr(self, name).copy_(weight)

    monkeypatch.setattr(PlainCopy, "load_one", load_one)
    base = base_checkpoint(PlainCopy)
    target = target_checkpoint(base, ["bias"])
    with pytest.raises(RuntimeError, match="bias"):
        attempt(masked, parts_of(deltas_for(base, target, ["bias"], dense)))


def test_a_loader_that_changes_its_mind_is_refused(
    masked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certified at start-up, but the loader writes the tensor elsewhere by now."""

    def load_one(self: ToyModel, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight.flip(0) if weight.dim() else weight)

    base = base_checkpoint(PlainCopy)
    target = target_checkpoint(base, ["bias"])
    delta = delta_between("bias", base["bias"], target["bias"])
    monkeypatch.setattr(PlainCopy, "load_one", load_one)
    assert refused(masked, [delta]) == {"bias"}


@pytest.mark.parametrize("replaced", ["cache", "bias"])
def test_a_buffer_that_no_sync_writes_to_may_move(replaced: str) -> None:
    """vLLM puts rotary embeddings in another dtype at the first forward pass."""

    class Cached(PlainCopy):
        def build(self) -> None:
            super().build()
            self.register_buffer("cache", torch.arange(4.0), persistent=False)

    base = base_checkpoint(Cached)
    served = serve(Cached, base)
    tensor = getattr(served.model, replaced)
    moved = tensor.detach().clone()
    setattr(served.model, replaced, moved if replaced == "cache" else torch.nn.Parameter(moved))
    target = target_checkpoint(base, ["weight"])
    delta = delta_between("weight", base["weight"], target["weight"])
    if replaced == "cache":
        assert attempt(served, parts_of([delta])) is None
    else:
        with pytest.raises(BaseMismatch, match=r"moved these after start-up: \['bias'\]"):
            attempt(served, parts_of([delta]))


def test_the_loader_gets_only_what_changes_here() -> None:
    base = base_checkpoint(toy_models.Skipped)
    served = serve(toy_models.Skipped, base, elsewhere=["rotary"])
    given: list[str] = []
    original = served.model.load_one

    def load_one(name: str, weight: torch.Tensor) -> None:
        if not weight.is_meta:
            given.append(name)
        original(name, weight)

    served.model.load_one = load_one  # type: ignore[method-assign]
    target = target_checkpoint(base, base)
    deltas = [delta_between(name, base[name], target[name]) for name in base]
    assert attempt(served, parts_of(deltas)) is None
    assert set(given) == {"weight"}


@pytest.mark.parametrize("model", every_model(), ids=sync_id)
def test_describe_is_json_and_names_the_uncertified(model: type[ToyModel]) -> None:
    served = serve(model, base_checkpoint(model))
    for apply in APPLIES:
        applier = make_applier(served.model, served.index, served.applier.plan, apply=apply)
        told = json.loads(json.dumps(applier.describe()))
        assert told["apply"] == apply
        assert sum(told["certification"].values()) == len(model.shapes)
        assert told["uncertified"].keys() <= model.refused
        assert all(told["uncertified"].values())
