"""Derived tensors follow their weights by the engine's own function, or the weights are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.rank_engine import errors_of, part_id
from tests.support.served_models import (
    delta_between,
    one_part,
)
from tests.unit.startup.derived.latent_attention import (
    KV,
    Across,
    Attention,
    Functions,
    Service,
    each,
    together,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("functions", "apply"), [(each, "scatter"), (together, "masked")])
def test_exact_after_a_sync_and_after_a_rollback(
    tmp_path: Path, attention: type[Attention], functions: Functions, apply: str
) -> None:
    service = Service(tmp_path, attention=attention, functions=functions, apply=apply)
    assert service.memory() == service.before
    assert service.refusals() == {}
    service.assert_holds(service.base)
    errors_of(service.sync(list(service.base)), none=True)
    service.assert_holds(service.target)
    errors_of(service.engine.call("rollback"), none=True)
    service.assert_holds(service.base)
    errors_of(service.sync(list(KV), version=1, dense=True), none=True)
    service.assert_holds(service.target)


def test_a_full_sync(tmp_path: Path, attention: type[Attention]) -> None:
    service = Service(tmp_path, attention=attention)
    errors_of(service.sync(list(service.base), version=7, full=True), none=True)
    service.assert_holds(service.target)


def test_only_what_is_made_of_written_weights_is_computed_again(tmp_path: Path) -> None:
    service = Service(tmp_path)
    before = service.calls()
    errors_of(service.sync(["norm"]), none=True)
    assert service.calls() == before
    service.base = service.target
    errors_of(service.sync([KV[1]], version=2), none=True)
    assert service.calls() == [[a, b + 1] for a, b in before]
    service.assert_holds(service.target)
    # Another weight of the same layer might be an ingredient, too: nothing excludes it.
    service.base = service.target
    errors_of(service.sync(["layers.0.q_proj"], version=3), none=True)
    assert service.calls() == [[a + 1, b + 1] for a, b in before]


def test_every_weight_below_the_functions_modules_counts(tmp_path: Path) -> None:
    service = Service(tmp_path, attention=Across)
    errors_of(service.sync(["layers.1.q_proj"]), none=True)
    service.assert_holds(service.target)


def test_what_a_rank_does_not_hold_makes_it_compute_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path)
    before = service.calls()
    new = service.base[KV[0]].clone()
    new[0, 0] += 1
    body = one_part([delta_between(KV[0], service.base[KV[0]], new)])
    errors_of(service.engine.apply(part_id(body), body), none=True)
    assert service.calls() == [[before[0][0] + 1, before[0][1]], before[1]]
    service.assert_holds({**service.base, KV[0]: new})


def test_what_the_engine_hangs_there_later_stays(tmp_path: Path) -> None:
    """A cache, say, in the place of the tensor that stood for it until it was allocated."""
    service = Service(tmp_path)
    caches = [torch.rand(3) for model in service.models for _ in model.attentions]
    layers = [layer for model in service.models for layer in model.attentions]
    for layer, cache in zip(layers, caches, strict=True):
        layer.kv_cache = cache
    errors_of(service.sync(list(service.base)), none=True)
    assert all(la.kv_cache is c for la, c in zip(layers, caches, strict=True))


def test_the_plan_names_them(tmp_path: Path) -> None:
    service = Service(tmp_path)
    for answer in service.engine.call("plan"):
        rows = {row["name"]: row for row in answer["ok"]["tensors"]}
        assert set(rows[KV[0]]["recomputed"]) == {"layers.0.W_UK_T", "layers.0.W_UV"}
        assert rows[KV[0]]["status"] == "exact"
        assert rows["norm"]["recomputed"] == []


class Backend:
    """The object that computes attention; it has its own copy of a weight, in float32."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self.sinks: torch.Tensor | None = None

    def process_weights_after_loading(self) -> None:
        if self.sinks is None:
            self.sinks = self.source.float()
        else:
            self.sinks.copy_(self.source)


class Replaced(Backend):
    """It makes another copy each time."""

    def process_weights_after_loading(self) -> None:
        self.sinks = self.source.float()


class Stale(Backend):
    """It keeps the first one."""

    def process_weights_after_loading(self) -> None:
        if self.sinks is None:
            self.sinks = self.source.float()


def with_backend(kind: type[Backend]) -> type[Attention]:
    class WithBackend(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.impl = kind(self.kv_b_proj.weight)

        def process(self) -> None:
            super().process()
            self.impl.process_weights_after_loading()

    return WithBackend


@pytest.mark.parametrize("kind", [Backend, Replaced])
def test_a_copy_in_a_backend_follows(tmp_path: Path, kind: type[Backend]) -> None:
    service = Service(tmp_path, attention=with_backend(kind))
    assert service.refusals() == {}
    impls = [layer.impl for model in service.models for layer in model.attentions]
    before = [(id(impl.sinks), impl.sinks.data_ptr()) for impl in impls]
    errors_of(service.sync(list(service.base)), none=True)
    service.assert_holds(service.target)
    assert all(torch.equal(impl.sinks, impl.source.float()) for impl in impls)
    errors_of(service.engine.call("rollback"), none=True)
    service.assert_holds(service.base)
    assert all(torch.equal(impl.sinks, impl.source.float()) for impl in impls)
    assert [(id(impl.sinks), impl.sinks.data_ptr()) for impl in impls] == before


def test_a_copy_in_a_backend_that_stays_is_refused(tmp_path: Path) -> None:
    service = Service(tmp_path, attention=with_backend(Stale))
    assert set(KV) <= service.refusals().keys()
    assert "impl.sinks" in service.refusals()[KV[0]]


def test_a_backend_that_has_the_weight_itself_follows(tmp_path: Path) -> None:
    class Alias(Backend):
        def process_weights_after_loading(self) -> None:
            self.sinks = self.source

    service = Service(tmp_path, attention=with_backend(Alias))
    assert service.refusals() == {}
    errors_of(service.sync(list(service.base)), none=True)
    service.assert_holds(service.target)


@pytest.mark.parametrize("apply", ["scatter", "masked"])
def test_what_is_made_of_moved_weights_follows_a_full_sync(
    tmp_path: Path, attention: type[Attention], apply: str
) -> None:
    service = Service(tmp_path, attention=attention, apply=apply)
    weight = service.models[1].layers[0].kv_b_proj.weight
    weight.data = weight.data.clone() + 1
    assert errors_of(service.sync(["norm"]))[0]["type"] == "BaseMismatch"
    errors_of(service.sync(list(service.base), version=7, full=True), none=True)
    service.tensors = [service.objects(model) for model in service.models]
    service.assert_holds(service.target)
    service.base = service.target
    errors_of(service.sync(list(KV), version=8), none=True)
    service.assert_holds(service.target)
    errors_of(service.engine.call("rollback"), none=True)
    service.assert_holds(service.base)
