"""Loader habits that show on two ranks: a class for the first one and a class for the last."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine_ext.conformance.toy_models import ToyModel, Weights, parameter


class UnevenRows(ToyModel):
    """Seven rows on two ranks: four and three, the last row of memory stays unused."""

    shapes: ClassVar = {"weight": (7, 12)}
    rows: ClassVar = slice(0, 4)

    def build(self) -> None:
        self.weight = parameter(4, 12)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        shard = weight[self.rows]
        self.weight.data[: len(shard)].copy_(shard)


class UnevenRowsLast(UnevenRows):
    rows: ClassVar = slice(4, 7)


class SharedHeads(ToyModel):
    """Fewer key-value heads than ranks: queries are cut, keys and values are on both ranks."""

    shapes: ClassVar = {"q": (16, 12), "k": (4, 12), "v": (4, 12)}
    rank = 0

    def build(self) -> None:
        self.qkv = parameter(16, 12)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        start = {"q": 0, "k": 8, "v": 12}[name]
        shard = weight.narrow(0, 8 * self.rank, 8) if name == "q" else weight
        self.qkv.data.narrow(0, start, len(shard)).copy_(shard)


class SharedHeadsLast(SharedHeads):
    rank = 1


class ExpertsByRank(ToyModel):
    """Expert parallel: each expert is on one rank, the other rank skips it."""

    shapes: ClassVar = {**{f"expert{e}": (8, 6) for e in range(4)}, "norm": (6,)}
    rank = 0

    def build(self) -> None:
        self.experts, self.norm = parameter(2, 8, 6), parameter(6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "norm":
            self.norm.data.copy_(weight)
        elif (place := int(name[-1]) - 2 * self.rank) in (0, 1):
            self.experts.data[place].copy_(weight)


class ExpertsByRankLast(ExpertsByRank):
    rank = 1


class LayersByRank(ToyModel):
    """Pipeline parallel: a rank has one of two layers."""

    shapes: ClassVar = {"layer0": (8, 6), "layer1": (8, 6)}
    rank = 0

    def build(self) -> None:
        self.layer = parameter(8, 6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == f"layer{self.rank}":
            self.layer.data.copy_(weight)


class LayersByRankLast(LayersByRank):
    rank = 1


class VocabShard(ToyModel):
    """Eleven tokens on two ranks of eight rows; what is left over is filled with zeros."""

    shapes: ClassVar = {"embed": (11, 6)}
    rank = 0

    def build(self) -> None:
        self.embed = parameter(8, 6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        shard = weight[8 * self.rank : 8 * self.rank + 8]
        self.embed[: len(shard)].data.copy_(shard)
        self.embed[len(shard) :].data.fill_(0)


class VocabShardLast(VocabShard):
    rank = 1


class OverlappingRows(ToyModel):
    """The ranks' parts overlap without being the same."""

    shapes: ClassVar = {"weight": (10, 6)}
    start = 0

    def build(self) -> None:
        self.weight = parameter(6, 6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.data.copy_(weight.narrow(0, self.start, 6))


class OverlappingRowsLast(OverlappingRows):
    start = 4


class FailsOnLastRank(ToyModel):
    """One rank's loader wants both tensors, the other's does not."""

    shapes: ClassVar = {"gate": (8, 6), "up": (8, 6)}
    wants_all = False

    def build(self) -> None:
        self.gate, self.up = parameter(4, 6), parameter(4, 6)

    def load_weights(self, weights: Weights) -> None:
        given = dict(weights)
        if self.wants_all and len(given) < len(self.shapes):
            raise ValueError("weights were not loaded")
        for name, weight in given.items():
            getattr(self, name).data.copy_(weight.narrow(0, 4 if self.wants_all else 0, 4))


class FailsOnLastRankLast(FailsOnLastRank):
    wants_all = True
