"""The boxes of the ranks' segments: they must be equal or disjoint, and cover the tensor."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.ownership import boxes, resolve
from engine_ext.placement.segments import Placed, Segment, TensorSpec


def placed(*runs: tuple[int, int, int]) -> Placed:
    """Return a tensor that a rank holds in runs, each given by begin, elements and stride."""
    module = nn.Module()
    module.register_buffer("live", torch.zeros(sum(size for _, size, _ in runs)))
    [live] = StorageIndex(module).entries
    segments, at = [], 0
    for begin, size, stride in runs:
        segments.append(Segment(live, at, (1,), (size,), begin, (stride,), True))
        at += size
    return Placed(TensorSpec("w", (at,), torch.float32), segments)


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([(0, 4, 1), (4, 4, 1)], ""),
        ([(0, 4, 2), (1, 4, 2)], ""),
        ([(0, 2, 7), (1, 6, 1)], ""),
        ([(0, 8, 1), (6, 2, 1)], "overlap"),
        ([(0, 8, 1), (1, 1, 1), (7, 2, 1)], "overlap"),
        ([(0, 4, 2), (2, 4, 2)], "overlap"),
        ([(0, 2, 1), (6, 2, 1), (1, 6, 1)], "overlap"),
        ([(0, 4, 1)] * 2, "on no rank"),
    ],
)
def test_boxes_are_disjoint_and_cover_the_tensor(
    runs: list[tuple[int, int, int]], reason: str
) -> None:
    tensor = placed(*runs)
    resolve({"w": tensor}, [boxes({"w": tensor})])
    assert reason in tensor.reason
    assert bool(tensor.reason) == bool(reason)


def test_many_boxes_of_one_tensor_take_little_time() -> None:
    tensor = placed(*((3 * number, 3, 1) for number in range(4000)))
    begin = time.perf_counter()
    [held] = resolve({"w": tensor}, [boxes({"w": tensor})]).values()
    assert time.perf_counter() - begin < 2
    assert (len(held), tensor.reason) == (4000, "")
