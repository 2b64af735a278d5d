from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext import compare
from engine_ext.compare import changed_elements

from .harness import PROPERTY


@PROPERTY
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 500),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 7),
)
def test_every_changed_bit_is_found(
    width: int, size: int, density: float, seed: int, shift: int
) -> None:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, size * width + shift, np.uint8)
    old = raw[shift:].view(f"u{width}")  # of any alignment
    new = old.copy()
    chosen = np.flatnonzero(rng.random(size) < density)
    new[chosen] ^= np.left_shift(1, rng.integers(0, 8 * width, chosen.size)).astype(new.dtype)
    for before, after in ((old, new), (new, old)):
        indices, bits = changed_elements(before, after)
        assert indices.tolist() == chosen.tolist()
        assert bits.tolist() == after[chosen].tolist()
        assert bits.dtype == after.dtype


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("compiled", [True, False])
def test_chunks_and_threads(threads: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(compare, "_loop", lambda width: None)
    old = np.zeros(3 * compare._CHUNK + 17, np.uint16)
    new = old.copy()
    edges = [0, 31, 32, compare._CHUNK - 1, compare._CHUNK, 3 * compare._CHUNK, old.size - 1]
    new[edges] = 0x8000
    found, bits = changed_elements(old, new, threads)
    assert found.tolist() == edges
    assert found.dtype == np.int64
    assert (bits == 0x8000).all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.zeros(3, np.uint16), np.zeros(4, np.uint16)),
        (np.zeros(3, np.uint16), np.zeros(3, np.uint8)),
        (np.zeros(3, np.int16), np.zeros(3, np.int16)),
        (np.zeros((3, 1), np.uint16), np.zeros((3, 1), np.uint16)),
    ],
)
def test_what_cannot_be_compared(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="not unsigned ints"):
        changed_elements(old, new)
