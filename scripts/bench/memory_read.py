"""The baseline of the benchmarks' speeds: reading two copies of the weights once."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
_CHUNK = 1 << 18  # words that a thread reads at a time


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of some calls."""
    return min(timeit.repeat(call, repeat=repeats, number=1))


def _read(first: Any, second: Any) -> Any:
    """Read two arrays of words; numba compiles this."""
    differs = np.uint64(0)
    for k in range(first.size):
        differs |= first[k] ^ second[k]
    return differs


def reader() -> Callable[[Any, Any], Any]:
    """Return a loop that reads two arrays of words; without numba, numpy's reduction of each."""
    try:
        from numba import njit
    except ImportError:
        return lambda first, second: (np.bitwise_or.reduce(first), np.bitwise_or.reduce(second))
    compiled: Callable[[Any, Any], Any] = njit(nogil=True)(_read)
    return compiled


def read_time(old: Bits, new: Bits, pool: ThreadPoolExecutor, repeats: int) -> float:
    """Return the seconds of reading both copies once."""
    loop = reader()
    words = old.view(np.uint64), new.view(np.uint64)
    chunks = [slice(start, start + _CHUNK) for start in range(0, words[0].size, _CHUNK)]

    def read() -> None:
        for _ in pool.map(lambda chunk: loop(words[0][chunk], words[1][chunk]), chunks):
            pass

    read()
    return fastest(read, repeats)
