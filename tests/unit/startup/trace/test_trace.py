"""What a trace finds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import ToyModel, Weights
from engine_ext.model import fingerprint
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.segments import Placed, Status, TensorSpec
from engine_ext.startup import LoaderDryRun
from tests.support.served_models import memory
from tests.unit.startup.trace.traced import COPY, MODELS, Calls, identities, loaded, trace

# Tensors whose placement a trace of the loader does not find; every other tensor is placed.
NOT_FOLLOWED: dict[str, set[str]] = {
    "Accumulates": {"weight"},
    "AssignsData": {"weight"},
    "BitsView": {"weight"},
    "ByteHalf": {"weight"},
    "BytesView": {"weight"},
    "ClampsAfter": {"weight"},
    "ConstantFirst": {"k", "q"},
    "FillsFirst": {"k", "q"},
    "ForeachCopy": {"weight"},
    "IndexPut": {"weight"},
    "KeepsCopy": {"weight"},
    "KeepsReference": {"weight"},
    "ReadsThroughTemporary": {"scale"},
    "ReadsValue": {"scale"},
    "SwapsParameter": {"weight"},
    "TiedInEngine": {"embed", "head"},
    "TiedInPart": {"embed", "head"},
    "TransformedWhileLoading": {"A_log"},
    "ZeroesFirst": {"k", "q"},
    "ZeroesPaddingRow": {"embed"},
}
NOT_HERE: dict[str, set[str]] = {"PackedAway": {"weight"}, "Skipped": {"rotary"}}


REASONS: dict[type[ToyModel], dict[str, str]] = {
    toy_models.IndexPut: {"weight": "index_put_"},
    toy_models.ForeachCopy: {"weight": "foreach_copy"},
    toy_models.TransformedWhileLoading: {"A_log": "changes it before"},
    toy_models.Accumulates: {"weight": "add_"},
    toy_models.BitsView: {"weight": "int16"},
    toy_models.BytesView: {"weight": "uint8"},
    toy_models.ZeroesPaddingRow: {"embed": "zero_"},
    toy_models.ClampsAfter: {"weight": "writes other values over it"},
    toy_models.ZeroesFirst: dict.fromkeys("qk", "writes other values over it"),
    toy_models.FillsFirst: {"k": "writes other values over it"},
    toy_models.ConstantFirst: {"k": "writes other values over it"},
    toy_models.TiedInEngine: {"embed": "with head", "head": "with embed"},
    toy_models.TiedInPart: {"embed": "with head", "head": "with embed"},
    toy_models.KeepsReference: {"weight": "kept"},
    toy_models.KeepsCopy: {"weight": "kept"},
    toy_models.ReadsValue: {"scale": "fails on a tensor without data"},
    toy_models.ReadsThroughTemporary: {"scale": "fails on a tensor without data"},
    toy_models.AssignsData: {"weight": "fails on a tensor without data"},
    toy_models.SwapsParameter: {"weight": "puts other memory in place of weight"},
}


@MODELS
def test_every_tensor_has_its_listed_status(model: type[ToyModel]) -> None:
    """And reason, after one call of the loader; or one for each tensor, to explain a failure.

    The model keeps its bits, objects and addresses, also where the loader fails.
    """
    live = loaded(model)
    bits, objects, calls, names = memory(live), identities(live), Calls(live), list(model.shapes)
    placement = LoaderDryRun(live, calls, StorageIndex(live)).trace(live.specs())
    assert memory(live) == bits
    assert identities(live) == objects
    assert torch.Tensor.copy_ is COPY
    assert calls.names in ([names], [names, *([name] for name in names)])
    assert list(placement) == names
    if calls.names == [names]:
        assert not any("fails" in placed.reason for placed in placement.values())
    expected = {
        name: Status.UNCERTIFIED
        if name in NOT_FOLLOWED.get(model.__name__, ())
        else Status.NOT_ON_RANK
        if name in NOT_HERE.get(model.__name__, ())
        else Status.UNJUDGED
        for name in model.shapes
    }
    assert {name: placed.status for name, placed in placement.items()} == expected
    for name, fragment in REASONS.get(model, {}).items():
        assert fragment in placement[name].reason
    for placed in placement.values():
        assert bool(placed.reason) == (placed.status is Status.UNCERTIFIED)
        assert bool(placed.segments) or placed.status is not Status.UNJUDGED
        assert not placed.segments or placed.status is not Status.NOT_ON_RANK


@pytest.mark.parametrize("table", [NOT_FOLLOWED, NOT_HERE])
def test_listed_tensors_exist(table: dict[str, set[str]]) -> None:
    shapes = {model.__name__: set(model.shapes) for model in toy_models.every_model()}
    assert all(names and names <= shapes[model] for model, names in table.items())


class KeepsInList(toy_models.KeepsReference):
    """Writes a tensor of its own that no module has as an attribute, and that seems constant."""

    shapes: ClassVar = {"weight": (1,)}
    dtypes: ClassVar = {"weight": torch.float32}

    def build(self) -> None:
        ToyModel.build(self)
        self.held = [torch.ones(1)]

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        ToyModel.load_one(self, name, weight)
        self.held[0].copy_(weight)


class WritesAcross(ToyModel):
    """Writes two parameters by one view over both, and then one of them again."""

    shapes: ClassVar = {"both": (16,), "first": (8,)}
    dtypes: ClassVar = {"both": torch.float32, "first": torch.float32}
    doubles: ClassVar = False

    def build(self) -> None:
        memory = torch.zeros(16)
        self.first = torch.nn.Parameter(memory[:8], requires_grad=False)
        self.second = torch.nn.Parameter(memory[8:], requires_grad=False)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "first":
            self.first.data.copy_(weight)
        else:
            across = self.first.data.as_strided((16,), (1,), 0)
            across.copy_(weight * 2 if self.doubles else weight)


class WritesDoubleAcross(WritesAcross):
    doubles: ClassVar = True


def test_what_is_written_into_a_list_is_refused() -> None:
    placed = trace(loaded(KeepsInList))["weight"]
    assert placed.status is Status.UNCERTIFIED
    assert "held[0]" in placed.reason


@pytest.mark.parametrize("model", [WritesAcross, WritesDoubleAcross])
def test_what_is_written_over_another_tensor_hides_neither(model: type[ToyModel]) -> None:
    """The one that is written as the loader should write it is not taken for ignored."""
    placement = trace(loaded(model))
    assert placement["both"].status is Status.UNCERTIFIED
    assert placement["both"].reason == "the loader also writes it over first"
    assert boxes(placement["first"]) == [("first", 0, (8,), (1,), 0, (1,))]


def test_elements_may_be_taken_by_a_transposed_index() -> None:
    class Takes(ToyModel):
        shapes: ClassVar = {"weight": (12,)}

        def build(self) -> None:
            self.weight = toy_models.parameter(3, 4)

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            self.weight.copy_(weight.take(torch.arange(12).reshape(4, 3).t()))

    placed = trace(loaded(Takes))["weight"]
    assert (placed.status, placed.reason) == (Status.UNJUDGED, "")
    assert placed.segments


def boxes(placed: Placed) -> list[tuple[Any, ...]]:
    return [
        (s.live.name, s.offset, s.sizes, s.strides, s.source_offset, s.source_strides)
        for s in placed.segments
    ]


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        (toy_models.RowShard, "weight", [("weight", 0, (3, 4), (4, 1), 12, (4, 1))]),
        (toy_models.ColumnShardLast, "weight", [("weight", 0, (24, 16), (16, 1), 16, (32, 1))]),
        (toy_models.FusedQkv, "v", [("qkv", 40, (2, 4), (4, 1), 0, (4, 1))]),
        (toy_models.StackedExpertsLast, "expert1.up", [("w13", 72, (4, 6), (6, 1), 24, (6, 1))]),
        (toy_models.StackedExperts, "expert1.down", [("w2", 24, (6, 4), (4, 1), 0, (8, 1))]),
        (toy_models.Transposed, "weight", [("weight", 0, (4, 6), (6, 1), 0, (1, 4))]),
        (toy_models.StridedParameter, "weight", [("weight", 0, (6, 4), (1, 9), 0, (4, 1))]),
        (toy_models.Broadcast, "row", [("row", 0, (3, 4), (4, 1), 0, (0, 1))]),
        (toy_models.Broadcast, "column", [("column", 0, (3, 4), (4, 1), 0, (1, 0))]),
        (toy_models.PlainCopy, "scale", [("scale", 0, (), (), 0, ())]),
        (toy_models.Tied, "embed", [("embed", 0, (5, 4), (4, 1), 0, (4, 1))]),
        (toy_models.Skipped, "rotary", []),
    ],
    ids=lambda v: getattr(v, "__name__", v if isinstance(v, str) else ""),
)
def test_segments(model: type[ToyModel], name: str, expected: list[tuple[Any, ...]]) -> None:
    assert boxes(trace(loaded(model))[name]) == expected


@pytest.mark.parametrize(
    ("model", "python_copy"), [(toy_models.PlainCopy, True), (toy_models.SetItem, False)]
)
def test_python_copies_are_told_from_others(model: type[ToyModel], python_copy: bool) -> None:
    [segment] = trace(loaded(model))["weight"].segments
    assert segment.python_copy is python_copy


def test_a_copy_bound_before_tracing_is_not_a_python_copy() -> None:
    """A masked apply could not replace it."""

    class BoundCopy(ToyModel):
        shapes: ClassVar = {"weight": (3, 4)}

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            COPY(self.weight, weight)

    [segment] = trace(loaded(BoundCopy))["weight"].segments
    assert not segment.python_copy


def test_a_tensor_is_placed_wherever_it_goes() -> None:
    assert [box[0] for box in boxes(trace(loaded(toy_models.Replicated))["weight"])] == [
        "first",
        "second",
    ]
    assert len(trace(loaded(toy_models.RowByRow))["weight"].segments) == 5


def test_padding_is_nobodys() -> None:
    """A fill of padding is no reason to refuse the tensor next to it."""
    assert trace(loaded(toy_models.PaddedVocab))["embed"].status is Status.UNJUDGED


def test_a_shape_the_engine_does_not_expect_is_uncertified() -> None:
    placement = trace(loaded(toy_models.PlainCopy), [TensorSpec("weight", (5, 4), torch.bfloat16)])
    assert "fails on a tensor without data" in placement["weight"].reason


def test_a_failing_tensor_does_not_harm_the_others() -> None:
    placement = trace(loaded(toy_models.ReadsValue))
    assert [p.status for p in placement.values()] == [
        Status.UNJUDGED,
        Status.UNCERTIFIED,
        Status.UNJUDGED,
    ]


def test_live_memory_may_be_looked_at() -> None:
    """Its values are there, unlike the checkpoint's."""

    class Looks(ToyModel):
        shapes: ClassVar = {"weight": (3, 4)}

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            largest = torch.empty(1)
            largest.copy_(self.weight.float().abs().max())
            if bool(largest < 1000):
                self.weight.copy_(weight)

    assert trace(loaded(Looks))["weight"].status is Status.UNJUDGED


@pytest.mark.parametrize("chunk", [1 << 24, 3])
def test_a_hash_of_memory_on_a_device(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change counts, and so does the place; as where all elements change alike."""
    monkeypatch.setattr(fingerprint, "_CHUNK", chunk)
    memory = torch.zeros(8, dtype=torch.int16)
    others = [memory, memory + 1, memory - 1]
    for place in range(8):
        others.append(memory.clone())
        others[-1][place] = 5
    assert len({fingerprint.weighted_sum(m) for m in others}) == len(others)
    assert fingerprint.weighted_sum(memory) == fingerprint.weighted_sum(memory.clone())


def test_other_threads_write_as_ever_while_tracing() -> None:
    live = loaded(toy_models.PlainCopy)
    other = torch.zeros(3)

    def loader(weights: Weights) -> None:
        thread = threading.Thread(target=lambda: other.copy_(torch.ones(3)))
        thread.start()
        thread.join()
        live.load_weights(weights)

    placement = LoaderDryRun(live, loader, StorageIndex(live)).trace(live.specs())
    assert other.tolist() == [1, 1, 1]
    assert all(p.status is Status.UNJUDGED for p in placement.values())


class Slow(torch.Tensor):
    """A tensor whose copy, once begun, ends when the test lets it."""

    begun: ClassVar[threading.Event]
    go_on: ClassVar[threading.Event]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        cls.begun.set()
        assert cls.go_on.wait(5)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_another_threads_copy_is_not_taken_for_the_loaders() -> None:
    """It is under way while the loader writes by other means."""
    live = loaded(toy_models.SetItem)
    slow = torch.zeros(3).as_subclass(Slow)
    Slow.begun, Slow.go_on = threading.Event(), threading.Event()

    def loader(weights: Weights) -> None:
        thread = threading.Thread(target=lambda: slow.copy_(torch.ones(3)))
        thread.start()
        assert Slow.begun.wait(5)
        live.load_weights(weights)
        Slow.go_on.set()
        thread.join()

    placement = LoaderDryRun(live, loader, StorageIndex(live)).trace(live.specs())
    assert [s.python_copy for p in placement.values() for s in p.segments] == [False, False]


@pytest.mark.slow
def test_models_are_traced_one_at_a_time() -> None:
    """Ranks can be threads; the original is back whichever of them ends last."""
    start = threading.Barrier(4, timeout=5)

    def run() -> None:
        live = loaded(toy_models.RowByRow)
        start.wait()
        for _ in range(20):
            assert all(s.python_copy for s in trace(live)["weight"].segments)

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(run) for _ in range(4)]:
            future.result()
    assert torch.Tensor.copy_ is COPY
