"""The digests of tensors as an array: the same sums as of objects."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.format import Digest
from engine_ext.sync.digest_table import DigestTable, sums_of, total_of
from tests.support.served_models import PROPERTY

LANES = st.integers(0, (1 << 64) - 1)
DIGESTS = st.builds(Digest, LANES, LANES)
NAMES = "abcdef"


@PROPERTY
@given(
    st.dictionaries(st.sampled_from(NAMES), DIGESTS),
    st.lists(st.tuples(st.sampled_from(NAMES), DIGESTS), max_size=8),
)
def test_changes_add_up(held: dict[str, Digest], given: list[tuple[str, Digest]]) -> None:
    """Also several of one tensor; and what was added can be taken away."""
    table = DigestTable(held)
    assert table == held
    assert table.total == Digest.total(held.values())
    changes = [(name, change) for name, change in given if name in held]
    names, sums = [name for name, _ in changes], sums_of(change for _, change in changes)
    expected = dict(held)
    for name, change in changes:
        expected[name] += change
    added = table.plus(table.find(names), sums)
    assert added == expected
    assert added.total == Digest.total(expected.values())
    assert total_of(sums) == Digest.total(change for _, change in changes)
    assert table == held
    assert added.minus(table.find(names), sums) == held


def test_tensors_of_other_ranks_are_not_found() -> None:
    table = DigestTable({"a": Digest(1, 2), "b": Digest(3, 4)})
    assert table.find(["b", "c", "a"]).tolist() == [1, -1, 0]
    assert table.get("c") is None
    assert table.of(np.array([1])).tolist() == [[3, 4]]
