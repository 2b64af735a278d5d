"""Models whose layers are quantised, or served in another layout than their checkpoint's.

Each class stands for one format, with the arithmetic of an engine's post-load processing in plain
torch on a small linear layer: K inputs and N outputs in groups of G.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from engine_ext.conformance.toy_models import ToyModel, parameter

N, K, G = 16, 32, 8
FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# The column of each of the eight 4-bit numbers in an int32 of AWQ's checkpoints.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Magnitudes of the 4-bit floats of the OCP MX formats (e2m1).
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Linear(nn.Module):
    """One linear layer, processed on its own as engines do."""

    def __init__(self, process: Callable[[Any], None]) -> None:
        super().__init__()
        self.process = process

    def after_loading(self) -> None:
        self.process(self)

    def compute(self) -> torch.Tensor | None:
        """Return numbers that depend on the weights in the handle; None without a handle."""
        handle = getattr(self, "handle", None)
        return None if handle is None else handle.packed.float() * 2

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor in the place of a parameter, without its loader."""
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))


class Quantised(ToyModel):
    """A norm, and a layer that loads every other checkpoint tensor into a parameter of its name."""

    def build(self) -> None:
        self.layer = Linear(type(self).process)
        for spec in self.specs():
            owner = self if spec.name == "norm" else self.layer
            setattr(owner, spec.name, parameter(*spec.shape, dtype=spec.dtype))

    @staticmethod
    def process(layer: Any) -> None:
        """The engine's processing of the layer after loading."""

    def processed(self) -> list[nn.Module]:
        return [self.layer]

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        owner = self if name == "norm" else self.layer
        getattr(owner, name).data.copy_(weight)

    def after_loading(self) -> None:
        self.layer.after_loading()


def scale_of(weight: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The scale with which the largest magnitude is the largest fp8 number."""
    found = weight.abs()
    largest = found.max() if dim is None else found.amax(dim, keepdim=True)
    return (largest / _LARGEST).clamp(min=1e-12)


def to_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-_LARGEST, _LARGEST).to(FP8)


def unpacked(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """4-bit numbers [rows, 8 * columns] of int32 [rows, columns]."""
    shifts = torch.tensor([4 * k for k in order], dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & 15).flatten(1)


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, columns / 2] of 4-bit numbers."""
    return (numbers[:, 0::2] | (numbers[:, 1::2] << 4)).to(torch.uint8)


class OnlineFp8PerTensor(Quantised):
    shapes: ClassVar = {"weight": (N, K), "norm": (K,)}
    dim: ClassVar[int | None] = None  # each index of it has a scale

    @classmethod
    def process(cls, layer: Any) -> None:
        weight = layer.weight.float()
        scale = scale_of(weight, cls.dim)
        layer.put("weight", to_fp8(weight, scale).t())
        layer.put("weight_scale", scale)


class OnlineFp8PerChannel(OnlineFp8PerTensor):
    dim: ClassVar = 1


class OnlineFp8Rows(OnlineFp8PerTensor):
    """The first of 2 ranks, which share the rows and have a scale each."""

    first: ClassVar = 0

    def build(self) -> None:
        super().build()
        self.layer.put("weight", parameter(N // 2, K))

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        own = weight if name == "norm" else weight.narrow(0, self.first, N // 2)
        super().load_one(name, own)


class OnlineFp8RowsLast(OnlineFp8Rows):
    first: ClassVar = N // 2


class OnlineInt8(Quantised):
    shapes: ClassVar = {"weight": (N, K), "norm": (K,)}

    @staticmethod
    def process(layer: Any) -> None:
        weight = layer.weight.float()
        scale = weight.nan_to_num().abs().amax(1, keepdim=True).clamp(min=1e-12, max=1e30) / 127
        layer.put("weight", (weight / scale).nan_to_num().round().clamp(-127, 127).char().t())
        layer.put("weight_scale", scale)


class Fp8PerTensor(Quantised):
    """Shards of one parameter have a scale each in the checkpoint, and one when they are served."""

    shapes: ClassVar = {"weight": (N, K), "weight_scale": (2,), "norm": (K,)}
    dtypes: ClassVar = {"weight": FP8, "weight_scale": torch.float32}

    @staticmethod
    def process(layer: Any) -> None:
        halves, scales = layer.weight.float().chunk(2), layer.weight_scale
        largest = scales.max()
        fused = torch.cat([half * scale for half, scale in zip(halves, scales, strict=True)])
        layer.put("weight", to_fp8(fused, largest).t())
        layer.put("weight_scale", largest.clone())


class Fp8PerChannel(Quantised):
    shapes: ClassVar = {"weight": (N, K), "weight_scale": (N, 1), "norm": (K,)}
    dtypes: ClassVar = {"weight": FP8, "weight_scale": torch.float32}

    @staticmethod
    def process(layer: Any) -> None:
        layer.put("weight", layer.weight.data.t())


class Fp8Block(Quantised):
    """Blocks of G x G, as DeepSeek and Qwen ship them; the layout of the scales changes."""

    shapes: ClassVar = {"weight": (N, K), "weight_scale_inv": (N // G, K // G), "norm": (K,)}
    dtypes: ClassVar = {"weight": FP8, "weight_scale_inv": torch.float32}

    @staticmethod
    def process(layer: Any) -> None:
        layer.put("weight_scale", layer.weight_scale_inv.data.t().contiguous().t())
        del layer.weight_scale_inv


class Fp8BlockRequantised(Fp8Block):
    """The scales become powers of two, as DeepGEMM wants them, and the weights follow."""

    @staticmethod
    def process(layer: Any) -> None:
        def spread(scale: torch.Tensor) -> torch.Tensor:
            return scale.repeat_interleave(G, 0).repeat_interleave(G, 1)

        scale = layer.weight_scale_inv.data
        power = torch.exp2(torch.ceil(torch.log2(scale.abs().clamp(min=1e-12))))
        layer.put("weight", to_fp8(layer.weight.float() * spread(scale), spread(power)))
        layer.put("weight_scale", power)
        del layer.weight_scale_inv


class Int8(Quantised):
    """W8A8: transposed, and the sum of each output's weights for the zero points of inputs."""

    shapes: ClassVar = {"weight": (N, K), "weight_scale": (N, 1), "norm": (K,)}
    dtypes: ClassVar = {"weight": torch.int8, "weight_scale": torch.float32}

    @staticmethod
    def process(layer: Any) -> None:
        layer.put("azp_adj", layer.weight.data.sum(1, dtype=torch.int32)[None])
        layer.put("weight", layer.weight.data.t())


class Awq(Quantised):
    """Two formats in one: numbers and zero points, both in AWQ's order."""

    shapes: ClassVar = {
        "qweight": (K, N // 8),
        "qzeros": (K // G, N // 8),
        "scales": (K // G, N),
        "norm": (K,),
    }
    dtypes: ClassVar = {
        "qweight": torch.int32,
        "qzeros": torch.int32,
        "scales": torch.float16,
    }

    @staticmethod
    def process(layer: Any) -> None:
        layer.put("qweight", packed(unpacked(layer.qweight.data, _AWQ_ORDER).t().contiguous()))
        layer.put("qzeros", unpacked(layer.qzeros.data, _AWQ_ORDER).to(torch.uint8))
        layer.put("scales", layer.scales.data.bfloat16())


class Gptq(Quantised):
    """The zero points are one less in the checkpoint, and the order of the groups is dropped."""

    shapes: ClassVar = {
        "qweight": (K // 8, N),
        "qzeros": (K // G, N // 8),
        "scales": (K // G, N),
        "g_idx": (K,),
        "norm": (K,),
    }
    dtypes: ClassVar = {
        "qweight": torch.int32,
        "qzeros": torch.int32,
        "scales": torch.float16,
        "g_idx": torch.int32,
    }

    @staticmethod
    def process(layer: Any) -> None:
        layer.put("qweight", packed(unpacked(layer.qweight.data.t().contiguous())))
        layer.put("qzeros", ((unpacked(layer.qzeros.data) + 1) & 15).to(torch.uint8))
        del layer.g_idx


class W4A16(Quantised):
    """compressed-tensors: symmetric, with the shape before packing, which is dropped."""

    shapes: ClassVar = {
        "weight_packed": (N, K // 8),
        "weight_scale": (N, K // G),
        "weight_shape": (2,),
        "norm": (K,),
    }
    dtypes: ClassVar = {"weight_packed": torch.int32, "weight_shape": torch.int64}

    @staticmethod
    def process(layer: Any) -> None:
        layer.put("weight_packed", packed(unpacked(layer.weight_packed.data).t().contiguous()))
        layer.put("weight_scale", layer.weight_scale.data.t().contiguous())
        del layer.weight_shape


class Mxfp4(Quantised):
    """Floats of 4 bits, 32 to a scale that is an exponent; served in bf16, as gpt-oss can be."""

    shapes: ClassVar = {"blocks": (N, K // 32, 16), "scales": (N, K // 32), "norm": (K,)}
    dtypes: ClassVar = {"blocks": torch.uint8, "scales": torch.uint8}

    @staticmethod
    def process(layer: Any) -> None:
        pairs = layer.blocks.data
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).long()
        values = _E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        powers = torch.exp2(layer.scales.float() - 127)[..., None]
        layer.put("weight", (values * powers).flatten(1).bfloat16())
        del layer.blocks, layer.scales


class Mxfp4Shuffled(Mxfp4):
    """The bytes in the order of a kernel's tiles, as on GPUs."""

    @staticmethod
    def process(layer: Any) -> None:
        tiles = layer.blocks.data.view(2, N // 2, 2, 8).transpose(1, 2).contiguous()
        layer.put("blocks", tiles.flatten(1))
        layer.put("scales", layer.scales.data.t().contiguous())


class Nvfp4(Quantised):
    """fp8 scales of groups under one scale, which is kept inverted and multiplied, too."""

    shapes: ClassVar = {
        "weight": (N, K // 2),
        "weight_scale": (N, K // G),
        "weight_scale_2": (1,),
        "input_scale": (1,),
        "norm": (K,),
    }
    dtypes: ClassVar = {
        "weight": torch.uint8,
        "weight_scale": FP8,
        "weight_scale_2": torch.float32,
        "input_scale": torch.float32,
    }

    @staticmethod
    def process(layer: Any) -> None:
        bits = layer.weight_scale.data.view(torch.uint8)
        layer.put("weight_scale", bits.view(2, N // 2, -1).transpose(0, 1).contiguous().view(FP8))
        layer.put("alpha", layer.input_scale.data * layer.weight_scale_2.data)
        layer.put("input_scale_inv", 1 / layer.input_scale.data)


class Handle(Quantised):
    """oneDNN: the weight goes into an opaque handle, and an empty tensor stays behind."""

    shapes: ClassVar = {"weight": (N, K), "bias": (N,), "norm": (K,)}

    @staticmethod
    def process(layer: Any) -> None:
        layer.handle = SimpleNamespace(packed=layer.weight.data.t().contiguous())
        layer.put("weight", torch.empty(0, dtype=torch.bfloat16))
