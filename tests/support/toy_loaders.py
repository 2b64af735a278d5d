"""Small models whose loaders move elements about before they copy them (see `toy`)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import ClassVar

import torch
from torch import nn

from engine_ext.conformance.toy_models import ToyModel, Weights, parameter

POOL = ThreadPoolExecutor(2)
POOL.submit(int).result()  # its first thread is there before any trace begins


class TransposedExperts(ToyModel):
    """gpt-oss: the fused experts are permuted and made contiguous; rank 1 of 2."""

    shapes: ClassVar = {"w13": (3, 4, 12), "w2": (3, 8, 4)}

    def build(self) -> None:
        self.w13, self.w2 = parameter(3, 6, 4), parameter(3, 4, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        shard = weight[:, :, 6:] if name == "w13" else weight[:, 4:, :]
        getattr(self, name).copy_(shard.permute(0, 2, 1).contiguous())


class FusedLowRank(ToyModel):
    """DeepSeek in SGLang: two projections wait for each other and are joined."""

    shapes: ClassVar = {"q_a_proj": (3, 4), "kv_a_proj": (2, 4), "norm": (4,)}
    needs: ClassVar = {"q_a_proj": frozenset({"kv_a_proj"}), "kv_a_proj": frozenset({"q_a_proj"})}

    def build(self) -> None:
        self.fused, self.norm = parameter(5, 4), parameter(4)

    def load_weights(self, weights: Weights) -> None:
        held: dict[str, torch.Tensor] = {}
        for name, weight in weights:
            if name == "norm":
                self.norm.copy_(weight)
                continue
            held[name] = weight
            if len(held) == 2:
                self.fused.copy_(torch.cat([held["q_a_proj"], held["kv_a_proj"]], dim=0))


class Interleaved(ToyModel):
    """Rows of two tensors take turns."""

    shapes: ClassVar = {"gate": (40, 3), "up": (40, 3)}
    needs: ClassVar = {"gate": frozenset({"up"}), "up": frozenset({"gate"})}

    def build(self) -> None:
        self.gate_up = parameter(80, 3)

    def load_weights(self, weights: Weights) -> None:
        held = dict(weights)
        if len(held) == 2:
            self.gate_up.copy_(torch.stack([held["gate"], held["up"]], 1).flatten(0, 1))


class InterleavedHalves(ToyModel):
    """Rotary halves of every head take turns, as some exporters store them."""

    shapes: ClassVar = {"q": (32, 4)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.q.copy_(weight.view(4, 2, 4, 4).transpose(1, 2).reshape(32, 4))


class FilledTemporary(ToyModel):
    """Experts are collected in memory of the loader's own, and split again."""

    shapes: ClassVar = {f"expert{e}": (4, 3) for e in range(3)}
    needs: ClassVar = {
        f"expert{e}": frozenset(f"expert{o}" for o in range(3) if o != e) for e in range(3)
    }
    meta = False

    def build(self) -> None:
        self.first, self.second = parameter(3, 2, 3), parameter(3, 2, 3)

    def load_weights(self, weights: Weights) -> None:
        held = dict(weights)
        if len(held) < 3:
            return
        device = held["expert0"].device if self.meta else "cpu"
        stacked = torch.empty(3, 4, 3, dtype=torch.bfloat16, device=device)
        for name, weight in held.items():
            stacked[int(name[-1])].copy_(weight)
        first, second = stacked.chunk(2, dim=1)
        self.first.copy_(first)
        self.second.copy_(second.contiguous())


class FilledOnItsDevice(FilledTemporary):
    meta = True


class Reversed(ToyModel):
    """Rows in reverse: no strides say that."""

    shapes: ClassVar = {"few": (5, 3), "many": (300, 2), "columns": (100, 70)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight.flip(1 if name == "columns" else 0))


class ReversedInPart(ToyModel):
    """The reversed rows neither begin nor end where blocks of their length do."""

    shapes: ClassVar = {"weight": (200, 2), "bias": (7, 2)}

    def build(self) -> None:
        self.both = parameter(207, 2)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        part = self.both[:7] if name == "bias" else self.both[7:]
        part.copy_(weight.flip(0))


class Picked(ToyModel):
    """Rows by an index that the loader knows."""

    shapes: ClassVar = {"weight": (6, 3), "head": (4, 3)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        order = torch.tensor([2, 0, 1, 5, 3, 4] if name == "weight" else [3, 1, 0, 2])
        moved = weight.index_select(0, order) if name == "weight" else weight[order]
        getattr(self, name).copy_(moved)


class PickedByLayer(ToyModel):
    """Layers that are alike but for the order."""

    shapes: ClassVar = {f"layer{n}": (5, 3) for n in range(3)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight.index_select(0, (torch.arange(5) * 2 + int(name[-1])) % 5))


class PaddedBefore(ToyModel):
    """Vocabulary padded in a temporary."""

    shapes: ClassVar = {"embed": (5, 4)}

    def build(self) -> None:
        self.embed = parameter(8, 6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.embed.copy_(nn.functional.pad(weight, (0, 2, 0, 3)))


class RepeatedHeads(ToyModel):
    """Key heads for more ranks than there are heads."""

    shapes: ClassVar = {"k": (4, 3), "v": (4, 3)}

    def build(self) -> None:
        self.k, self.v = parameter(8, 3), parameter(8, 3)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        heads = weight.view(2, 2, 3)
        if name == "k":
            moved = heads.repeat_interleave(2, dim=0)
        else:
            moved = heads[:, None].expand(2, 2, 2, 3).reshape(4, 2, 3)
        getattr(self, name).copy_(moved.reshape(8, 3))


class BroughtToItsDevice(ToyModel):
    shapes: ClassVar = {"weight": (4, 3)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.copy_(weight.to(self.weight.device, copy=True))


class Pooled(ToyModel):
    """Copies are done by the threads of a pool that is made for it."""

    shapes: ClassVar = {"first": (3, 4), "second": (3, 4)}
    dense_only: ClassVar = frozenset({"first", "second"})

    def load_weights(self, weights: Weights) -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(self.load_one, name, w.clone()) for name, w in weights]:
                done.result()


class PooledElsewhere(Pooled):
    """A pool that is there before; its threads stay."""

    def load_weights(self, weights: Weights) -> None:
        list(POOL.map(lambda pair: self.load_one(*pair), weights))


class PooledByMultiprocessing(Pooled):
    def load_weights(self, weights: Weights) -> None:
        with ThreadPool(2) as pool:
            pool.starmap(self.load_one, weights)
            pool.close()
            pool.join()


class ThreadOfAThread(Pooled):
    """The loader does not even wait for it."""

    def load_weights(self, weights: Weights) -> None:
        def outer() -> None:
            inner = threading.Thread(target=super(ThreadOfAThread, self).load_weights, args=(held,))
            inner.start()
            inner.join()

        held = list(weights)
        thread = threading.Thread(target=outer)
        thread.start()
        thread.join()


MOVING = [
    TransposedExperts,
    FusedLowRank,
    Interleaved,
    InterleavedHalves,
    FilledTemporary,
    FilledOnItsDevice,
    Reversed,
    ReversedInPart,
    Picked,
    PickedByLayer,
    PaddedBefore,
    RepeatedHeads,
    BroughtToItsDevice,
    Pooled,
    PooledElsewhere,
    PooledByMultiprocessing,
    ThreadOfAThread,
]


# --- loaders that look as if they moved ---


class Scaled(ToyModel):
    shapes: ClassVar = {"weight": (4, 3), "norm": (3,)}
    refused: ClassVar = frozenset({"weight"})

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight.t().contiguous() * 1).t()

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(self.move(weight) if name == "weight" else weight)


class ThroughNarrower(Scaled):
    """A cast to fp8 and back; the base's values happen to survive it."""

    @classmethod
    def adjust(cls, base: dict[str, torch.Tensor]) -> None:
        base["weight"] = base["weight"].to(torch.float8_e4m3fn).to(torch.bfloat16)

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.float8_e4m3fn).to(torch.bfloat16)


class ThroughOtherHalf(Scaled):
    """Neither half-precision dtype holds the other."""

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.float16).float()


class BitsMoved(Scaled):
    """The bits of a temporary, as integers."""

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone().view(torch.int16).flip(0).view(torch.bfloat16)


class SortedRows(Scaled):
    """The order is the values' own; the base is sorted."""

    @classmethod
    def adjust(cls, base: dict[str, torch.Tensor]) -> None:
        base["weight"] = base["weight"].sort(0).values

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.gather(0, weight.argsort(0))


class ListIndexed(Scaled):
    """torch makes the index on the tensor's device, where it has no values."""

    def move(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[[1, 0, 3, 2]]


class AddedToTemporary(Scaled):
    def move(self, weight: torch.Tensor) -> torch.Tensor:
        temporary = torch.zeros(4, 3, dtype=torch.bfloat16)
        temporary.add_(weight)
        return temporary


class AccumulatedIntoTemporary(Scaled):
    def move(self, weight: torch.Tensor) -> torch.Tensor:
        temporary = torch.zeros(4, 3, dtype=torch.bfloat16)
        temporary.index_put_((torch.tensor([0, 1, 2, 3]),), weight, accumulate=True)
        return temporary


class ReadBack(Scaled):
    """One parameter is filled from another, which a delta would leave behind."""

    def build(self) -> None:
        super().build()
        self.copy = parameter(4, 3)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight)
        if name == "weight":
            self.copy.copy_(self.weight)


class ReadBackCloned(ReadBack):
    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight)
        if name == "weight":
            self.copy.copy_(self.weight.clone().flip(0))


class WritesOver(Scaled):
    """One element of the tensor over another; in the base they are equal."""

    @classmethod
    def adjust(cls, base: dict[str, torch.Tensor]) -> None:
        base["weight"][0] = base["weight"][1]

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight)
        if name == "weight":
            self.weight[0].copy_(weight[1])


class OverwritesOthers(ToyModel):
    """A computed copy of one tensor over another one; in the base both are zero."""

    shapes: ClassVar = {"weight": (4, 3), "other": (2, 3)}
    refused: ClassVar = frozenset({"weight", "other"})

    @classmethod
    def adjust(cls, base: dict[str, torch.Tensor]) -> None:
        base["weight"].zero_()
        base["other"].zero_()

    def build(self) -> None:
        self.weight = parameter(4, 3)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "weight":
            self.weight.copy_(weight)
        else:
            self.weight[:2].copy_(weight * 2)


NOT_MOVING = [
    (Scaled, "mul"),
    (ThroughNarrower, "float8_e4m3fn loses"),
    (ThroughOtherHalf, "float16 loses"),
    (BitsMoved, "int16"),
    (SortedRows, "sort"),
    (ListIndexed, "not known"),
    (AddedToTemporary, "add_"),
    (AccumulatedIntoTemporary, "index_put_"),
    (ReadBack, "reads it back from weight into copy"),
    (ReadBackCloned, "reads it back from weight into copy"),
    (WritesOver, "writes parts of it over others"),
    (OverwritesOthers, "writes other values over it"),
]
