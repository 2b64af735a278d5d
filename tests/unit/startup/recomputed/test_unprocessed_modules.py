"""Modules are kept as they were before processing, within a limit."""

from __future__ import annotations

from typing import Any

import torch

from engine_ext.startup import UnprocessedModules
from tests.support.quantised_engine import processing
from tests.support.toy_quantised import IN, OUT, Int8, Layer, parameter

SIZE = 2 * (OUT * IN + OUT)


def kept(layer: Layer, *, moves: bool = False, limit: int = SIZE) -> UnprocessedModules:
    states = UnprocessedModules(limit)
    assert states.keep(processing(layer), moves) is None
    return states


def test_the_copy_shares_nothing_and_stays_as_it_was() -> None:
    layer = Layer(Int8())
    [state] = kept(layer).states
    assert state.module is layer
    weights = dict(state.weights())
    assert weights.keys() == {"weight", "bias"}
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(weights["weight"].cpu(), torch.full((OUT, IN), 7.0))
    assert weights["weight"].dtype == torch.bfloat16
    before: Any = state.before
    assert before.quant_method is not layer.quant_method


def test_what_is_only_moved_has_no_data_and_costs_nothing() -> None:
    layer: Any = Layer(Int8())
    layer.register_buffer("table", torch.ones(3))
    states = kept(layer, moves=True, limit=0)
    assert states.nbytes == 0
    [state] = states.states
    assert not dict(state.weights())
    assert all(t.is_meta for t in [*state.before.parameters(), *state.before.buffers()])


def test_a_module_is_kept_once() -> None:
    layer = Layer(Int8())
    states = kept(layer)
    assert states.keep(processing(layer), False) is None
    assert len(states.states) == 1
    assert states.nbytes == SIZE


def test_buffers_count() -> None:
    layer = Layer(Int8())
    layer.register_buffer("stats", torch.ones(2))
    states = UnprocessedModules(SIZE + 7)
    assert "--delta-shadow-bytes" in str(states.keep(processing(layer), False))
    assert kept(layer, limit=SIZE + 8).nbytes == SIZE + 8


def test_what_does_not_fit_is_not_kept() -> None:
    states = UnprocessedModules(2 * SIZE - 1)
    assert states.keep(processing(Layer(Int8())), False) is None
    reason = states.keep(processing(Layer(Int8())), False)
    assert reason is not None
    assert f"--delta-shadow-bytes, which allows {2 * SIZE - 1}" in reason
    assert (len(states.states), states.nbytes) == (1, SIZE)
    assert states.reserve(SIZE - 1)
    assert not states.reserve(1)


def test_parameters_that_are_reachable_otherwise_are_named() -> None:
    layer: Any = Layer(Int8())
    layer.none = parameter(torch.empty(0))
    assert kept(layer).states[0].shared == frozenset()
    layer.view = layer.weight.data[2:]
    assert kept(layer).states[0].shared == {"weight"}
    bias = layer.bias
    layer.read = lambda: bias
    assert kept(layer).states[0].shared == {"weight", "bias"}
