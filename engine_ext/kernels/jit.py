"""Compile loops with numba, which is optional; both engines install it.

numba is imported late: while vLLM starts a worker it inspects every object of every loaded module,
and fails on one of numba's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, Final, TypeVar

import xxhash

# The rooms with functions that loops of other files call.
_CALLED: Final = ("format", "kernels", "placement")
_COMPILING = threading.RLock()

_Made = TypeVar("_Made")


def made_once(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """Cache `make` per arguments, and let no two threads compute the same entry."""
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


def made_with_numba(make: Callable[..., _Made]) -> Callable[..., _Made | None]:
    """Cache ``make(numba.types, ...)`` as `made_once` does; the result is None without numba."""

    @made_once
    @functools.wraps(make)
    def get(*key: Any) -> _Made | None:
        try:
            from numba import types
        except ImportError:
            return None
        return make(types, *key)

    return get


def array(types: Any, dtype: str, *, readonly: bool = True) -> Any:
    """Return the numba type of a contiguous 1-D array; a read-only one can be unaligned."""
    return types.Array(getattr(types, dtype), 1, "C", readonly=readonly, aligned=not readonly)


def compile_loop(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile a function to machine code that runs without the GIL.

    It is compiled now for the numba types in `signature`, or loaded from numba's cache. Code that
    was compiled before a file of the rooms ``format``, ``kernels`` and ``placement`` changed is not
    used.

    Raises:
        ImportError: numba is not installed.
    """
    from numba import njit

    function = _with_sources(function)
    compiled: Any
    try:
        compiled = njit(signature, nogil=True, cache=True)(function)
    except Exception:  # no writable cache folder, or a corrupt cache
        compiled = njit(signature, nogil=True)(function)
    # If several processes write numba's cache at once, as ranks do at their first start, one
    # signature's code might end up under another's name.
    if tuple(signature.args) not in compiled.overloads:
        compiled = njit(signature, nogil=True)(function)
    loop: Callable[..., Any] = compiled
    return loop


def _with_sources(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a hash of the called rooms' files among the values it encloses.

    numba's cache compares a function's own file, its bytecode and what it encloses. Without this, a
    loop would call the old form of a function that has changed in another file.
    """
    code, enclosed = function.__code__, function.__closure__ or ()
    code = code.replace(co_freevars=(*code.co_freevars, "sources"))
    enclosed = (*enclosed, CellType(_hash_of_sources()))
    made = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, enclosed
    )
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


@functools.cache
def _hash_of_sources() -> str:
    found = xxhash.xxh3_128()
    for room in _CALLED:
        for file in sorted((Path(__file__).parents[1] / room).glob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
