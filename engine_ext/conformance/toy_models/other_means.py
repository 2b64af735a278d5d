"""Loaders that write by other means than a copy."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch
from torch import nn

from engine_ext.conformance.toy_models.base import DEVICE, ToyModel


class SetItem(ToyModel):
    """A copy, but not one that Python's ``Tensor.copy_`` sees."""

    shapes: ClassVar = {"weight": (3, 4), "scale": ()}
    dense_only: ClassVar = frozenset({"weight", "scale"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name)[...] = weight


class IndexPut(ToyModel):
    shapes: ClassVar = {"weight": (4, 3)}
    refused: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight[torch.tensor([2, 0, 3, 1])] = weight.to(DEVICE)


class ForeachCopy(ToyModel):
    shapes: ClassVar = {"weight": (4, 3)}
    refused: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        torch._foreach_copy_([self.weight], [weight])


class AssignsData(ToyModel):
    shapes: ClassVar = {"weight": (4, 3)}
    refused: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.data = weight


class Threaded(ToyModel):
    """Another thread's copies would not be masked."""

    shapes: ClassVar = {"weight": (4, 3)}
    dense_only: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        def copy() -> None:
            try:
                self.weight.data.copy_(weight)
            except Exception as error:
                failures.append(error)

        failures: list[Exception] = []
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]


class SwapsParameter(ToyModel):
    """Replaces the parameter itself, so that no address holds from one load to the next."""

    shapes: ClassVar = {"weight": (3, 4)}
    refused: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight = nn.Parameter(weight, requires_grad=False)
