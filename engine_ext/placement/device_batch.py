"""Elements of several live tensors on accelerators, read or written together.

One kernel visits those of a dtype, and what it reads or takes crosses the bus in one copy. Without
the kernels, PyTorch's operators visit one tensor after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from engine_ext.kernels import gather_scatter as host
from engine_ext.kernels.triton import runs_kernels
from engine_ext.placement.live_elements import DeviceElements

Bits = list[torch.Tensor]  # of each tensor's elements, as integers, [n] each


class DeviceBatch:
    """Elements on accelerators; none of them twice.

    Args:
        elements: of each live tensor.
    """

    def __init__(self, elements: Sequence[DeviceElements]) -> None:
        self._size = len(elements)
        self._alone: list[tuple[int, DeviceElements]] = []
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = defaultdict(list)
        for number, one in enumerate(elements):
            if runs_kernels(one.flat.device):
                groups[one.flat.device, one.flat.dtype, one.offsets.dtype].append(number)
            else:
                self._alone.append((number, one))
        self._groups = [
            _Group(numbers, [elements[number] for number in numbers]) for numbers in groups.values()
        ]

    def read(self) -> Bits:
        """Return their bits, copies in host memory."""
        return self._ordered(
            *((group.numbers, group.read()) for group in self._groups),
            *(([number], [one.read()]) for number, one in self._alone),
        )

    def holds(self, bits: Sequence[torch.Tensor]) -> bool:
        """Return whether these are their bits."""
        return all(group.holds([bits[n] for n in group.numbers]) for group in self._groups) and all(
            one.holds(bits[number]) for number, one in self._alone
        )

    def put(self, bits: Sequence[torch.Tensor]) -> None:
        """Overwrite them by bits in host memory or on their device."""
        for group in self._groups:
            group.put([bits[number] for number in group.numbers])
        for number, one in self._alone:
            one.put(bits[number])

    def swap(self, bits: Sequence[torch.Tensor]) -> Bits:
        """Overwrite them like `put`, and return the old bits in host memory."""
        return self._ordered(
            *(
                (group.numbers, group.swap([bits[n] for n in group.numbers]))
                for group in self._groups
            ),
            *(([number], [one.swap(bits[number])]) for number, one in self._alone),
        )

    def _ordered(self, *found: tuple[list[int], Bits]) -> Bits:
        by_number = dict(
            pair for numbers, bits in found for pair in zip(numbers, bits, strict=True)
        )
        return [by_number[number] for number in range(self._size)]


def upload(bits: Sequence[torch.Tensor], device: torch.device) -> Bits:
    """Copy 1-D tensors of one dtype in host memory to a device at once; views of one tensor."""
    return [*torch.split(_joined(bits).to(device), [one.numel() for one in bits])]


def _joined(bits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 1-D tensors of one dtype in host memory as one, [n]; a view if they lie in a row."""
    start, at = bits[0].data_ptr(), bits[0].data_ptr()
    storage = bits[0].untyped_storage().data_ptr()
    for one in bits:
        if one.data_ptr() != at or one.untyped_storage().data_ptr() != storage:
            whole = _host_memory(sum(one.numel() for one in bits), bits[0].dtype)
            torch.cat(list(bits), out=whole)
            return whole
        at += one.nbytes
    return bits[0].as_strided(((at - start) // bits[0].itemsize,), (1,))


def _host_memory(size: int, dtype: torch.dtype) -> torch.Tensor:
    # Allocated by numpy, which asks for huge pages: page faults take longer than the copy.
    return host.signed(np.empty(size, f"u{dtype.itemsize}"))


class _Group:
    """Elements of live tensors of one dtype on one device, with offsets of one dtype."""

    def __init__(self, numbers: list[int], elements: list[DeviceElements]) -> None:
        self.numbers = numbers
        self._elements = elements
        self._counts = [one.offsets.numel() for one in elements]
        self._flat = elements[0].flat
        self._wide = elements[0].offsets.dtype == torch.int64

    def read(self) -> Bits:
        old = self._empty(self._flat.device)
        self._visit(old, [], keep=True)
        return self._split(_host_memory(old.numel(), old.dtype).copy_(old))

    def holds(self, bits: Bits) -> bool:
        differs = self._visit(_joined(bits).to(self._flat.device), [], compare=True)
        return not differs.any()

    def put(self, bits: Bits) -> None:
        self._visit(self._flat, self._sent(bits), write=True)

    def swap(self, bits: Bits) -> Bits:
        # Allocated before anything is written: after that only the device itself can fail.
        old = self._empty(self._flat.device)
        kept = _host_memory(old.numel(), old.dtype)
        self._visit(old, self._sent(bits), keep=True, write=True)
        return self._split(kept.copy_(old))

    def _visit(self, old: torch.Tensor, new: Bits, **modes: bool) -> torch.Tensor:
        from engine_ext.kernels.triton import gather_scatter

        table = gather_scatter.rows(
            [one.flat.data_ptr() for one in self._elements],
            [one.offsets.data_ptr() for one in self._elements],
            [one.data_ptr() for one in new] or [0] * len(self._counts),
            self._counts,
            width=self._flat.itemsize,
            wide=self._wide,
        )
        return gather_scatter.visit(table, old, wide=self._wide, **modes)

    def _sent(self, bits: Bits) -> Bits:
        device = self._flat.device
        if all(one.device == device for one in bits):
            return bits
        return upload([one.cpu() for one in bits], device)

    def _empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(sum(self._counts), dtype=self._flat.dtype, device=device)

    def _split(self, whole: torch.Tensor) -> Bits:
        return [*torch.split(whole, self._counts)]
