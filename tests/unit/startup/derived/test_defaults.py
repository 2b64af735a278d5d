"""Copies of weights on a module that processing makes of defaults, as attention without scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.conformance.toy_models.base import DEVICE, OpenModule
from engine_ext.startup import Recomputation
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of
from tests.support.toy_quantised import Layer, Method, Model, linear_shapes, parameter
from tests.unit.sync.test_post_load import target_of

pytestmark = [pytest.mark.slow, pytest.mark.host_memory]


class CacheScale(Method):
    """Keeps the scale of a cache, which a checkpoint can omit, and drops the parameter."""

    def create_weights(self, layer: Any) -> None:
        layer.k_scale = parameter(torch.tensor(-1.0))
        layer.register_buffer("kept_scale", torch.tensor(1.0, device=DEVICE))

    def process_weights_after_loading(self, layer: Any) -> None:
        given = layer.k_scale if layer.k_scale > 0 else torch.tensor(1.0)
        layer.kept_scale.copy_(given)
        layer.served_scale = parameter(given.clone())
        layer.served_scale_float = layer.kept_scale_float = float(given)
        del layer.k_scale


class Attention(OpenModule):
    """Computes with the weights of the layer around it."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = CacheScale()
        self.quant_method.create_weights(self)


class Block(Layer):
    def __init__(self) -> None:
        super().__init__(Method())
        self.attention = Attention()

    def absorb(self) -> None:
        self.absorbed = self.weight.float() * 2


class Unscaled(Model):
    shapes: ClassVar = linear_shapes("block", "other")

    def build(self, rank: int, ranks: int) -> None:
        self.block = Block()
        self.other = Layer(Method())


class CopiedAtStart(Unscaled):
    def after_processing(self) -> None:
        self.block.attention.wide = self.block.weight.float()


class Absorbing(Unscaled):
    """The engine's own function recomputes a tensor of the block around the attention."""

    def after_processing(self) -> None:
        self.block.absorb()


def test_what_the_block_recomputes_is_proven(tmp_path: Path) -> None:
    def recomputations(model: Any) -> list[Recomputation]:
        return [Recomputation(("block",), model.block.absorb)]

    serving = Serving(Absorbing, tmp_path, recomputations=recomputations)
    assert serving.reasons() == {}
    errors_of(serving.sync(target_of(serving)), none=True)
    serving.assert_fresh()


def test_attention_without_scales_refuses_nothing(tmp_path: Path) -> None:
    serving = Serving(Unscaled, tmp_path)
    for seed in range(3):
        errors_of(serving.sync(target_of(serving, seed=seed)), none=True)
        serving.assert_fresh()
    assert serving.reasons() == {}


def test_copy_on_it_at_start_refuses_the_block(tmp_path: Path) -> None:
    serving = Serving(CopiedAtStart, tmp_path)
    assert serving.reasons().keys() == {"block.weight", "block.bias"}
    others = ["norm", "other.weight"]
    errors_of(serving.sync(target_of(serving, *others)), none=True)
    serving.assert_fresh()


def test_copy_on_it_of_a_forward_refuses_the_block(tmp_path: Path) -> None:
    serving = Serving(Unscaled, tmp_path)
    errors_of(serving.sync(target_of(serving)), none=True)
    block = serving.models[0].block
    block.attention.wide = block.weight.float()
    before = serving.served()
    message = refusal(serving.sync(target_of(serving, "block.weight")))
    assert "the engine keeps block.attention.wide since it has generated" in message
    assert serving.served() == before


def test_numbers_of_a_forward_refuse_nothing(tmp_path: Path) -> None:
    """Kernels keep scales of their outputs there; adapters refuse them by name."""
    serving = Serving(Unscaled, tmp_path)
    serving.models[0].block.attention.output_scale = 0.37
    errors_of(serving.sync(target_of(serving)), none=True)
    assert serving.reasons() == {}
