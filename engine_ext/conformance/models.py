"""Loader habits that `engine_ext.conformance.toy_models` does not have."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from engine_ext.conformance.toy_models import (
    Checkpoint,
    RepackedInPlace,
    ToyModel,
    Weights,
    parameter,
)


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
    weight: nn.Parameter

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
        self.layer: Any = nn.Module()
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

    def build(self) -> None:
        super().build()
        del self.layer.linear.weight
        self.layer.linear.handle = self.made()

    def made(self) -> Any:
        """Return the handle that `fill` fills later."""
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

    def made(self) -> Any:
        return list(torch.zeros(8, 6, dtype=torch.bfloat16).chunk(2))

    def fill(self, weight: torch.Tensor) -> None:
        for place, rows in zip(self.layer.linear.handle, weight.chunk(2), strict=True):
            place.copy_(rows)


class MadeInHandle(LoadedIntoHandle):
    """The loader makes what it keeps: another object in the place of the first."""

    def fill(self, weight: torch.Tensor) -> None:
        self.layer.linear.handle = SimpleNamespace(weight=weight.clone())


class MadeInDict(LoadedIntoHandle):
    """The same, in a dict that was there."""

    def made(self) -> Any:
        return {}

    def fill(self, weight: torch.Tensor) -> None:
        self.layer.linear.handle["weight"] = weight.clone()


class LoaderReplaced(ToyModel):
    """AWQ on vLLM: processing puts a parameter in place whose loader does nothing."""

    shapes: ClassVar = {"qweight": (8, 6), "norm": (6,)}
    qweight: Any  # a parameter with a loader

    def build(self) -> None:
        super().build()
        self.qweight.weight_loader = self.qweight.data.copy_

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(getattr(self, name), "weight_loader", getattr(self, name).data.copy_)(weight)

    def after_loading(self) -> None:
        packed: Any = parameter(6, 8)
        packed.data.copy_(self.qweight.data.t() * 2)
        packed.weight_loader = lambda weight: None
        self.qweight = packed


class HalfReplaced(ToyModel):
    """The same for one of the two parameters that a checkpoint tensor is loaded into."""

    shapes: ClassVar = {"qkv": (8, 6)}

    def build(self) -> None:
        self.q, self.kv = parameter(4, 6), parameter(4, 6)
        self.loaders: list[Callable[[torch.Tensor], object]] = [
            self.q.data.copy_,
            self.kv.data.copy_,
        ]

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        for number, load in enumerate(self.loaders):
            load(weight.narrow(0, 4 * number, 4))

    def after_loading(self) -> None:
        self.packed = nn.Parameter(self.kv.data.t() * 2, requires_grad=False)
        self.loaders[1] = lambda weight: weight
        del self.kv


class DerivedBeside(ToyModel):
    """MLA: post-load processing keeps a rearranged copy of the weight as well."""

    shapes: ClassVar = {"kv_b_proj": (8, 6), "norm": (6,)}

    def after_loading(self) -> None:
        upper, lower = self.kv_b_proj.data.split(4)
        self.absorbed = [upper.t().contiguous(), lower.clone()]


class DerivedWhileLoading(ToyModel):
    """The loader itself computes what it keeps next to the weight."""

    shapes: ClassVar = {"kv_b_proj": (8, 6), "norm": (6,)}

    def build(self) -> None:
        super().build()
        self.absorbed = torch.zeros(6, 8)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        getattr(self, name).data.copy_(weight)
        if name == "kv_b_proj":
            self.absorbed = self.kv_b_proj.data.t().float() * 2


class DerivedRecomputed(ToyModel):
    """MLA again, of an engine whose function for it can be called."""

    shapes: ClassVar = {"kv_b_proj": (8, 6), "norm": (6,)}

    def after_loading(self) -> None:
        self.recompute()

    def recompute(self) -> None:
        upper, lower = self.kv_b_proj.data.split(4)
        self.w_kc = upper.t().contiguous()
        self.w_vc = lower.float() * 2


class DerivedInPlace(DerivedRecomputed):
    """The function writes into what it has made at first."""

    absorbed: nn.Parameter

    def recompute(self) -> None:
        upper, lower = self.kv_b_proj.data.split(4)
        if hasattr(self, "absorbed"):
            self.absorbed.copy_(lower @ upper.t())
        else:
            self.absorbed = nn.Parameter(lower @ upper.t(), requires_grad=False)


class ViewBeside(ToyModel):
    """Views of the weight are kept, one of them as a parameter."""

    shapes: ClassVar = {"kv_b_proj": (8, 6), "norm": (6,)}

    def after_loading(self) -> None:
        upper, self.lower = self.kv_b_proj.data.split(4)
        self.upper = nn.Parameter(upper.t(), requires_grad=False)


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
