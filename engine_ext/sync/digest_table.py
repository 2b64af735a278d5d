"""The digests of a rank's tensors as an array, which a sync advances by one addition.

A mixture of experts has tens of thousands of tensors. To add two objects for each of them takes
longer than to write what they stand for.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.format import Digest

Sums = NDArray[np.uint64]  # [n, 2]: both lanes of digests; they wrap around as digests do


def sums_of(digests: Iterable[Digest]) -> Sums:
    """Return digests as an array, uint64 [n, 2]."""
    lanes = [(digest.lane0, digest.lane1) for digest in digests]
    return np.array(lanes, np.uint64).reshape(-1, 2)


def total_of(sums: Sums) -> Digest:
    """Return the sum of digests, uint64 [n, 2]."""
    return Digest(*sums.sum(0).tolist())


class Changes(NamedTuple):
    """How much the digests of some tensors change.

    Attributes:
        names: of the tensors.
        sums: uint64 [tensors, 2].
    """

    names: Sequence[str]
    sums: Sums


NO_CHANGES: Final = Changes((), np.empty((0, 2), np.uint64))


class DigestTable(Mapping[str, Digest]):
    """The digest of each tensor, by name; it does not change.

    Attributes:
        total: the sum of all.
    """

    def __init__(self, digests: Mapping[str, Digest]) -> None:
        self._numbers = {name: number for number, name in enumerate(digests)}
        self._sums = sums_of(digests.values())
        self.total = total_of(self._sums)

    def __getitem__(self, name: str) -> Digest:
        return Digest(*self._sums[self._numbers[name]].tolist())

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def items(self) -> ItemsView[str, Digest]:
        """Return the names with their digests."""
        lanes = self._sums.tolist()
        return {name: Digest(*own) for name, own in zip(self._numbers, lanes, strict=True)}.items()

    def find(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of each of these tensors, int64 [n]; -1 for one that is not here."""
        find = self._numbers.get
        return np.array([find(name, -1) for name in names], np.int64)

    def of(self, numbers: NDArray[np.int64]) -> Sums:
        """Return the digests of tensors by number, uint64 [n, 2]."""
        return self._sums[numbers]

    def plus(self, numbers: NDArray[np.int64], sums: Sums) -> DigestTable:
        """Return another table, to whose tensors these digests are added.

        Args:
            numbers: of the tensors, int64 [n], any of them several times.
            sums: uint64 [n, 2].
        """
        found = object.__new__(DigestTable)
        found._numbers, found._sums = self._numbers, self._sums.copy()
        np.add.at(found._sums, numbers, sums)
        found.total = self.total + total_of(sums)
        return found

    def minus(self, numbers: NDArray[np.int64], sums: Sums) -> DigestTable:
        """Return another table, from whose tensors these digests are taken; args as of `plus`."""
        return self.plus(numbers, np.uint64(0) - sums)
