"""Tensors that the loader computes from one checkpoint tensor are loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.conformance.toy_models import Checkpoint
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of
from tests.support.served_models import changed
from tests.support.toy_quantised import (
    OUT,
    Int8,
    Layer,
    Mixer,
    Model,
    empty,
    linear_shapes,
    parameter,
)


class Mamba(Model):
    """A mixer, and a layer that is quantised."""

    shapes: ClassVar = {**linear_shapes("lin"), "mixer.A_log": (OUT,), "mixer.D": (OUT,)}
    renamed: ClassVar = {"mixer.A_log": "mixer.A"}
    replaced: ClassVar = ("mixer.D",)

    def build(self, rank: int, ranks: int) -> None:
        self.lin = Layer(Int8(), rank=rank, ranks=ranks)
        self.mixer = Mixer()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["mixer.A_log", "mixer.D"])
def test_one_tensor_is_loaded_again(tmp_path: Path, name: str, ranks: int) -> None:
    serving = Serving(Mamba, tmp_path, ranks=ranks)
    assert serving.statuses()[name] == "rebuilt"
    before: Checkpoint = {}
    for seed in range(2):
        before = dict(serving.current)
        target = {name: changed(serving.current[name], seed)}
        errors_of(serving.sync(target), none=True)
        serving.assert_fresh()
    errors_of(serving.rollback(before), none=True)
    serving.assert_fresh()
    full = {n: changed(t, 9) for n, t in serving.current.items()}
    errors_of(serving.sync(full, full=True), none=True)
    serving.assert_fresh()


def test_the_kept_tensor_counts_against_the_limit(tmp_path: Path) -> None:
    size = 2 * (OUT * 6 + OUT)
    serving = Serving(Mamba, tmp_path, shadow_bytes=size)  # the bias stays in place, and frees some
    assert serving.states[0].nbytes == size
    chosen = [serving.statuses()[name] for name in ("mixer.A_log", "mixer.D")]
    assert sorted(chosen) == ["rebuilt", "uncertified"] or chosen == ["uncertified"] * 2


def test_another_layout_is_refused(tmp_path: Path) -> None:
    serving = Serving(Mamba, tmp_path)
    before, mixer = serving.served(), serving.models[0].get_submodule("mixer")
    assert isinstance(mixer, Mixer)

    def load(live: Any, weight: torch.Tensor) -> None:
        live.data = -weight.double().exp()

    mixer.A.weight_loader = load  # type: ignore[attr-defined]
    target = {"mixer.A_log": changed(serving.base["mixer.A_log"], 3)}
    assert "gives mixer.A another layout" in refusal(serving.sync(target))
    assert serving.served() == before


class TwoSources(Model):
    """Two tensors are loaded into one parameter, the second after the first."""

    shapes: ClassVar = {"one": (OUT,), "two": (OUT,), "child.plain": (OUT,)}
    renamed: ClassVar = {"one": "child.both", "two": "child.both"}

    def build(self, rank: int, ranks: int) -> None:
        self.child: Any = nn.Module()
        self.child.plain = empty(OUT)
        self.child.both = empty(OUT)
        self.child.both.weight_loader = self.load_both  # type: ignore[attr-defined]

    @staticmethod
    def load_both(live: Any, weight: torch.Tensor) -> None:
        live.data.copy_(weight.float().exp())


def test_two_sources_of_a_parameter_are_refused(tmp_path: Path) -> None:
    serving = Serving(TwoSources, tmp_path)
    assert serving.reasons().keys() == {"one", "two", "child.plain"}
    target = {"one": changed(serving.base["one"], 3)}
    before = serving.served()
    refusal(serving.sync(target))
    assert serving.served() == before


class Halves(Model):
    """The loader computes from every second element only."""

    shapes: ClassVar = {"wide": (2 * OUT,), "constant": (OUT,)}

    def build(self, rank: int, ranks: int) -> None:
        self.wide, self.constant = empty(OUT), empty(OUT)
        self.wide.weight_loader = self.load_wide  # type: ignore[attr-defined]
        self.constant.weight_loader = self.load_constant  # type: ignore[attr-defined]

    @staticmethod
    def load_wide(live: Any, weight: torch.Tensor) -> None:
        live.data.copy_(-weight[::2].float().exp())

    @staticmethod
    def load_constant(live: Any, weight: torch.Tensor) -> None:
        live.data.copy_(weight * 0 + 1)


def test_what_the_result_does_not_depend_on_is_refused(tmp_path: Path) -> None:
    serving = Serving(Halves, tmp_path)
    assert serving.statuses()["wide"] == "rebuilt"
    assert "another copy" in serving.reasons()["constant"]
    errors_of(serving.sync({"wide": changed(serving.base["wide"], 3)}), none=True)
    serving.assert_fresh()


class OfOldValues(Model):
    """The loader computes from what the parameter held before, too."""

    shapes: ClassVar = {"one": (OUT,), "two": (OUT,)}
    start: ClassVar = 0.0

    def build(self, rank: int, ranks: int) -> None:
        self.one, self.two = parameter(torch.full((OUT,), self.start)), empty(OUT)
        self.one.weight_loader = self.load  # type: ignore[attr-defined]

    @classmethod
    def load(cls, live: Any, weight: torch.Tensor) -> None:
        live.data.copy_(cls.compute(live.data, weight.float().to(live.device)))

    @staticmethod
    def compute(live: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Largest(OfOldValues):
    """Scales of several shards have their largest one in common."""

    start: ClassVar = float("-inf")

    @staticmethod
    def compute(live: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.maximum(live, weight)


class Positive(OfOldValues):
    @staticmethod
    def compute(live: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(weight > 0, weight, live)


class NotZero(OfOldValues):
    @staticmethod
    def compute(live: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(weight != 0, weight, live)


@pytest.mark.parametrize("model", [Largest, Positive, NotZero])
def test_what_depends_on_old_values_is_refused(tmp_path: Path, model: type[Model]) -> None:
    serving = Serving(model, tmp_path)
    assert serving.reasons().keys() == {"one"}
    assert "one depends on what it held before" in serving.reasons()["one"]


class Padded(Model):
    """The loader computes the first elements, and leaves the others alone."""

    shapes: ClassVar = {"short": (OUT,), "plain": (OUT,)}
    dtype: ClassVar = torch.float32

    def build(self, rank: int, ranks: int) -> None:
        self.plain = empty(OUT)
        self.short = parameter(torch.full((OUT + 2,), 7).to(self.dtype))
        self.short.weight_loader = self.load  # type: ignore[attr-defined]

    @staticmethod
    def load(live: Any, weight: torch.Tensor) -> None:
        live.data[:OUT].copy_(weight.float() * 3)


class PaddedNarrow(Padded):
    dtype: ClassVar = torch.float8_e4m3fn


class PaddedInteger(Padded):
    dtype: ClassVar = torch.int8


@pytest.mark.parametrize("model", [Padded, PaddedNarrow, PaddedInteger])
def test_a_loader_may_leave_padding_as_it_is(tmp_path: Path, model: type[Model]) -> None:
    serving = Serving(model, tmp_path)
    assert serving.statuses()["short"] == "rebuilt"
    errors_of(serving.sync({"short": changed(serving.base["short"], 3)}), none=True)
    serving.assert_fresh()


class UnderTwoNames(Model):
    """The loader computes into a parameter that has two names."""

    shapes: ClassVar = {"norm_a": (OUT,), "child.plain": (OUT,)}
    renamed: ClassVar = {"norm_a": "child.norm.weight"}

    def build(self, rank: int, ranks: int) -> None:
        self.child: Any = nn.Module()
        self.child.plain = empty(OUT)
        self.child.norm = nn.Module()
        self.child.norm.weight = empty(OUT)
        self.child.norm.weight.weight_loader = self.load_scaled  # type: ignore[attr-defined]
        self.wrapper = self.other()

    def other(self) -> nn.Module:
        raise NotImplementedError

    @staticmethod
    def load_scaled(live: Any, weight: torch.Tensor) -> None:
        live.data.copy_(weight)
        live.data.copy_(live.data * 1.3)


class SharedModule(UnderTwoNames):
    def other(self) -> nn.Module:
        wrapper = nn.Module()
        wrapper.norm = self.child.norm
        return wrapper


class SharedParameter(UnderTwoNames):
    def other(self) -> nn.Module:
        wrapper = nn.Module()
        wrapper.scale = self.child.norm.weight
        return wrapper


class SharedMemory(UnderTwoNames):
    def other(self) -> nn.Module:
        wrapper = nn.Module()
        wrapper.scale = nn.Parameter(self.child.norm.weight.data, requires_grad=False)
        return wrapper


@pytest.mark.parametrize("model", [SharedModule, SharedParameter])
def test_a_parameter_under_two_names_is_loaded_again(tmp_path: Path, model: type[Model]) -> None:
    serving = Serving(model, tmp_path)
    assert serving.statuses()["norm_a"] == "rebuilt"
    before = dict(serving.current)
    errors_of(serving.sync({"norm_a": changed(serving.current["norm_a"], 3)}), none=True)
    serving.assert_fresh()
    errors_of(serving.rollback(before), none=True)
    serving.assert_fresh()


def test_memory_of_two_parameters_is_refused(tmp_path: Path) -> None:
    """The loader could write to the other one, which a copy of this one would not show."""
    serving = Serving(SharedMemory, tmp_path)
    assert serving.reasons().keys() == {"norm_a"}


def test_a_parameter_that_the_loader_parts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(SharedParameter, tmp_path)
    before = serving.served()
    monkeypatch.setattr(SharedParameter, "replaced", ("child.norm.weight",))
    target = {"norm_a": changed(serving.base["norm_a"], 3)}
    assert "the loader parts wrapper.scale from child.norm.weight" in refusal(serving.sync(target))
    assert serving.served() == before


class InPart(Model):
    """A parameter is a slice of another one, and the checkpoint has both."""

    shapes: ClassVar = {"embed": (OUT, 6), "head": (2, 6), "last": (1, 6)}

    def build(self, rank: int, ranks: int) -> None:
        self.embed = empty(OUT, 6)
        self.head = nn.Parameter(self.embed.data[1:3], requires_grad=False)
        self.last = nn.Parameter(self.embed.data[-1:], requires_grad=False)


def test_parameters_that_share_memory_in_part_are_refused(tmp_path: Path) -> None:
    """Loading one alone leaves the others without what is written over them."""
    base = InPart.checkpoint()
    base |= {"head": base["embed"][1:3].clone(), "last": base["embed"][-1:].clone()}
    serving = Serving(InPart, tmp_path, checkpoint=base)
    assert serving.reasons().keys() == {"embed", "head", "last"}
    before = serving.served()
    refusal(serving.sync({"embed": changed(base["embed"], 3)}))
    assert serving.served() == before


def test_refused_first_syncs_take_no_more_memory(tmp_path: Path) -> None:
    size = 2 * (OUT * 6 + OUT)
    serving = Serving(Mamba, tmp_path, dummy=True, shadow_bytes=size + 6 * OUT)
    few = {name: tensor for name, tensor in serving.base.items() if name != "norm"}
    for _ in range(9):
        assert "the engine keeps norm" in refusal(serving.sync(few, full=True))
    errors_of(serving.sync(serving.base, full=True), none=True)
    assert serving.statuses()["mixer.A_log"] == "rebuilt"
    serving.assert_fresh()
