"""Keep the changes of a sync in memory up to a limit, and the rest in a file: the class `Spill`."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from delta_sender.diff.change import Bits, Change

Keep = Callable[[Change], Change]

_WINDOW: Final = 64 << 20  # bytes of a file; many small changes share one


class Spill:
    """The changes of one sync; their memory and files are freed with them.

    At most `limit` bytes of them stay in memory. Beyond that, all but what the snapshot holds is
    written to an unnamed temporary file below ``TMPDIR`` and mapped from there; unless that is a
    tmpfs, the system can drop it from memory when memory is short.
    """

    def __init__(self, limit: int) -> None:
        self.spilled = 0  # bytes that were written
        self._left = limit
        self._window: Any = b""
        self._at = 0

    def keep(self, change: Change) -> Change:
        """Return the same change, in memory or in a file.

        Raises:
            OSError: The file cannot be written.
        """
        size = change.nbytes
        fits = size <= self._left
        if fits:
            self._left -= size
            if not self.spilled:
                return change
        own = change.elements.own
        if fits:
            # Small tensors that were compared together have common arrays, which one of them would
            # keep in memory when the others are in a file. Only those of the first spill are.
            moved = [array.copy() for array in own.values()]
        else:
            moved = self._mapped([*own.values()])
        arrays = dict(zip(own, moved, strict=True))
        return replace(change, elements=change.elements.with_own(arrays))

    def _mapped(self, arrays: list[Bits]) -> list[Bits]:
        """Return the same arrays in a file, which is freed with the last change in it."""
        size = sum(_padded(array.nbytes) for array in arrays)
        if self._at + size > len(self._window):
            self._window, self._at = _new_window(max(size, _WINDOW)), 0
        mapped = []
        for array in arrays:
            copy = np.frombuffer(self._window, array.dtype, array.size, self._at)
            copy[:] = array
            mapped.append(copy)
            self._at += _padded(array.nbytes)
        self.spilled += size
        return mapped


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _new_window(size: int) -> mmap.mmap:
    """Return a mapped, unnamed temporary file; it holds a file descriptor until it is freed."""
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="delta-changes-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # fails now if there is no room
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: the changes of a sync exceed `changes_in_memory`, and the rest "
            f"cannot be written to {folder} (TMPDIR)",
        ) from error
