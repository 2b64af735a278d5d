"""Gather and scatter: the compiled loops, numpy's indexing and torch's operators do the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.kernels import gather_scatter
from engine_ext.placement.live_elements import DeviceElements
from tests.support.served_models import PROPERTY

BACKENDS = pytest.mark.parametrize("compiled", [True, False], ids=["numba", "numpy"])


@BACKENDS
@PROPERTY
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    index=st.sampled_from([np.int32, np.int64]),
    chosen=st.sets(st.integers(0, 199)),
    seed=st.integers(0, 1 << 20),
)
def test_elements_of_every_width(
    compiled: bool, width: int, index: Any, chosen: set[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    dtype = np.dtype(f"u{width}")
    live = random.integers(0, 1 << 8 * width, 200, dtype=dtype)
    new = random.integers(0, 1 << 8 * width, len(chosen), dtype=dtype)
    new.flags.writeable = False
    offsets = random.permutation(np.array(sorted(chosen), index))
    before, after = live.copy(), live.copy()
    old_bits, after[offsets] = before[offsets], new
    loops = gather_scatter._loops if compiled else lambda width, index: None
    with mock.patch.object(gather_scatter, "_loops", loops):
        old = gather_scatter.read(live, offsets)
        assert old.dtype == dtype
        assert old.tolist() == old_bits.tolist()
        assert gather_scatter.holds(live, offsets, old)
        assert gather_scatter.holds(live, offsets, new) == (old.tolist() == new.tolist())
        assert gather_scatter.swap(live, offsets, new).tolist() == old.tolist()
        assert live.tolist() == after.tolist()
        assert gather_scatter.holds(live, offsets, new)
        gather_scatter.write(live, offsets, old)
        assert live.tolist() == before.tolist()


@pytest.mark.slow
@BACKENDS
@PROPERTY
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    index=st.sampled_from([np.int32, np.int64]),
    odd=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_elements_of_many_tensors(
    compiled: bool, dtype: torch.dtype, sizes: list[int], index: Any, odd: bool, seed: int
) -> None:
    """Also for memory that is not aligned, and for tensors without changes."""
    random = np.random.default_rng(seed)
    width = dtype.itemsize
    live, offsets, bits, expected = [], [], [], []
    for size in sizes:
        raw = random.integers(0, 256, size * width + odd, np.uint8)[int(odd) :]
        live.append(torch.from_numpy(raw.view(f"i{width}" if width > 1 else "u1")).view(dtype))
        offsets.append(random.permutation(size)[: random.integers(0, size + 1)].astype(index))
        bits.append(random.integers(0, 1 << 8 * width, offsets[-1].size, dtype=f"u{width}"))
        right = raw.copy().view(f"u{width}")
        right[offsets[-1]] = bits[-1]
        expected.append((raw, right))
    loop = gather_scatter._loop_of_table if compiled else lambda width, index: None
    with mock.patch.object(gather_scatter, "_loop_of_table", loop):
        gather_scatter.write_many(live, offsets, bits)
        for raw, right in expected:
            assert raw.tobytes() == right.tobytes()
        arrays, counts = [right for _, right in expected], [own.size for own in offsets]
        where, whole = np.concatenate(offsets), np.concatenate(bits)
        assert gather_scatter.read_many(arrays, counts, where).tolist() == whole.tolist()
        gather_scatter.add_many(arrays, counts, where, whole)
        sums = gather_scatter.read_many(arrays, counts, where)
    assert sums.tolist() == (whole + whole).tolist()
    for (raw, right), own in zip(expected, offsets, strict=True):
        left = np.delete(right, own)
        assert left.tolist() == np.delete(raw.view(right.dtype), own).tolist()


@BACKENDS
@PROPERTY
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    index=st.sampled_from([np.int32, np.int64]),
    chosen=st.sets(st.integers(0, 799), max_size=700),
    foreign=st.sets(st.integers(0, 799), max_size=3),
    seed=st.integers(0, 1 << 20),
)
def test_a_swap_that_is_checked(
    compiled: bool, width: int, index: Any, chosen: set[int], foreign: set[int], seed: int
) -> None:
    """It says whether the old bits were there; what it leaves of them restores memory."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(f"u{width}")
    live = random.integers(0, 1 << 8 * width, 800, dtype=dtype)
    new = random.integers(0, 1 << 8 * width, len(chosen), dtype=dtype)
    new.flags.writeable = False
    offsets = np.array(sorted(chosen), index)
    old = live[offsets]
    live[list(foreign)] ^= dtype.type(1 << 8 * width - 1)
    before, after = live.copy(), live.copy()
    after[offsets] = new
    loops = gather_scatter._loops if compiled else lambda width, index: None
    with mock.patch.object(gather_scatter, "_loops", loops):
        unchanged = gather_scatter.swap_checked(live, offsets, new, old)
        assert unchanged == foreign.isdisjoint(chosen)
        assert live.tolist() == after.tolist()
        assert old.tolist() == before[offsets].tolist()
        gather_scatter.write(live, offsets, old)
    assert live.tolist() == before.tolist()


@pytest.mark.slow
@PROPERTY
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    index=st.sampled_from([np.int32, np.int64]),
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=6),
    foreign=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_a_table_of_elements(
    width: int, index: Any, sizes: list[int], foreign: bool, seed: int
) -> None:
    """Each way to visit it does what the function for one tensor does."""
    random, dtype = np.random.default_rng(seed), np.dtype(f"u{width}")
    elements = []
    for size in sizes:
        live = random.integers(0, 1 << 8 * width, size, dtype=dtype)
        offsets = random.permutation(size)[: random.integers(0, size + 1)].astype(index)
        new = random.integers(0, 1 << 8 * width, offsets.size, dtype=dtype)
        elements.append((live, offsets, new, live[offsets]))
    table = gather_scatter.table_of(elements)
    assert table is not None
    changed = [live for live, offsets, *_ in elements if offsets.size]
    assert table.holds_old()
    if foreign and changed:
        changed[-1] ^= dtype.type(1)
    unchanged = not (foreign and changed)
    assert (table.holds_old(), table.holds_old(256)) == (unchanged, unchanged)
    before = [live.copy() for live, *_ in elements]
    assert table.swap_checked() == unchanged
    for (live, offsets, new, old), was in zip(elements, before, strict=True):
        after = was.copy()
        after[offsets] = new
        assert live.tolist() == after.tolist()
        assert old.tolist() == was[offsets].tolist()
    table.write_old()
    for (live, *_), was in zip(elements, before, strict=True):
        assert live.tolist() == was.tolist()
    table.write()
    for live, offsets, new, _ in elements:
        assert live[offsets].tolist() == new.tolist()


def test_memory_that_is_not_aligned_has_no_table() -> None:
    live = np.zeros(9, np.uint8)[1:].view(np.uint32)
    offsets, bits = np.zeros(1, np.int32), np.zeros(1, np.uint32)
    assert gather_scatter.table_of([(live, offsets, bits, bits.copy())]) is None


@BACKENDS
@PROPERTY
@given(
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 20),
)
def test_all_elements_swapped(
    compiled: bool, dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    live, new, old = (torch.randint(0, 256, shape, generator=generator).to(dtype) for _ in range(3))
    before, after = live.clone(), new.clone()
    loop = gather_scatter._loop_of_all if compiled else lambda: None
    with mock.patch.object(gather_scatter, "_loop_of_all", loop):
        gather_scatter.swap_all(live, new, old)
    assert torch.equal(live, after)
    assert torch.equal(new, after)
    assert torch.equal(old, before)


@BACKENDS
def test_a_sample_is_every_so_many_elements(compiled: bool) -> None:
    live = np.arange(100, dtype=np.uint16)
    offsets = np.arange(0, 100, 2, dtype=np.int32)
    expected = live[offsets]
    loops = gather_scatter._loops if compiled else lambda width, index: None
    with mock.patch.object(gather_scatter, "_loops", loops):
        for place in range(50):
            live[2 * place] ^= 1
            assert gather_scatter.holds(live, offsets, expected, 7) == (place % 7 != 0)
            live[2 * place] ^= 1
        assert gather_scatter.holds(live, offsets[:0], expected[:0], 7)


@BACKENDS
@pytest.mark.parametrize("place", range(5))
def test_one_bit_of_one_element_is_seen(compiled: bool, place: int) -> None:
    live = np.arange(10, dtype=np.uint16)
    offsets = np.array([0, 2, 3, 8, 9], np.int32)
    expected = live[offsets]
    live[offsets[place]] ^= 0x8000
    loops = gather_scatter._loops if compiled else lambda width, index: None
    with mock.patch.object(gather_scatter, "_loops", loops):
        assert not gather_scatter.holds(live, offsets, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_elements_by_torch(dtype: torch.dtype) -> None:
    """The operators for other devices, here on the CPU."""
    flat = torch.arange(20, dtype=dtype)
    place = DeviceElements(flat, torch.tensor([3, 1, 17], dtype=torch.int32))
    new = torch.tensor([100, 101, 102], dtype=dtype)
    old = place.read()
    assert old.tolist() == [3, 1, 17]
    assert place.holds(old)
    place.put(new)
    assert flat[[3, 1, 17, 4]].tolist() == [100, 101, 102, 4]
    assert place.holds(new)
    assert not place.holds(old)
    assert place.swap(old).tolist() == new.tolist()
    assert flat.tolist() == list(range(20))


def test_bits_are_unsigned_and_the_same_memory() -> None:
    live = torch.zeros(3, dtype=torch.bfloat16)
    bits = gather_scatter.host_bits(gather_scatter.bits_of(live))
    assert bits.dtype == np.uint16
    bits[1] = 0xBF80
    assert live.tolist() == [0, -1, 0]
