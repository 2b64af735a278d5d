"""What a step changes, kept until it is committed: in memory up to a limit, then in a file."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sender_snapshot import Change

_Array = NDArray[Any]


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
        """The same, in a file. It goes with the last of them."""
        folder = tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=folder, prefix="delta-changes-") as file:
                starts = []
                for array in arrays:
                    file.seek(-file.tell() % array.itemsize, os.SEEK_CUR)
                    starts.append(file.tell())
                    file.write(array.data)
                file.flush()
                self.spilled += file.tell()
                # A private map can be written to, as numpy and torch want it; nobody does.
                mapped = mmap.mmap(file.fileno(), file.tell(), access=mmap.ACCESS_COPY)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: what a step changes is more than `changes_in_memory`, and the "
                f"rest cannot be kept in {folder} (TMPDIR)",
            ) from error
        return [
            np.frombuffer(mapped, array.dtype, array.size, start)
            for array, start in zip(arrays, starts, strict=True)
        ]
