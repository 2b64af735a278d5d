"""Loaders that move elements about before they copy them: followed exactly, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine_ext.conformance.toy_models import ToyModel, Weights, parameter
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.certify import holds
from engine_ext.placement.segments import Placement, Repack, Status, TensorSpec
from engine_ext.startup import LoaderDryRun
from engine_ext.startup.permuted.infer import compose
from engine_ext.startup.trace import index_replay, recorder, strided_boxes
from engine_ext.startup.trace.permutations import find_permutation
from engine_ext.startup.trace.strided_boxes import ElementIds, find_boxes
from tests.support.served_models import (
    APPLIES,
    PROPERTY,
    attempt,
    base_checkpoint,
    delta_between,
    load,
    make_applier,
    memory,
    parts_of,
    random_tensor,
    serve,
    target_checkpoint,
)
from tests.support.toy_loaders import MOVING, NOT_MOVING, PickedByLayer, Reversed


def trace(live: ToyModel) -> Placement:
    return LoaderDryRun(live, live.load_weights, StorageIndex(live)).trace(live.specs())


# --- habits ---


@pytest.mark.parametrize("model", MOVING, ids=lambda m: m.__name__)
def test_applied_is_freshly_loaded(model: type[ToyModel]) -> None:
    base = base_checkpoint(model)
    served = serve(model, base)
    assert {p.status for p in served.placement.values()} == {Status.EXACT}
    chosen = [*([n] for n in model.shapes), list(model.shapes)]
    for seed, (apply, names) in enumerate(itertools.product(APPLIES, chosen)):
        plan = served.applier.plan
        served.applier = make_applier(served.model, served.index, plan, apply=apply)
        target = target_checkpoint(base, names, 10 * seed)
        refusal = attempt(served, parts_of([delta_between(n, base[n], target[n]) for n in names]))
        alone = any(not model.needs.get(n, frozenset()) <= set(names) for n in names)
        if apply == "masked" and (alone or model.dense_only):
            assert refusal is not None, names
            continue
        assert refusal is None, (apply, names)
        assert memory(served.model) == memory(load(model, target)), (apply, names)
        base = target


@pytest.mark.parametrize(("model", "fragment"), NOT_MOVING, ids=lambda v: getattr(v, "__name__", v))
def test_what_does_more_than_move_is_refused(model: type[ToyModel], fragment: str) -> None:
    served = serve(model, base_checkpoint(model))
    for name, placed in served.placement.items():
        assert (placed.status is Status.UNCERTIFIED) == (name in model.refused)
    assert fragment in served.placement["weight"].reason


def test_few_segments_say_what_strides_can() -> None:
    """And tracing leaves the models alone."""
    found = {}
    for model in MOVING:
        live = load(model, base_checkpoint(model))
        bits, placement = memory(live), trace(live)
        assert memory(live) == bits, model
        found[model.__name__] = max(len(p.segments) for p in placement.values())
    assert found.pop("Reversed") == 5
    assert found.pop("ReversedInPart") == 7
    assert found.pop("Picked") == found.pop("PickedByLayer") == 3
    assert found.pop("FilledTemporary") == found.pop("FilledOnItsDevice") == 2
    assert set(found.values()) == {1}


def test_an_order_without_strides_is_a_repack() -> None:
    placement = trace(load(Reversed, base_checkpoint(Reversed)))
    [rows], [columns] = placement["many"].segments, placement["columns"].segments
    assert rows.repack is not None
    assert columns.repack is not None
    assert (rows.repack.block, columns.repack.block) == (600, 70)


def test_a_learned_repack_follows_the_loaders_own() -> None:
    """The engine turns pairs around in what the loader has reversed."""
    base = base_checkpoint(Reversed)
    live = load(Reversed, base)
    placement = trace(live)
    live.many.data.copy_(live.many.data.flip(1))
    compose(placement, {"many": Repack(np.array([1, 0], np.int32))})
    [segment] = placement["many"].segments
    assert segment.repack is not None
    assert segment.repack.block == 600
    assert holds(segment, base["many"])
    assert not holds(segment, base["many"].flip(0))


def test_what_takes_too_many_segments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(ToyModel):
        shapes: ClassVar = {"weight": (50, 2)}

        def build(self) -> None:
            self.weight = nn.Parameter(torch.zeros(100, 2, dtype=torch.bfloat16)[::2])

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            self.weight.data.copy_(weight.flip(0))

    monkeypatch.setattr(recorder, "_MANY_SEGMENTS", 4)
    monkeypatch.setattr(recorder, "_MOST_SEGMENTS", 49)
    placed = trace(load(Mixed, base_checkpoint(Mixed)))["weight"]
    assert "more than 49 segments" in placed.reason
    monkeypatch.setattr(recorder, "_MOST_SEGMENTS", 50)
    assert len(trace(load(Mixed, base_checkpoint(Mixed)))["weight"].segments) == 50


def test_layers_that_are_alike_are_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(ToyModel):
        shapes: ClassVar = {f"layer{n}": (4, 3) for n in range(5)}

        def build(self) -> None:
            for name in self.shapes:
                setattr(self, name, parameter(3, 4))

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            getattr(self, name).copy_(weight.t().contiguous())

    replays = []
    replayed = index_replay.Provenance.replay

    def counted(provenance: index_replay.Provenance) -> Any:
        replays.append(provenance.sources)
        return replayed(provenance)

    monkeypatch.setattr(index_replay.Provenance, "replay", counted)
    placement = trace(load(Layers, base_checkpoint(Layers)))
    assert replays == [["layer0"]]
    assert [p.segments[0].live.name for p in placement.values()] == list(Layers.shapes)
    # A large index is not compared, and so each of its moves is replayed.
    monkeypatch.setattr(index_replay, "_MAX_COMPARED", 4)
    replays.clear()
    trace(load(PickedByLayer, base_checkpoint(PickedByLayer)))
    assert len(replays) == 3


def test_what_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_replay, "_MAX_BYTES", 100)
    placed = trace(load(Reversed, base_checkpoint(Reversed)))["many"]
    assert "too many elements to be followed" in placed.reason


# --- any chain of moves ---

Move = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))


def dim_of(tensor: torch.Tensor, number: int) -> int:
    return number % max(1, tensor.dim())


def filled(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Both tensors in memory of its own, with a gap."""
    memory = torch.zeros(one.numel() + other.numel() + 1, dtype=one.dtype)
    memory[: one.numel()].copy_(one.reshape(-1))
    memory[one.numel() + 1 :] = other.reshape(-1)
    return memory


def overwritten(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A part of a temporary is written again, and another part is cleared."""
    memory = one.clone(memory_format=torch.contiguous_format)
    flat = memory.view(-1)
    flat[: other.numel()].copy_(other.reshape(-1)[: flat.numel()])
    flat[-1:].zero_()
    return memory


def picked(one: torch.Tensor, seed: int, dim: int) -> torch.Tensor:
    if one.numel() == 0:
        return one
    order = torch.randint(0, one.shape[dim], (3,), generator=torch.Generator().manual_seed(seed))
    return one.index_select(dim, order)


@st.composite
def chains(draw: st.DrawFn) -> list[Move]:
    def move(kind: int, a: int, b: int) -> Move:
        kinds: list[Move] = [
            lambda x, y: x.clone(),
            lambda x, y: x.transpose(dim_of(x, a), dim_of(x, b)).contiguous(),
            lambda x, y: x.transpose(dim_of(x, a), dim_of(x, b)),
            lambda x, y: x.flip(dim_of(x, a)),
            lambda x, y: x.roll(b, dim_of(x, a)),
            lambda x, y: x.roll(b),
            lambda x, y: x.repeat_interleave(1 + b % 2, dim_of(x, a)),
            lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
            lambda x, y: torch.stack([x, x.flip(0)], dim_of(x, a)),
            lambda x, y: nn.functional.pad(x, (a % 2, b % 3)),
            lambda x, y: picked(x, a, dim_of(x, b)),
            lambda x, y: x[x.shape[0] // 2 :].clone(),
            lambda x, y: x.reshape(-1)[a % 2 :: 1 + b % 2],
            lambda x, y: x.to(torch.int64).flip(0),
            lambda x, y: x.expand(2, *x.shape).reshape(-1),
            lambda x, y: x.repeat(2, *(1,) * (x.dim() - 1)),
            lambda x, y: x.chunk(2)[-1].contiguous(),
            filled,
            overwritten,
        ]
        return kinds[kind % len(kinds)]

    numbers = st.integers(0, 18)
    return [
        move(*draw(st.tuples(numbers, numbers, numbers))) for _ in range(draw(st.integers(1, 5)))
    ]


class Chain(ToyModel):
    """Sends two tensors through a chain of moves, and what comes out to one parameter."""

    moves: ClassVar[Sequence[Move]]

    def run(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        for number, move in enumerate(self.moves):
            one = move(one, other)
            if one.numel() > 600:
                one = one.reshape(-1)[:600]
            if number % 2:
                other = one.reshape(-1)[:7]
        return one

    def build(self) -> None:
        one, other = (torch.zeros(s, dtype=torch.int32) for s in self.shapes.values())
        self.live = nn.Parameter(
            self.run(one, other).to(torch.int32, copy=True).contiguous(), requires_grad=False
        )

    def load_weights(self, weights: Weights) -> None:
        held = dict(weights)
        self.live.copy_(self.run(held["one"], held["other"]))


@pytest.mark.slow
@pytest.mark.parametrize("most", [(64, 1024), (2, 4)], ids=["ample", "scarce"])
@PROPERTY
@given(chain=chains(), one=shapes(), other=shapes())
def test_a_placement_is_what_loading_does(
    most: tuple[int, int], chain: list[Move], one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Every element of live memory is where the placement says, and no other one is."""

    class Model(Chain):
        shapes: ClassVar = {"one": one, "other": other}
        dtypes: ClassVar = {"one": torch.int32, "other": torch.int32}
        moves: ClassVar = chain

    live = Model()
    placement = trace_with(live, most)
    count = torch.Size(one).numel()
    checkpoint = {
        "one": torch.arange(1, 1 + count, dtype=torch.int32).view(one),
        "other": torch.arange(1000, 1000 + torch.Size(other).numel(), dtype=torch.int32).view(
            other
        ),
    }
    live.load_weights(checkpoint.items())
    refused = [p for p in placement.values() if p.status is Status.UNCERTIFIED]
    if refused:
        assert most == (2, 4)
        return
    covered = torch.zeros(live.live.numel(), dtype=torch.int32)
    for name, placed in placement.items():
        for segment in placed.segments:
            assert holds(segment, checkpoint[name])
            covered.as_strided(segment.sizes, segment.strides, segment.offset).add_(1)
    assert torch.equal(covered, (live.live.view(-1) != 0).to(torch.int32))


def trace_with(live: ToyModel, most: tuple[int, int]) -> Placement:
    with mock.patch.multiple(recorder, _MANY_SEGMENTS=most[0], _MOST_SEGMENTS=most[1]):
        return trace(live)


# --- boxes of numbers ---


STARTS = [1, 9, 30, 60]


@st.composite
def arrays(draw: st.DrawFn) -> ElementIds:
    """Small arrays, mostly of long strides, with few different numbers."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    step = draw(st.integers(0, 3))
    values = (torch.arange(torch.Size(shape).numel()) * step).view(shape) % 29 + draw(
        st.integers(0, 9)
    )
    for _ in range(draw(st.integers(0, 3))):
        values.view(-1)[draw(st.integers(0, values.numel() - 1)) :] += draw(st.integers(0, 5))
    return ElementIds(values.clamp(max=59).to(torch.int32), STARTS)


@pytest.mark.parametrize("chunk", [1 << 22, 3])
@PROPERTY
@given(numbers=arrays(), permuted=st.booleans())
def test_boxes_are_the_array(chunk: int, numbers: ElementIds, permuted: bool) -> None:
    if permuted:
        numbers = ElementIds(
            numbers.values.permute(list(range(numbers.values.dim()))[::-1]), STARTS
        )
    with mock.patch.object(strided_boxes, "_CHUNK", chunk):
        found = find_boxes(numbers, 2, numbers.values.stride(), 1000)
    assert found is not None
    memory = torch.full((numbers.values.numel() + 2,), -1, dtype=torch.int32)
    for box in found:
        assert min(box.steps, default=0) >= 0
        assert numbers.source(box.first) == numbers.source(box.last)
        view = memory.as_strided(box.sizes, box.strides, box.offset)
        assert bool((view == -1).all())
        source = torch.arange(box.last + 1, dtype=torch.int32)
        view.copy_(source.as_strided(box.sizes, box.steps, box.first))
    read = memory.as_strided(numbers.values.shape, numbers.values.stride(), 2)
    assert torch.equal(read, numbers.values)
    if len(found) > 1:
        fewer = find_boxes(numbers, 2, numbers.values.stride(), len(found) - 1)
        assert fewer is None or len(fewer) < len(found)


@PROPERTY
@given(order=st.permutations(range(12)), missing=st.booleans())
def test_a_shuffle_is_found(order: list[int], missing: bool) -> None:
    values = torch.tensor(order, dtype=torch.int32).view(3, 4) + 5
    if missing:
        values[0, 0] = values[2, 3]
    found = find_permutation(ElementIds(values.t(), [5, 17]), (1, 4))
    if missing:
        assert found is None
        return
    assert found is not None
    first, places = found
    assert first == 5
    assert torch.equal(
        values.reshape(-1)[torch.from_numpy(places).long()], torch.arange(5, 17).int()
    )
    assert find_permutation(ElementIds(values, [5, 11, 17]), (4, 1)) is None
    assert find_permutation(ElementIds(values, [5, 17]), (5, 1)) is None


def test_a_large_transpose_takes_no_time_and_no_pieces() -> None:
    """One element number per element, twice, and a comparison in small pieces."""
    spec = TensorSpec("weight", (1000, 3000), torch.bfloat16)

    class Large(ToyModel):
        shapes: ClassVar = {"weight": spec.shape}

        def build(self) -> None:
            self.weight = nn.Parameter(torch.zeros(3000, 1000, dtype=torch.bfloat16))

        def load_one(self, name: str, weight: torch.Tensor) -> None:
            self.weight.data.copy_(weight.t().contiguous())

    live = Large()
    live.load_weights([("weight", random_tensor(spec.shape, spec.dtype, 0))])
    assert len(trace(live)["weight"].segments) == 1
