"""Look up which live parameter or buffer an address belongs to.

The index is built once, after the engine has loaded and post-processed its weights. It keeps the
address ranges of all live tensors, sorted, so that a write anywhere below the engine's loader is
attributed with one bisect. Tensors that share an address range (tied weights) are one entry under
their first name.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch


def extent(tensor: torch.Tensor) -> int:
    """Return the elements that a tensor spans in memory, gaps included (0 if it is empty)."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's device, shape, strides and dtype."""
    return (tensor.device, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first element, and just past its last."""
    start = tensor.data_ptr()
    return start, start + extent(tensor) * tensor.element_size()


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One live parameter or buffer.

    Attributes:
        name: its first name in the model.
        start, end: address of its first element, and just past its last.
        aliases: other names of the same memory.
    """

    name: str
    tensor: torch.Tensor
    start: int
    end: int
    aliases: list[str] = field(default_factory=list)

    @property
    def in_place(self) -> bool:
        """Whether the tensor still has the memory that it had; another can have its name by now."""
        return self.tensor.data_ptr() == self.start

    def flat(self) -> torch.Tensor:
        """Return the memory as a 1-D tensor of `extent` elements, whatever the strides."""
        data = self.tensor.detach()
        return data.as_strided((extent(data),), (1,), data.storage_offset())


def live_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer that has memory, under every name that it has."""
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in chain(model.named_parameters(remove_duplicate=False), buffers):
        if tensor.numel() and not tensor.is_meta:
            yield name, tensor


@dataclass(frozen=True, slots=True)
class _Registry:
    """Snapshot of one dict of a module: its submodules, parameters or buffers."""

    current: dict[str, Any]
    values: list[Any]
    addresses: list[int | None]

    def unchanged(self) -> bool:
        """Return whether the dict holds the very same objects, at the same addresses."""
        if len(self.current) != len(self.values):
            return False
        found = zip(self.current.values(), self.values, self.addresses, strict=True)
        return all(
            now is then and (address is None or now.data_ptr() == address)
            for now, then, address in found
        )


def _registries(model: torch.nn.Module) -> Iterator[_Registry]:
    for module in model.modules():
        for registry in (module._modules, module._parameters, module._buffers):
            values: list[Any] = list(registry.values())
            addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else None for v in values]
            yield _Registry(registry, values, addresses)


class StorageIndex:
    """Sorted address ranges of a model's live tensors; `moved` lists those that change later.

    Attributes:
        entries: the live tensors, by address.
        by_name: the same, by their first name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        by_range: dict[tuple[int, int], LiveTensor] = {}
        tensors = list(live_tensors(model))
        for name, tensor in tensors:
            start, end = address_range(tensor)
            known = by_range.get((start, end))
            if known is None:
                by_range[start, end] = LiveTensor(name, tensor, start, end)
            else:
                known.aliases.append(name)
        # If two ranges start at one address the longer comes first, so that bisect finds the
        # shorter, and `holding` walks outwards to those that hold the whole view.
        self.entries = sorted(by_range.values(), key=lambda e: (e.start, -e.end))
        self._starts = [entry.start for entry in self.entries]
        # The last address of each and of those before it: where a search among them can stop.
        self._ends = list(accumulate((entry.end for entry in self.entries), max))
        self.by_name = {entry.name: entry for entry in self.entries}
        self._addresses = {name: tensor.data_ptr() for name, tensor in tensors}
        self._layouts = {name: layout(tensor) for name, tensor in tensors}
        # Without names, so that the usual answer of `moved`, at every sync, is found quickly.
        self._registries = list(_registries(model))

    def find(self, tensor: torch.Tensor) -> LiveTensor | None:
        """Return the smallest live tensor whose memory holds the whole view, or None."""
        return next(self.holding(tensor), None)

    def holding(self, tensor: torch.Tensor) -> Iterator[LiveTensor]:
        """Yield every live tensor whose memory holds the whole view, innermost first."""
        if tensor.is_meta or tensor.numel() == 0:
            return
        start, end = address_range(tensor)
        position = bisect_right(self._starts, start) - 1
        while position >= 0 and self._ends[position] >= end:
            entry = self.entries[position]
            if end <= entry.end:
                yield entry
            position -= 1

    def overlapping(self, tensor: torch.Tensor) -> Iterator[LiveTensor]:
        """Yield every live tensor that has memory in common with a tensor's range, by address."""
        start, end = address_range(tensor)
        first = stop = bisect_left(self._starts, end)
        while first > 0 and self._ends[first - 1] > start:
            first -= 1
        return (entry for entry in self.entries[first:stop] if start < entry.end)

    def moved(self, model: torch.nn.Module) -> list[str]:
        """Return the names whose memory is not where it was when the index was built, sorted."""
        if all(registry.unchanged() for registry in self._registries):
            return []
        now = {name: tensor.data_ptr() for name, tensor in live_tensors(model)}
        names = self._addresses.keys() | now.keys()
        return sorted(n for n in names if self._addresses.get(n) != now.get(n))

    def differences(self, later: StorageIndex, names: Iterable[str]) -> list[str]:
        """Return which tensors are not in a later index of the model as they are here, sorted.

        Their addresses do not count. Their layouts do, and which tensors share memory with them.
        """
        before, now = self._arrangement(), later._arrangement()
        return sorted(name for name in names if before.get(name) != now.get(name))

    def _arrangement(self) -> dict[str, tuple[object, ...]]:
        """Return by each name the layout, the names in the same stretch of memory, and where."""
        found: dict[str, tuple[object, ...]] = {}
        stretch: list[LiveTensor] = []

        def close() -> None:
            together = frozenset(n for one in stretch for n in (one.name, *one.aliases))
            for one in stretch:
                for name in (one.name, *one.aliases):
                    found[name] = (self._layouts[name], together, one.start - stretch[0].start)

        end = 0
        for entry in self.entries:
            if entry.start >= end:
                close()
                stretch = []
            stretch.append(entry)
            end = max(end, entry.end)
        close()
        return found
