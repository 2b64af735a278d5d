"""The locator against a dictionary of every element, and the holders against sets."""

from __future__ import annotations

from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine_ext.model.storage_index import LiveTensor, StorageIndex
from engine_ext.placement.locator import Locator
from engine_ext.placement.ownership import SourceBox, box_of, boxes, resolve
from engine_ext.placement.segments import (
    Placed,
    Placement,
    Repack,
    Segment,
    Status,
    TensorSpec,
)
from tests.support.served_models import PROPERTY

LIVE = 4096


def live() -> LiveTensor:
    module = nn.Module()
    module.register_buffer("live", torch.zeros(LIVE))
    [entry] = StorageIndex(module).entries
    return entry


ENTRY = live()


def segment(
    sizes: tuple[int, ...],
    source: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    start: int = 0,
    offset: int = 0,
    repack: Repack | None = None,
) -> Segment:
    if strides is None:
        strides = tuple(int(np.prod(sizes[k + 1 :], dtype=int)) for k in range(len(sizes)))
    return Segment(ENTRY, offset, strides, sizes, start, source, True, repack)


def pairs(seg: Segment) -> list[tuple[int, int]]:
    """Return (checkpoint index, live offset) of every element, sorted."""
    found = []
    for position in product(*map(range, seg.sizes)):
        index = seg.source_offset + sum(
            p * s for p, s in zip(position, seg.source_strides, strict=True)
        )
        where = seg.offset + sum(p * s for p, s in zip(position, seg.strides, strict=True))
        if seg.repack is not None:
            block = len(seg.repack.permutation)
            where = where // block * block + int(seg.repack.permutation[where % block])
        found.append((index, where))
    return sorted(found)


def located(seg: Segment, indices: np.ndarray) -> list[tuple[int, int]]:
    chosen, offsets = Locator(seg)(indices)
    assert offsets.dtype == np.int32
    return sorted(zip(indices[chosen].tolist(), offsets.tolist(), strict=True))


def listed(seg: Segment, start: int, stop: int) -> list[tuple[int, int]]:
    """All elements from one index to another, in the order that a device would list them in."""
    locator = Locator(seg)
    found: list[tuple[int, int]] = []
    for copy in range(locator.copies):
        indices, offsets = locator.elements_in(start, stop, torch.device("cpu"), copy)
        assert indices.tolist() == sorted(set(indices.tolist()))
        found += zip(indices.tolist(), offsets.tolist(), strict=True)
    return sorted(found)


def check(seg: Segment, indices: np.ndarray) -> None:
    given_ = set(indices.tolist())
    assert located(seg, indices) == [pair for pair in pairs(seg) if pair[0] in given_]
    if seg.repack is None:
        for start, stop in ((0, LIVE * LIVE), *((i, i + 7) for i in indices[:20].tolist())):
            expected = [pair for pair in pairs(seg) if start <= pair[0] < stop]
            assert listed(seg, start, stop) == expected


PERMUTED = Repack(np.random.default_rng(0).permutation(16).astype(np.int32))
CASES = {
    "scalar": segment((), (), start=5),
    "empty": segment((0, 4), (4, 1)),
    "whole": segment((6, 4), (4, 1)),
    "row shard": segment((3, 4), (4, 1), start=12, offset=7),
    "column shard": segment((3, 4), (8, 1), start=4),
    "every other": segment((3, 4), (16, 2), start=1),
    "transposed": segment((4, 6), (1, 4)),
    "transposed live": segment((6, 4), (4, 1), (1, 9)),
    "broadcast row": segment((3, 4), (0, 1)),
    "broadcast column": segment((3, 4), (1, 0)),
    "broadcast scalar": segment((3, 4), (0, 0), start=2),
    "broadcast shard": segment((2, 3, 4), (8, 0, 1), start=3),
    "repacked": segment((6, 4), (4, 1), offset=5, repack=PERMUTED),
    "repacked column shard": segment((4, 4), (8, 1), start=4, offset=16, repack=PERMUTED),
    "repacked broadcast": segment((3, 4), (0, 1), repack=PERMUTED),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_box(name: str) -> None:
    seg = CASES[name]
    everything = np.arange(64)
    check(seg, everything)
    for some in (everything[::3], everything[1::7], everything[:0], everything[40:]):
        check(seg, some)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Draw strided boxes with a padded live side."""
    dims = draw(st.integers(0, 3))
    sizes = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    source = tuple(draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 12, 16])) for _ in range(dims))
    order = draw(st.permutations(range(dims)))
    step, strides = draw(st.integers(1, 2)), [0] * dims
    for axis in order:
        strides[axis] = step
        step *= sizes[axis] + draw(st.integers(0, 1))
    repack = draw(st.sampled_from([None, PERMUTED]))
    start, offset = draw(st.integers(0, 9)), draw(st.integers(0, 20))
    return segment(sizes, source, tuple(strides), start, offset, repack)


def nested(seg: Segment) -> bool:
    return box_of(seg).nested


@pytest.mark.parametrize("start", [0, 5, 2**31 - 4])
def test_the_range_between_the_ends_is_of_either_width(start: int) -> None:
    """Also if the box ends at 2**31, which no int32 is."""
    locator = Locator(segment((4,), (1,), start=start))
    around = np.arange(max(0, start - 3), min(start + 7, 2**31))
    for chosen in (around, around[::2], around[:0], around[-1:]):
        expected = [index for index in chosen.tolist() if start <= index < start + 4]
        for dtype in (np.int32, np.int64):
            indices = chosen.astype(dtype)
            assert indices[locator.within(indices)].tolist() == expected


@pytest.mark.slow
@PROPERTY
@given(segments().filter(nested), st.sets(st.integers(0, 130)))
def test_located_is_what_counting_finds(seg: Segment, indices: set[int]) -> None:
    check(seg, np.array(sorted(indices), np.int64))
    assert sorted(box_of(seg).indices().tolist()) == sorted({index for index, _ in pairs(seg)})


@PROPERTY
@given(segments(), st.sets(st.integers(0, 130)))
def test_of_a_box_that_does_not_nest_nothing_is_found_elsewhere(
    seg: Segment, indices: set[int]
) -> None:
    """`resolve` refuses it; until then, what the locator finds in it must be right."""
    assert set(located(seg, np.array(sorted(indices), np.int64))) <= set(pairs(seg))


@pytest.mark.slow
@PROPERTY
@given(segments().filter(nested), st.sets(st.integers(0, 130)))
def test_numpy_finds_the_same_as_numba(seg: Segment, indices: set[int]) -> None:
    ascending = np.array(sorted(indices), np.int64)
    compiled = located(seg, ascending)
    with mock.patch("engine_ext.placement.locator._compiled", return_value=None):
        assert located(seg, ascending) == compiled


def test_a_run_is_where_indices_are_offsets_but_for_a_shift() -> None:
    runs = {name for name, seg in CASES.items() if Locator(seg).shift is not None}
    assert runs == {"scalar", "empty", "whole", "row shard"}
    for name in runs:
        seg, everything = CASES[name], np.arange(64)
        locator = Locator(seg)
        found = everything[locator.within(everything)]
        assert [(i, i - locator.shift) for i in found.tolist()] == pairs(seg)


@PROPERTY
@given(segments().filter(nested))
def test_copies_of_one_element_stand_together(seg: Segment) -> None:
    """Staging takes one of every `copies` consecutive elements."""
    locator = Locator(seg)
    chosen, offsets = locator(np.arange(140))
    found = np.arange(140)[chosen].reshape(-1, locator.copies)
    assert (found == found[:, :1]).all()
    assert len(np.unique(found[:, 0])) == len(found)
    assert offsets.size == found.size


# --- holders ---


def placement(numel: int, *held: Segment, status: Status = Status.EXACT) -> Placement:
    return {"w": Placed(TensorSpec("w", (numel,), torch.float32), list(held), status)}


def judge(numel: int, *ranks: list[Segment]) -> tuple[Placed, dict[SourceBox, tuple[int, ...]]]:
    """Resolve all ranks' segments on rank 0; every rank must get the same result."""
    placements = [placement(numel, *held) for held in ranks]
    shared = [boxes(p) for p in placements]
    found = [resolve(p, shared) for p in placements]
    assert all(f == found[0] for f in found)
    assert len({(p["w"].status, p["w"].reason) for p in placements}) == 1
    return placements[0]["w"], found[0]["w"]


TOP, BOTTOM = segment((3, 4), (4, 1)), segment((3, 4), (4, 1), start=12)
LEFT, RIGHT = segment((6, 2), (4, 1)), segment((6, 2), (4, 1), start=2)
WHOLE = segment((6, 4), (4, 1))


def test_equal_boxes_are_held_together() -> None:
    placed, found = judge(24, [WHOLE], [segment((4, 6), (1, 4))], [WHOLE])
    assert placed.status is Status.EXACT
    assert found == {box_of(WHOLE): (0, 1, 2)}


@pytest.mark.parametrize(("one", "other"), [(TOP, BOTTOM), (LEFT, RIGHT)], ids=["rows", "columns"])
def test_disjoint_boxes_have_a_holder_each(one: Segment, other: Segment) -> None:
    placed, found = judge(24, [one], [other], [one], [])
    assert placed.status is Status.EXACT
    assert found == {box_of(one): (0, 2), box_of(other): (1,)}


@pytest.mark.parametrize(
    "ranks",
    [[[WHOLE], [TOP]], [[TOP, BOTTOM], [LEFT, RIGHT]], [[WHOLE, TOP]], [[TOP], [LEFT]]],
    ids=["inside", "crossed", "on one rank", "crossed in part"],
)
def test_boxes_that_overlap_in_part_are_refused(ranks: list[list[Segment]]) -> None:
    placed, _ = judge(24, *ranks)
    assert placed.status is Status.UNCERTIFIED
    assert "overlap" in placed.reason


@pytest.mark.parametrize("ranks", [[[TOP]], [[LEFT], [LEFT]], [[], [BOTTOM]]])
def test_elements_on_no_rank_are_refused(ranks: list[list[Segment]]) -> None:
    placed, _ = judge(24, *ranks)
    assert (placed.status, placed.reason[:2]) == (Status.UNCERTIFIED, "12")


def test_a_tensor_that_nobody_holds_is_left_to_others() -> None:
    assert judge(24, [], [])[0].status is Status.EXACT


@pytest.mark.slow
@PROPERTY
@given(st.lists(st.lists(segments().filter(nested), max_size=2), min_size=1, max_size=3))
def test_resolved_is_what_sets_say(ranks: list[list[Segment]]) -> None:
    """Certified if and only if different boxes are disjoint and nothing is missing."""
    found = {box_of(s) for held in ranks for s in held}
    elements = {
        box: {i for i, _ in pairs(s)} for held in ranks for s in held for box in [box_of(s)]
    }
    numel = len(set().union(*elements.values())) if found else 1
    disjoint = sum(map(len, elements.values())) == numel
    placed, holders = judge(numel, *ranks)
    assert (placed.status is Status.EXACT) == (disjoint or not found)
    assert holders == {
        box: tuple(r for r, held in enumerate(ranks) if box in map(box_of, held)) for box in found
    }
    if found:
        assert judge(numel + 1, *ranks)[0].status is Status.UNCERTIFIED
