"""Compare many small tensors in one compiled call.

A call for each tensor gives up the interpreter lock and waits for it again, which takes longer than
a small tensor. So one loop goes through a table of addresses: it finds what differs, digests the
change and writes the gap stream of each tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from delta_sender.diff.loop import Difference, find_differing
from engine_ext.format import Digest, loops
from engine_ext.kernels import array, compile_loop, made_with_numba, memory_at, register_intrinsics

# Compiled loops know global functions by plain names.
_digest_sums, _write_gaps, _SKIP = loops.digest_sums, loops.write_gaps, loops.BYTE_SKIP

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor, str | None]  # old, new, name


class _Scratch(threading.local):
    """Memory of a thread for a batch's results; it is touched only as far as needed."""

    def __init__(self) -> None:
        self.size = -1
        self.fit(0)

    def fit(self, elements: int) -> None:
        if elements > self.size:
            self.size = elements
            most = elements + 2  # the loop writes two elements ahead
            self.indices = np.empty(most, np.int64)
            self.old, self.new = np.empty(most, np.uint64), np.empty(most, np.uint64)
            self.symbols = np.empty(2 * most, np.uint8)  # at most one skip for each element


_scratch: Final = _Scratch()


def compare_batch(pairs: Sequence[Pair], *, streams: bool) -> list[Difference] | None:
    """Compare pairs of small tensors; see `delta_sender.diff.host.Comparisons`.

    Args:
        pairs: Contiguous tensors in host memory, the two of a pair of one size, all of one element
            size. Their addresses are all that is taken from them, as making an array of each
            takes longer than to compare it.

    Returns:
        What `delta_sender.diff.host.compare` returns for each, but views of common arrays; None if
        it must be asked: without numba, and for memory that is not aligned.
    """
    width = pairs[0][0].element_size()
    loop = _loop(width)
    addresses = np.array([(old.data_ptr(), new.data_ptr()) for old, new, _ in pairs], np.uint64)
    sizes = np.array([old.numel() for old, _, _ in pairs], np.int64)
    if not addresses[sizes > 0].all():
        raise ValueError("a tensor's memory has been freed")
    if loop is None or (addresses % width).any():
        return None
    bits = np.dtype(f"u{width}")
    seeds = np.array(
        [(0, 0) if name is None else loops.digest_seeds(name) for *_, name in pairs], np.uint64
    )
    _scratch.fit(int(sizes.sum()))
    counts, ends = np.empty((2, sizes.size), np.int64)
    lanes = np.empty((sizes.size, 2), np.uint64)
    places = _scratch.indices
    old, new = _scratch.old.view(bits), _scratch.new.view(bits)
    symbols = _scratch.symbols if streams else _scratch.symbols[:0]
    found, written = loop(
        *(addresses, sizes, seeds, loops.DIGEST_FACTORS, np.empty(0, bits)),
        *(places, old, new, symbols, counts, ends, lanes),
    )
    indices, was, now = places[:found].astype(np.int32), old[:found].copy(), new[:found].copy()
    stream = symbols[:written].copy()
    differences = []
    start = at = 0
    for (*_, name), size, count, end, sums in zip(
        pairs, sizes.tolist(), counts.tolist(), ends.tolist(), lanes.tolist(), strict=True
    ):
        own = slice(start, start + count)
        gaps = None
        if end >= 0 and size:
            gaps, at = stream[at:end], end
        change = None if name is None else Digest(*sums)
        differences.append(Difference(indices[own], was[own], now[own], change, gaps))
        start += count
    return differences


def _compare_all(
    addresses: Any,
    sizes: Any,
    seeds: Any,
    factors: Any,
    like: Any,
    places: Any,
    old: Any,
    new: Any,
    symbols: Any,
    counts: Any,
    ends: Any,
    lanes: Any,
) -> Any:
    """Compiled: compare each pair, one after another; return the elements and symbols in all.

    An end is that of the tensor's symbols; -1 if they are not wanted, or may not be the smallest.
    """
    start = end = np.int64(0)
    for k in range(sizes.size):
        before = memory_at(addresses[k, 0], sizes[k], like)
        after = memory_at(addresses[k, 1], sizes[k], like)
        count = find_differing(before, after, 0, places[start:], old[start:], new[start:])
        found = places[start : start + count]
        was, now = old[start : start + count], new[start : start + count]
        lanes[k, 0], lanes[k, 1] = _digest_sums(seeds[k, 0], seeds[k, 1], factors, found, now, was)
        counts[k], ends[k] = count, -1
        if symbols.size:
            gaps = found[count - 1] + 1 - count if count else 0
            if gaps // _SKIP <= count:
                end += _write_gaps(found, np.uint64(0), np.uint64(_SKIP), symbols[end:])
                ends[k] = end
        start += count
    return start, end


@made_with_numba
def _loop(types: Any, width: int) -> Callable[..., tuple[int, int]]:
    """Return the loop for elements of `width` bytes; None without numba."""
    from numba.extending import register_jitable

    register_intrinsics()
    loops.register()
    register_jitable(find_differing)
    bits, word = f"uint{8 * width}", types.int64
    out = array(types, bits, readonly=False)
    words, symbols = array(types, "int64", readonly=False), array(types, "uint8", readonly=False)

    def table(dtype: Any) -> Any:
        return types.Array(dtype, 2, "C")

    arguments = (
        *(table(types.uint64), words, table(types.uint64), array(types, "uint64")),
        *(array(types, bits), words, out, out, symbols, words, words, table(types.uint64)),
    )
    return compile_loop(_compare_all, types.UniTuple(word, 2)(*arguments))
