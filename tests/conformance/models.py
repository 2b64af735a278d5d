"""Loader habits that need several ranks, or that `tests.core.toy` does not have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from tests.core.toy import Checkpoint, RepackedInPlace, ToyModel, Weights, parameter

# --- two ranks ---


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
    shapes: ClassVar = ColumnShard.shapes
    rank = 1


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
    shapes: ClassVar = UnevenRows.shapes
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
    shapes: ClassVar = SharedHeads.shapes
    rank = 1


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
    shapes: ClassVar = StackedExperts.shapes
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
    shapes: ClassVar = ExpertsByRank.shapes
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
    shapes: ClassVar = LayersByRank.shapes
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
    shapes: ClassVar = VocabShard.shapes
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
    shapes: ClassVar = OverlappingRows.shapes
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
    shapes: ClassVar = FailsOnLastRank.shapes
    wants_all = True


# --- one rank ---


class PermutedAndCloned(ToyModel):
    """gpt-oss: fused experts are permuted and made contiguous before the copy."""

    shapes: ClassVar = {"w13": (3, 4, 12), "norm": (4,)}

    def build(self) -> None:
        self.w13, self.norm = parameter(3, 12, 4), parameter(4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        moved = weight if name == "norm" else weight.permute(0, 2, 1).contiguous()
        getattr(self, name).data.copy_(moved)


class Truncated(ToyModel):
    """The engine has fewer rows than the checkpoint and drops the rest."""

    shapes: ClassVar = {"embed": (9, 6), "norm": (6,)}

    def build(self) -> None:
        self.embed, self.norm = parameter(7, 6), parameter(6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).data.copy_(weight[:7] if name == "embed" else weight)


class ThreadPoolLoader(ToyModel):
    """DeepSeek in SGLang: the copies are made by the threads of a pool."""

    shapes: ClassVar = {f"layer{n}": (8, 6) for n in range(4)}

    def load_weights(self, weights: Weights) -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(self.load_one, name, weight) for name, weight in weights]:
                done.result()

    @torch.no_grad()
    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).data.copy_(weight)


class RepackedExperts(RepackedInPlace):
    """Rows go side by side, two columns at a time, in the storage and shape they had."""

    shapes: ClassVar = {"experts": (3, 32, 8), "norm": (8,)}

    def after_loading(self) -> None:
        tiles = self.experts.data.view(3, 2, 16, 4, 2)
        packed = tiles.permute(0, 1, 3, 2, 4).contiguous()
        self.experts.data.copy_(packed.view(3, 32, 8))


class PaddedAfterLoading(ToyModel):
    """Post-load processing makes a padded copy and puts it in the parameter's place."""

    shapes: ClassVar = {"weight": (7, 6), "norm": (6,)}

    def after_loading(self) -> None:
        padded = torch.zeros(8, 8, dtype=torch.bfloat16)
        padded[:7, :6] = self.weight.data
        self.weight = nn.Parameter(padded, requires_grad=False)


class ScaledAfterLoading(ToyModel):
    """Post-load processing folds one tensor into another."""

    shapes: ClassVar = {"weight": (8, 6), "scale": (8, 1), "norm": (6,)}

    def after_loading(self) -> None:
        self.weight.data.mul_(self.scale.data)


class PackedIntoHandle(ToyModel):
    """oneDNN: the weight goes into an opaque handle, and an empty tensor stays behind."""

    shapes: ClassVar = {"weight": (8, 6), "norm": (6,), "embed": (9, 6)}

    def build(self) -> None:
        self.embed = parameter(9, 6)
        self.layer = nn.Module()
        self.layer.norm = parameter(6)
        self.layer.linear = nn.Module()
        self.layer.linear.weight = parameter(8, 6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        modules = {"weight": self.layer.linear, "norm": self.layer, "embed": self}
        getattr(modules[name], name).data.copy_(weight)

    def after_loading(self) -> None:
        linear = self.layer.linear
        linear.handle = SimpleNamespace(packed=linear.weight.data.t().contiguous())
        linear.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)


class LoadedIntoHandle(PackedIntoHandle):
    """The loader itself fills memory that is no parameter."""

    shapes: ClassVar = PackedIntoHandle.shapes

    def build(self) -> None:
        super().build()
        del self.layer.linear.weight
        self.layer.linear.handle = self.made()

    def made(self) -> Any:
        """What is filled later."""
        return SimpleNamespace(weight=torch.zeros(8, 6, dtype=torch.bfloat16))

    def fill(self, weight: torch.Tensor) -> None:
        self.layer.linear.handle.weight.copy_(weight)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "weight":
            self.fill(weight)
        else:
            super().load_one(name, weight)

    def after_loading(self) -> None:
        """Nothing is packed."""


class LoadedIntoList(LoadedIntoHandle):
    """The same, with a list of slices of one tensor."""

    shapes: ClassVar = LoadedIntoHandle.shapes

    def made(self) -> Any:
        return list(torch.zeros(8, 6, dtype=torch.bfloat16).chunk(2))

    def fill(self, weight: torch.Tensor) -> None:
        for place, rows in zip(self.layer.linear.handle, weight.chunk(2), strict=True):
            place.copy_(rows)


class DerivedBeside(ToyModel):
    """MLA: post-load processing keeps a rearranged copy beside the weight."""

    shapes: ClassVar = {"kv_b_proj": (8, 6), "norm": (6,)}

    def after_loading(self) -> None:
        upper, lower = self.kv_b_proj.data.split(4)
        self.absorbed = [upper.t().contiguous(), lower.clone()]


class DerivedWhileLoading(ToyModel):
    """The loader itself computes what it keeps beside the weight."""

    shapes: ClassVar = {"kv_b_proj": (8, 6), "norm": (6,)}

    def build(self) -> None:
        super().build()
        self.absorbed = torch.zeros(6, 8)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).data.copy_(weight)
        if name == "kv_b_proj":
            self.absorbed = self.kv_b_proj.data.t().float() * 2


class ScaledRows(ToyModel):
    """The loader multiplies; the base's factor of one hides it."""

    shapes: ClassVar = {"weight": (8, 6), "scale": (8, 1)}

    @classmethod
    def adjust(cls, base: Checkpoint) -> None:
        base["scale"].fill_(1)

    def build(self) -> None:
        self.weight = parameter(8, 6)

    def load_weights(self, weights: Weights) -> None:
        given = dict(weights)
        if "weight" in given:
            self.weight.data.copy_(given["weight"])
        if "scale" in given:
            self.weight.data.mul_(given["scale"])


class ManyDtypes(ToyModel):
    """Dtypes that have no NaN, or none that torch finds."""

    shapes: ClassVar = {"fp8": (8, 6), "int8": (8, 6), "int32": (6,)}
    dtypes: ClassVar = {
        "fp8": torch.float8_e4m3fn,
        "int8": torch.int8,
        "int32": torch.int32,
    }


class OtherFloats(ToyModel):
    shapes: ClassVar = {"fp16": (8, 6), "fp32": (8, 6)}
    dtypes: ClassVar = {"fp16": torch.float16, "fp32": torch.float32}
