"""Derived tensors follow their weights by the engine's own function, or the weights are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.derived.recompute import Recomputation
from engine_ext.model.constants import is_constant
from engine_ext.receiver.loaded_model import LoadedModel
from engine_ext.receiver.startup import make_receiver
from engine_ext.settings import Settings
from tests.support.rank_engine import Engine, errors_of, part_id
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
from tests.support.thread_group import Group, ThreadRanks
from tests.support.toy_models import UNTOUCHED, Checkpoint, ToyModel, Weights, parameter

KV = ("layers.0.kv_b_proj", "layers.1.kv_b_proj")


class Projection(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = parameter(*shape)


class Attention(nn.Module):
    """Latent attention: two halves of a projection are kept, turned and padded, beside it."""

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

    W_UK_T = W_UV = property(lambda self: self.kv_b_proj.mixed)  # type: ignore[assignment]

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
        self.get_submodule(name).weight.data.copy_(weight)  # type: ignore[operator, union-attr]

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
    shapes: ClassVar = Latent.shapes
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
                constants=lambda path, t: path == UNTOUCHED or is_constant(path, t),
                recomputations=functions(model),
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
        """The engine's own way, which makes its derived tensors by itself."""
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
            self.engine.call("drop")
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


@pytest.fixture(params=[Attention, InPlace, SwapsMemory])
def attention(request: pytest.FixtureRequest) -> type[Attention]:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("apply", ["scatter", "masked"])
@pytest.mark.parametrize("functions", [each, together])
def test_exact_after_a_sync_and_after_a_rollback(
    tmp_path: Path, attention: type[Attention], functions: Functions, apply: str
) -> None:
    service = Service(tmp_path, attention=attention, functions=functions, apply=apply)
    assert service.memory() == service.before
    assert service.refusals() == {}
    service.assert_holds(service.base)
    errors_of(service.sync(list(service.base)), none=True)
    service.assert_holds(service.target)
    errors_of(service.engine.call("rollback"), none=True)
    service.assert_holds(service.base)
    errors_of(service.sync(list(KV), version=1, dense=True), none=True)
    service.assert_holds(service.target)


def test_a_full_sync(tmp_path: Path, attention: type[Attention]) -> None:
    service = Service(tmp_path, attention=attention)
    errors_of(service.sync(list(service.base), version=7, full=True), none=True)
    service.assert_holds(service.target)


def test_only_what_is_made_of_written_weights_is_computed_again(tmp_path: Path) -> None:
    service = Service(tmp_path)
    before = service.calls()
    errors_of(service.sync(["norm"]), none=True)
    assert service.calls() == before
    service.base = service.target
    errors_of(service.sync([KV[1]], version=2), none=True)
    assert service.calls() == [[a, b + 1] for a, b in before]
    service.assert_holds(service.target)
    # A weight of the same layer may be an ingredient too, as far as anybody knows.
    service.base = service.target
    errors_of(service.sync(["layers.0.q_proj"], version=3), none=True)
    assert service.calls() == [[a + 1, b + 1] for a, b in before]


def test_every_weight_below_the_functions_modules_counts(tmp_path: Path) -> None:
    service = Service(tmp_path, attention=Across)
    errors_of(service.sync(["layers.1.q_proj"]), none=True)
    service.assert_holds(service.target)


def test_what_a_rank_does_not_hold_makes_it_compute_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path)
    before = service.calls()
    new = service.base[KV[0]].clone()
    new[0, 0] += 1
    body = one_part([delta_between(KV[0], service.base[KV[0]], new)])
    errors_of(service.engine.apply(part_id(body), body), none=True)
    assert service.calls() == [[before[0][0] + 1, before[0][1]], before[1]]
    service.assert_holds({**service.base, KV[0]: new})


def test_what_the_engine_hangs_there_later_stays(tmp_path: Path) -> None:
    """A cache, say, in the place of the tensor that stood for it until it was allocated."""
    service = Service(tmp_path)
    caches = [torch.rand(3) for model in service.models for _ in model.attentions]
    layers = [layer for model in service.models for layer in model.attentions]
    for layer, cache in zip(layers, caches, strict=True):
        layer.kv_cache = cache
    errors_of(service.sync(list(service.base)), none=True)
    assert all(la.kv_cache is c for la, c in zip(layers, caches, strict=True))


def test_the_plan_names_them(tmp_path: Path) -> None:
    service = Service(tmp_path)
    for answer in service.engine.call("plan"):
        rows = {row["name"]: row for row in answer["ok"]["tensors"]}
        assert set(rows[KV[0]]["recomputed"]) == {"layers.0.W_UK_T", "layers.0.W_UV"}
        assert rows[KV[0]]["status"] == "exact"
        assert rows["norm"]["recomputed"] == []


# --- an engine on dummy weights ---


def test_dummy_weights_are_seeded_and_then_take_deltas(
    tmp_path: Path, attention: type[Attention]
) -> None:
    service = Service(tmp_path, attention=attention, dummy=True)
    assert service.memory() == service.before
    [answer, _] = service.sync(list(service.base), full=True)
    assert answer["ok"]["apply"] == "reload"
    service.base = service.target
    service.tensors = [service.objects(model) for model in service.models]
    service.assert_holds(service.base)
    errors_of(service.sync(list(KV), version=2), none=True)
    service.assert_holds(service.target)


def test_dummy_weights_and_views_of_them(tmp_path: Path) -> None:
    service = Service(tmp_path, attention=Views, functions=lambda model: [], dummy=True)
    errors_of(service.sync(list(service.base), full=True), none=True)
    service.base = service.target
    errors_of(service.sync(list(KV), version=2), none=True)
    assert service.memory() == [memory(load(kind, service.target)) for kind in service.kinds]


def test_caches_are_not_copied_for_the_proof(tmp_path: Path) -> None:
    """By the first full sync they are allocated, and they are most of an engine's memory."""
    service = Service(tmp_path, dummy=True)
    for model in service.models:
        model.attentions[0].kv_cache = torch.zeros(1).expand(1 << 40)
    errors_of(service.sync(list(service.base), full=True), none=True)


def test_dummy_weights_of_which_something_would_not_follow(tmp_path: Path) -> None:
    service = Service(tmp_path, dummy=True, functions=lambda model: [])
    errors = errors_of(service.sync(list(service.base), full=True))
    assert {e["type"] for e in errors} == {"NotUpdatable"}
    assert "layers.0.W_UV" in errors[0]["message"]
    assert service.memory() == service.before


def test_a_reload_that_forgets_what_it_has_derived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "reload", lambda self, model, weights: model.load_weights(weights))
    service = Service(tmp_path, dummy=True)
    errors = errors_of(service.sync(list(service.base), full=True))
    assert {e["type"] for e in errors} == {"CommitFailed"}
    assert "changes layers.0.W_UK_T" in errors[0]["message"]


# --- a function that fails in the commit ---


def failing(times: int) -> Callable[[], None]:
    left = iter(range(times))

    def fail() -> None:
        if next(left, None) is not None:
            raise OSError("no memory")

    return fail


@pytest.mark.parametrize("rank", [0, 1])
def test_a_function_that_raises_in_the_commit_is_undone_everywhere(
    tmp_path: Path, attention: type[Attention], rank: int
) -> None:
    service = Service(tmp_path, attention=attention)
    service.models[rank].attentions[1].fails = failing(1)
    errors = errors_of(service.sync(list(service.base)))
    assert {(e["type"], e["engine_state"]) for e in errors} == {("WriteUndone", "unchanged")}
    assert "no memory" in errors[0]["message"]
    service.assert_holds(service.base)
    errors_of(service.sync(list(service.base)), none=True)
    service.assert_holds(service.target)


def test_one_that_fails_for_the_undo_too_makes_the_engine_uncertain(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.models[0].attentions[0].fails = failing(2)
    assert {e["type"] for e in errors_of(service.sync(list(KV)))} == {"CommitFailed"}
    assert {s["engine_state"] for s in service.engine.status()} == {"uncertain"}
    errors_of(service.sync(list(service.base), version=2, full=True), none=True)
    service.assert_holds(service.target)


def test_another_failure_on_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that had finished takes its derived tensors back too."""
    service = Service(tmp_path)
    applier = service.engine.receivers[1]._applier
    with monkeypatch.context() as patch:
        patch.setattr(applier, "write", partial(_raise, OSError("gone")))
        assert {e["type"] for e in errors_of(service.sync(list(KV)))} == {"WriteUndone"}
    service.assert_holds(service.base)


def _raise(error: Exception, *_: object) -> None:
    raise error


@pytest.mark.parametrize("what", ["shape", "strides", "dtype", "nothing"])
def test_a_function_that_makes_something_else_in_the_commit(tmp_path: Path, what: str) -> None:
    service = Service(tmp_path)
    layer = service.models[0].attentions[0]

    def spoil() -> None:
        layer.fails = lambda: None
        if what == "nothing":
            del layer.W_UV
        else:
            layer.W_UV = {
                "shape": layer.W_UV[:2],
                "strides": layer.W_UV.t().contiguous().t(),
                "dtype": layer.W_UV.float(),
            }[what]

    layer.fails = spoil
    errors = errors_of(service.sync(list(KV)))
    assert {e["type"] for e in errors} == {"WriteUndone"}
    assert "layers.0.W_UV" in errors[0]["message"]
    service.assert_holds(service.base)


@pytest.mark.parametrize("what", ["object", "memory", "gone"])
def test_a_derived_tensor_that_moved_is_noticed(tmp_path: Path, what: str) -> None:
    service = Service(tmp_path)
    layer = service.models[1].attentions[0]
    old, kept = layer.W_UV, layer.W_UV.data
    if what == "object":
        layer.W_UV = old.clone()
    elif what == "memory":
        old.data = old.data.clone()
    else:
        del layer.W_UV
    for names in (["norm"], list(KV)):
        errors = errors_of(service.sync(names))
        assert {e["type"] for e in errors} == {"NotUpdatable"}
        assert errors[0]["tensors"] == ["layers.0.W_UV"]
    layer.W_UV = old
    old.data = kept
    errors_of(service.sync(list(KV)), none=True)
    service.assert_holds(service.target)
