"""Modules that look alike, and that the engine processes differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.conformance.toy_models import Checkpoint
from engine_ext.startup.permuted.learner import Processing, RepackLearner
from tests.support import toy_quantised
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of
from tests.support.toy_quantised import OUT, Model, linear_shapes
from tests.unit.startup.permuted.test_learner import Layer, Method, engine, nothing, walk


class FlipsOdd(toy_quantised.Method):
    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.number % 2:
            layer.bias.data.copy_(layer.bias.data.flip(0).clone())


class ScalesOdd(toy_quantised.Method):
    def create_weights(self, layer: Any) -> None:
        layer.scale = toy_quantised.empty(1)

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.number % 2:
            layer.weight.data.mul_(layer.scale.data)


class SumsOdd(toy_quantised.Method):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.processed = True
        if layer.number % 2:
            put_sum(layer, float(layer.bias.float().sum()))


def put_sum(layer: Any, total: float) -> None:
    layer.total = total


def put_sum_in_list(layer: Any, total: float) -> None:
    layer.totals = [total]


def put_sum_on_parameter(layer: Any, total: float) -> None:
    layer.weight.total = total


def put_sum_on_method(layer: Any, total: float) -> None:
    layer.quant_method.total = total


def alike(method: type[toy_quantised.Method], number: int = 4) -> type[Model]:
    """Layers that differ only in their numbers; the last has a bias of zeros."""

    class Alike(Model):
        shapes: ClassVar = {
            **linear_shapes(*(f"layers.{n}" for n in range(number))),
            **({f"layers.{n}.scale": (1,) for n in range(number)} if method is ScalesOdd else {}),
        }

        def build(self, rank: int, ranks: int) -> None:
            self.layers = nn.ModuleList()
            for n in range(number):
                layer = toy_quantised.Layer(method())
                layer.number = n
                self.layers.append(layer)

        @classmethod
        def checkpoint(cls, seed: int = 0) -> Checkpoint:
            ones = {n: torch.ones(1, dtype=torch.bfloat16) for n in cls.shapes if "scale" in n}
            zeros = torch.zeros(OUT, dtype=torch.bfloat16)
            return {**super().checkpoint(seed), **ones, f"layers.{number - 1}.bias": zeros}

    return Alike


@pytest.mark.parametrize(
    ("method", "name"), [(FlipsOdd, "layers.3.bias"), (ScalesOdd, "layers.1.scale")]
)
def test_bytes_that_prove_nothing_let_a_module_be_probed(
    tmp_path: Path, method: type[toy_quantised.Method], name: str
) -> None:
    serving = Serving(alike(method), tmp_path)
    assert name not in serving.reasons()
    new = torch.arange(2, len(serving.base[name]) + 2).to(torch.bfloat16)
    errors_of(serving.sync({name: new}), none=True)
    serving.assert_fresh()


@pytest.mark.parametrize("put", [put_sum, put_sum_in_list, put_sum_on_parameter, put_sum_on_method])
def test_a_number_that_one_like_it_has_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Any, float], None]
) -> None:
    monkeypatch.setitem(globals(), "put_sum", put)
    serving = Serving(alike(SumsOdd), tmp_path)
    odd = [f"layers.{n}.{name}" for n in (1, 3) for name in ("weight", "bias")]
    assert sorted(serving.reasons()) == sorted(odd)
    assert "which one like it does not" in serving.reasons()["layers.1.bias"]


def test_numbers_of_a_module_that_is_kept_refuse_nothing() -> None:
    """An attention layer is processed twice: its quant method keeps the scale as a number."""

    def keep_scale(layer: Any) -> None:
        layer.scale = float(layer.weight[0, 0])

    def calls(model: nn.Module, *args: Any) -> Iterator[Processing]:
        for one in walk(model):
            yield one
            yield Processing(one.module, one.module, nothing, recomputed=True)

    model, owner = nn.Sequential(*[Layer(Method(keep_scale)) for _ in range(3)]), engine()
    for number, layer in enumerate(model.children()):
        layer.get_parameter("weight").copy_(torch.arange(24).view(4, 6) + number)
    with RepackLearner(owner, "process", calls, keep=lambda one, moves: None) as learner:
        owner.process(model, "cpu")
    assert [layer.scale for layer in model] == [0.0, 1.0, 2.0]
    assert learner.refusals == {}


@pytest.mark.parametrize("zeros", [False, True])
def test_only_modules_with_equal_elements_are_probed(tmp_path: Path, zeros: bool) -> None:
    """And the first of those that are alike."""
    runs: list[int] = []

    class Counted(toy_quantised.Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.seen = layer.number
            runs.append(layer.number)

    kind = alike(Counted)
    base = kind.checkpoint()
    if not zeros:
        base["layers.3.bias"] = base["layers.1.bias"]
    serving = Serving(kind, tmp_path, checkpoint=base)
    assert serving.reasons() == {}
    assert {n for n in runs if runs.count(n) > 1} == ({0, 3} if zeros else {0})
