"""Loops that numba compiles where it is installed: every engine brings it, the core needs it not.

numba is imported late: while vLLM starts a worker it looks into every object of every loaded
module, and trips over one of numba's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

COMPILING = threading.RLock()
"""Held while something is compiled, so that no two threads compile the same."""


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

    compiled: Callable[..., Any]
    try:
        compiled = njit(signature, nogil=True, cache=True)(function)
    except Exception:  # no folder to cache in, or a spoilt cache
        compiled = njit(signature, nogil=True)(function)
    return compiled
