from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from engine_ext.model.constants import ConstantsWatch, is_default


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(4.0)


def engine() -> ModuleType:
    module = ModuleType("engine")
    module.make = Model  # type: ignore[attr-defined]
    return module


def fails() -> Model:
    raise RuntimeError("no memory")


def test_what_was_there_before_the_weights_is_known() -> None:
    module = engine()
    with ConstantsWatch(module, "make") as constants:
        model = module.make()
    assert constants.known("table", model.table)
    assert not constants.known("product", torch.arange(4.0) * 2)


def test_only_the_first_model_counts() -> None:
    module = engine()
    with ConstantsWatch(module, "make") as constants:
        first, draft = module.make(), module.make()
    draft.table.add_(1)
    assert constants.known("table", first.table)
    assert not constants.known("table", draft.table)


def test_the_function_is_put_back_when_loading_fails() -> None:
    module = engine()
    with ConstantsWatch(module, "make"):
        assert module.make is not Model
    assert module.make is Model
    module.make = fails  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no memory"), ConstantsWatch(module, "make"):
        module.make()
    assert module.make is fails


def test_constants_are_unknown_for_another_model_factory() -> None:
    with ConstantsWatch(engine(), "make") as constants:
        model = Model()
    assert not constants.known("table", model.table * 3)


@pytest.mark.parametrize(
    ("tensor", "default"),
    [
        (torch.full((3,), -1.0), True),
        (torch.tensor(-1.0), True),
        (torch.tensor(0.0), True),
        (torch.zeros(3), False),  # might be memory that nothing was written to
        (torch.tensor([1.0, 2.0]), False),
        (torch.full((3,), float("nan")), False),
        (torch.ones(0), False),
        (torch.ones(3, device="meta"), False),
        (torch.ones(1 << 17), False),  # a weight
    ],
)
def test_what_a_constructor_has_filled_with_one_number(tensor: torch.Tensor, default: bool) -> None:
    assert is_default(tensor) is default
