"""LoRA adapters on the ranks of a toy engine, which keeps a copy of what it has installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine_ext.errors import AdapterNotLoaded
from engine_ext.sync import AdapterReceivers, AdapterStore
from tests.support.endpoint_rig import Rig

Tensors = dict[str, torch.Tensor]

A = "base_model.model.q_proj.lora_A.weight"
B = "base_model.model.q_proj.lora_B.weight"


def fresh_adapter() -> Tensors:
    """The contents of an adapter's folder."""
    a, b = torch.arange(8, dtype=torch.bfloat16), torch.arange(12, dtype=torch.float32)
    return {A: a.reshape(2, 4), B: b.reshape(6, 2)}


class ToyAdapters:
    """The adapters of one rank; an `AdapterStores`.

    Attributes:
        installed: what the engine generates with, by adapter.
        fails: how many of the next installations fail.
    """

    def __init__(self) -> None:
        self.stores: dict[str, AdapterStore] = {}
        self.installed: dict[str, Tensors] = {}
        self.fails = 0

    def load(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load an adapter, again or for the first time."""
        kept = {key: tensor.clone() for key, tensor in tensors.items()}
        self.stores[name] = AdapterStore(name, kept, lambda: self._install(name, kept))
        self.installed[name] = {key: tensor.clone() for key, tensor in kept.items()}

    def _install(self, name: str, tensors: Tensors) -> None:
        self.installed[name] = {key: tensor.clone() for key, tensor in tensors.items()}
        if self.fails:
            self.fails -= 1
            raise MemoryError("no place for the adapter")

    def find(self, name: str) -> AdapterStore:
        if name not in self.stores:
            raise AdapterNotLoaded(f"no adapter {name} is loaded", adapter=name)
        return self.stores[name]

    def loaded(self) -> Sequence[AdapterStore]:
        return list(self.stores.values())

    def unload(self, name: str) -> None:
        self.stores.pop(name, None)


def with_adapters(rig: Rig, *names: str) -> list[ToyAdapters]:
    """Let the ranks of a server serve some adapters; return those of each rank."""
    engine = rig.engine
    ranks = [ToyAdapters() for _ in engine.receivers]
    for adapters in ranks:
        for name in names:
            adapters.load(name, fresh_adapter())
    receivers: list[Any] = [
        AdapterReceivers(receiver, adapters, rank, rig.settings)
        for receiver, adapters, rank in zip(engine.receivers, ranks, engine.ranks, strict=True)
    ]
    engine.receivers = receivers
    return ranks


def same_adapter(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
