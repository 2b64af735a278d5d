"""Put off Python's full garbage collections while many objects are made that are no garbage."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NEVER: Final = 1 << 30
_lock = threading.Lock()
_inside = 0
_before = _during = (0, 0, 0)


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Let the garbage collector look at young objects only, inside the block, in all threads.

    A full collection looks at every object of the process, 0.1 s for 300,000 of them, and is made
    whenever as many as a quarter of them are new. It frees cycles that have survived two earlier
    ones; inside the block, they stay. Blocks can nest, and overlap in several threads. Nothing is
    changed if the collector is switched off, and nothing changed back if somebody else has set it
    meanwhile. A process that is forked inside a block is outside of it.
    """
    global _inside, _before, _during
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], max(_before[2], _NEVER))
            _during = gc.get_threshold()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and gc.get_threshold() == _during:
                gc.set_threshold(*_before)


def _leave_in_child() -> None:
    """Undo the blocks of the parent's threads, which the forked process does not have."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and gc.get_threshold() == _during:
        gc.set_threshold(*_before)
    _inside = 0


os.register_at_fork(after_in_child=_leave_in_child)
