"""Loaders that look at values, or at other tensors."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine_ext.conformance.toy_models.base import ToyModel, Weights, parameter


class ReadsValue(ToyModel):
    """Fails on a tensor without data; the others must not suffer."""

    shapes: ClassVar = {"weight": (3, 4), "scale": (1,), "norm": (4,)}
    refused: ClassVar = frozenset({"scale"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "scale":
            self.scale.data.fill_(weight.item())
        else:
            super().load_one(name, weight)


class ReadsThroughTemporary(ToyModel):
    """Reads a value out of real memory that the data never reached."""

    shapes: ClassVar = {"weight": (3, 4), "scale": (1,)}
    refused: ClassVar = frozenset({"scale"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        super().load_one(name, weight)
        if name == "scale":
            temporary = torch.full((1,), -1.0)
            temporary.copy_(weight)
            self.scale_float = temporary.item()


class PairsConcatenated(ToyModel):
    """Joins two tensors once both are there, and copies nothing before."""

    shapes: ClassVar = {"gate": (2, 4), "up": (2, 4), "norm": (4,)}
    needs: ClassVar = {"gate": frozenset({"up"}), "up": frozenset({"gate"})}

    def build(self) -> None:
        self.gate_up, self.norm = parameter(4, 4), parameter(4)

    def load_pair(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        self.gate_up.copy_(torch.cat([gate, up]))

    def load_weights(self, weights: Weights) -> None:
        held: dict[str, torch.Tensor] = {}
        for name, weight in weights:
            if name == "norm":
                self.norm.copy_(weight)
                continue
            held[name] = weight
            if len(held) == 2:
                self.load_pair(held["gate"], held["up"])


class PairsTogether(PairsConcatenated):
    """Copies each of two tensors, but only once both are there."""

    def load_pair(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        self.gate_up.data[:2].copy_(gate)
        self.gate_up.data[2:].copy_(up)


class PairsOrFailure(PairsTogether):
    """Raises without the second of a pair, after it has written the first."""

    def load_weights(self, weights: Weights) -> None:
        loaded = dict(weights)
        if "norm" in loaded:
            self.norm.copy_(loaded["norm"])
        if loaded.keys() & {"gate", "up"}:
            self.load_pair(loaded["gate"], loaded["up"])


class WantsAll(ToyModel):
    """Raises where a tensor is missing, as strict loaders do."""

    shapes: ClassVar = {"weight": (3, 4), "bias": (3,)}
    needs: ClassVar = {"weight": frozenset({"bias"}), "bias": frozenset({"weight"})}

    def load_weights(self, weights: Weights) -> None:
        loaded = dict(weights)
        super().load_weights(loaded.items())
        if missing := self.shapes.keys() - loaded.keys():
            raise ValueError(f"weights were not loaded: {missing}")
