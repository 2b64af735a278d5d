"""Keep what a generator yields apart from what it does next: it can refill memory that it yielded.

Frameworks gather into buffers that they use again, and free what they have gathered. Tensors are
compared some time after they were yielded, while the next ones are made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine_ext.kernels import Bits, bits_of, host_bits

# Bytes up to which a copy costs less than looking at the memory twice.
_COPIED: Final = 1 << 16
_LOOKED_AT: Final = 1 << 10  # elements
# So many buffers a generator can fill in turn, each for the first time with a tensor of its size.
_BUFFERS: Final = 4


class Stable(Iterator[tuple[str, torch.Tensor]]):
    """An iterator whose tensors keep their values until the sync ends, so that none is copied."""


class StableGenerator(Stable):
    """The tensors of a generator that does not write what it has yielded."""

    def __init__(self, tensors: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        self._tensors = tensors

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    def close(self) -> None:
        """Close the generator."""
        self._tensors.close()


Unchanged = Callable[[], bool]  # whether a tensor is as it was yielded


class Yielded:
    """The tensors of one iterator, in host memory.

    Small tensors are copied. A larger one that can be in memory with others, as it is a view of
    larger memory or its memory was yielded before, has to be compared before the next is taken; so
    have the first few. Some elements of any other are looked at when it is yielded and when it has
    been compared.
    """

    def __init__(self) -> None:
        self._storages: set[StorageWeakRef] = set()

    def take(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Unchanged | None, bool]:
        """Return what to compare in place of a tensor, and how to make sure of it.

        Args:
            tensor: Contiguous, in memory that the iterator can write.

        Returns:
            The tensor or a copy; a function that returns whether the memory is as it was, or None
            if there is no need to ask; whether it must be compared before the next is taken.
        """
        nbytes = tensor.nbytes
        if nbytes <= _COPIED:
            return tensor.clone(), None, False
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        is_alone = storage.nbytes() == nbytes and reference not in self._storages
        self._storages.add(reference)
        if is_alone and len(self._storages) > _BUFFERS:
            found = _some_elements(tensor)
            return tensor, lambda: _some_elements(tensor) == found, False
        return tensor, None, True


def _some_elements(tensor: torch.Tensor) -> bytes | None:
    """Return some elements of a tensor, from all over it; None if its memory was freed."""
    if not tensor.data_ptr():
        return None
    bits: Bits = host_bits(bits_of(tensor.view(-1)))
    # An odd step is no multiple of the length of a row.
    return bits[:: tensor.numel() // _LOOKED_AT | 1].tobytes()
