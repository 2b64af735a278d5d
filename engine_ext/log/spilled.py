"""Add up the deltas of all tensors in bounded memory; what exceeds a window waits in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from engine_ext.format import ParamDelta
from engine_ext.log.merged import MergedDelta, add_delta, payload_bytes, without_elements

WINDOW_BYTES: Final = 64 << 20


class SpilledDeltas(AbstractContextManager["SpilledDeltas"]):
    """One delta of each tensor with the effect of several in turn; a context manager.

    At most `WINDOW_BYTES`, and what the deltas of one part need, stay in memory. The rest is in an
    unnamed temporary file below ``TMPDIR``, from which a tensor's deltas are read again in turn.
    """

    def __init__(self) -> None:
        self._now: dict[str, MergedDelta] = {}
        self._nbytes = 0  # of these
        self._stored: dict[str, list[_Stored]] = {}  # of each tensor, the oldest first
        self._file = tempfile.TemporaryFile(prefix="delta-fold-", buffering=0)  # noqa: SIM115

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def add(self, deltas: list[ParamDelta]) -> None:
        """Add the deltas of the next part; all have values.

        Raises:
            CannotFold: one has another dtype or shape than before.
            OSError: the file cannot be written. All that was added is lost after either.
        """
        for delta in deltas:
            before = self._now.get(delta.name)
            self._nbytes -= 0 if before is None else before.nbytes
            add_delta(self._now, delta)
            self._nbytes += self._now[delta.name].nbytes
        if self._nbytes > WINDOW_BYTES:
            self._store()

    def sizes(self) -> Iterator[tuple[str, str, int]]:
        """Yield each tensor's name, dtype, and the bytes of positions and values at most."""
        self._store()
        for name, stored in self._stored.items():
            yield name, stored[-1].like.dtype, _size(stored)

    def result(self, name: str) -> ParamDelta:
        """Return a tensor's delta.

        Raises:
            CannotFold: the tensor has had another dtype or shape.
            OSError: the file cannot be read, or not be written.
        """
        self._store()
        merged: dict[str, MergedDelta] = {}
        for one in self._stored[name]:
            indices = one.indices
            add_delta(
                merged,
                replace(
                    one.like,
                    indices=None if indices is None else self._read(indices),
                    values=self._read(one.values),
                ),
            )
        return merged[name].result()

    def _store(self) -> None:
        self._nbytes = 0
        for name in [*self._now]:
            delta = self._now.pop(name).result()
            indices = None if delta.indices is None else self._write(delta.indices)
            one = _Stored(without_elements(delta), indices, self._write(delta.values))
            # A dense one replaces what was before.
            self._stored[name] = [*([] if indices is None else self._stored.get(name, [])), one]

    def _write(self, array: NDArray[Any]) -> _Place:
        place = _Place(self._file.tell(), array.dtype, array.size)
        left = memoryview(array.tobytes())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: what is folded cannot be kept in {tempfile.gettempdir()} "
                "(TMPDIR)",
            ) from error
        return place

    def _read(self, place: _Place) -> NDArray[Any]:
        raw = bytearray(place.size * place.dtype.itemsize)
        left, at = memoryview(raw), place.start
        while left:
            read = os.preadv(self._file.fileno(), [left], at)
            if not read:
                raise OSError(f"the temporary file in {tempfile.gettempdir()} (TMPDIR) was cut")
            left, at = left[read:], at + read
        return np.frombuffer(raw, place.dtype)


class _Place(NamedTuple):
    """Where an array is in the file."""

    start: int
    dtype: np.dtype[Any]
    size: int  # elements


class _Stored(NamedTuple):
    """A delta in the file."""

    like: ParamDelta  # without elements
    indices: _Place | None
    values: _Place


def _size(stored: list[_Stored]) -> int:
    """Return the bytes of what some deltas in turn lead to, at most."""
    first, like = stored[0], stored[-1].like
    if first.indices is None:
        return first.values.size * like.values.itemsize
    return payload_bytes(like, min(like.numel, sum(one.values.size for one in stored)))
