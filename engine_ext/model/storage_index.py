"""Which live parameter or buffer an address belongs to.

The index is made once, after the engine has loaded and post-processed its weights. It keeps the
address range of every live tensor, sorted, so that a write seen anywhere below the engine's
loader is attributed with one bisect. Tensors that share an address (tied weights) are one entry
under their first name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


def extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to just past its last one in memory (0 if it is empty)."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One live parameter or buffer.

    Attributes:
        name: its first name in the model.
        tensor: the tensor itself.
        start: address of its first element.
        end: address just past its last element.
        aliases: other names of the same memory.
    """

    name: str
    tensor: torch.Tensor
    start: int
    end: int
    aliases: list[str] = field(default_factory=list)

    def flat(self) -> torch.Tensor:
        """The memory as a 1-D tensor of `extent` elements, whatever the strides."""
        data = self.tensor.detach()
        return data.as_strided((extent(data),), (1,), data.storage_offset())


def live_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of the model that has memory, under every name it has."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() and not parameter.is_meta:
            yield name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.numel() and not buffer.is_meta:
            yield name, buffer


@dataclass(frozen=True, slots=True)
class _Part:
    """One dictionary of a module, as it was: its submodules, parameters or buffers."""

    found: dict[str, Any]
    values: list[Any]
    addresses: list[int | None]

    def same(self) -> bool:
        """Whether it holds the very same objects, at the same addresses."""
        return len(self.found) == len(self.values) and all(
            now is then and (address is None or now.data_ptr() == address)
            for now, then, address in zip(
                self.found.values(), self.values, self.addresses, strict=True
            )
        )


def _parts(model: torch.nn.Module) -> Iterator[_Part]:
    for module in model.modules():
        yield _Part(module._modules, list(module._modules.values()), [None] * len(module._modules))
        for found in (module._parameters, module._buffers):
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in found.values()]
            yield _Part(found, list(found.values()), addresses)


class StorageIndex:
    """Sorted address ranges of a model's live tensors.

    Args:
        model: the loaded model. The index holds its tensors' addresses as of now; `moved` tells
            whether they still hold.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        by_range: dict[tuple[int, int], LiveTensor] = {}
        for name, tensor in live_tensors(model):
            start = tensor.data_ptr()
            end = start + extent(tensor) * tensor.element_size()
            known = by_range.get((start, end))
            if known is None:
                by_range[start, end] = LiveTensor(name, tensor, start, end)
            else:
                known.aliases.append(name)
        # Of two ranges with one start the longer comes first, so that bisect finds the shorter,
        # and `find` walks outwards to the one that holds the whole view.
        self.entries = sorted(by_range.values(), key=lambda e: (e.start, -e.end))
        self._starts = [entry.start for entry in self.entries]
        self._longest = max((e.end - e.start for e in self.entries), default=0)
        self.by_name = {entry.name: entry for entry in self.entries}
        self._addresses = {name: tensor.data_ptr() for name, tensor in live_tensors(model)}
        # What the model is made of, without names: quick to compare at every sync, however large
        # the model is.
        self._parts = list(_parts(model))

    def find(self, tensor: torch.Tensor) -> LiveTensor | None:
        """The live tensor whose memory holds the whole of this view, or None; the smallest one."""
        return next(self.holding(tensor), None)

    def holding(self, tensor: torch.Tensor) -> Iterator[LiveTensor]:
        """Every live tensor whose memory holds the whole of this view; smaller ones first where
        they begin at one address."""
        if tensor.is_meta or tensor.numel() == 0:
            return
        start = tensor.data_ptr()
        end = start + extent(tensor) * tensor.element_size()
        position = bisect_right(self._starts, start) - 1
        while position >= 0 and self._starts[position] > start - self._longest:
            entry = self.entries[position]
            if end <= entry.end:
                yield entry
            position -= 1

    def moved(self, model: torch.nn.Module) -> list[str]:
        """Names whose memory is no longer where it was when the index was made."""
        if all(part.same() for part in self._parts):
            return []
        now = {name: tensor.data_ptr() for name, tensor in live_tensors(model)}
        names = self._addresses.keys() | now.keys()
        return sorted(n for n in names if self._addresses.get(n) != now.get(n))
