"""Loaders and engines that change values."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from engine_ext.conformance.toy_models.base import DEVICE, Checkpoint, ToyModel, parameter


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
    weight: nn.Parameter

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
            self.weight.add_(weight.to(DEVICE))
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
