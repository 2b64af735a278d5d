"""Rebuilds of modules: handles, names, the context of processing; see `test_rebuild_contract`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from engine_ext.model import StorageIndex
from engine_ext.placement import DeviceElements, HostElements, flat_bits
from engine_ext.startup.recomputed import ModuleRebuild, UnprocessedModules
from engine_ext.startup.recomputed import rebuild as rebuild_module
from engine_ext.startup.recomputed.compare import RebuildError
from engine_ext.startup.recomputed.rebuild import tensor_differences
from engine_ext.startup.recomputed.unprocessed_modules import Replacement
from tests.support.quantised_engine import probe, processing
from tests.support.served_models import bits, random_tensor
from tests.support.toy_quantised import IN, OUT, Int8, Layer, Method, Packed


@dataclass
class Change:
    """Flat elements of a tensor, and their new values."""

    elements: Any
    new: Any

    @classmethod
    def to(cls, old: torch.Tensor, new: torch.Tensor) -> Change:
        before, after = bits(old).view("u2"), bits(new).view("u2")
        offsets = np.flatnonzero(before != after).astype(np.int32)
        return cls(HostElements(before, offsets), after[offsets])


def loaded(method: type[Method]) -> Any:
    layer: Any = Layer(method())
    for seed, tensor in enumerate((layer.weight, layer.bias)):
        tensor.data.copy_(random_tensor(tensor.shape, torch.bfloat16, seed))
    return layer


def rebuild_of(layer: Any, context: Any = contextlib.nullcontext) -> ModuleRebuild:
    """The rebuild of a loaded layer, which is processed."""
    states = UnprocessedModules(1 << 20)
    states.keep(processing(layer), False)
    layer.quant_method.process_weights_after_loading(layer)
    return ModuleRebuild("lin", states.states[0], context, lambda module: None)


@pytest.mark.host_memory
def test_a_handle_comes_back() -> None:
    layer = loaded(Packed)
    rebuild = rebuild_of(layer)
    handle, before = layer.handle, probe(layer)
    old, new = dict(rebuild.weights())["weight"], torch.ones(OUT, IN, dtype=torch.bfloat16)
    [one] = rebuild.rebuild({"weight": [Change.to(old, new)]}).differences
    before_it = one.elements.read()
    assert one.elements.holds(before_it)
    assert not one.elements.holds(one.new)
    one.elements.put(one.new)
    assert layer.handle is one.new.value is not handle
    assert one.elements.holds(one.new)
    assert isinstance(before_it, Replacement)
    assert before_it.nbytes == rebuild.numel * 2
    one.elements.put(before_it)
    assert layer.handle is handle
    assert torch.equal(probe(layer), before)  # type: ignore[arg-type]


def test_names_within_the_model() -> None:
    rebuild = rebuild_of(loaded(Int8))
    assert rebuild.contains("lin.weight")
    assert not rebuild.contains("linear.weight")
    root = torch.nn.Module()
    root.other = rebuild.state.before  # another name of the same memory
    rebuild.bind(StorageIndex(root))
    assert rebuild.names == {"other.weight": "weight", "other.bias": "bias"}
    assert rebuild.numel == OUT * IN + OUT
    assert rebuild.keeps("weight")
    assert not rebuild_of(loaded(Packed)).keeps("weight")


def test_processing_keeps_context_and_random_state() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        events.append("in")
        yield
        events.append("out")

    class Random(Int8):
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            torch.rand(3)
            events.append(f"gradients {torch.is_grad_enabled()}")

    rebuild = rebuild_of(loaded(Random), context)
    events.clear()
    state = torch.get_rng_state()
    rebuild.rebuild({})
    assert events == ["in", "gradients False", "out"]
    assert torch.equal(torch.get_rng_state(), state)


def test_gaps_are_an_error() -> None:
    wide = torch.zeros(4, 6)
    with pytest.raises(RebuildError, match="has gaps"):
        list(tensor_differences("a", wide[:, :3], wide[:, :3]))


@pytest.mark.parametrize("size", [0, 1, 7, (1 << 20) + 3])
def test_differences_are_by_bits(size: int) -> None:
    live = torch.zeros(size)
    new = live.clone()
    new[::5] = -0.0
    new[1::1000] = float("nan")
    for one in tensor_differences("a", live, new):
        one.elements.put(one.new)
    assert np.array_equal(bits(live), bits(new))


class Elsewhere(torch.Tensor):
    """A tensor in host memory that says it is on an accelerator."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@pytest.mark.host_memory
@pytest.mark.parametrize(
    ("chunk", "expected"), [(7, [[0, 6], [7], [29]]), (1 << 24, [[0, 6, 7, 29]])]
)
def test_places_on_a_device_are_narrow(
    chunk: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept until the next sync, and half as large as PyTorch's own, a chunk at a time."""
    monkeypatch.setattr(rebuild_module, "_DEVICE_CHUNK", chunk)
    live, new = torch.arange(30.0), torch.arange(30.0)
    new[[0, 6, 7, 29]] += 1
    live, new = live.as_subclass(Elsewhere), new.as_subclass(Elsewhere)
    found = [*tensor_differences("a", live, new)]
    for one, places in zip(found, expected, strict=True):
        assert isinstance(one.elements, DeviceElements)
        assert one.elements.offsets.dtype == torch.int32
        assert one.elements.offsets.tolist() == places
        assert torch.equal(one.new, flat_bits(new)[places])
    assert [*tensor_differences("a", live, live.clone())] == []
    assert [*tensor_differences("a", live[:0], new[:0])] == []


def test_elements_of_a_device_are_those_of_another_tensor() -> None:
    live, other = torch.arange(6.0), torch.zeros(6)
    elements = DeviceElements(flat_bits(live), torch.tensor([1, 4])).within(other)
    elements.put(flat_bits(torch.tensor([7.0, 8.0])))
    assert other.tolist() == [0, 7, 0, 0, 8, 0]


@pytest.mark.host_memory
def test_a_handle_of_a_module_on_an_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph would still use the handle that it was captured with."""
    rebuild = rebuild_of(loaded(Packed))
    assert [one.path for one in rebuild.rebuild({}).differences] == ["handle"]
    elsewhere = torch.empty(0, device="meta")
    monkeypatch.setattr(rebuild, "live_tensors", lambda: [elsewhere])
    with pytest.raises(RebuildError, match="it keeps handle"):
        rebuild.rebuild({})
