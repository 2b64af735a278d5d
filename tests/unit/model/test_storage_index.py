from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine_ext.conformance.toy_models import (
    PlainCopy,
    StridedParameter,
    Tied,
    TiedInPart,
    every_model,
    parameter,
)
from engine_ext.model.storage_index import StorageIndex, extent
from tests.support.served_models import PROPERTY


class Slices(nn.Module):
    """Parameters that are slices of one piece of memory; they can overlap."""

    def __init__(self, memory: torch.Tensor, slices: list[tuple[int, int]]) -> None:
        super().__init__()
        for number, (start, length) in enumerate(slices):
            view = memory[start : start + length]
            self.register_parameter(f"p{number}", nn.Parameter(view, requires_grad=False))


SLICES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=8)


@PROPERTY
@given(slices=SLICES, start=st.integers(0, 40), length=st.integers(1, 12))
def test_lookups_find_what_a_full_comparison_does(
    slices: list[tuple[int, int]], start: int, length: int
) -> None:
    memory = torch.zeros(64)
    index = StorageIndex(Slices(memory, slices))
    view = memory[start : start + length]
    first, last = view.data_ptr(), view.data_ptr() + 4 * length
    holding = [e.name for e in index.entries if e.start <= first and last <= e.end]
    assert [e.name for e in index.holding(view)] == holding[::-1]
    common = [e.name for e in index.entries if e.start < last and first < e.end]
    assert [e.name for e in index.overlapping(view)] == common


@pytest.mark.parametrize("model", every_model(), ids=lambda m: m.__name__)
def test_every_live_tensor_finds_itself(model: type[nn.Module]) -> None:
    live = model()
    index = StorageIndex(live)
    for name, tensor in [*live.named_parameters(), *live.named_buffers()]:
        found = index.find(tensor)
        assert found is not None
        assert name in (found.name, *found.aliases)
        assert index.by_name[found.name] is found


@pytest.mark.parametrize(
    "view",
    [
        lambda p: p[2],
        lambda p: p[:, 1:3],
        lambda p: p[1:3, ::2],
        lambda p: p.t(),
        lambda p: p.view(-1)[5:6],
        lambda p: p.view(torch.uint8)[:, 3:],
        lambda p: p[3, 2],
        lambda p: p.detach().unfold(0, 2, 1),
    ],
)
def test_views_are_attributed(view: object) -> None:
    live = PlainCopy()
    found = StorageIndex(live).find(view(live.weight))  # type: ignore[operator]
    assert found is not None
    assert found.name == "weight"


@pytest.mark.parametrize(
    "other",
    [
        lambda p: p.clone(),
        lambda p: torch.empty(0),
        lambda p: p[:0],
        lambda p: p.to("meta"),
        lambda p: p.detach().as_strided((2,), (1,), 6),
    ],
    ids=["copy", "empty", "empty view", "meta", "reaches beyond"],
)
def test_other_tensors_are_not_live(other: object) -> None:
    """The last one starts in a live tensor, but its last element is in nobody's memory."""
    memory = torch.zeros(8)
    live = Slices(memory, [(0, 7)])
    assert StorageIndex(live).find(other(live.p0)) is None  # type: ignore[operator]


def test_memory_in_the_gaps_of_a_strided_parameter() -> None:
    live = StridedParameter()
    index = StorageIndex(live)
    [entry] = [e for e in index.entries if e.name == "weight"]
    assert extent(live.weight) == 33  # 4 rows of 9, the view has 6 columns
    assert entry.flat().shape == (33,)
    assert entry.flat().data_ptr() == live.weight.data_ptr()


def test_tied_weights_are_one_entry() -> None:
    index = StorageIndex(Tied())
    [entry] = [e for e in index.entries if e.tensor.numel() == 20]
    assert (entry.name, entry.aliases) == ("embed", ["head"])


def test_of_nested_memory_the_innermost_is_found() -> None:
    live = TiedInPart()
    index = StorageIndex(live)
    found = [index.find(live.embed[part]) for part in (1, slice(2), 4)]
    assert [one and one.name for one in found] == ["head", "embed", "embed"]


def test_of_two_that_start_together_the_shorter_is_found() -> None:
    memory = torch.zeros(8)
    index = StorageIndex(Slices(memory, [(0, 8), (0, 3), (0, 5)]))
    found = [index.find(memory[:length]) for length in (1, 3, 4, 6, 8)]
    assert [entry and entry.name for entry in found] == ["p1", "p1", "p2", "p0", "p0"]


@PROPERTY
@given(
    slices=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 64)), min_size=1, max_size=6),
    queries=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 64)), max_size=12),
)
def test_find_against_a_search_through_all(
    slices: list[tuple[int, int]], queries: list[tuple[int, int]]
) -> None:
    memory = torch.zeros(64, dtype=torch.bfloat16)
    ranges = [(start, min(start + length, 64)) for start, length in slices]
    index = StorageIndex(Slices(memory, [(start, end - start) for start, end in ranges]))
    for start, length in queries:
        view = memory[start : start + length]
        holders = [
            (a, b) for a, b in ranges if view.numel() and a <= start and start + len(view) <= b
        ]
        found = index.find(view)
        if found is None:
            assert not holders
        else:
            first = (found.start - memory.data_ptr()) // 2
            assert (first, first + len(found.tensor)) in holders


def replace(live: PlainCopy) -> None:
    live.weight = parameter(6, 4)


def move(live: PlainCopy) -> None:
    live.weight.data = live.weight.data.clone()


def release(live: PlainCopy) -> None:
    live.weight.untyped_storage().resize_(0)


def drop(live: Any) -> None:
    live.weight = None


@pytest.mark.parametrize("change", [replace, move, release, drop])
def test_moved_names_what_moved(change: object) -> None:
    live = PlainCopy()
    index = StorageIndex(live)
    keep = live.weight.data  # so that its address is not given to the next one
    assert index.moved(live) == []
    change(live)  # type: ignore[operator]
    assert index.moved(live) == ["weight"]
    del keep


def test_moved_names_what_is_new() -> None:
    live = PlainCopy()
    index = StorageIndex(live)
    live.extra = parameter(3)
    assert index.moved(live) == ["extra"]


@pytest.mark.parametrize("before", [None, torch.empty(0), torch.empty(3, device="meta")])
def test_moved_names_what_comes_to_have_memory(before: torch.Tensor | None) -> None:
    live = PlainCopy()
    live.register_buffer("late", before)
    index = StorageIndex(live)
    assert index.moved(live) == []
    live.late = torch.ones(3)
    assert index.moved(live) == ["late"]


def test_moved_looks_below_a_module_that_was_replaced() -> None:
    live = PlainCopy()
    live.block = PlainCopy()
    index = StorageIndex(live)
    old, live.block = live.block, PlainCopy()
    assert "block.weight" in index.moved(live)
    live.block = old
    assert index.moved(live) == []


def test_writing_does_not_move() -> None:
    live = PlainCopy()
    index = StorageIndex(live)
    live.weight.data.fill_(3)
    assert index.moved(live) == []


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((), (), 1),
        ((3, 4), (4, 1), 12),
        ((3, 4), (9, 1), 22),
        ((0, 4), (4, 1), 0),
        ((2, 3), (0, 1), 3),
    ],
)
def test_extent(shape: tuple[int, ...], stride: tuple[int, ...], expected: int) -> None:
    assert extent(torch.zeros(64).as_strided(shape, stride)) == expected
