"""Reading and digesting in one pass gives what the two passes give."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.format import Digest, change_digest, gather_change, gathered_change
from engine_ext.kernels import AHEAD

pytestmark = pytest.mark.slow

PROPERTY = settings(deadline=None, database=None, max_examples=50)
BACKENDS = pytest.mark.parametrize("compiled", [True, False], ids=["numba", "numpy"])


@BACKENDS
@PROPERTY
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    index=st.sampled_from([np.int32, np.int64]),
    offset=st.sampled_from([np.int32, np.int64]),
    differences=st.booleans(),
    count=st.sampled_from([0, 1, 2, AHEAD - 1, AHEAD, AHEAD + 1, 1500]),
    shift=st.sampled_from([0, 1, 1023, 1024, 70_000]),
    far=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_the_same_as_in_two_passes(
    compiled: bool,
    width: int,
    index: type,
    offset: type,
    differences: bool,
    count: int,
    shift: int,
    far: bool,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    dtype = np.dtype(f"u{width}")
    live = random.integers(0, 1 << 8 * width, 80_000 if far else 4000, dtype=dtype)
    new = random.integers(0, 1 << 8 * width, count, dtype=dtype)
    places = np.sort(random.choice(live.size, count, replace=False))
    if far:  # fewer elements than blocks
        places = places[places % 50 == 0]
        count, new = places.size, new[: places.size]
    sent = new - live[places] if differences else new.copy()
    sent.flags.writeable = False
    indices = (places + shift).astype(index)
    out = np.empty(count, offset), np.empty(count, dtype), np.empty(count, dtype)
    loop = gathered_change._loop if compiled else lambda *widths: None
    before = live.copy()
    with mock.patch.object(gathered_change, "_loop", loop):
        change = gather_change("w", indices, sent, live, shift, out, differences=differences)
    assert out[0].tolist() == places.tolist()
    assert out[1].tolist() == live[places].tolist()
    assert out[2].tolist() == new.tolist()
    assert change == change_digest("w", indices.astype(np.int64), live[places], new)
    assert live.tolist() == before.tolist()


@BACKENDS
def test_values_of_any_alignment_and_stride(compiled: bool) -> None:
    live = np.arange(100, dtype=np.uint16)
    raw = np.arange(9, dtype=np.uint8).tobytes()
    unaligned = np.frombuffer(raw, np.uint16, 4, offset=1)
    strided = np.arange(8, dtype=np.uint16)[::2]
    indices = np.array([3, 4, 50, 99])
    loop = gathered_change._loop if compiled else lambda *widths: None
    for sent in (unaligned, strided):
        out = np.empty(4, np.int32), np.empty(4, np.uint16), np.empty(4, np.uint16)
        with mock.patch.object(gathered_change, "_loop", loop):
            change = gather_change("w", indices, sent, live, 0, out, differences=False)
        assert out[2].tolist() == sent.tolist()
        assert change == change_digest("w", indices, live[indices], out[2])


def test_what_does_not_change_adds_nothing() -> None:
    live = np.arange(2000, dtype=np.uint16)
    indices = np.arange(0, 2000, 3)
    places, old, new = (np.empty(indices.size, kind) for kind in (np.int32, np.uint16, np.uint16))
    out = places, old, new
    same = live[indices]
    assert gather_change("w", indices, same, live, 0, out, differences=False) == Digest.ZERO
