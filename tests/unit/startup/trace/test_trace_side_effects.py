"""Tracing leaves the model, and all else, as it was."""

from __future__ import annotations

import _thread
import gc
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import ToyModel, Weights, parameter
from engine_ext.model import StorageIndex, TracingError
from engine_ext.placement.segments import Status
from engine_ext.startup import LoaderDryRun, young_collections
from engine_ext.startup.trace import thread_propagation
from tests.support.served_models import base_checkpoint, memory, serve
from tests.unit.startup.trace.traced import COPY, Calls, identities, loaded, trace


def test_a_value_that_is_not_there_is_not_read() -> None:
    """The loader keeps a Python float of a scale; tracing must not give it another."""
    live = loaded(toy_models.ReadsThroughTemporary)
    before = live.scale_float
    trace(live)
    assert live.scale_float == before


def write_through_numpy(weight: torch.Tensor) -> None:
    weight.data.view(torch.int16).numpy()[...] = 1


def write_in_a_thread_of_its_own(weight: torch.Tensor) -> None:
    """Started below `threading`, where it is not followed."""
    done = _thread.allocate_lock()
    done.acquire()

    def write() -> None:
        weight.data.fill_(1)
        done.release()

    _thread.start_new_thread(write, ())
    assert done.acquire(timeout=5)


@pytest.mark.host_memory
@pytest.mark.parametrize("write", [write_through_numpy, write_in_a_thread_of_its_own])
def test_a_model_that_tracing_changes_is_not_served(write: Callable[[torch.Tensor], None]) -> None:
    """No write to live memory is overlooked, though not every one can be followed."""
    live = loaded(toy_models.PlainCopy)

    def loader(weights: Weights) -> None:
        write(live.weight)
        live.load_weights(weights)

    with pytest.raises(TracingError, match=r"cannot be followed: \['weight'\]"):
        LoaderDryRun(live, loader, StorageIndex(live)).trace(live.specs())
    assert torch.Tensor.copy_ is COPY


def test_a_wrapped_loader_is_not_traced() -> None:
    live = loaded(toy_models.PlainCopy)
    calls = Calls(live)

    def refuse_while(model: nn.Module) -> str:
        return f"{type(model).__name__} is being reloaded"

    with pytest.raises(RuntimeError, match="PlainCopy is being reloaded") as caught:
        LoaderDryRun(live, calls, StorageIndex(live), refuse_while).trace(live.specs())
    assert type(caught.value) is RuntimeError  # a TracingError says that the model has changed
    assert calls.names == []


def test_a_thread_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_propagation, "_JOIN_TIMEOUT_S", 0.01)
    live = loaded(toy_models.PlainCopy)
    end = threading.Event()

    def loader(weights: Weights) -> None:
        threading.Thread(target=end.wait, args=(5,)).start()
        live.load_weights(weights)

    with pytest.raises(TracingError, match="threads"):
        LoaderDryRun(live, loader, StorageIndex(live)).trace(live.specs())
    end.set()


def test_what_the_loader_replaces_is_put_back() -> None:
    """Memory of a parameter, parameters and modules; what lay in them is refused."""

    class Replaces(ToyModel):
        shapes: ClassVar = {"weight": (3, 4), "bias": (3,), "norm": (4,)}

        def build(self) -> None:
            super().build()
            self.child = nn.Linear(2, 2)

        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            self.weight.data = torch.zeros(3, 4, dtype=torch.bfloat16)
            self.bias = parameter(3)
            self.child = nn.Linear(2, 2)
            self.extra = torch.zeros(2)
            self.register_buffer("more", torch.zeros(2))

    live = loaded(Replaces)
    bits, objects, child = memory(live), identities(live), live.child
    del live.extra, live.more
    placement = trace(live)
    assert [p.status for p in placement.values()] == [
        Status.UNCERTIFIED,
        Status.UNCERTIFIED,
        Status.UNJUDGED,
    ]
    assert "puts other memory in place of weight" in placement["weight"].reason
    assert live.child is child
    assert not hasattr(live, "extra")
    assert memory(live) == {n: b for n, b in bits.items() if n not in (".extra", "more")}
    objects.pop("extra"), objects.pop("more")
    assert identities(live) == objects


class Beside(ToyModel):
    """The loader also fills memory that no module holds, or computes a parameter besides."""

    shapes: ClassVar = {"weight": (3, 4), "bias": (3,)}

    def build(self) -> None:
        super().build()
        side = nn.Module()
        side.copy = parameter(3, 4)
        self.sides = [side]

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        temporary = torch.from_numpy(np.zeros(tuple(weight.shape), np.float32))
        temporary.copy_(weight)
        self.get_parameter(name).data.copy_(temporary)
        if name == "weight":
            self.sides[0].get_parameter("copy").data.copy_(weight)


class ComputedBeside(Beside):
    shapes: ClassVar = {"weight": (3, 4)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.sides[0].get_parameter("copy").data.copy_(weight)
        self.get_parameter(name).data.copy_(-weight.exp())


def test_a_copy_to_memory_of_no_module_is_refused() -> None:
    placement = trace(loaded(Beside))
    assert "also copies it to memory that was there before" in placement["weight"].reason
    assert placement["bias"].status is Status.UNJUDGED


def test_what_is_also_put_elsewhere_is_not_loaded_alone() -> None:
    """A rebuild would give the loader no copy of that."""
    live = loaded(ComputedBeside)
    dry_run = LoaderDryRun(live, live.load_weights, StorageIndex(live))
    assert dry_run.written_alone(live.specs()[0]) == set()


def test_rehearsing_reports_what_is_replaced() -> None:
    served = serve(toy_models.PlainCopy, base_checkpoint(toy_models.PlainCopy))
    before = identities(served.model)

    def swaps(weights: Weights) -> None:
        served.model.bias = parameter(6)

    found = LoaderDryRun(served.model, swaps, served.index).rehearse(["bias"], served.placement)
    assert found.keys() == {"bias"}
    assert identities(served.model) == before


class Allocations(TorchDispatchMode):
    """Remembers the size of everything that is made, but for meta tensors and views."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.largest = max(self.largest, storage.nbytes())
        return out


def test_tracing_allocates_nothing() -> None:
    """Two thousand elements a tensor, row-sharded and stacked."""

    class Large(ToyModel):
        shapes: ClassVar = {f"w{n}": (64, 32) for n in range(8)}

        def build(self) -> None:
            self.stacked = parameter(8, 32, 32)

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            self.stacked.data[int(name[1:])].copy_(weight[32:])

    live = loaded(Large)
    with Allocations() as allocations:
        placement = trace(live)
    assert all(placed.segments for placed in placement.values())
    assert allocations.largest == 0


def test_interleaved_tensors_cost_only_their_own_range() -> None:
    """Where address ranges overlap, one byte per element of the two ranges separates them."""

    class Wide(ToyModel):
        shapes: ClassVar = {f"w{n}": (16, 8) for n in range(20)}

        def build(self) -> None:
            self.stacked = parameter(10, 16, 16)

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            number = int(name[1:])
            self.stacked.data[number // 2][:, number % 2 :: 2].copy_(weight)

    live = loaded(Wide)
    with Allocations() as allocations:
        placement = trace(live)
    assert all(p.status is Status.UNJUDGED for p in placement.values())
    assert 0 < allocations.largest <= 16 * 16


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_collection_begins_in_a_trace(enabled: bool, fails: bool) -> None:
    live, seen = loaded(toy_models.PlainCopy), []

    def load_weights(weights: Weights) -> None:
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("no")
        live.load_weights(weights)

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        LoaderDryRun(live, load_weights, StorageIndex(live)).trace(live.specs())
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(seen)


@pytest.mark.slow
@pytest.mark.host_memory
def test_collections_leave_out_what_is_there_already() -> None:
    assert gc.get_freeze_count() == 0
    with young_collections():
        assert gc.get_freeze_count() > 0
        with young_collections():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_what_the_engine_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        with young_collections():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
