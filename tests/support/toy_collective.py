"""Post-load processing that communicates: the ranks of `Serving` meet in an operator of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from engine_ext.conformance.thread_group import Group
from tests.support.toy_quantised import Int8, Layer, Method, Model, linear_shapes, parameter

_groups: list[Group] = []


_library = torch.library.Library("toy", "DEF")
_library.define("all_reduce_max_(Tensor(a!) value, int rank) -> ()")


def _all_reduce_max(value: torch.Tensor, rank: int) -> None:
    if _groups:
        found: list[torch.Tensor] = _groups[-1].all_gather(rank, value.clone())
        value.copy_(torch.stack(found).amax(0))


for _backend in ("CPU", "CUDA"):
    _library.impl("all_reduce_max_", _all_reduce_max, _backend)


def all_reduce_max_(value: torch.Tensor, rank: int) -> None:
    """Make it the largest of all ranks, which wait for each other; of one alone by default."""
    torch.ops.toy.all_reduce_max_(value, rank)


@contextmanager
def all_ranks(size: int) -> Iterator[None]:
    """Let all ranks take part from now on; before that, they are started one by one."""
    _groups.append(Group(size))
    try:
        yield
    finally:
        _groups.pop()


class Together(Int8):
    """Quantises with the largest weight of all ranks."""

    first: ClassVar[Callable[[Any], None] | None] = None
    """The steps before the ranks meet."""

    def process_weights_after_loading(self, layer: Any) -> None:
        first = type(self).first
        if first is not None:
            first(layer)
        weight = layer.weight.float().nan_to_num()
        top = weight.abs().amax().reshape(1)
        all_reduce_max_(top, layer.rank)
        super().process_weights_after_loading(layer)
        layer.top = top


class OneScale(Method):
    """Divides by the largest weight of all ranks."""

    def process_weights_after_loading(self, layer: Any) -> None:
        top = layer.weight.float().abs().amax().reshape(1)
        all_reduce_max_(top, layer.rank)
        layer.weight = parameter((layer.weight.float() / top).bfloat16())
        layer.weight_scale = parameter(top)

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ (layer.weight.float() * layer.weight_scale).t()


class Meeting(Model):
    """Two layers that communicate, whole on every rank."""

    shapes: ClassVar = linear_shapes("one", "two")

    def build(self, rank: int, ranks: int) -> None:
        self.one, self.two = (Layer(Together(), rank=rank) for _ in range(2))
