"""Derived tensors of an engine that starts on dummy weights follow its first full sync."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.rank_engine import errors_of
from tests.support.served_models import (
    load,
    memory,
)
from tests.unit.startup.derived.latent_attention import KV, Attention, Service, Views

pytestmark = pytest.mark.slow


def test_dummy_weights_are_seeded_and_then_take_deltas(
    tmp_path: Path, attention: type[Attention]
) -> None:
    service = Service(tmp_path, attention=attention, dummy=True)
    assert service.memory() == service.before
    [answer, _] = service.sync(list(service.base), full=True)
    assert answer["ok"]["apply"] == "reload"
    service.base = service.target
    service.tensors = [service.objects(model) for model in service.models]
    service.assert_holds(service.base)
    errors_of(service.sync(list(KV), version=2), none=True)
    service.assert_holds(service.target)


def test_dummy_weights_and_views_of_them(tmp_path: Path) -> None:
    service = Service(tmp_path, attention=Views, functions=lambda model: [], dummy=True)
    errors_of(service.sync(list(service.base), full=True), none=True)
    service.base = service.target
    errors_of(service.sync(list(KV), version=2), none=True)
    assert service.memory() == [memory(load(kind, service.target)) for kind in service.kinds]


def test_caches_are_not_copied_for_the_proof(tmp_path: Path) -> None:
    """By the first full sync they are allocated, and they are most of an engine's memory."""
    service = Service(tmp_path, dummy=True)
    for model in service.models:
        model.attentions[0].kv_cache = torch.zeros(1).expand(1 << 40)
    errors_of(service.sync(list(service.base), full=True), none=True)


def test_dummy_weights_of_which_something_would_not_follow(tmp_path: Path) -> None:
    service = Service(tmp_path, dummy=True, functions=lambda model: [])
    errors = errors_of(service.sync(list(service.base), full=True))
    assert {e["type"] for e in errors} == {"NotUpdatable"}
    assert "layers.0.W_UV" in errors[0]["message"]
    assert service.memory() == service.before


def test_a_reload_that_forgets_what_it_has_derived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "reload", lambda self, model, weights: model.load_weights(weights))
    service = Service(tmp_path, dummy=True)
    errors = errors_of(service.sync(list(service.base), full=True))
    assert {e["type"] for e in errors} == {"CommitFailed"}
    assert "changes layers.0.W_UK_T" in errors[0]["message"]
