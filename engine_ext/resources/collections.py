"""Suspend Python's full garbage collections while many long-lived objects are made."""

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
    """Suspend full garbage collections inside the block, in all threads; young objects are freed.

    A full collection looks at every object of the process, 0.1 s for 300,000 of them, and is made
    whenever as many as a quarter of them are new. It frees cycles that have survived two earlier
    collections; inside the block, they stay. Blocks can nest, and overlap in several threads. A
    collector that is switched off stays off, and one that other code sets inside the block keeps
    that setting. A process that is forked inside a block is outside of it.
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
