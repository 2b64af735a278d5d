"""Gaps, differences and digests by PyTorch's operators, on the CPU.

`tests/unit/kernels` has the kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.format import (
    ChangedElements,
    EncodedDifferences,
    byte_stream,
    change_digest,
    encode_on_device,
    join_differences,
    read_differences,
)
from engine_ext.format.digest import Digest
from engine_ext.format.ulp_differences import encode_differences
from engine_ext.kernels.gather_scatter import host_bits, signed
from tests.unit.format.test_digest import UNSIGNED, random_values

pytestmark = pytest.mark.slow

PROPERTY = settings(deadline=None, database=None, max_examples=50)


def send(arrays: object) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", UNSIGNED)
@PROPERTY
@given(
    places=st.lists(
        st.sets(st.integers(0, 2000) | st.integers(250, 260), min_size=1, max_size=40),
        min_size=1,
        max_size=4,
    ),
    starts=st.sampled_from([0, 5000, 1 << 20]),
)
def test_they_are_those_of_the_host(width: int, places: list[set[int]], starts: int) -> None:
    firsts = [starts * number for number in range(len(places))]
    own = [
        np.array(sorted(some), np.int64) + first for some, first in zip(places, firsts, strict=True)
    ]
    old, new = (random_values(sum(map(len, places)), width, seed) for seed in (1, 2))
    counts = np.array([*map(len, places)])
    names = [f"w{number}" for number in range(len(places))]
    joined = torch.from_numpy(np.concatenate(own))
    exponents = [0x7C << 8 * (width - 1)] * len(places)
    elements = ChangedElements(
        joined, signed(old), signed(new), counts, firsts, names, exponents, 2001 * len(places)
    )
    symbols, nibbles, escaped, totals = encode_on_device(elements, send)
    at = before = half = large = nonfinite = 0
    previous = Digest.ZERO
    pieces = []
    for name, first, indices, (end, lane0, lane1, several, whole, last) in zip(
        names, firsts, own, totals.tolist(), strict=True
    ):
        stream = host_bits(symbols[before:end])
        assert stream.tolist() == byte_stream(indices, first).tolist()
        these = slice(at, at + indices.size)
        change = change_digest(name, indices, old[these], new[these])
        assert Digest(lane0, lane1) - previous == change
        pairs = (indices.size + 1) // 2
        pieces.append(
            EncodedDifferences(
                host_bits(nibbles[half : half + pairs]),
                host_bits(escaped[large:several]),
                indices.size,
            )
        )
        apart = new[these] - old[these]
        assert encode_differences([pieces[-1]]).tolist() == encode_differences([apart]).tolist()
        mask = new.dtype.type(exponents[0])
        assert whole - nonfinite == np.count_nonzero((new[these] & mask) == mask)
        assert last == indices[-1]
        at, before, previous = at + indices.size, end, Digest(lane0, lane1)
        half, large, nonfinite = half + pairs, several, whole
    assert read_differences(pieces).tolist() == (new - old).tolist()
    one = join_differences(pieces)
    assert encode_differences([one]).tolist() == encode_differences([new - old]).tolist()
