"""Small models whose ``load_weights`` treat weights the ways that engine loaders do.

Each class is one habit. Its attributes say what the receiver must make of it: a tensor is updated
by any sync, unless it stands in `refused` (by none), in `dense_only`, or in `needs` (only by a
sync that holds these other tensors too).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from engine_ext.placement.segments import TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
Checkpoint = dict[str, torch.Tensor]

UNTOUCHED = "serving_state"
GARBAGE = 7.0


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """Memory that no loader has written to yet."""
    return nn.Parameter(torch.full(shape, GARBAGE).to(dtype), requires_grad=False)


class ToyModel(nn.Module):
    """A model with one buffer that serving changes and loading never touches."""

    shapes: ClassVar[dict[str, tuple[int, ...]]]
    dtypes: ClassVar[dict[str, torch.dtype]] = {}
    refused: ClassVar[frozenset[str]] = frozenset()
    dense_only: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[dict[str, frozenset[str]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(UNTOUCHED, torch.zeros(5))
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


def every_model() -> list[type[ToyModel]]:
    """Every concrete model below, in the order in which they are written."""
    found: list[type[ToyModel]] = []

    def walk(cls: type[ToyModel]) -> None:
        for child in cls.__subclasses__():
            found.append(child)
            walk(child)

    walk(ToyModel)
    return [cls for cls in found if "shapes" in vars(cls) and cls.__module__ == __name__]


# --- loaders that only move elements ---


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
    shapes: ClassVar = RowShard.shapes
    rank = 0


class ColumnShard(ToyModel):
    """Rank 1 of 2, cut along the input dimension: a strided source."""

    shapes: ClassVar = {"weight": (3, 8), "bias": (3,)}

    def build(self) -> None:
        self.weight, self.bias = parameter(3, 4), parameter(3)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        shard = weight if name == "bias" else weight[:, 4:]
        getattr(self, name).data.copy_(shard)


class FusedQkv(ToyModel):
    """Grouped-query attention: three tensors in one parameter."""

    shapes: ClassVar = {"q": (8, 4), "k": (2, 4), "v": (2, 4)}

    def build(self) -> None:
        self.qkv = parameter(12, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        start = {"q": 0, "k": 8, "v": 10}[name]
        self.qkv.data.narrow(0, start, len(weight)).copy_(weight)


class StackedExperts(ToyModel):
    """Per-expert gate, up and down tensors in two 3-d parameters; rank 0 of 2."""

    shapes: ClassVar = {
        f"expert{e}.{part}": (3, 4) if part == "down" else (4, 3)
        for e in range(3)
        for part in ("gate", "up", "down")
    }

    def build(self) -> None:
        self.w13, self.w2 = parameter(3, 4, 3), parameter(3, 3, 2)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        expert, part = int(name[len("expert")]), name.split(".")[1]
        if part == "down":
            self.w2.data[expert].copy_(weight[:, :2])
        else:
            half = 0 if part == "gate" else 2
            self.w13.data[expert][half : half + 2].copy_(weight[:2])


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
    """One checkpoint element lies in several places."""

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
    """Overlapping windows: an element lies in two places, though no stride of its view is 0.

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


class TiedHeadSkipped(Tied):
    """The loader takes a head, too, and drops it."""

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name != "head":
            super().load_one(name, weight)


class TiedHeadWanted(Tied):
    """The loader takes the embedding for a head only if it is given none."""

    def load_weights(self, weights: Weights) -> None:
        given = dict(weights)
        if "embed" in given:
            self.embed.data.copy_(given.get("head", given["embed"]))


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


# --- loaders that write by other means ---


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
        self.weight[torch.tensor([2, 0, 3, 1])] = weight


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


# --- loaders and engines that change values ---


class Widened(ToyModel):
    shapes: ClassVar = {"weight": (3, 4)}
    refused: ClassVar = frozenset({"weight"})

    def build(self) -> None:
        self.weight = parameter(3, 4, dtype=torch.float32)


class Narrowed(ToyModel):
    shapes: ClassVar = {"weight": (3, 4)}
    dtypes: ClassVar = {"weight": torch.float32}
    refused: ClassVar = frozenset({"weight"})

    def build(self) -> None:
        self.weight = parameter(3, 4)


class CastBefore(ToyModel):
    """A cast to a wider dtype and back loses nothing."""

    shapes: ClassVar = {"weight": (3, 4)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.copy_(weight.float())


class BitsView(ToyModel):
    """Copies the bits as integers, which are never NaN."""

    shapes: ClassVar = {"weight": (3, 4)}
    refused: ClassVar = frozenset({"weight"})
    bits: torch.dtype = torch.int16

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight.data.view(self.bits).copy_(weight.view(self.bits))


class BytesView(BitsView):
    """Copies the bits as bytes, whose strides are not the elements'."""

    shapes: ClassVar = {"weight": (4, 8)}
    bits = torch.uint8


class ByteHalf(ToyModel):
    """Copies the right half of the rows, as bytes: the offset is not the elements' either."""

    shapes: ClassVar = {"weight": (4, 8)}
    refused: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        live = self.weight.data.view(torch.uint8)
        live.copy_(weight.view(torch.uint8))
        live[:, 8:].copy_(weight.view(torch.uint8)[:, 8:])


class TransformedWhileLoading(ToyModel):
    """Mamba's ``A``: two stages, the second one before the copy."""

    shapes: ClassVar = {"A_log": (4,), "D": (4,)}
    refused: ClassVar = frozenset({"A_log"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(-torch.exp(weight.float()) if name == "A_log" else weight)


class TransformedAfterLoading(ToyModel):
    """Mamba's ``A``: two stages, the second one in place, after the copy."""

    shapes: ClassVar = {"A_log": (4,), "D": (4,)}
    refused: ClassVar = frozenset({"A_log"})

    def after_loading(self) -> None:
        self.A_log.data.exp_().neg_()


class RepackedInPlace(ToyModel):
    """Same storage, same shape, other order: the case that a masked apply corrupts."""

    shapes: ClassVar = {"experts": (2, 4, 4), "norm": (4,)}
    refused: ClassVar = frozenset({"experts"})

    def after_loading(self) -> None:
        packed = self.experts.data.view(2, 2, 2, 4).transpose(1, 2).contiguous()
        self.experts.data.copy_(packed.view(2, 4, 4))


class ReplacedAfterLoading(ToyModel):
    """Post-load processing makes a new, transposed parameter of the same shape."""

    shapes: ClassVar = {"weight": (4, 4), "norm": (4,)}
    refused: ClassVar = frozenset({"weight"})

    def after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)


class PackedAway(ToyModel):
    """Post-load processing leaves an empty tensor behind."""

    shapes: ClassVar = {"weight": (4, 4), "norm": (4,)}
    refused: ClassVar = frozenset({"weight"})

    def after_loading(self) -> None:
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Accumulates(ToyModel):
    shapes: ClassVar = {"weight": (3, 4), "bias": (3,)}
    refused: ClassVar = frozenset({"weight"})

    def build(self) -> None:
        super().build()
        self.weight.zero_()

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "weight":
            self.weight.add_(weight)
        else:
            self.bias.copy_(weight)


class ThroughTemporary(ToyModel):
    """The way of permute and clone."""

    shapes: ClassVar = {"weight": (3, 4), "cloned": (3, 4)}

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "weight":
            temporary = torch.zeros(3, 4, dtype=weight.dtype)
            temporary.copy_(weight)
        else:
            temporary = weight.t().contiguous().t()
        getattr(self, name).copy_(temporary)


class Repeated(ToyModel):
    """Key-value heads replicated with a gather, not with strides."""

    shapes: ClassVar = {"k": (2, 4)}

    def build(self) -> None:
        self.k = parameter(4, 4)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.k.copy_(weight.repeat_interleave(2, dim=0))


class ZeroesPaddingRow(ToyModel):
    """Changes the checkpoint tensor itself, which the base's bytes do not show."""

    shapes: ClassVar = {"embed": (4, 3), "norm": (3,)}
    refused: ClassVar = frozenset({"embed"})

    @classmethod
    def adjust(cls, base: Checkpoint) -> None:
        base["embed"][0] = 0

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "embed":
            weight[0].zero_()
        getattr(self, name).copy_(weight)


class ClampsAfter(ToyModel):
    """Does arithmetic on live memory, which the base's bytes do not show."""

    shapes: ClassVar = {"weight": (3, 4), "norm": (4,)}
    refused: ClassVar = frozenset({"weight"})

    @classmethod
    def adjust(cls, base: Checkpoint) -> None:
        base["weight"].clamp_(-1, 1)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).copy_(weight)
        if name == "weight":
            self.weight.clamp_(-1, 1)


# --- loaders that write more than the tensor they were given ---


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
    shapes: ClassVar = ZeroesFirst.shapes

    def clear(self) -> None:
        self.qk.data.fill_(0)


class ConstantFirst(ZeroesFirst):
    shapes: ClassVar = ZeroesFirst.shapes

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
    """Keeps a tensor beside the parameters, where no update would reach it."""

    shapes: ClassVar = {"weight": (3, 4), "norm": (4,)}
    refused: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        super().load_one(name, weight)
        if name == "weight":
            self.kept = weight


class KeepsCopy(KeepsReference):
    """The same with memory of its own, into which a masked apply would copy the NaNs."""

    shapes: ClassVar = KeepsReference.shapes

    def build(self) -> None:
        super().build()
        self.kept = torch.zeros(3, 4, dtype=torch.bfloat16)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        ToyModel.load_one(self, name, weight)
        if name == "weight":
            self.kept.copy_(weight)


# --- loaders that look at values, or at other tensors ---


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

    shapes: ClassVar = PairsConcatenated.shapes

    def load_pair(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        self.gate_up.data[:2].copy_(gate)
        self.gate_up.data[2:].copy_(up)


class PairsOrFailure(PairsTogether):
    """Raises without the second of a pair, after it has written the first."""

    shapes: ClassVar = PairsConcatenated.shapes

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


class SwapsParameter(ToyModel):
    """Replaces the parameter itself, so that no address holds from one load to the next."""

    shapes: ClassVar = {"weight": (3, 4)}
    refused: ClassVar = frozenset({"weight"})

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        self.weight = nn.Parameter(weight, requires_grad=False)
