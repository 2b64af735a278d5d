from __future__ import annotations

import operator
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from delta_sender.diff import compare as diff_host
from delta_sender.diff.compare import Comparisons
from delta_sender.diff.compare import compare as compared
from engine_ext.format.digest import change_digest
from engine_ext.format.gap_streams import encode_gaps
from engine_ext.kernels.gather_scatter import signed
from tests.support.served_models import PROPERTY


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
        found = compared(before, after, "w", streams=True)
        assert found.indices.tolist() == chosen.tolist()
        assert (found.stream is None) == (size == 0)
        if found.stream is not None:
            assert found.stream.tobytes() == encode_gaps(chosen)[0].tobytes()
        assert (found.indices.dtype, found.old.dtype, found.new.dtype) == (
            np.dtype(np.int32),
            old.dtype,
            old.dtype,
        )
        assert found.old.tolist() == before[chosen].tolist()
        assert found.new.tolist() == after[chosen].tolist()
        assert found.change == change_digest("w", chosen, before[chosen], after[chosen])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("compiled", [True, False])
def test_chunks_and_threads(threads: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(diff_host, "loop_of", lambda width: None)
    old = np.zeros(3 * diff_host._CHUNK + 17, np.uint16)
    new = old.copy()
    edges = [0, 31, 32, diff_host._CHUNK - 1, diff_host._CHUNK, 3 * diff_host._CHUNK, old.size - 1]
    new[edges] = 0x8000
    found = compared(old, new, "w", threads)
    assert found.indices.tolist() == edges
    assert not found.old.any()
    assert (found.new == 0x8000).all()
    assert found.change == change_digest("w", np.array(edges), found.old, found.new)
    assert found.stream is None
    assert compared(old, new, threads=threads).change is None
    assert compared(old, new, threads=threads, streams=True).stream is None  # too far apart
    new[::200] ^= 1
    near = compared(old, new, threads=threads, streams=True)
    assert near.stream is not None
    assert near.stream.tobytes() == encode_gaps(near.indices.astype(np.int64))[0].tobytes()
    new[::200] ^= 1
    with ThreadPoolExecutor(2) as pool:
        comparisons = Comparisons(pool)
        pending = [comparisons.begin(signed(old), signed(new), name) for name in ("w", "v", "")]
    changes = [wait().change for wait in pending]
    assert changes[0] == found.change
    assert len(set(changes)) == 3


def test_small_tensors_are_compared_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results can be read in any order, also before there are enough tensors for a thread."""
    monkeypatch.setattr(diff_host, "_CHUNK", 128)
    rng = np.random.default_rng(0)
    pairs = []
    for number, size in enumerate([0, 5, 60, 70, 300, 1, 127, 128, 129, 2, 3]):
        old = rng.integers(0, 1 << 16, size, np.uint16)
        new = np.where(rng.random(size) < 0.3, old ^ np.uint16(1), old)
        pairs.append((old, new, f"tensor {number}"))
    expected = [compared(*pair, streams=True) for pair in pairs]
    for order in (range(len(pairs)), reversed(range(len(pairs))), rng.permutation(len(pairs))):
        with ThreadPoolExecutor(2) as pool:
            comparisons = Comparisons(pool, streams=True)
            waits = [comparisons.begin(signed(old), signed(new), name) for old, new, name in pairs]
            for number in order:
                both = waits[number](), expected[number]
                for one, other in zip(*map(msgspec.structs.astuple, both), strict=True):
                    is_same: Any = np.array_equal if isinstance(one, np.ndarray) else operator.eq
                    assert is_same(one, other)


def test_a_thread_gets_a_chunk_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_host, "_CHUNK", 100)
    handed = []

    class Pool(ThreadPoolExecutor):
        def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Any:
            handed.append(arguments)
            return super().submit(work, *arguments, **options)

    with Pool(1) as pool:
        comparisons = Comparisons(pool)
        tensors = [torch.zeros(30, dtype=torch.int16) for _ in range(9)]
        waits = [comparisons.begin(tensor, tensor, None) for tensor in tensors]
        assert len(handed) == 2
        waits[3]()
        assert len(handed) == 2
        waits[8]()
        assert len(handed) == 3
        for other in (tensors[0][1:], tensors[0].int()):
            with pytest.raises(ValueError, match="one size and element size"):
                comparisons.begin(tensors[0], other, None)


def test_tensors_are_compared_in_the_order_in_which_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they are asked for: a small one behind all large ones would hold up the first part."""
    monkeypatch.setattr(diff_host, "_CHUNK", 100)
    began: list[str | None] = []
    small, large = diff_host.compare_batch, diff_host._compare_chunk

    def compare_batch(pairs: Any, *, streams: bool) -> Any:
        began.extend(name for *_, name in pairs)
        return small(pairs, streams=streams)

    def compare_chunk(old: Any, new: Any, start: int, name: Any, streams: bool) -> Any:
        began.append(name)
        return large(old, new, start, name, streams)

    monkeypatch.setattr(diff_host, "compare_batch", compare_batch)
    monkeypatch.setattr(diff_host, "_compare_chunk", compare_chunk)
    sizes = {"norm": 5, "scale": 1, "first": 100, "bias": 7, "second": 100, "last": 3}
    with ThreadPoolExecutor(1) as pool:
        comparisons, waits = Comparisons(pool), []
        for number, (name, size) in enumerate(sizes.items()):
            old = torch.zeros(size, dtype=torch.float32 if number == 1 else torch.int16)
            waits.append(comparisons.begin(old, old, name))
        assert [wait().indices.size for wait in waits] == [0] * len(sizes)
    assert began == [*sizes]


def test_each_element_size_has_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they alternate: a batch of several sizes would be compared one by one."""
    batches: list[list[int]] = []
    original = diff_host.compare_batch

    def compare_batch(pairs: Any, *, streams: bool) -> Any:
        batches.append([new.element_size() for _, new, _ in pairs])
        return original(pairs, streams=streams)

    monkeypatch.setattr(diff_host, "compare_batch", compare_batch)
    with ThreadPoolExecutor(1) as pool:
        comparisons, waits = Comparisons(pool), []
        for number in range(9):
            old = torch.arange(5, dtype=(torch.bfloat16, torch.float32, torch.uint8)[number % 3])
            new = old.clone()
            new[number % 5] = 77
            waits.append(comparisons.begin(old, new, None))
        assert [wait().indices.tolist() for wait in waits] == [[n % 5] for n in range(9)]
    assert sorted(batches) == [[1] * 3, [2] * 3, [4] * 3]


def test_small_tensors_that_were_compared_are_let_go() -> None:
    tensor = torch.zeros(30)
    with ThreadPoolExecutor(1) as pool:
        comparisons = Comparisons(pool)
        waits = [comparisons.begin(tensor, tensor, None) for _ in range(3)]
        kept = sys.getrefcount(tensor)
        waits[0]()
    assert sys.getrefcount(tensor) <= kept - 6


def test_what_was_found_is_kept() -> None:
    """A thread uses its memory again for the next chunk."""
    old, new = np.zeros(100, np.uint16), np.ones(100, np.uint16)
    found = compared(old, new)
    compared(old, new + np.uint16(1))
    assert (found.new == 1).all()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_any_number_in_a_line(width: int) -> None:
    elements = 64 // width
    old = np.zeros(elements * elements, f"u{width}")
    new = old.copy().reshape(elements, elements)
    new[np.tri(elements, dtype=bool)] = 1  # one in the first line, ..., all in the last
    for after in (new, new[::-1], new[:, ::-1]):
        after = np.ascontiguousarray(after).reshape(-1)
        assert compared(old, after).indices.tolist() == np.flatnonzero(after).tolist()


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
        compared(old, new)
