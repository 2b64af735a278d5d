from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.conformance.toy_models import Checkpoint
from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.startup.permuted.learner import LearningError, Processing, RepackLearner
from tests.support import toy_quantised
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of
from tests.support.toy_quantised import OUT, Model, linear_shapes


class Method:
    """A toy quant method; it processes a layer by the function that it is made with."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function

    def process_weights_after_loading(self, layer: Any) -> None:
        self.function(layer)


class Layer(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16), requires_grad=False)
        self.quant_method = method


def transpose(layer: Any) -> None:
    layer.weight.copy_(layer.weight.t().contiguous().view(4, 6))


def double(layer: Any) -> None:
    layer.weight.mul_(2)


def walk(model: nn.Module, *args: Any) -> Iterator[Processing]:
    for module in model.children():
        yield Processing(
            module,
            module.quant_method,
            lambda copy: copy.quant_method.process_weights_after_loading(copy),
        )


def process(model: nn.Module, device: str) -> str:
    for module in model.children():
        module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
    return device


def engine() -> Any:
    module = ModuleType("engine")
    module.process = process  # type: ignore[attr-defined]
    return module


def learned_of(*functions: Callable[[Any], None]) -> RepackLearner:
    model = nn.Sequential(*[Layer(Method(function)) for function in functions])
    owner = engine()
    with RepackLearner(owner, "process", walk) as learner:
        assert owner.process(model, "cpu") == "cpu"
    assert owner.process is process
    return learner


def test_a_move_is_learned_though_all_elements_are_the_same() -> None:
    learner = learned_of(transpose)
    assert learner.repacks.keys() == {"0.weight"}
    assert not learner.refusals
    assert learner.complete


def test_modules_that_are_alike_share_what_was_learned() -> None:
    model = nn.Sequential(*[Layer(Method(transpose)) for _ in range(3)])
    for layer in model.children():
        layer.get_parameter("weight").copy_(torch.arange(24).view(4, 6))
    owner = engine()
    with RepackLearner(owner, "process", walk) as learner:
        owner.process(model, "cpu")
    assert len(learner.repacks) == 3
    assert len({id(repack) for repack in learner.repacks.values()}) == 1


def test_what_computes_is_refused() -> None:
    learner = learned_of(double)
    assert learner.refusals.keys() == {"0.weight"}
    assert not learner.repacks


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def apply(self) -> torch.Tensor:
        return self.scale


KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "kept": lambda scale: scale,
    "kept[0]": lambda scale: [scale],
    "kept['a']": lambda scale: {"a": scale},
    "kept.scale": Slotted,
    "kept.__self__.scale": lambda scale: Slotted(scale).apply,
    "kept.keywords['s']": lambda scale: functools.partial(print, s=scale),
    "kept.__defaults__[0]": lambda scale: lambda s=scale: s,
}


@pytest.mark.parametrize("path", KEEPERS)
def test_what_is_computed_and_kept_is_found_wherever_it_is(path: str) -> None:
    def keep(layer: Any) -> None:
        layer.kept = KEEPERS[path](layer.weight.float().amax(0))

    assert learned_of(keep).refusals["0.weight"].endswith(f"in {path}")

    def recomputed(model: nn.Module, *args: Any) -> Iterator[Processing]:
        return (dataclasses.replace(one, recomputed=True) for one in walk(model))

    owner = engine()
    with RepackLearner(owner, "process", recomputed) as learner:
        owner.process(nn.Sequential(Layer(Method(keep))), "cpu")
    assert bool(learner.refusals) == (path != "kept")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (4096, lambda: int("4096")),
        (2.5, lambda: float("2.5")),
        ((4096, "a"), lambda: (int("4096"), "a")),
        (float("nan"), lambda: float("nan")),
    ],
)
def test_an_equal_value_assigned_anew_is_no_change(before: Any, after: Callable[[], Any]) -> None:
    """Processing rounds the sizes in a configuration that all layers share."""
    shared = SimpleNamespace(size=before)

    def assign(layer: Any) -> None:
        shared.size = layer.size = after()
        transpose(layer)

    model: Any = nn.Sequential(Layer(Method(assign)))
    model[0].shared, model[0].size = shared, before
    owner = engine()
    with RepackLearner(owner, "process", walk) as learner:
        owner.process(model, "cpu")
    assert ([*learner.repacks], learner.refusals) == (["0.weight"], {})


@pytest.mark.parametrize(("before", "after"), [(4096, 8192), (0.0, -0.0), (1, True)])
def test_another_value_in_what_layers_share_is_refused(before: Any, after: Any) -> None:
    shared = SimpleNamespace(size=before)

    def assign(layer: Any) -> None:
        shared.size = after
        transpose(layer)

    model: Any = nn.Sequential(Layer(Method(assign)))
    model[0].shared = shared
    owner = engine()
    with RepackLearner(owner, "process", walk) as learner:
        owner.process(model, "cpu")
    assert "writes to the live model" in learner.refusals["0.weight"]


def test_what_fails_is_refused() -> None:
    def fail(layer: Any) -> None:
        if layer.weight.sum() != 24:
            raise ValueError("no kernel for that")

    assert "no kernel for that" in learned_of(fail).refusals["0.weight"]


def test_what_writes_to_the_live_module_stops_the_start() -> None:
    live: list[Layer] = []

    def leak(layer: Any) -> None:
        live[0].weight.add_(1)

    model = nn.Sequential(Layer(Method(leak)))
    live.append(model[0])  # type: ignore[arg-type]
    owner = engine()
    with (
        pytest.raises(LearningError, match=r"changed the live 0\.weight"),
        RepackLearner(owner, "process", walk),
    ):
        owner.process(model, "cpu")
    assert owner.process is process


def test_only_the_first_model_counts() -> None:
    owner = engine()
    with RepackLearner(owner, "process", walk) as learner:
        owner.process(nn.Sequential(Layer(Method(transpose))), "cpu")
        owner.process(nn.Sequential(nn.Sequential(), Layer(Method(double)))[1:], "cpu")
    assert learner.repacks.keys() == {"0.weight"}
    assert not learner.refusals


def test_a_static_method_stays_one() -> None:
    class Loader:
        postprocess = staticmethod(process)

    model = nn.Sequential(Layer(Method(transpose)))
    with RepackLearner(Loader, "postprocess", walk) as learner:
        assert Loader().postprocess(model, "cpu") == "cpu"
    assert learner.repacks.keys() == {"0.weight"}
    assert isinstance(vars(Loader)["postprocess"], staticmethod)
    assert Loader.postprocess is process


def test_what_is_not_called_is_not_learned() -> None:
    with RepackLearner(engine(), "process", walk) as learner:
        pass
    assert not learner.complete


def test_model_with_own_hook_is_learned_incompletely() -> None:
    class Model(nn.Sequential):
        def process_weights_after_loading(self) -> None:
            """Moves what it likes."""

    owner = engine()
    with RepackLearner(owner, "process", walk) as learner:
        owner.process(Model(Layer(Method(transpose))), "cpu")
        owner.process(nn.Sequential(Layer(Method(double))), "cpu")  # a draft model
    assert not learner.refusals
    assert learner.repacks.keys() == {"0.weight"}
    assert not learner.complete


# --- modules that are kept ---


def replace_weight(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)


def nothing(layer: Any) -> None:
    """Leave the layer as it is."""


def kept_of(
    why_not: str | None, *functions: Callable[[Any], None], recomputed: bool = False
) -> tuple[RepackLearner, list[tuple[int, bool]]]:
    """Return the learner, and the layers that are kept, with whether they are only moved."""
    model = nn.Sequential(*[Layer(Method(function)) for function in functions])
    layers, kept, owner = list(model), [], engine()

    def keep(one: Processing, moves: bool) -> str | None:
        assert torch.equal(one.module.weight, torch.ones(4, 6, dtype=torch.bfloat16))  # type: ignore[arg-type]
        kept.append((layers.index(one.module), moves))
        return why_not

    def calls(model: nn.Module, *args: Any) -> Iterator[Processing]:
        return (dataclasses.replace(one, recomputed=recomputed) for one in walk(model))

    with RepackLearner(owner, "process", calls, keep=keep) as learner:
        owner.process(model, "cpu")
    return learner, kept


def test_what_cannot_be_followed_is_kept_and_not_refused() -> None:
    """Each module is kept, also if it is like one that was tried out."""
    learner, kept = kept_of(None, double, double)
    assert kept == [(0, False), (1, False)]
    assert not learner.refusals
    assert not learner.repacks


@pytest.mark.parametrize("function", [transpose, nothing])
def test_what_can_be_followed_is_not_kept(function: Callable[[Any], None]) -> None:
    learner, kept = kept_of(None, function)
    assert not kept
    assert bool(learner.repacks) is (function is transpose)


def test_a_replaced_parameter_is_kept_and_its_move_is_learned() -> None:
    learner, kept = kept_of(None, replace_weight)
    assert kept == [(0, True)]
    assert learner.repacks.keys() == {"0.weight"}


@pytest.mark.parametrize(("name", "moves"), [("output_dim", True), ("block_scale", False)])
def test_a_number_that_a_parameter_is_given_may_be_computed(name: str, moves: bool) -> None:
    """But not the dimensions that its loader goes by."""

    def replace_and_mark(layer: Any) -> None:
        replace_weight(layer)
        setattr(layer.weight, name, 1)

    _, kept = kept_of(None, replace_and_mark)
    assert kept == [(0, moves)]


@pytest.mark.parametrize("function", [double, replace_weight])
def test_what_cannot_be_kept_is_refused(function: Callable[[Any], None]) -> None:
    learner, kept = kept_of("too large", function)
    assert len(kept) == 1
    assert learner.refusals == {"0.weight": "too large"}
    assert not learner.repacks


def test_what_may_be_recomputed_is_not_kept() -> None:
    _, kept = kept_of(None, double, replace_weight, recomputed=True)
    assert not kept


# --- buffers ---


class Filled(toy_quantised.Method):
    """A layer with a buffer, which the checkpoint fills with zeros."""

    def create_weights(self, layer: Any) -> None:
        seven = torch.full((OUT,), 7.0, dtype=torch.bfloat16, device=DEVICE)
        layer.register_buffer("corr", seven)


class FlipsBuffer(Filled):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.corr.copy_(layer.corr.flip(0).clone())


class AddsBuffer(Filled):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.bias.data.copy_(torch.where(layer.corr == 0, layer.bias.data, layer.corr))


class SumsBuffer(Filled):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.total = float(layer.corr.float().sum())


def with_buffer(method: type[toy_quantised.Method]) -> type[Model]:
    class WithBuffer(Model):
        shapes: ClassVar = {**linear_shapes("lin"), "lin.corr": (OUT,)}

        def build(self, rank: int, ranks: int) -> None:
            self.lin = toy_quantised.Layer(method())

        @classmethod
        def checkpoint(cls, seed: int = 0) -> Checkpoint:
            zeros = torch.zeros(OUT, dtype=torch.bfloat16)
            return {**super().checkpoint(seed), "lin.corr": zeros}

    return WithBuffer


@pytest.mark.parametrize(
    ("method", "status"), [(Filled, "exact"), (FlipsBuffer, "exact"), (AddsBuffer, "rebuilt")]
)
def test_a_processed_buffer_follows_a_sync(
    tmp_path: Path, method: type[toy_quantised.Method], status: str
) -> None:
    serving = Serving(with_buffer(method), tmp_path)
    assert serving.statuses()["lin.corr"] == status
    new = torch.arange(1, OUT + 1).to(torch.bfloat16)
    errors_of(serving.sync({"lin.corr": new}), none=True)
    serving.assert_fresh()


def test_a_number_computed_from_a_buffer_refuses_it(tmp_path: Path) -> None:
    serving = Serving(with_buffer(SumsBuffer), tmp_path)
    assert "total would be" in serving.reasons()["lin.corr"]
