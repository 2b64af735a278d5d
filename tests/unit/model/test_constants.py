from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.model.constants import Constants, ConstantsWatch, is_constant, is_default


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


@pytest.mark.parametrize("name", ["PiT", "Pi", "Pi_half", "centroids", "midpoints"])
def test_tables_of_turboquant_are_constants(name: str) -> None:
    table = torch.ones(2, 2)
    assert is_constant(f"layers.0.attn._tq_{name}", table)
    assert not is_constant(f"layers.0.attn._tq_{name}_of_weights", table)


@pytest.mark.parametrize("name", ["_uq_kfull_buf", "_uq_vfull_buf"])
def test_unpacked_kv_is_a_cache(name: str) -> None:
    assert is_constant(f"layers.0.attn.{name}", torch.ones(2, 2))
    assert not is_constant(f"layers.0.attn.{name}_2", torch.ones(2, 2))


def test_constants_are_unknown_for_another_model_factory() -> None:
    with ConstantsWatch(engine(), "make") as constants:
        model = Model()
    assert not constants.known("table", model.table * 3)


class Biased(nn.Module):
    """A bias that the checkpoint has, with other tensors of its shape and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("wide", torch.zeros(4, dtype=torch.float64))
        self.kept = {"wide": torch.ones(4)}
        self.register_buffer("other", torch.zeros(5))
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.register_buffer("ramp", torch.arange(4.0))


@torch.no_grad()
def test_equal_bits_written_later_are_no_history() -> None:
    """A bias of zeros, and a weight of ones, might have been copied to these."""
    model: Any = Biased()
    constants = Constants(model)
    tensors = {"wide": model.wide, "kept['wide']": model.kept["wide"]}
    for path, tensor in tensors.items():
        assert constants(path, tensor)
        tensor.copy_(tensor.clone())
        assert not constants(path, tensor)


@torch.no_grad()
def test_what_copies_no_weight_may_be_written_again() -> None:
    """Engines fill the scales of their KV cache with ones, after the constructor has."""
    model: Any = Biased()
    constants = Constants(model)
    names = ["_k_scale", "other", "ramp", "norm.bias", "scale"]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in names:
            tensor.copy_(tensor.clone())
            assert constants(name, tensor)


@torch.no_grad()
def test_copy_of_a_bias_in_place_of_a_constant_is_none() -> None:
    model: Any = Biased()
    constants = Constants(model)
    assert constants("wide", model.wide)
    model.wide = model.norm.bias.clone()
    assert not constants("wide", model.wide)


def test_history_of_inference_tensors_is_their_bits() -> None:
    with torch.inference_mode():
        model: Any = Biased()
        constants = Constants(model)
        model.wide.copy_(model.norm.bias)
        assert constants("wide", model.wide)


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
