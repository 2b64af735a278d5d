from __future__ import annotations

import _thread
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_ext.model import fingerprint
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.segments import Placed, Placement, Status, TensorSpec
from engine_ext.tracing import thread_propagation
from engine_ext.tracing.trace import TracingError, rehearse, trace_placement, written_alone
from tests.support import toy_models
from tests.support.receiver_harness import base_checkpoint, load, memory, serve
from tests.support.toy_models import ToyModel, Weights, every_model, parameter

COPY = torch.Tensor.copy_
MODELS = pytest.mark.parametrize("model", every_model(), ids=lambda m: m.__name__)


class Calls:
    """A loader that counts how often it is called, and with what."""

    def __init__(self, model: ToyModel) -> None:
        self._model = model
        self.names: list[list[str]] = []

    def __call__(self, weights: Weights) -> None:
        given = list(weights)
        self.names.append([name for name, _ in given])
        self._model.load_weights(iter(given))


def loaded(model: type[ToyModel]) -> ToyModel:
    return load(model, base_checkpoint(model))


def trace(live: ToyModel, specs: Iterable[TensorSpec] | None = None) -> Placement:
    chosen = live.specs() if specs is None else list(specs)
    return trace_placement(live, live.load_weights, chosen, StorageIndex(live))


def identities(live: ToyModel) -> dict[str, tuple[int, int]]:
    tensors = [*live.named_parameters(remove_duplicate=False), *live.named_buffers()]
    tensors += [(n, v) for n, v in vars(live).items() if isinstance(v, torch.Tensor)]
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_collection_begins_in_a_trace(enabled: bool, fails: bool) -> None:
    live, seen = loaded(toy_models.PlainCopy), []

    def load_weights(weights: Weights) -> None:
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("no")
        live.load_weights(weights)

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        trace_placement(live, load_weights, live.specs(), StorageIndex(live))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(seen)


# --- the model is left as it was ---


@MODELS
def test_tracing_leaves_the_model_alone(model: type[ToyModel]) -> None:
    """Bits, objects, addresses and ``Tensor.copy_``, also where the loader fails."""
    live = loaded(model)
    bits, objects = memory(live), identities(live)
    trace(live)
    assert memory(live) == bits
    assert identities(live) == objects
    assert torch.Tensor.copy_ is COPY


@MODELS
def test_rehearsing_leaves_the_model_alone(model: type[ToyModel]) -> None:
    served = serve(model, base_checkpoint(model))
    bits, objects = memory(served.model), identities(served.model)
    for name in model.shapes:
        rehearse(served.model, served.model.load_weights, [name], served.placement, served.index)
    assert memory(served.model) == bits
    assert identities(served.model) == objects
    assert torch.Tensor.copy_ is COPY


def test_a_value_that_is_not_there_is_not_read() -> None:
    """The loader keeps a Python float of a scale; tracing must not give it another."""
    live = loaded(toy_models.ReadsThroughTemporary)
    before = live.scale_float
    trace(live)
    assert live.scale_float == before


def write_through_numpy(weight: torch.Tensor) -> None:
    weight.data.view(torch.int16).numpy()[...] = 1


def write_in_a_thread_of_its_own(weight: torch.Tensor) -> None:
    """Started below `threading`, where it is not followed."""
    done = _thread.allocate_lock()
    done.acquire()

    def write() -> None:
        weight.data.fill_(1)
        done.release()

    _thread.start_new_thread(write, ())
    assert done.acquire(timeout=5)


@pytest.mark.parametrize("write", [write_through_numpy, write_in_a_thread_of_its_own])
def test_a_model_that_tracing_changes_is_not_served(write: Callable[[torch.Tensor], None]) -> None:
    """No write to live memory is overlooked, though not every one can be followed."""
    live = loaded(toy_models.PlainCopy)

    def loader(weights: Weights) -> None:
        write(live.weight)
        live.load_weights(weights)

    with pytest.raises(TracingError, match=r"cannot be followed: \['weight'\]"):
        trace_placement(live, loader, live.specs(), StorageIndex(live))
    assert torch.Tensor.copy_ is COPY


def test_a_wrapped_loader_is_not_traced() -> None:
    live = loaded(toy_models.PlainCopy)
    calls = Calls(live)

    def refuse_while(model: nn.Module) -> str:
        return f"{type(model).__name__} is being reloaded"

    with pytest.raises(RuntimeError, match="PlainCopy is being reloaded") as caught:
        trace_placement(live, calls, live.specs(), StorageIndex(live), refuse_while=refuse_while)
    assert type(caught.value) is RuntimeError  # a TracingError says that the model has changed
    assert calls.names == []


def test_a_thread_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_propagation, "_JOIN_TIMEOUT_S", 0.01)
    live = loaded(toy_models.PlainCopy)
    end = threading.Event()

    def loader(weights: Weights) -> None:
        threading.Thread(target=end.wait, args=(5,)).start()
        live.load_weights(weights)

    with pytest.raises(TracingError, match="threads"):
        trace_placement(live, loader, live.specs(), StorageIndex(live))
    end.set()


def test_what_the_loader_replaces_is_put_back() -> None:
    """Memory of a parameter, parameters and modules; what lay in them is refused."""

    class Replaces(ToyModel):
        shapes: ClassVar = {"weight": (3, 4), "bias": (3,), "norm": (4,)}

        def build(self) -> None:
            super().build()
            self.child = nn.Linear(2, 2)

        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            self.weight.data = torch.zeros(3, 4, dtype=torch.bfloat16)
            self.bias = parameter(3)
            self.child = nn.Linear(2, 2)
            self.extra = torch.zeros(2)
            self.register_buffer("more", torch.zeros(2))

    live = loaded(Replaces)
    bits, objects, child = memory(live), identities(live), live.child
    del live.extra, live.more
    placement = trace(live)
    assert [p.status for p in placement.values()] == [
        Status.UNCERTIFIED,
        Status.UNCERTIFIED,
        Status.UNJUDGED,
    ]
    assert "puts other memory in place of weight" in placement["weight"].reason
    assert live.child is child
    assert not hasattr(live, "extra")
    assert memory(live) == {n: b for n, b in bits.items() if n not in (".extra", "more")}
    objects.pop("extra"), objects.pop("more")
    assert identities(live) == objects


def test_rehearsing_reports_what_is_replaced() -> None:
    served = serve(toy_models.PlainCopy, base_checkpoint(toy_models.PlainCopy))
    before = identities(served.model)

    def swaps(weights: Weights) -> None:
        served.model.bias = parameter(6)

    found = rehearse(served.model, swaps, ["bias"], served.placement, served.index)
    assert found.keys() == {"bias"}
    assert identities(served.model) == before


class Allocations(TorchDispatchMode):
    """Remembers the size of everything that is made, but for meta tensors and views."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.largest = max(self.largest, storage.nbytes())
        return out


def test_tracing_allocates_nothing() -> None:
    """Two thousand elements a tensor, row-sharded and stacked."""

    class Large(ToyModel):
        shapes: ClassVar = {f"w{n}": (64, 32) for n in range(8)}

        def build(self) -> None:
            self.stacked = parameter(8, 32, 32)

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            self.stacked.data[int(name[1:])].copy_(weight[32:])

    live = loaded(Large)
    with Allocations() as allocations:
        placement = trace(live)
    assert all(placed.segments for placed in placement.values())
    assert allocations.largest == 0


def test_interleaved_tensors_cost_only_their_own_range() -> None:
    """Where address ranges overlap, one byte per element of the two ranges tells them apart."""

    class Wide(ToyModel):
        shapes: ClassVar = {f"w{n}": (16, 8) for n in range(20)}

        def build(self) -> None:
            self.stacked = parameter(10, 16, 16)

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            number = int(name[1:])
            self.stacked.data[number // 2][:, number % 2 :: 2].copy_(weight)

    live = loaded(Wide)
    with Allocations() as allocations:
        placement = trace(live)
    assert all(p.status is Status.UNJUDGED for p in placement.values())
    assert 0 < allocations.largest <= 16 * 16


# --- what is found ---


@MODELS
def test_one_call_of_the_loader_is_enough(model: type[ToyModel]) -> None:
    """All tensors in one call; singly only to explain a failure."""
    live = loaded(model)
    calls = Calls(live)
    placement = trace_placement(live, calls, live.specs(), StorageIndex(live))
    names = list(model.shapes)
    assert calls.names in ([names], [names, *([name] for name in names)])
    assert list(placement) == names
    if calls.names == [names]:
        assert not any("fails" in placed.reason for placed in placement.values())


@MODELS
def test_a_status_for_every_tensor(model: type[ToyModel]) -> None:
    for placed in trace(loaded(model)).values():
        if placed.status is Status.UNJUDGED:
            assert placed.segments
        elif placed.status is Status.NOT_ON_RANK:
            assert not placed.segments
        else:
            assert placed.status is Status.UNCERTIFIED
            assert placed.reason


REASONS = [
    (toy_models.IndexPut, "weight", "index_put_"),
    (toy_models.ForeachCopy, "weight", "foreach_copy"),
    (toy_models.TransformedWhileLoading, "A_log", "changes it before"),
    (toy_models.Accumulates, "weight", "add_"),
    (toy_models.BitsView, "weight", "int16"),
    (toy_models.BytesView, "weight", "uint8"),
    (toy_models.ZeroesPaddingRow, "embed", "zero_"),
    (toy_models.ClampsAfter, "weight", "writes other values over it"),
    (toy_models.ZeroesFirst, "q", "writes other values over it"),
    (toy_models.ZeroesFirst, "k", "writes other values over it"),
    (toy_models.FillsFirst, "k", "writes other values over it"),
    (toy_models.ConstantFirst, "k", "writes other values over it"),
    (toy_models.TiedInEngine, "embed", "with head"),
    (toy_models.TiedInEngine, "head", "with embed"),
    (toy_models.TiedInPart, "embed", "with head"),
    (toy_models.TiedInPart, "head", "with embed"),
    (toy_models.KeepsReference, "weight", "kept"),
    (toy_models.KeepsCopy, "weight", "kept"),
    (toy_models.ReadsValue, "scale", "fails on a tensor without data"),
    (toy_models.ReadsThroughTemporary, "scale", "fails on a tensor without data"),
    (toy_models.AssignsData, "weight", "fails on a tensor without data"),
    (toy_models.SwapsParameter, "weight", "puts other memory in place of weight"),
]


@pytest.mark.parametrize(
    ("model", "name", "fragment"), REASONS, ids=lambda v: getattr(v, "__name__", v)
)
def test_the_reason_says_what_the_loader_does(
    model: type[ToyModel], name: str, fragment: str
) -> None:
    placed = trace(loaded(model))[name]
    assert placed.status is Status.UNCERTIFIED
    assert fragment in placed.reason


def boxes(placed: Placed) -> list[tuple[Any, ...]]:
    return [
        (s.live.name, s.offset, s.sizes, s.strides, s.source_offset, s.source_strides)
        for s in placed.segments
    ]


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        (toy_models.RowShard, "weight", [("weight", 0, (3, 4), (4, 1), 12, (4, 1))]),
        (toy_models.ColumnShard, "weight", [("weight", 0, (3, 4), (4, 1), 4, (8, 1))]),
        (toy_models.FusedQkv, "v", [("qkv", 40, (2, 4), (4, 1), 0, (4, 1))]),
        (toy_models.StackedExperts, "expert2.up", [("w13", 30, (2, 3), (3, 1), 0, (3, 1))]),
        (toy_models.StackedExperts, "expert1.down", [("w2", 6, (3, 2), (2, 1), 0, (4, 1))]),
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
    """A fill of padding is no reason to refuse the tensor beside it."""
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

    placement = trace_placement(live, loader, live.specs(), StorageIndex(live))
    assert other.tolist() == [1, 1, 1]
    assert all(p.status is Status.UNJUDGED for p in placement.values())


class Slow(torch.Tensor):
    """A tensor whose copy, once begun, ends when it is told to."""

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

    placement = trace_placement(live, loader, live.specs(), StorageIndex(live))
    assert [s.python_copy for p in placement.values() for s in p.segments] == [False, False]


def test_models_are_traced_one_at_a_time() -> None:
    """Ranks may be threads; the original is back whichever of them ends last."""
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


# --- rehearsal ---


def reasons(model: type[ToyModel], names: Iterable[str]) -> dict[str, str]:
    served = serve(model, base_checkpoint(model))
    return rehearse(
        served.model, served.model.load_weights, list(names), served.placement, served.index
    )


def in_and_out_of_company() -> Iterator[tuple[type[ToyModel], str]]:
    for model in every_model():
        for name in model.shapes:
            if name not in model.refused:
                yield model, name


@pytest.mark.parametrize(
    ("model", "name"), list(in_and_out_of_company()), ids=lambda v: getattr(v, "__name__", v)
)
def test_a_rehearsal_tells_whether_the_loader_needs_company(
    model: type[ToyModel], name: str
) -> None:
    needs = model.needs.get(name, frozenset())
    assert set(reasons(model, [name])) == ({name} if needs else set())
    assert reasons(model, {name, *needs}) == {}


@pytest.mark.parametrize(
    ("model", "name", "fragment"),
    [
        (toy_models.PairsTogether, "gate", "differently"),
        (toy_models.FallsBackToEmbedding, "embed", "differently"),
        (toy_models.PairsOrFailure, "gate", "KeyError"),
        (toy_models.WantsAll, "bias", "not loaded"),
        (toy_models.DefaultsWhatIsMissing, "weight", "writes over bias"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_rehearsal_gives_the_reason(model: type[ToyModel], name: str, fragment: str) -> None:
    assert fragment in reasons(model, [name])[name]


# --- what the loader does with one tensor alone ---


class Habits(ToyModel):
    """Writes a tensor to one parameter, to two, to a replaced one, and elsewhere."""

    names = ("plain", "exp", "both", "replaced", "kept", "buffer", "fails", "dropped", "memory")
    shapes: ClassVar = dict.fromkeys(names, (3,))

    def build(self) -> None:
        super().build()
        self.other = parameter(3)
        self.tied = self.plain
        self.others = nn.Parameter(self.memory.data, requires_grad=False)
        self.register_buffer("table", torch.zeros(3))

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        if name == "exp":
            self.exp.data.copy_(-weight.float().exp())
        elif name == "both":
            self.both.data.copy_(weight)
            self.other.data.copy_(weight * 2)
        elif name == "replaced":
            self.replaced = nn.Parameter(weight, requires_grad=False)
        elif name == "kept":
            self.kept.data.copy_(weight)
            self.elsewhere = weight * 2
        elif name == "buffer":
            self.table.copy_(weight)
        elif name == "fails":
            self.fails.data.fill_(float(weight.sum()))
        elif name in ("plain", "memory"):
            self.get_parameter(name).data.copy_(weight)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("exp", {"exp"}),
        ("both", {"both", "other"}),
        ("replaced", {"replaced"}),
        ("kept", set()),
        ("buffer", set()),
        ("fails", set()),
        ("dropped", set()),
        ("plain", {"plain", "tied"}),
        ("memory", set()),
    ],
)
def test_what_is_written_for_one_tensor_alone(name: str, names: set[str]) -> None:
    live = loaded(Habits) if name == "fails" else Habits()
    before, objects = memory(live), identities(live)
    spec = TensorSpec(name, (3,), torch.bfloat16)
    assert written_alone(live, live.load_weights, spec, StorageIndex(live)) == names
    assert memory(live) == before
    assert identities(live) == objects
