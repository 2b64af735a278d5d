"""Keep on a device what has changed there, until engines have acknowledged it: no byte goes back.

A change's elements were listed on the device when it was found. Its snapshot there advances from
the very list, in one launch for all tensors of a dtype. A list belongs to one change: a sync that
was not acknowledged is never written, nor is anything that a change does not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from weakref import WeakSet

import torch

from engine_ext.format import device_factors
from engine_ext.kernels.triton import runs_change_kernels

# Most bytes of lists for each byte of the snapshot there: 2 % of bf16 weights take 6 % of it.
LISTED_SHARE: Final = 1 / 8


class Listed:
    """Changed elements of some tensors, on their device.

    Args:
        places: Flat indices, each in its tensor, int32 or int64 [n].
        new: Their bits, integers, [n].
    """

    def __init__(self, places: torch.Tensor, new: torch.Tensor) -> None:
        self._elements: tuple[torch.Tensor, torch.Tensor] | None = (places, new)

    @property
    def elements(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places and new bits."""
        assert self._elements is not None, "the list was let go"
        return self._elements

    @property
    def nbytes(self) -> int:
        """Bytes on the device; 0 once it was let go."""
        return 0 if self._elements is None else sum(one.nbytes for one in self._elements)

    def let_go(self) -> None:
        """Free the memory."""
        self._elements = None


class ListedShare(NamedTuple):
    """Some elements of a list, of one tensor."""

    listed: Listed
    first: int
    nnz: int


class Lists:
    """The lists of the last comparison with a snapshot.

    They are freed with the changes that have them, or when the next comparison begins.
    """

    def __init__(self) -> None:
        self._all: WeakSet[Listed] = WeakSet()

    def keep(
        self, places: torch.Tensor, new: torch.Tensor, *, wide: bool, most: float
    ) -> Listed | None:
        """Keep elements, without waiting for the device; None if there is no memory for them.

        Args:
            places: int64 [n].
            new: Integers [n].
            wide: Whether a place can be 2**31 or more.
            most: Bytes that all lists on the device can take.
        """
        device = places.device
        kept = [one for one in self._all if one.nbytes and one.elements[0].device == device]
        taken = sum(one.nbytes for one in kept)
        if taken + len(places) * ((8 if wide else 4) + new.itemsize) > most:
            return None
        try:
            listed = Listed(places if wide else places.to(torch.int32), new)
        except torch.OutOfMemoryError:
            return None
        self._all.add(listed)
        return listed

    def let_go(self) -> None:
        """Free the memory of all lists."""
        for listed in self._all:
            listed.let_go()
        self._all.clear()


def is_listed(shares: Sequence[ListedShare]) -> bool:
    """Return whether a change's elements are on its device."""
    return bool(shares) and all(share.listed.nbytes for share in shares)


def write_listed(changed: Iterable[tuple[torch.Tensor, Sequence[ListedShare]]]) -> None:
    """Overwrite listed elements by their new bits, without waiting for the devices.

    Args:
        changed: Tensors, integers [n], each with its shares, which are on its device.
    """
    kinds: defaultdict[tuple[torch.device, torch.dtype, torch.dtype], list[_Written]]
    kinds = defaultdict(list)
    for flat, shares in changed:
        for share in shares:
            places, _ = share.listed.elements
            kinds[flat.device, flat.dtype, places.dtype].append(_Written(flat, *share))
    for (device, _, _), written in kinds.items():
        if runs_change_kernels(device):
            _write_by_kernel(written)
            continue
        for one in written:
            places, new = (each[one.first : one.first + one.nnz] for each in one.listed.elements)
            one.flat.index_copy_(0, places.to(torch.int64), new)


class _Written(NamedTuple):
    flat: torch.Tensor
    listed: Listed
    first: int
    nnz: int


def _write_by_kernel(written: Sequence[_Written]) -> None:
    """Overwrite elements of tensors of one dtype on one device, whose places have one dtype."""
    from engine_ext.kernels.triton import gather_scatter

    like = written[0].flat
    wide = written[0].listed.elements[0].dtype == torch.int64
    addresses = {listed: [one.data_ptr() for one in listed.elements] for _, listed, _, _ in written}
    table = gather_scatter.rows(
        [one.flat.data_ptr() for one in written],
        [addresses[one.listed][0] + one.first * (8 if wide else 4) for one in written],
        [addresses[one.listed][1] + one.first * like.itemsize for one in written],
        [one.nnz for one in written],
        width=like.itemsize,
        wide=wide,
    )
    sent = torch.from_numpy(table).to(like.device)
    gather_scatter.visit(sent, like, device_factors(like.device), wide=wide, write=True)
