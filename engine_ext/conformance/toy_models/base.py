"""The base of the toy models."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn

from engine_ext.placement import TensorSpec

# On the CPU, or as this variable says.
DEVICE: Final = torch.device(os.environ.get("DELTA_TEST_DEVICE", "cpu"))

if TYPE_CHECKING:

    class OpenModule(nn.Module):
        """A module whose attributes can be anything; torch declares tensors and modules."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    OpenModule = nn.Module

Weights = Iterable[tuple[str, torch.Tensor]]
Checkpoint = dict[str, torch.Tensor]

UNTOUCHED = "serving_state"
GARBAGE = 7.0


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """Memory that no loader has written to yet."""
    return nn.Parameter(torch.full(shape, GARBAGE, device=DEVICE).to(dtype), requires_grad=False)


class ToyModel(OpenModule):
    """A model with one buffer that serving changes and loading never touches."""

    shapes: ClassVar[dict[str, tuple[int, ...]]]
    dtypes: ClassVar[dict[str, torch.dtype]] = {}
    refused: ClassVar[frozenset[str]] = frozenset()
    dense_only: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[dict[str, frozenset[str]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(UNTOUCHED, torch.zeros(5, device=DEVICE))
        self.build()

    @classmethod
    def specs(cls) -> list[TensorSpec]:
        return [
            TensorSpec(name, shape, cls.dtypes.get(name, torch.bfloat16))
            for name, shape in cls.shapes.items()
        ]

    @classmethod
    def adjust(cls, base: Checkpoint) -> None:
        """Give the base checkpoint what makes this loader's habit hard to see."""

    def build(self) -> None:
        """Make one parameter per checkpoint tensor, of its shape."""
        for spec in self.specs():
            setattr(self, spec.name, parameter(*spec.shape, dtype=spec.dtype))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.load_one(name, weight)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight)

    def after_loading(self) -> None:
        """The engine's post-load processing."""

    def processed(self) -> list[nn.Module]:
        """Return the modules that the engine processes, one by one; each has `after_loading`."""
        return [self]
