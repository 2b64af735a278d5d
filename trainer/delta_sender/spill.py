"""What a step changes, kept until it is committed: in memory up to a limit, then in a file."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delta_sender.snapshot import Change

_Array = NDArray[Any]

_WINDOW: Final = 64 << 20  # bytes of a file, which many small changes share


class Spill:
    """Changes of one step. What they hold is given back with them.

    Args:
        most: bytes of them that stay in memory. Of what is beyond, all but what the snapshot holds
            is written into a temporary file without a name, below ``TMPDIR``, and mapped from
            there: the system may drop it from memory when that is short, if it is no tmpfs.

    Attributes:
        spilled: bytes that were written.
    """

    def __init__(self, most: int) -> None:
        self.spilled = 0
        self._left = most
        self._window: Any = b""
        self._at = 0

    def keep(self, change: Change) -> Change:
        """The same change, wherever there is room for it.

        Raises:
            OSError: the file cannot be written.
        """
        own: dict[str, Any] = {"new": change.new}
        if change.places is not None:
            own |= {"places": change.places, "old": change.old}
        if change.stream is not None:
            own["stream"] = change.stream
        size = sum(array.nbytes for array in own.values())
        if size <= self._left:
            self._left -= size
            return change
        mapped: dict[str, Any] = dict(zip(own, self._mapped([*own.values()]), strict=True))
        return replace(change, **mapped)

    def _mapped(self, arrays: list[_Array]) -> list[_Array]:
        """The same, in a file. It goes with the last change that lies there."""
        size = sum(_rounded(array.nbytes) for array in arrays)
        if self._at + size > len(self._window):
            self._window, self._at = _new_window(max(size, _WINDOW)), 0
        mapped = []
        for array in arrays:
            there = np.frombuffer(self._window, array.dtype, array.size, self._at)
            there[:] = array
            mapped.append(there)
            self._at += _rounded(array.nbytes)
        self.spilled += size
        return mapped


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _new_window(size: int) -> mmap.mmap:
    """A temporary file without a name, mapped; each costs a file descriptor as long as it is."""
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="delta-changes-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # where there is no room, it is said now
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: what a step changes is more than `changes_in_memory`, and the "
            f"rest cannot be kept in {folder} (TMPDIR)",
        ) from error
