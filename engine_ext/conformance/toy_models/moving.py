"""Loaders that only move elements."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from engine_ext.conformance.toy_models.base import ToyModel, Weights, parameter


class PlainCopy(ToyModel):
    shapes: ClassVar = {"weight": (6, 4), "bias": (6,), "scale": ()}


class RowShard(ToyModel):
    """Rank 1 of 2, cut along the output dimension."""

    shapes: ClassVar = {"weight": (6, 4)}
    rank = 1

    def build(self) -> None:
        self.weight = parameter(3, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.data.copy_(weight.narrow(0, 3 * self.rank, 3))


class RowShardFirst(RowShard):
    rank = 0


class ColumnShard(ToyModel):
    """The weight is cut along the input dimension, the bias is on both ranks."""

    shapes: ClassVar = {"weight": (24, 32), "bias": (24,)}
    rank = 0

    def build(self) -> None:
        self.weight, self.bias = parameter(24, 16), parameter(24)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        shard = weight if name == "bias" else weight.narrow(1, 16 * self.rank, 16)
        getattr(self, name).data.copy_(shard)


class ColumnShardLast(ColumnShard):
    rank = 1


class FusedQkv(ToyModel):
    """Grouped-query attention: three tensors in one parameter."""

    shapes: ClassVar = {"q": (8, 4), "k": (2, 4), "v": (2, 4)}

    def build(self) -> None:
        self.qkv = parameter(12, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        start = {"q": 0, "k": 8, "v": 10}[name]
        self.qkv.data.narrow(0, start, len(weight)).copy_(weight)


class StackedExperts(ToyModel):
    """Gate, up and down of every expert in two 3-d parameters, each cut between the ranks."""

    shapes: ClassVar = {
        f"expert{e}.{part}": (6, 8) if part == "down" else (8, 6)
        for e in range(2)
        for part in ("gate", "up", "down")
    }
    rank = 0

    def build(self) -> None:
        self.w13, self.w2 = parameter(2, 8, 6), parameter(2, 6, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        expert, part = int(name[len("expert")]), name.split(".")[1]
        if part == "down":
            self.w2.data[expert].copy_(weight.narrow(1, 4 * self.rank, 4))
        else:
            start = 0 if part == "gate" else 4
            shard = weight.narrow(0, 4 * self.rank, 4)
            self.w13.data[expert].narrow(0, start, 4).copy_(shard)


class StackedExpertsLast(StackedExperts):
    rank = 1


class InterleavedColumns(ToyModel):
    """Two tensors share every row of one parameter, so that their address ranges overlap."""

    shapes: ClassVar = {"gate": (5, 3), "up": (5, 3)}

    def build(self) -> None:
        self.gate_up = parameter(5, 6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        start = 0 if name == "gate" else 1
        self.gate_up.data[:, start::2].copy_(weight)


class Transposed(ToyModel):
    shapes: ClassVar = {"weight": (6, 4)}

    def build(self) -> None:
        self.weight = parameter(4, 6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.data.copy_(weight.t())


class StridedParameter(ToyModel):
    """The parameter is a transposed view, and a column slice of its memory is a gap."""

    shapes: ClassVar = {"weight": (6, 4)}

    def build(self) -> None:
        self.weight = nn.Parameter(parameter(4, 9).data[:, :6].t(), requires_grad=False)


class RowByRow(ToyModel):
    shapes: ClassVar = {"weight": (5, 3)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        for row in reversed(range(5)):
            self.weight.data[row].copy_(weight[row])


class PaddedVocab(ToyModel):
    """Padding is filled while loading and changed by post-load processing."""

    shapes: ClassVar = {"embed": (5, 4)}

    def build(self) -> None:
        self.embed = parameter(8, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.embed.data[:5].copy_(weight)
        self.embed.data[5:].fill_(0)

    def after_loading(self) -> None:
        self.embed.data[5:] = float("-inf")


class Broadcast(ToyModel):
    """One checkpoint element is in several places."""

    shapes: ClassVar = {"row": (4,), "column": (3, 1)}

    def build(self) -> None:
        self.row, self.column = parameter(3, 4), parameter(3, 4)


class Replicated(ToyModel):
    shapes: ClassVar = {"weight": (3, 4)}

    def build(self) -> None:
        self.first, self.second = parameter(3, 4), parameter(3, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.first.copy_(weight)
        self.second.copy_(weight)


class Windows(ToyModel):
    """Overlapping windows: an element is in two places, though no stride of its view is 0.

    As many elements are written as the tensor has, and two of the tensor's are dropped.
    """

    shapes: ClassVar = {"weight": (6,)}
    refused: ClassVar = frozenset({"weight"})

    def build(self) -> None:
        self.weight = parameter(3, 2)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.copy_(weight[:4].unfold(0, 2, 1))


class Tied(ToyModel):
    """The head is the embedding; the checkpoint holds only the embedding."""

    shapes: ClassVar = {"embed": (5, 4)}

    def build(self) -> None:
        self.embed = parameter(5, 4)
        self.head = self.embed


class Skipped(ToyModel):
    shapes: ClassVar = {"weight": (3, 4), "rotary": (4,)}

    def build(self) -> None:
        self.weight = parameter(3, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "weight":
            self.weight.copy_(weight)


class MakesDict(ToyModel):
    """Collects all weights before it looks at any; a name given twice would be lost."""

    shapes: ClassVar = {"weight": (3, 4), "bias": (3,)}

    def load_weights(self, weights: Weights) -> None:
        for name, weight in sorted(dict(weights).items()):
            self.load_one(name, weight)
