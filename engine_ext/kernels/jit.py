"""Loops that numba compiles where it is installed: every engine brings it, the core needs it not.

numba is imported late: while vLLM starts a worker it looks into every object of every loaded
module, and trips over one of numba's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_COMPILING = threading.RLock()

_Made = TypeVar("_Made")


def made_once(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """Remember what `make` makes of each arguments; no two threads make the same."""
    known: dict[tuple[Any, ...], _Made] = {}

    @functools.wraps(make)
    def get(*key: Any) -> _Made:
        if key not in known:
            with _COMPILING:
                if key not in known:
                    known[key] = make(*key)
        return known[key]

    get.cache_clear = known.clear  # type: ignore[attr-defined]
    return get


def array(types: Any, dtype: str, *, readonly: bool = True) -> Any:
    """The numba type of a contiguous 1-D array; a read-only one takes unaligned memory too."""
    return types.Array(getattr(types, dtype), 1, "C", readonly=readonly, aligned=not readonly)


def compile_loop(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """The function as machine code that runs without the interpreter lock.

    Args:
        function: what numba can compile.
        signature: numba's, of its arguments; compiled now, or loaded from numba's cache.

    Raises:
        ImportError: numba is not installed.
    """
    from numba import njit

    compiled: Any
    try:
        compiled = njit(signature, nogil=True, cache=True)(function)
    except Exception:  # no folder to cache in, or a spoilt cache
        compiled = njit(signature, nogil=True)(function)
    # Processes that write numba's cache at once, as ranks do at their first start, may leave one
    # signature's code under another's name.
    if tuple(signature.args) not in compiled.overloads:
        compiled = njit(signature, nogil=True)(function)
    loop: Callable[..., Any] = compiled
    return loop
