"""A model with latent attention, which derives tensors from a projection, on two served ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.conformance.toy_models import UNTOUCHED, Checkpoint, ToyModel, Weights, parameter
from engine_ext.conformance.toy_models.base import OpenModule
from engine_ext.model.constants import Constants, Known, is_constant
from engine_ext.settings import Settings
from engine_ext.startup import LoadedModel
from engine_ext.startup.derived.recompute import Recomputation
from engine_ext.sync import make_receiver
from tests.support.rank_engine import Engine, part_id
from tests.support.served_models import (
    base_checkpoint,
    delta_between,
    dense_delta,
    load,
    memory,
    one_part,
    random_tensor,
    target_checkpoint,
)

KV = ("layers.0.kv_b_proj", "layers.1.kv_b_proj")


class Projection(OpenModule):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = parameter(*shape)


class Attention(OpenModule):
    """Latent attention: two halves of a projection are kept next to it, turned and padded."""

    W_UV: torch.Tensor
    W_UK_T: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = Projection(3, 6)
        self.kv_b_proj = Projection(8, 6)
        self.one = torch.tensor(1.0)
        self.kv_cache = torch.tensor([])
        self.calls = 0
        self.fails: Callable[[], object] = lambda: None

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        upper, lower = self.kv_b_proj.weight.data.split(4)
        padded = torch.zeros(6, 6, dtype=upper.dtype)
        padded[:, :4] = upper.t()
        return padded, (lower.float() * 2).to(upper.dtype)

    def process(self) -> None:
        """Hangs up new tensors, another `one` too."""
        self.calls += 1
        self.W_UK_T, self.W_UV = self.halves()
        self.fails()
        self.one = torch.tensor(1.0)


class InPlace(Attention):
    """Makes parameters first, and writes into them from then on."""

    def process(self) -> None:
        self.calls += 1
        for name, made in zip(("W_UK_T", "W_UV"), self.halves(), strict=True):
            if hasattr(self, name):
                getattr(self, name).copy_(made)
                self.fails()
            else:
                setattr(self, name, nn.Parameter(made, requires_grad=False))


class SwapsMemory(Attention):
    """Gives its parameters other memory."""

    def process(self) -> None:
        self.calls += 1
        for name, made in zip(("W_UK_T", "W_UV"), self.halves(), strict=True):
            if hasattr(self, name):
                getattr(self, name).data = made
                self.fails()
            else:
                setattr(self, name, nn.Parameter(made, requires_grad=False))


class Across(Attention):
    """All that it keeps hangs on one projection, and is made of both."""

    W_UK_T = W_UV = property(lambda self: self.kv_b_proj.mixed)

    def process(self) -> None:
        self.kv_b_proj.mixed = self.kv_b_proj.weight.data[:3] + self.q_proj.weight.data


class Views(Attention):
    """As vLLM where nothing is dequantised: parameters that are views of the weight."""

    def process(self) -> None:
        upper, lower = self.kv_b_proj.weight.data.split(4)
        self.W_UK_T = nn.Parameter(upper.t(), requires_grad=False)
        self.W_UV = nn.Parameter(lower, requires_grad=False)


class Latent(ToyModel):
    """Two layers and a norm outside them; rank 0 of 2 holds the upper half of every head."""

    shapes: ClassVar = {
        **{
            f"layers.{n}.{part}": shape
            for n in range(2)
            for part, shape in (("q_proj", (3, 6)), ("kv_b_proj", (16, 6)))
        },
        "norm": (6,),
    }
    attention: ClassVar[type[Attention]] = Attention
    rank: ClassVar = 0

    def build(self) -> None:
        self.layers = nn.ModuleList([self.attention(), self.attention()])
        self.norm = parameter(6)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "norm":
            self.norm.copy_(weight)
            return
        if name.endswith("kv_b_proj"):
            weight = weight.narrow(0, 8 * self.rank, 8)
        self.get_parameter(f"{name}.weight").data.copy_(weight)

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.load_one(name, weight)

    def after_loading(self) -> None:
        for layer in self.attentions:
            layer.process()

    @property
    def attentions(self) -> Sequence[Any]:
        return list(self.layers)


class LatentLast(Latent):
    rank: ClassVar = 1


def kinds(attention: type[Attention]) -> tuple[type[Latent], type[Latent]]:
    """The model of both ranks with another attention."""
    first = type("First", (Latent,), {"attention": attention, "shapes": Latent.shapes})
    last = type("Last", (LatentLast,), {"attention": attention, "shapes": Latent.shapes})
    return first, last


Functions = Callable[[Latent], Sequence[Recomputation]]


def each(model: Latent) -> list[Recomputation]:
    return [
        Recomputation((f"layers.{number}",), layer.process)
        for number, layer in enumerate(model.attentions)
    ]


def together(model: Latent) -> list[Recomputation]:
    return [Recomputation(("layers.0", "layers.1"), model.after_loading)]


def known_of(kind: type[Latent]) -> Known:
    """What the adapters know of a model's constants."""
    constants = Constants(kind())
    return lambda path, tensor: (
        path == UNTOUCHED or is_constant(path, tensor) or constants(path, tensor)
    )


class Service:
    """Two ranks, served."""

    def __init__(
        self,
        folder: Path,
        *,
        attention: type[Attention] = Attention,
        functions: Functions = each,
        dummy: bool = False,
        **settings: Any,
    ) -> None:
        self.kinds = kinds(attention)
        self.base = base_checkpoint(Latent)
        self.models: list[Any] = [self.start(kind, dummy) for kind in self.kinds]
        self.before = self.memory()
        group = Group(2)
        loaded = [
            LoadedModel(
                model=model,
                load_weights=model.load_weights,
                checkpoint=None if dummy else self.base.items,
                reload=partial(self.reload, model),
                ranks=ThreadRanks(group, rank),
                constants=known_of(self.kinds[rank]),
                recomputations=functions(model),
                captures=False,
            )
            for rank, model in enumerate(self.models)
        ]
        self.engine = Engine([], folder)
        with ThreadPoolExecutor(2) as threads:
            self.engine.receivers = list(
                threads.map(lambda one: make_receiver(one, Settings(**settings)), loaded)
            )
        self.tensors = [self.objects(model) for model in self.models]

    def start(self, kind: type[Latent], dummy: bool) -> ToyModel:
        """A model that has loaded the base checkpoint, or one on dummy weights."""
        if not dummy:
            return load(kind, self.base)
        random = {name: random_tensor(t.shape, t.dtype, 99) for name, t in self.base.items()}
        return load(kind, random)

    @torch.no_grad()
    def reload(self, model: Latent, weights: Weights) -> None:
        """Reload as the engine does: it makes its derived tensors itself."""
        model.load_weights(weights)
        model.after_loading()

    def memory(self) -> list[dict[str, bytes]]:
        return [memory(model) for model in self.models]

    def objects(self, model: Latent) -> list[tuple[int, int]]:
        return [
            (id(t), t.data_ptr())
            for layer in model.attentions
            for t in (layer.W_UK_T, layer.W_UV, layer.one, layer.kv_b_proj.weight)
        ]

    def sync(
        self, names: Sequence[str], *, version: int = 1, full: bool = False, dense: bool = False
    ) -> list[dict[str, Any]]:
        """Change some tensors; every rank's answer to the commit, or to the staging."""
        self.target = target_checkpoint(self.base, names, seed=version)
        deltas = [
            dense_delta(n, self.target[n])
            if full or dense
            else delta_between(n, self.base[n], self.target[n])
            for n in names
        ]
        more: dict[str, Any] = {"full": True, "base_version": None} if full else {}
        body = one_part(deltas, **{"current_version": version, **more})
        part = part_id(body)
        answers = self.engine.stage(part, body)
        if any("error" in answer for answer in answers):
            self.engine.call("abort")
            return answers
        return self.engine.commit(part)

    def assert_holds(self, checkpoint: Checkpoint) -> None:
        """All memory is a fresh model's, derived tensors too, in the objects and places of old."""
        assert self.memory() == [memory(load(kind, checkpoint)) for kind in self.kinds]
        assert [self.objects(model) for model in self.models] == self.tensors

    def calls(self) -> list[list[int]]:
        return [[layer.calls for layer in model.attentions] for model in self.models]

    def refusals(self) -> dict[str, str]:
        return {n: r for s in self.engine.status() for n, r in s["uncertified"].items()}


def fail_with(error: Exception, *_: object) -> None:
    """Stands for a function that fails."""
    raise error
