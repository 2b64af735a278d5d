"""Shards as boxes: local indices become the tensor's, and shards rebuild it without overlap."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from delta_sender.sharded.box import Box, box_digest
from delta_sender.sharded.ownership import Held, Ownership
from engine_ext.format import tensor_digest

pytestmark = pytest.mark.slow

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def boxes(draw: Any) -> Box:
    shape = draw(SHAPES)
    slices = []
    for size in shape:
        start = draw(st.integers(0, size))
        slices.append(slice(start, draw(st.integers(start, size))))
    return Box.of(shape, slices)


@settings(deadline=None)
@given(boxes())
def test_local_indices_become_the_tensors(box: Box) -> None:
    numbers = np.arange(math.prod(box.shape)).reshape(box.shape)
    wanted = numbers[box.slices].reshape(-1)
    found = box.to_global(np.arange(box.numel, dtype=np.int32))
    assert found.dtype == np.int64
    assert np.array_equal(found, wanted)
    if box.numel:
        assert box.start == wanted[0]
        assert box.is_run == bool(np.all(np.diff(wanted) == 1))


@settings(deadline=None)
@given(boxes())
def test_the_digest_of_a_box_is_that_of_its_elements(box: Box) -> None:
    values = np.arange(box.numel).astype(np.uint16)
    where = box.to_global(np.arange(box.numel))
    assert box_digest("w", values, box) == tensor_digest("w", values, where)


def test_a_scalar_is_a_box() -> None:
    box = Box.whole(())
    assert (box.numel, box.is_whole, box.is_run, box.start) == (1, True, True, 0)
    assert box.to_global(np.array([0])).tolist() == [0]


def test_rows_of_a_large_tensor_need_wide_indices() -> None:
    box = Box.of((1 << 20, 1 << 12), (slice(1 << 19, (1 << 19) + 1), slice(None)))
    assert box.to_global(np.array([5], np.int32)).tolist() == [(1 << 31) + 5]


@pytest.mark.parametrize(
    "slices", [(slice(0, 2),), (slice(0, 5), slice(None)), (slice(0, 4, 2), slice(None))]
)
def test_other_slices_are_refused(slices: tuple[slice, ...]) -> None:
    with pytest.raises(ValueError, match="slice"):
        Box.of((4, 3), slices)


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], list[Box | None]]:
    """Return a tensor's shape and the boxes of the ranks of a mesh, in rank order."""
    shape = draw(SHAPES)
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    placements: list[Any] = []
    for _ in mesh:
        kind = draw(st.sampled_from(["replicate", "shard"]))
        dim = draw(st.integers(0, len(shape) - 1))
        placements.append(Shard(dim) if kind == "shard" else Replicate())
    if draw(st.booleans()):
        # As FSDP2 over tensor parallelism: outer mesh dimensions divide what inner ones have.
        for at, one in enumerate(placements):
            inner = [n for n, p in zip(mesh, placements, strict=True) if p == one][1:]
            if isinstance(one, Shard) and placements.index(one) == at and inner:
                placements[at] = _StridedShard(one.dim, split_factor=math.prod(inner))
    found: list[Box | None] = []
    for where in np.ndindex(*mesh):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh, list(where), placements
        )
        box = Box(shape, tuple(offsets), tuple(sizes))
        found.append(box if box.numel else None)
    return shape, found


def held(name: str, box: Box) -> Held:
    return Held(name, "bfloat16", box.shape, box.offsets, box.sizes)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_shards_of_any_placement_rebuild_the_tensor_once(
    layout: tuple[tuple[int, ...], list[Box | None]],
) -> None:
    shape, ranks = layout
    values = np.arange(math.prod(shape), dtype=np.uint16)
    ownership = Ownership([[held("w", box)] if box is not None else [] for box in ranks])
    found = np.zeros_like(values)
    times = np.zeros(values.size, int)
    for rank, box in enumerate(ranks):
        own = ownership.of_rank(rank).get("w")
        assert own in (None, box)
        if own is not None:
            where = own.to_global(np.arange(own.numel))
            found[where] = values.reshape(shape)[own.slices].reshape(-1)
            times[where] += 1
    assert np.array_equal(found, values)
    assert np.all(times == 1)
    assert ownership["w"].assembler in {rank for _, rank in ownership["w"].owners}
