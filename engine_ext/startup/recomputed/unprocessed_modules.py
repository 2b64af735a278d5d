"""Keep modules as they were when the engine's post-load processing of them began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine_ext.model import extent, reachable_tensors
from engine_ext.startup.permuted import ModuleCopy, Processing
from engine_ext.startup.recomputed.elements import AttributeElements


@dataclass(frozen=True, slots=True, eq=False)
class UnprocessedModule:
    """A module as it was before post-load processing.

    Attributes:
        module: the live module.
        before: its copy. If the processing only `moves` elements, the tensors have no data.
        process: runs the engine's processing on a copy of `before`.
        moves: whether the elements stay in the memory of their parameters, so that these are
            written to directly.
        memory: the storage that each parameter and buffer had before, which is not kept alive, and
            its offset there in elements.
        in_place: names of parameters and buffers that processing leaves where and as they are:
            their unprocessed weights are live memory.
        attributes: what rebuilds have replaced as a whole, by path.
        shared: names of parameters and buffers whose memory processing can also reach by another
            way than their copies.
    """

    module: torch.nn.Module
    before: torch.nn.Module
    process: Callable[[Any], None]
    moves: bool
    memory: dict[str, tuple[StorageWeakRef, int]]
    shared: frozenset[str]
    in_place: set[str] = field(default_factory=set)
    attributes: dict[str, AttributeElements] = field(default_factory=dict)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is loaded before processing, by name; nothing if elements are only moved."""
        if not self.moves:
            yield from loaded_tensors(self.before)


class UnprocessedModules:
    """The states of the modules that the engine's loader cannot be traced on after processing.

    Args:
        limit: bytes that the parameters and buffers kept can take on this rank.
        moved_too: the modules whose processing can be followed are to be kept, too, because the
            engine has loaded no checkpoint yet, so that it must be repeated.

    Attributes:
        states: in the order in which the engine processed the modules.
        nbytes: bytes of the parameters and buffers kept.
    """

    def __init__(self, limit: int, *, moved_too: bool = False) -> None:
        self.states: list[UnprocessedModule] = []
        self.nbytes = 0
        self.moved_too = moved_too
        self._limit = limit
        self._known: set[int] = set()

    def keep(self, processing: Processing, moves: bool) -> str | None:
        """Keep a module that is about to be processed, unless it is kept already.

        Returns:
            Why it could not be kept, or None.
        """
        module = processing.module
        if id(module) in self._known:
            return None
        tensors = [tensor for _, tensor in loaded_tensors(module)]
        size = 0 if moves else sum(tensor.nbytes for tensor in tensors)
        if not self.reserve(size):
            return (
                f"post-load processing computes it, and its unprocessed weights take {size} bytes "
                f"more than {self.nbytes}: raise --delta-shadow-bytes, which allows {self._limit}"
            )
        empty = {id(tensor): _without_data(tensor) for tensor in tensors} if moves else {}
        before = ModuleCopy(module, empty).root
        memory = {n: (storage_of(t), int(t.storage_offset())) for n, t in loaded_tensors(module)}
        shared = frozenset() if moves else _shared(module, before)
        self.states.append(
            UnprocessedModule(module, before, processing.call, moves, memory, shared)
        )
        self._known.add(id(module))
        return None

    def release(self, size: int) -> None:
        """Count `size` bytes as kept no longer."""
        self.nbytes -= size

    def reserve(self, size: int) -> bool:
        """Count another `size` bytes as kept, if they fit; return whether they do."""
        fits = self.nbytes + size <= self._limit
        self.nbytes += size if fits else 0
        return fits


def loaded_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, which a loader can write to, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _shared(module: torch.nn.Module, before: torch.nn.Module) -> frozenset[str]:
    """Return the parameters and buffers whose memory is that of something else that is reachable.

    That is another tensor of the module, or what an object holds that its copy `before` shares.
    """
    held = [tensor for _, _, _, tensor in reachable_tensors(before)]
    around = [tensor for _, _, _, tensor in reachable_tensors(module)]
    return frozenset(
        name
        for name, tensor in loaded_tensors(module)
        if any(_overlap(tensor, other) for other in held)
        or any(_overlap(tensor, other) for other in around if other is not tensor)
    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    ranges = [
        (t.data_ptr(), t.data_ptr() + extent(t) * t.element_size())
        for t in (one, other)
        if t.layout == torch.strided and not t.is_meta and t.numel()
    ]
    return len(ranges) == 2 and ranges[0][0] < ranges[1][1] and ranges[1][0] < ranges[0][1]


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a reference to a tensor's storage that does not keep it alive."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
