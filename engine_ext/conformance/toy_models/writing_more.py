"""Loaders that write more than the tensor they were given."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from engine_ext.conformance.toy_models.base import Checkpoint, ToyModel, Weights, parameter


class ZeroesFirst(ToyModel):
    """Clears the fused parameter with the first shard: unchanged elements would be lost."""

    shapes: ClassVar = {"q": (4, 4), "k": (2, 4), "norm": (4,)}
    refused: ClassVar = frozenset({"q", "k"})

    def build(self) -> None:
        self.qk, self.norm = parameter(6, 4), parameter(4)

    def clear(self) -> None:
        self.qk.data.zero_()

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "norm":
            self.norm.copy_(weight)
        elif name == "q":
            self.clear()
            self.qk.data[:4].copy_(weight)
        else:
            self.qk.data[4:].copy_(weight)


class FillsFirst(ZeroesFirst):
    def clear(self) -> None:
        self.qk.data.fill_(0)


class ConstantFirst(ZeroesFirst):
    def clear(self) -> None:
        self.qk.data.copy_(torch.ones(6, 4))


class DefaultsWhatIsMissing(ToyModel):
    """A tensor that the checkpoint leaves out gets a default."""

    shapes: ClassVar = {"weight": (3, 4), "bias": (3,)}
    needs: ClassVar = {"weight": frozenset({"bias"})}

    def load_weights(self, weights: Weights) -> None:
        loaded = dict(weights)
        for name, weight in loaded.items():
            self.load_one(name, weight)
        if "bias" not in loaded:
            self.bias.data.copy_(torch.zeros(3))


class FallsBackToEmbedding(ToyModel):
    """A checkpoint without a head means that the head is the embedding."""

    shapes: ClassVar = {"embed": (3, 4), "head": (3, 4)}
    needs: ClassVar = {"embed": frozenset({"head"})}

    def load_weights(self, weights: Weights) -> None:
        loaded = dict(weights)
        for name, weight in loaded.items():
            self.load_one(name, weight)
        if "head" not in loaded:
            self.head.data.copy_(loaded["embed"])


class TiedInEngine(ToyModel):
    """The checkpoint keeps apart (with equal bytes) what the engine ties."""

    shapes: ClassVar = {"embed": (5, 4), "head": (5, 4)}
    refused: ClassVar = frozenset({"embed", "head"})

    @classmethod
    def adjust(cls, base: Checkpoint) -> None:
        base["head"] = base["embed"].clone()

    def build(self) -> None:
        self.embed = parameter(5, 4)
        self.head = self.embed


class TiedInPart(ToyModel):
    """The same, where one parameter is a slice of the other's memory."""

    shapes: ClassVar = {"embed": (5, 4), "head": (2, 4), "norm": (4,)}
    refused: ClassVar = frozenset({"embed", "head"})

    @classmethod
    def adjust(cls, base: Checkpoint) -> None:
        base["head"] = base["embed"][1:3].clone()

    def build(self) -> None:
        self.embed, self.norm = parameter(5, 4), parameter(4)
        self.head = nn.Parameter(self.embed.data[1:3], requires_grad=False)


class KeepsReference(ToyModel):
    """Keeps a tensor next to the parameters, where no update would reach it."""

    shapes: ClassVar = {"weight": (3, 4), "norm": (4,)}
    refused: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        super().load_one(name, weight)
        if name == "weight":
            self.kept = weight


class KeepsCopy(KeepsReference):
    """The same with memory of its own, into which a masked apply would copy the NaNs."""

    def build(self) -> None:
        super().build()
        self.kept = torch.zeros(3, 4, dtype=torch.bfloat16)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        ToyModel.load_one(self, name, weight)
        if name == "weight":
            self.kept.copy_(weight)
