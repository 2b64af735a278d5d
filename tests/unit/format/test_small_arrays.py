"""Small arrays are taken together, up to a number of elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.format.small_arrays import in_groups, joined
from tests.support.independent_encoder import PROPERTY


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([0], [(0, 1)]),
        ([4, 6], [(0, 2)]),
        ([4, 7], [(0, 1), (1, 2)]),
        ([11], [(0, 1)]),
        ([11, 1], [(0, 1), (1, 2)]),
        ([1, 11, 1], [(0, 1), (1, 2), (2, 3)]),
        ([5, 5, 0, 1, 9], [(0, 3), (3, 5)]),
        ([0, 0, 20, 0], [(0, 2), (2, 3), (3, 4)]),
    ],
)
def test_groups_by_hand(sizes: list[int], groups: list[tuple[int, int]]) -> None:
    arrays = [np.empty(size, np.uint8) for size in sizes]
    assert [(group.start, group.stop) for group in in_groups(arrays, 10)] == groups


@PROPERTY
@given(st.lists(st.integers(0, 12), max_size=30))
def test_every_array_is_in_one_group(sizes: list[int]) -> None:
    arrays = [np.full(size, number, np.uint16) for number, size in enumerate(sizes)]
    groups = [arrays[group] for group in in_groups(arrays, 10)]
    assert [id(array) for group in groups for array in group] == [id(array) for array in arrays]
    for group in groups:
        assert joined(group).tolist() == [n for array in group for n in array.tolist()]
        assert len(group) == 1 or sum(array.size for array in group) <= 10
        assert (joined(group) is group[0]) == (len(group) == 1)
