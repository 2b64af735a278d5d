"""An engine on dummy weights that quantises or packs them: a full sync first, then deltas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.placement.certify import certify_placement
from engine_ext.startup import order
from engine_ext.startup.recomputed import ModuleRebuild
from engine_ext.sync import initial_sync
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of
from tests.support.served_models import changed
from tests.support.toy_quantised import (
    OUT,
    Everything,
    Int8,
    Layer,
    Method,
    Model,
    SecondCopy,
    empty,
    linear_shapes,
    one_layer,
    parameter,
)
from tests.unit.sync.test_post_load import METHODS


class Repacked(Method):
    """Reverses the rows where they are; the loader stays, so the move could be followed."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data.copy_(layer.weight.data.flip(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.float().t().flip(1)


def assert_seeded(serving: Serving, *, deltas: bool = True) -> None:
    """A full sync, then a delta of every tensor, and back."""
    errors_of(serving.sync(serving.base, full=True), none=True)
    serving.assert_fresh()
    first = dict(serving.current)
    target = {n: changed(t, seed) for seed, (n, t) in enumerate(first.items())}
    errors_of(serving.sync(target), none=True)
    serving.assert_fresh()
    errors_of(serving.rollback(first), none=True)
    serving.assert_fresh()


@pytest.mark.slow
@pytest.mark.host_memory
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_habit(tmp_path: Path, ranks: int) -> None:
    assert_seeded(Serving(Everything, tmp_path, ranks=ranks, dummy=True))


@pytest.mark.host_memory
@pytest.mark.parametrize("method", [*METHODS, Repacked])
def test_one_habit(tmp_path: Path, method: type[Method]) -> None:
    assert_seeded(Serving(one_layer(method), tmp_path, dummy=True))


def test_a_tie_is_seeded(tmp_path: Path) -> None:
    class Tied(Model):
        shapes: ClassVar = {"embed.weight": (OUT, 6)}

        def build(self, rank: int, ranks: int) -> None:
            self.embed, self.head = Layer(Method(), bias=False), Layer(SecondCopy(), bias=False)
            self.head.weight = self.embed.weight

    assert_seeded(Serving(Tied, tmp_path, dummy=True))


def test_what_the_sync_leaves_out_is_named(tmp_path: Path) -> None:
    """Random numbers in its place would be quantised."""
    serving = Serving(one_layer(Int8), tmp_path, dummy=True)
    before = serving.served()
    part = {name: tensor for name, tensor in serving.base.items() if name != "lin.weight"}
    assert "lin.weight" in refusal(serving.sync(part, full=True))
    assert serving.served() == before
    assert_seeded(serving)


class Limited(Int8):
    """The engine's constructor fills a parameter that no checkpoint need have."""

    def create_weights(self, layer: Any) -> None:
        layer.limit = empty(1)

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.weight_scale = parameter(layer.weight_scale * layer.limit.float())
        del layer.limit


def test_what_no_checkpoint_has_is_that_of_the_constructor(tmp_path: Path) -> None:
    kind = one_layer(Limited)
    kind.constants = ("lin.limit",)
    assert_seeded(Serving(kind, tmp_path, dummy=True))


def test_what_no_checkpoint_has_is_named(tmp_path: Path) -> None:
    """The dummy weights have overwritten it."""
    serving = Serving(one_layer(Limited), tmp_path, dummy=True)
    before = serving.served()
    assert "lin.limit" in refusal(serving.sync(serving.base, full=True))
    assert serving.served() == before


class Padded(Layer):
    """Finds out whether it is padded when it is first loaded."""

    @functools.cached_property
    def is_padded(self) -> bool:
        return False

    def load(self, live: torch.nn.Parameter, weight: torch.Tensor) -> None:
        assert not self.is_padded
        super().load(live, weight)


@pytest.mark.parametrize("method", [Int8, Repacked])
def test_what_a_loader_finds_out_is_known_to_the_live_module(
    tmp_path: Path, method: type[Method]
) -> None:
    class PaddedModel(Model):
        shapes: ClassVar = linear_shapes("lin")

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Padded(method())

    assert_seeded(Serving(PaddedModel, tmp_path, dummy=True))


def test_unprocessed_weights_that_do_not_fit_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"need a checkpoint to start from: lin.*shadow-bytes"):
        Serving(one_layer(Int8), tmp_path, dummy=True, shadow_bytes=8)


def test_other_bits_after_loading_leave_the_weights_uncertain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(one_layer(Int8), tmp_path, dummy=True)
    original = ModuleRebuild.rebuild
    calls: list[Any] = []

    def rebuild(self: ModuleRebuild, changes: Any) -> Any:
        calls.append(changes)
        found = original(self, changes)
        kept = found.differences[:-1] if len(calls) == 1 else found.differences
        return dataclasses.replace(found, differences=kept)

    monkeypatch.setattr(ModuleRebuild, "rebuild", rebuild)
    errors = errors_of(serving.sync(serving.base, full=True))
    assert {error["engine_state"] for error in errors} == {"uncertain"}


@pytest.mark.slow
@pytest.mark.parametrize("step", ["load_checkpoint", "trace_model", "certify_model"])
def test_one_rank_that_fails_does_not_keep_the_others_waiting(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are uncertain on all of them then, and another full sync heals them."""
    serving = Serving(one_layer(Method), tmp_path, ranks=2, dummy=True)
    done: list[object] = []

    def fail(*arguments: Any) -> Any:
        if arguments and arguments[0].model is not serving.models[1]:
            return original(*arguments)
        done.append(arguments)
        if step == "trace_model" and len(done) <= 2:  # the checks before the write
            return original(*arguments)
        raise MemoryError("no memory left")

    original = getattr(initial_sync, step)
    if step == "certify_model":
        monkeypatch.setattr(order, "certify_placement", on_rank_1(serving, fail))
    else:
        monkeypatch.setattr(initial_sync, step, fail)
    answers = serving.sync(serving.base, full=True)
    assert {answer["error"]["type"] for answer in answers} == {"CommitFailed"}
    assert all("no memory left" in answer["error"]["message"] for answer in answers)
    monkeypatch.undo()
    errors_of(serving.sync(serving.base, full=True), none=True)
    serving.assert_fresh()


def on_rank_1(serving: Serving, fail: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fails there alone."""
    original, second = certify_placement, {id(p) for p in serving.models[1].parameters()}

    def certify(placement: Any, *arguments: Any, **options: Any) -> Any:
        segments = [s for placed in placement.values() for s in placed.segments]
        if any(id(s.live.tensor) in second for s in segments):
            fail()
        return original(placement, *arguments, **options)

    return certify
