"""Many tensors compared in one call have the same result as one call for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from delta_sender.diff import compare as diff_host
from delta_sender.diff.compare import Difference, compare, compare_batch
from engine_ext.kernels.gather_scatter import signed
from tests.support.served_models import PROPERTY

pytestmark = pytest.mark.slow


def same(one: Difference, other: Difference) -> bool:
    pairs = [(one.indices, other.indices), (one.old, other.old), (one.new, other.new)]
    if one.stream is not None and other.stream is not None:
        pairs.append((one.stream, other.stream))
    equal = [a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs]
    return (
        all(equal) and one.change == other.change and (one.stream is None) == (other.stream is None)
    )


def tensors_of(*pairs: tuple[Any, Any, str | None]) -> list[diff_host.Pair]:
    return [(signed(old), signed(new), name) for old, new, name in pairs]


@PROPERTY
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    tensors=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 31, 32, 33, 500, 3000]),
            st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    streams=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_finds_what_a_call_for_each_does(
    width: int, tensors: list[tuple[int, float, bool]], streams: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    pairs: list[Any] = []
    for number, (size, density, named) in enumerate(tensors):
        old = random.integers(0, 256, size * width, np.uint8).view(f"u{width}")
        new = old.copy()
        chosen = random.random(size) < density
        new[chosen] ^= np.array(1 << random.integers(0, 8 * width), new.dtype)
        pairs.append((old, new, f"größe.{number}" if named else None))
    found = compare_batch(tensors_of(*pairs), streams=streams)
    assert found is not None
    for one, pair in zip(found, pairs, strict=True):
        assert same(one, compare(*pair, streams=streams))


def test_what_is_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of odd addresses, and no numba."""
    words, odd = np.zeros(9, np.uint16), np.zeros(19, np.uint8)[1:].view(np.uint16)
    assert compare_batch(tensors_of((odd, words, "a")), streams=True) is None
    assert compare_batch(tensors_of((words, words, "a"), (words, odd, "b")), streams=True) is None
    assert compare_batch(tensors_of((words, words, "a")), streams=True) is not None
    monkeypatch.setattr(diff_host, "batch_loop_of", lambda width: None)
    assert compare_batch(tensors_of((words, words, "a")), streams=True) is None


def test_the_results_are_kept_when_the_next_batch_is_compared() -> None:
    old = np.zeros(100, np.uint16)
    new = old + np.arange(100, dtype=np.uint16)
    [first] = compare_batch(tensors_of((old, new, "a")), streams=True) or []
    kept = [part.tolist() for part in (first.indices, first.old, first.new)]
    compare_batch(tensors_of(*[(new, old, "a")] * 3), streams=True)
    assert [part.tolist() for part in (first.indices, first.old, first.new)] == kept


def test_memory_that_was_freed_is_not_read() -> None:
    tensor = torch.zeros(9)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        compare_batch([(torch.zeros(9), tensor, "a")], streams=True)
    assert compare_batch([(torch.zeros(0), torch.zeros(0), "a")], streams=True) is not None
