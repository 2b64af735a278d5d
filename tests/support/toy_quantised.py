"""Small models that an engine quantises or packs after loading.

Each `Method` is one habit of post-load processing; `tests.support.quantised_engine` serves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from engine_ext.conformance.toy_models import Checkpoint, Weights
from engine_ext.conformance.toy_models.base import DEVICE, OpenModule
from tests.support.served_models import random_tensor

IN, OUT = 6, 8


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.to(DEVICE), requires_grad=False)


def empty(*shape: int) -> nn.Parameter:
    return parameter(torch.full(shape, 7.0, dtype=torch.bfloat16))


class Method:
    """A quant method that leaves the layer as it is."""

    def create_weights(self, layer: Any) -> None:
        """Attach what the layer loads besides its weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make what is served of what was loaded."""

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.float().t()


class Int8(Method):
    """Quantises by row; the new parameters have no loader."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.float()
        scale = weight.nan_to_num().abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        layer.weight = parameter((weight / scale).nan_to_num().round().clamp(-127, 127).char())
        layer.weight_scale = parameter(scale)

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ (layer.weight.float() * layer.weight_scale).t()


class Table(Int8):
    """Reads a plain tensor that no checkpoint holds."""

    keeps = True

    def create_weights(self, layer: Any) -> None:
        layer.table = torch.full((OUT, 1), 2.0, dtype=torch.bfloat16, device=DEVICE)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = parameter(layer.weight * layer.table)
        if not self.keeps:
            del layer.table
        super().process_weights_after_loading(layer)


class TableAway(Table):
    keeps = False


class Transpose(Method):
    """Moves only, but the new parameter has no loader."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = parameter(layer.weight.t().contiguous())

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.float()


class Handle:
    """An opaque kernel handle: a plain object with a function that has captured the weight."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.run = lambda x: x @ packed.t()


class Packed(Method):
    """Packs the weight into a handle and removes it."""

    keeps_empty = True

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.handle = Handle(layer.weight.float())
        layer.weight = parameter(torch.empty(0)) if self.keeps_empty else None

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.handle.run(x)
        return found


class PackedAway(Packed):
    keeps_empty = False


class ZeroPoints(Method):
    """Symmetric: the zero points are loaded and dropped."""

    def create_weights(self, layer: Any) -> None:
        layer.zeros = empty(OUT)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = parameter(layer.weight.float() * 2)
        del layer.zeros


class SecondCopy(Method):
    """Leaves the parameter, and keeps its transpose in a list."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.copies = [layer.weight.t().contiguous()]

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.copies[0].float()


class Attribute(Method):
    """Replaces the parameter by a plain attribute."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.fast = layer.weight.float() * 3
        layer.weight = parameter(torch.empty(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.fast.t()
        return found


def copy_shard(live: nn.Parameter, weight: torch.Tensor, rank: int) -> None:
    """Copy the rows of a checkpoint tensor that the rank holds."""
    rows = live.shape[0]
    start = 0 if rows == weight.shape[0] else rank * rows
    live.data.copy_(weight.narrow(0, start, rows))


class Layer(OpenModule):
    """A linear layer whose rows are divided between the ranks."""

    def __init__(self, method: Method, *, bias: bool = True, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.weight = empty(OUT // ranks, IN)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        if bias:
            self.bias = empty(OUT // ranks)
        self.quant_method = method
        method.create_weights(self)

    def load(self, live: nn.Parameter, weight: torch.Tensor) -> None:
        copy_shard(live, weight, self.rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, "bias", None)
        out = self.quant_method.apply(self, x)
        return out if bias is None else out + bias.float()


class Mixer(OpenModule):
    """Stores -exp of what it loads, and puts another parameter in place of one."""

    def __init__(self) -> None:
        super().__init__()
        self.A = parameter(torch.zeros(OUT))
        self.A.weight_loader = self.load_a  # type: ignore[attr-defined]
        self.D = empty(OUT)

    @staticmethod
    def load_a(live: nn.Parameter, weight: torch.Tensor) -> None:
        live.data.copy_(-torch.exp(weight.float()))


class Model(OpenModule):
    """A norm, and what a subclass builds."""

    renamed: ClassVar[Mapping[str, str]] = {}
    replaced: ClassVar[tuple[str, ...]] = ()
    constants: ClassVar[tuple[str, ...]] = ()  # parameters that dummy weights leave alone
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.norm = empty(IN)
        self.build(rank, ranks)

    def build(self, rank: int, ranks: int) -> None:
        """Attach the layers."""

    def after_processing(self) -> None:
        """The engine's steps after its post-load processing."""

    def load_weights(self, weights: Weights) -> None:
        live = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        for name, weight in weights:
            path = self.renamed.get(name, name)
            target = live[path]
            loader = getattr(target, "weight_loader", None)
            if path in self.replaced:
                module, _, attribute = path.rpartition(".")
                setattr(self.get_submodule(module), attribute, parameter(weight))
            elif loader is not None:
                loader(target, weight)
            else:
                copy_shard(target, weight, self.rank)  # type: ignore[arg-type]

    @classmethod
    def checkpoint(cls, seed: int = 0) -> Checkpoint:
        names = {"norm": (IN,), **cls.shapes}
        return {
            name: random_tensor(shape, torch.bfloat16, seed + number)
            for number, (name, shape) in enumerate(names.items())
        }


def linear_shapes(*names: str, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """The checkpoint's shapes of some layers."""
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        found[f"{name}.weight"] = (OUT, IN)
        if bias:
            found[f"{name}.bias"] = (OUT,)
    return found


def one_layer(method: Callable[[], Method]) -> type[Model]:
    """A model of one layer that is processed so."""

    class OneLayer(Model):
        shapes: ClassVar = linear_shapes("lin") | (
            {"lin.zeros": (OUT,)} if method is ZeroPoints else {}
        )

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Layer(method(), rank=rank, ranks=1 if method is ZeroPoints else ranks)

    return OneLayer


class Everything(Model):
    """One layer of each habit, and a mixer."""

    shapes: ClassVar = {
        **linear_shapes("int8", "transpose", "packed", "away", "second", "attribute", "plain"),
        **linear_shapes("zeros"),
        "zeros.zeros": (OUT,),
        "mixer.A_log": (OUT,),
        "mixer.D": (OUT,),
    }
    renamed: ClassVar = {"mixer.A_log": "mixer.A"}
    replaced: ClassVar = ("mixer.D",)

    def build(self, rank: int, ranks: int) -> None:
        self.int8 = Layer(Int8(), rank=rank, ranks=ranks)
        self.transpose = Layer(Transpose(), rank=rank, ranks=ranks)
        self.packed = Layer(Packed(), rank=rank, ranks=ranks)
        self.away = Layer(PackedAway(), rank=rank, ranks=ranks)
        self.second = Layer(SecondCopy(), rank=rank, ranks=ranks)
        self.attribute = Layer(Attribute(), rank=rank, ranks=ranks)
        self.plain = Layer(Method(), rank=rank, ranks=ranks)
        self.zeros = Layer(ZeroPoints())
        self.mixer = Mixer()
