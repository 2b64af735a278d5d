"""Comparing and digesting in one pass gives what the two passes give."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.format import compared_digest, digest_if_equal, tensor_digest

pytestmark = pytest.mark.slow

PROPERTY = settings(deadline=None, database=None, max_examples=50)
BACKENDS = pytest.mark.parametrize("compiled", [True, False], ids=["numba", "numpy"])


@BACKENDS
@PROPERTY
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    count=st.sampled_from([0, 1, 1023, 1024, 1025, 3000]),
    start=st.sampled_from([0, 1, 1023, 1024, 70_000]),
    unaligned=st.booleans(),
    seed=st.integers(0, 1 << 20),
    data=st.data(),
)
def test_the_same_as_in_two_passes(
    compiled: bool,
    width: int,
    count: int,
    start: int,
    unaligned: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, 1 << 8 * width, count, dtype=f"u{width}")
    memory = np.empty(values.nbytes + 1, np.uint8)
    expected = memory[unaligned : values.nbytes + unaligned].view(values.dtype)
    expected[:] = values
    expected.flags.writeable = False
    loop = compared_digest._loop if compiled else lambda width: None
    with mock.patch.object(compared_digest, "_loop", loop):
        assert digest_if_equal("w", values, expected, start) == tensor_digest(
            "w", values, start=start
        )
        if count:
            element = data.draw(st.integers(0, count - 1))
            values[element] ^= values.dtype.type(1 << data.draw(st.integers(0, 8 * width - 1)))
            assert digest_if_equal("w", values, expected, start) is None
