"""What happens after something has given a parameter other memory, as worker extensions do."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.errors import NotUpdatable
from engine_ext.model import StorageIndex
from engine_ext.startup import trace_again
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of
from tests.support.toy_quantised import Int8, Layer, Method, Model, linear_shapes
from tests.unit.sync.test_post_load import target_of

pytestmark = [pytest.mark.slow, pytest.mark.host_memory]


class Unprocessed(Model):
    """A norm and a layer."""

    shapes: ClassVar = linear_shapes("plain")

    def build(self, rank: int, ranks: int) -> None:
        self.plain = Layer(Method(), rank=rank, ranks=ranks)


class Plain(Unprocessed):
    """With another layer that is processed."""

    shapes: ClassVar = linear_shapes("plain", "int8")

    def build(self, rank: int, ranks: int) -> None:
        super().build(rank, ranks)
        self.int8 = Layer(Int8(), rank=rank, ranks=ranks)


def give_memory(tensor: torch.Tensor, change: float = 1.0) -> None:
    """What SkyRL's extension does: other memory, and other values in it."""
    tensor.data = tensor.detach().clone() + change


def corrupted(serving: Serving) -> list[str]:
    answers = serving.engine.call("digest", scan=True)
    return sorted({name for answer in answers for name in answer["ok"]["corrupted"]})


def states(serving: Serving) -> set[tuple[str, tuple[str, ...]]]:
    found = serving.engine.status()
    return {(one["engine_state"], tuple(one["mismatched"])) for one in found}


def assert_heals(serving: Serving) -> None:
    """Only a full sync is taken; the engine serves its weights, and takes deltas again."""
    healed = target_of(serving, seed=11)
    before = [one["digest"] for one in serving.engine.status()]
    for name in ("norm", "plain.weight"):  # whichever rank has found it
        refused = serving.sync(target_of(serving, name))
        assert {"BaseMismatch"} == {one["error"]["type"] for one in refused if "error" in one}
    assert errors_of(serving.engine.call("rollback"))[0]["type"] == "BaseMismatch"
    assert [one["digest"] for one in serving.engine.status()] == before
    errors_of(serving.sync(healed, full=True), none=True)
    assert states(serving) == {("certain", ())}
    serving.assert_fresh()
    assert corrupted(serving) == []
    assert errors_of(serving.engine.call("rollback"))[0]["type"] == "Conflict"
    before_last = dict(serving.current)
    errors_of(serving.sync(target_of(serving, seed=31)), none=True)
    serving.assert_fresh()
    errors_of(serving.rollback(before_last), none=True)
    serving.assert_fresh()


@pytest.mark.parametrize(
    ("apply", "kind", "ranks"),
    [("scatter", Plain, 1), ("scatter", Plain, 2), ("masked", Unprocessed, 2)],
)
def test_scan_finds_a_moved_tensor(
    tmp_path: Path, apply: str, kind: type[Model], ranks: int
) -> None:
    serving = Serving(kind, tmp_path, ranks=ranks, apply=apply)
    errors_of(serving.sync(target_of(serving)), none=True)
    for model in serving.models:
        give_memory(model.norm)
        give_memory(model.plain.weight)
    assert corrupted(serving) == ["norm", "plain.weight"]
    assert states(serving) == {("mismatched", ("norm", "plain.weight"))}
    assert_heals(serving)


@pytest.mark.parametrize("rank", [0, 1])
def test_scan_finds_a_copy_changed_on_one_rank(tmp_path: Path, rank: int) -> None:
    """Whichever rank's copy the digest counts."""
    serving = Serving(Plain, tmp_path, ranks=2)
    errors_of(serving.sync(target_of(serving)), none=True)
    assert corrupted(serving) == []
    with torch.no_grad():
        serving.models[rank].norm[0] += 1
    assert corrupted(serving) == ["norm"]
    assert states(serving) == {("mismatched", ("norm",))}
    assert_heals(serving)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_delta_finds_a_tensor_moved_on_one_rank(tmp_path: Path, change: float) -> None:
    """Also one that has the same values there, and that the delta is not of."""
    serving = Serving(Plain, tmp_path, ranks=2)
    give_memory(serving.models[1].norm, change)
    errors = errors_of(serving.sync(target_of(serving, "plain.weight")))
    assert {error["type"] for error in errors} == {"BaseMismatch"}
    assert {tuple(error["moved"]) for error in errors} == {("norm",)}
    assert states(serving) == {("mismatched", ("norm",))}
    assert_heals(serving)


def test_full_sync_finds_a_moved_tensor_itself(tmp_path: Path) -> None:
    """Before anything else has; one that is refused leaves the state behind."""
    serving = Serving(Plain, tmp_path, ranks=2)
    give_memory(serving.models[0].norm)
    incomplete = {"norm": serving.current["norm"]}
    assert "must cover every tensor" in refusal(serving.sync(incomplete, full=True))
    mismatch = ("mismatched", ("norm",))
    assert mismatch in states(serving)
    assert_heals(serving)


def test_replaced_parameter_is_followed(tmp_path: Path) -> None:
    """By another object."""
    serving = Serving(Plain, tmp_path)
    model = serving.models[0]
    new = nn.Parameter(torch.zeros_like(model.norm), requires_grad=False)
    model.norm = new
    assert corrupted(serving) == ["norm"]
    assert_heals(serving)
    assert model.norm is new


def other_layout(model: Any) -> None:
    model.plain.weight.data = model.plain.weight.data.t().contiguous().t()


def other_dtype(model: Any) -> None:
    model.norm.data = model.norm.data.float()


def rebuilt(model: Any) -> None:
    give_memory(model.int8.weight, 0)


def shared(model: Any) -> None:
    model.plain.bias.data = model.plain.weight.data.view(-1)[: model.plain.bias.numel()]


def swapped(model: Any) -> None:
    first, second = model.norm.data, model.norm.data.clone()
    model.copy = first
    model.norm.data = second


def added(model: Any) -> None:
    model.plain.extra = nn.Parameter(torch.ones(3), requires_grad=False)


@pytest.mark.parametrize(
    ("move", "why"),
    [
        (other_layout, "another layout"),
        (other_dtype, "another layout"),
        (rebuilt, "computes them from weights"),
        (shared, "share memory with others"),
        (swapped, "['copy'] after start-up, and no sync can follow: they still refer to the"),
        (added, "another layout"),
    ],
)
def test_full_sync_cannot_follow_these(
    tmp_path: Path, move: Callable[[Any], None], why: str
) -> None:
    """Refused by name, and nothing is written."""
    serving = Serving(Plain, tmp_path)
    move(serving.models[0])
    before = serving.served()
    assert "send a full sync" in refusal(serving.sync(target_of(serving)))
    message = refusal(serving.sync(target_of(serving), full=True))
    assert why in message
    assert "restart the engine" in message
    assert serving.served() == before
    [(state, _)] = states(serving)
    assert state == "mismatched"


def test_tied_tensor_is_followed_under_both_names(tmp_path: Path) -> None:
    class Tied(Plain):
        def build(self, rank: int, ranks: int) -> None:
            super().build(rank, ranks)
            self.other = nn.Module()
            self.other.norm = self.norm

    serving = Serving(Tied, tmp_path)
    give_memory(serving.models[0].norm)
    assert corrupted(serving) == ["norm"]
    assert_heals(serving)


@pytest.mark.usefixtures("quick_collections")
def test_a_replaced_parameter_is_freed_once_it_is_followed(tmp_path: Path) -> None:
    serving = Serving(Plain, tmp_path)
    plain = serving.models[0].plain
    before = weakref.ref(plain.weight)
    plain.weight = nn.Parameter(plain.weight.detach().clone() + 1, requires_grad=False)
    errors_of(serving.sync(target_of(serving, seed=11), full=True), none=True)
    serving.assert_fresh()
    gc.collect()
    assert before() is None


@pytest.mark.parametrize(("device", "captures"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_graphs_keep_the_memory_that_a_tensor_had(device: str, captures: bool) -> None:
    """Writes to its new memory would not reach them."""
    model = nn.Linear(2, 2)
    index: Any = StorageIndex(model)
    index.by_name = {"weight": SimpleNamespace(tensor=SimpleNamespace(device=torch.device(device)))}
    loaded: Any = SimpleNamespace(captures=captures, repacks={}, refuse_while=None)
    expected: Any = contextlib.nullcontext()
    if device != "cpu" and captures:
        expected = pytest.raises(NotUpdatable, match="read the memory before; restart the engine")
    with expected:
        assert trace_again(loaded, model, list, {}, {}, index, ["weight"]) == {}
