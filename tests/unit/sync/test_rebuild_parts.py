"""A layer that is processed as a whole, with a part that is elsewhere in the model, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of
from tests.support.served_models import changed
from tests.support.toy_quantised import IN, OUT, Layer, Method, Model, empty, parameter

pytestmark = pytest.mark.slow


class PackPart(Method):
    """Packs the weight of the part, and leaves it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = parameter(layer.part.weight.detach().float().t().contiguous() * 2)


class PackAndClone(PackPart):
    """Puts a copy in the place of the part's weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.part.weight = parameter(layer.part.weight.detach().clone())


class PackAndDrop(PackPart):
    """Drops the part's weight, as vLLM's MLA does for CPUs with AMX."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.part.weight = parameter(torch.empty(0))


class Outer(nn.Module):
    def __init__(self, part: nn.Module, method: Method) -> None:
        super().__init__()
        self.part, self.own = part, empty(IN)
        self.quant_method = method


def sharing(method: type[Method], outers: tuple[str, ...], *, part_first: bool) -> type[Model]:
    """A model whose outer layers share one part, which is also a module of the model."""

    class Sharing(Model):
        shapes: ClassVar = {"part.weight": (OUT, IN), **{f"{name}.own": (IN,) for name in outers}}

        def build(self, rank: int, ranks: int) -> None:
            part: Any = Layer(Method(), bias=False)
            part.quant_method = None
            layers = {name: Outer(part, method()) for name in outers}
            for name, layer in ({"part": part} | layers if part_first else layers).items():
                setattr(self, name, layer)
            self.part = part

    return Sharing


@pytest.mark.parametrize("part_first", [True, False])
@pytest.mark.parametrize(
    ("method", "outers", "refused"),
    [
        (PackPart, ("a",), ()),
        (PackPart, ("a", "b"), ()),
        (PackAndClone, ("a",), ()),
        # Each has unprocessed weights of the part, and a sync would write to one of them.
        (PackAndClone, ("a", "b"), ("part.weight",)),
        (PackAndDrop, ("a",), ()),
    ],
)
def test_the_part_is_exact_or_refused(
    method: type[Method],
    outers: tuple[str, ...],
    refused: tuple[str, ...],
    part_first: bool,
    tmp_path: Path,
) -> None:
    serving = Serving(sharing(method, outers, part_first=part_first), tmp_path)
    assert serving.reasons().keys() == set(refused)
    names = [name for name in serving.current if name not in refused]
    for seed, chosen in enumerate([*([name] for name in names), names]):
        before = serving.current
        target = {name: changed(before[name], seed) for name in chosen}
        errors_of(serving.sync(target), none=True)
        serving.assert_fresh()
        errors_of(serving.rollback(before), none=True)
        serving.assert_fresh()
        errors_of(serving.sync(target), none=True)
    for name in refused:
        errors_of(serving.sync({name: changed(serving.current[name], 99)}))
        serving.assert_fresh()
