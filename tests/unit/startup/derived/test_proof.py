"""The proof that an engine's function recomputes derived tensors, and functions that fail it."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine_ext.conformance.toy_models import parameter
from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.model.state_guard import TracingError
from engine_ext.startup.derived.proof import _MANTISSA, varied
from engine_ext.startup.derived.recompute import Recomputation
from engine_ext.startup.recomputed.rebuild import Perturbation
from tests.support.rank_engine import errors_of
from tests.support.served_models import PROPERTY, random_tensor
from tests.unit.startup.derived.latent_attention import (
    KV,
    Attention,
    Latent,
    Service,
    each,
    fail_with,
)

pytestmark = pytest.mark.slow

# --- functions that are not believed ---

# What they know of their layers, out of sight.
HIDDEN: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class Lies(Attention):
    """Another result than the engine has."""

    def process(self) -> None:
        super().process()
        self.W_UV = self.W_UV + self.calls


class Caches(Attention):
    """Looks at a copy that it made at the first call."""

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        upper, lower = HIDDEN.setdefault(self, super().halves())
        return upper.clone(), lower.clone()


class CachesARow(Attention):
    """Only the last row of one of them is old."""

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        upper, lower = super().halves()
        lower[3] = HIDDEN.setdefault(self, lower[3].clone())
        return upper, lower


class DoesNothing(Attention):
    """As one that is done once."""

    def process(self) -> None:
        if not self.calls:
            super().process()


class Remembers(Attention):
    """The outcome depends on how often the weights have changed."""

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        upper, lower = super().halves()
        before, changes = HIDDEN.get(self, (lower, 0))
        changes += int(not torch.equal(before, lower))
        HIDDEN[self] = (lower, changes)
        return upper, lower + changes


class PacksWeights(Attention):
    """Changes the weight itself from the second call on."""

    def process(self) -> None:
        super().process()
        if self.calls > 1:
            self.kv_b_proj.weight.copy_(self.kv_b_proj.weight.flip(0))


class PacksOthers(Attention):
    """Changes another tensor, and only with the weight."""

    def process(self) -> None:
        others = self.calls and bool((self.halves()[1] != self.W_UV).any())
        super().process()
        if others:
            self.one = self.one * 3


class Raises(Attention):
    def process(self) -> None:
        if self.calls:
            self.W_UV = self.W_UV * 0
            self.W_UK_T.mul_(2)
            raise ValueError("only once")
        super().process()


class RaisesForOthers(Attention):
    def process(self) -> None:
        if self.calls and (self.halves()[1] != self.W_UV).any():
            raise ValueError("not these")
        super().process()


class ChangesLayout(Attention):
    def process(self) -> None:
        super().process()
        if self.calls > 1:
            self.W_UV = self.W_UV.t().contiguous().t()


class MakesMore(Attention):
    def process(self) -> None:
        super().process()
        if self.calls > 1:
            self.more = self.W_UV * 2


class InAList(Attention):
    def process(self) -> None:
        super().process()
        self.kept = [self.W_UV * 2]


class AroundTheWeight(Attention):
    """It keeps the memory that the weight is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.full((9, 6), 7.0, dtype=torch.bfloat16)
        self.kv_b_proj.weight = nn.Parameter(self.whole[:8], requires_grad=False)


class MakesZeros(Attention):
    """Zeros do not show which weights they are computed from."""

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        padded, lower = super().halves()
        return torch.zeros_like(padded), lower


LIARS: dict[type[Attention], str] = {
    MakesZeros: "layers.0.W_UK_T is zero",
    Lies: "changes layers.0.W_UV on the weights as they are",
    Caches: "leaves parts of layers.0.W_UK_T, layers.0.W_UV unchanged",
    CachesARow: "leaves parts of layers.0.W_UV unchanged",
    DoesNothing: "leaves parts of",
    PacksWeights: "changes layers.0.kv_b_proj.weight on the weights as they are",
    PacksOthers: "changes layers.0.one with the weights",
    Remembers: "on the old weights after others",
    Raises: "ValueError: only once",
    RaisesForOthers: "ValueError: not these",
    ChangesLayout: "another layout",
    MakesMore: "adds or removes layers.0.more",
    AroundTheWeight: "layers.0.whole shares memory with a weight",
    InAList: "not a plain attribute",
}


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_what_is_not_proven_stays_refused(tmp_path: Path, liar: type[Attention]) -> None:
    service = Service(tmp_path, attention=liar)
    assert service.memory() == service.before
    refusals = service.refusals()
    assert refusals.keys() >= set(KV)
    assert "norm" not in refusals
    assert LIARS[liar] in refusals[KV[0]]
    for names in (list(KV), ["norm", KV[1]]):
        errors = errors_of(service.sync(names))
        assert {e["type"] for e in errors} == {"NotUpdatable"}
        assert service.memory() == service.before
    errors_of(service.sync(["norm"]), none=True)


def test_one_layer_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def functions(model: Latent) -> list[Recomputation]:
        first, second = each(model)
        return [Recomputation(first.modules, lambda: None), second]

    service = Service(tmp_path, functions=functions)
    assert service.refusals().keys() == {"layers.0.q_proj", KV[0]}
    errors_of(service.sync([KV[1]]), none=True)
    service.assert_holds(service.target)


def test_without_a_function_they_are_refused(tmp_path: Path) -> None:
    service = Service(tmp_path, functions=lambda model: [])
    assert "layers.1.W_UV" in service.refusals()[KV[1]]


def test_functions_without_derived_tensors_are_not_run(tmp_path: Path) -> None:
    def functions(model: Latent) -> list[Recomputation]:
        return [*each(model), Recomputation(("layers.0.q_proj",), partial(fail_with, OSError()))]

    assert Service(tmp_path, functions=functions).refusals() == {}


def test_integer_weights_cannot_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Integers(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj.weight = parameter(3, 6, dtype=torch.int32)

    dtypes = dict.fromkeys(("layers.0.q_proj", "layers.1.q_proj"), torch.int32)
    monkeypatch.setattr(Latent, "dtypes", dtypes)
    refusals = Service(tmp_path, attention=Integers).refusals()
    assert "layers.0.q_proj.weight is torch.int32" in refusals[KV[0]]
    assert "norm" not in refusals


def test_function_that_writes_elsewhere_stops_start(tmp_path: Path) -> None:
    def functions(model: Latent) -> list[Recomputation]:
        model.attentions[0].fails = lambda: model.norm.add_(1)
        return each(model)

    with pytest.raises(TracingError, match="functions for recomputed tensors"):
        Service(tmp_path, functions=functions)


# --- the values that the proof gives to the weights ---


@pytest.mark.parametrize("dtype", _MANTISSA, ids=str)
@PROPERTY
@given(seed=st.integers(0, 1 << 20))
def test_other_values_differ_everywhere_and_are_numbers(dtype: torch.dtype, seed: int) -> None:
    info = torch.finfo(dtype)
    odd = torch.tensor([info.max, info.min, 0.0, float("nan"), float("inf")]).to(dtype)
    saved = random_tensor((200,), dtype, seed)
    values = torch.cat([saved.view(torch.uint8), odd.view(torch.uint8)]).view(dtype)
    old = values.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    )
    new = varied(old, dtype, torch.Generator().manual_seed(seed))
    assert bool((new != old).all())
    assert new.view(dtype).double().isfinite().all()


@pytest.mark.parametrize("proof", ["of functions", "of rebuilds"])
def test_other_values_are_drawn_where_the_weights_are(
    proof: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host takes minutes for what a device draws in a second."""
    drawn: list[object] = []
    generator = torch.Generator

    class Recorded(torch.Generator):  # a class: PyTorch has annotations of it
        def __new__(cls, device: object = "cpu") -> torch.Generator:  # type: ignore[misc]
            frame = inspect.currentframe()
            assert frame is not None
            assert frame.f_back is not None
            if not frame.f_back.f_globals["__name__"].startswith("engine_ext."):
                return generator()
            drawn.append(device)
            return generator(DEVICE)

    monkeypatch.setattr(torch, "Generator", Recorded)
    if proof == "of functions":
        assert Service(tmp_path).refusals() == {}
    else:
        tensor = torch.ones(3, dtype=torch.bfloat16, device=DEVICE)
        for one in (tensor, tensor.to(torch.int32)):
            before = one.clone()
            Perturbation().within(one).put(Perturbation.new)
            assert bool((one != before).all())
    assert drawn
    assert set(drawn) == {torch.empty(0, device=DEVICE).device}
