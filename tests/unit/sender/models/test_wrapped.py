"""Models inside of other modules, and tensors that are none of torch's own classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from delta_sender import DeltaSender, checkpoint_names, named_tensors
from tests.support.fake_engine import Engine
from tests.support.trainer_models import assert_same, change, make_model, saved


class Wrapped(torch.Tensor):
    """A tensor around another, as torchao has for weights that FSDP gathers in 8 bits."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self._inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Wrapped:
        return Wrapped(inner["_inner"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func == torch.ops.aten.detach.default:
            return cls(args[0]._inner)
        args, kwargs = pytree.tree_map_only(Wrapped, lambda t: t._inner, (args, kwargs or {}))
        return func(*args, **kwargs)


class Closed(Wrapped):
    """One that gives its values to nobody, as quantised ones do."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func == torch.ops.aten.detach.default:
            return cls(args[0]._inner)
        raise NotImplementedError(f"{func} is not implemented")


def wrap(model: nn.Module, kind: type[Wrapped]) -> Iterator[nn.Module]:
    """Wrap the query projections' weights; yield their modules."""
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.weight = nn.Parameter(kind(module.get_parameter("weight").detach()))
            yield module


@pytest.mark.parametrize("kind", ["tied", "qwen3_moe"])
def test_tensors_around_others_are_read(kind: str) -> None:
    model = make_model(kind)
    base = saved(model)
    change(model)
    wanted = saved(model)
    assert len(list(wrap(model, Wrapped))) == 2
    assert_same(named_tensors(model), wanted)
    assert_same(named_tensors(model, base), wanted)
    assert_same(checkpoint_names(model.named_parameters(), model, base), wanted)
    engine = Engine.of(base)
    with DeltaSender("http://e", base, client=engine.client()) as sender:
        sender.sync(named_tensors(model, base))
    assert engine.holds(wanted)


def test_ties_of_tensors_around_others_are_found() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    inner = module.get_parameter("0.weight").detach()
    module[0].weight, module[1].weight = (nn.Parameter(Wrapped(inner)) for _ in range(2))
    names = [name for name, _ in named_tensors(module)]
    assert names == ["0.weight", "0.bias", "1.bias", "2.weight", "2.bias"]


def test_tensors_that_give_no_values_are_named() -> None:
    model = make_model("dense")
    base = saved(model)
    list(wrap(model, Closed))
    said = r"layers.0.self_attn.q_proj.weight: a Closed does not give its values .*`dequantize`"
    with pytest.raises(ValueError, match=said):
        list(named_tensors(model, base))
    with pytest.raises(ValueError, match=said):
        list(checkpoint_names(model.named_parameters(), model, base))


class WithValueHead(nn.Module):
    """A model with a value head, as PPO trainers wrap it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = model, nn.Linear(4, 1)


def test_a_value_head_is_looked_through() -> None:
    model = make_model("tied")
    base = saved(model)
    change(model)
    wanted, wrapped = saved(model), WithValueHead(model)
    assert_same(named_tensors(wrapped, base), wanted)
    assert_same(named_tensors(nn.DataParallel(wrapped)), wanted)
    assert_same(checkpoint_names(wrapped.named_parameters(), wrapped, base), wanted)
    assert_same(checkpoint_names(wrapped.named_parameters(), model, base), wanted)
    wrapped.more = nn.Linear(4, 1)
    with pytest.raises(ValueError, match="in the model, but not in the base"):
        named_tensors(wrapped, base)


def test_a_resized_vocabulary_is_refused_with_the_way_out() -> None:
    model = make_model("dense")
    base = saved(model)
    model.resize_token_embeddings(72, mean_resizing=False)
    said = r"\[72, 32\] in the model, but \[64, 32\] in the base; the vocabulary was resized: start"
    with pytest.raises(ValueError, match=said):
        named_tensors(model, base)


@pytest.mark.parametrize("given", [{}, [], 3, "model"])
def test_what_is_no_model_is_a_type_error(given: Any) -> None:
    kind = type(given).__name__
    with pytest.raises(TypeError, match=rf"a torch.nn.Module is needed, and not a {kind}"):
        named_tensors(given)
