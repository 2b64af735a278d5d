"""Keep modules as they were when the engine's post-load processing of them began."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine_ext.model import address_range, reachable_tensors
from engine_ext.startup.permuted import ModuleCopy, Processing, loaded_tensors
from engine_ext.startup.recomputed import host_copies


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """An object that processing has made, such as a number or the handle of a kernel.

    Attributes:
        keeps: what the object might point to without a reference of its own, kept alive with it.
        nbytes: host memory that both take.
    """

    value: Any
    keeps: Any
    nbytes: int


@dataclass(slots=True)
class AttributeElements:
    """An attribute of the live module; see `engine_ext.placement.LiveElements`.

    Attributes:
        container: the ``__dict__`` of the object that has it, or a dict or list of the module.
        key: the attribute's name, or its key.
        size: host memory that a value of it takes, in bytes.
    """

    container: Any
    key: Any
    size: int
    nbytes: int = 0
    _keeps: Any = field(default=None, init=False)

    def read(self) -> Replacement:
        return Replacement(self.container[self.key], self._keeps, self.size)

    def holds(self, bits: Replacement) -> bool:
        return self.container[self.key] is bits.value

    def put(self, bits: Replacement) -> None:
        self.container[self.key] = bits.value
        self._keeps = bits.keeps


class Change(Protocol):
    """Elements of the unprocessed weights and their new bits."""

    @property
    def elements(self) -> Any: ...

    @property
    def new(self) -> Any: ...


Changes = Mapping[str, Iterable[Change]]
"""Changes of unprocessed weights, by the weights' names."""
_NO_CHANGES: Final[Changes] = {}


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
        devices: where the weights are processed that are kept in host memory, by name.
        refused: why the module is not updated; then `before` has the layout of its weights alone.
    """

    module: torch.nn.Module
    before: torch.nn.Module
    process: Callable[[Any], None]
    moves: bool
    memory: dict[str, tuple[StorageWeakRef, int]]
    shared: frozenset[str]
    in_place: set[str] = field(default_factory=set)
    attributes: dict[str, AttributeElements] = field(default_factory=dict)
    devices: dict[str, torch.device] = field(default_factory=dict)
    refused: str | None = None

    def copy(self, changes: Changes = _NO_CHANGES) -> ModuleCopy:
        """Return a copy of the module before processing, on the devices that it is processed on.

        Its tensors have the `changes`; names that it has no tensor for are left out.
        """
        there: dict[int, torch.Tensor] = {}
        for name, tensor in loaded_tensors(self.before):
            if name in self.devices:
                changed = tensor
                if name in changes:
                    changed = host_copies.copied(tensor, tensor.device)
                    _apply(changes[name], changed)
                there[id(tensor)] = host_copies.copied(changed, self.devices[name])
        copy = ModuleCopy(self.before, there)
        for name, tensor in loaded_tensors(copy.root):
            if name not in self.devices:
                _apply(changes.get(name, ()), tensor)
        return copy

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is loaded before processing, by name; nothing if elements are only moved."""
        if not self.moves:
            yield from loaded_tensors(self.before)


class UnprocessedModules:
    """The states of the modules that the engine's loader cannot be traced on after processing.

    Weights on an accelerator are kept in pinned host memory.

    Args:
        limit: bytes of host memory that the parameters and buffers kept can take on this rank.
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
        self._traced = 0
        self._known: dict[int, str | None] = {}
        self._memory = host_copies.HostMemory()

    def keep(self, processing: Processing, moves: bool) -> str | None:
        """Keep a module that is about to be processed, unless it is kept already.

        Returns:
            Why it could not be kept, or None.
        """
        module = processing.module
        if id(module) in self._known:
            return self._known[id(module)]
        tensors = [tensor for _, tensor in loaded_tensors(module)]
        size = 0 if moves else sum(tensor.nbytes for tensor in tensors)
        if not self.reserve(size):
            return (
                f"post-load processing computes it, and its unprocessed weights take {size} bytes "
                f"more than {self.nbytes}: raise --delta-shadow-bytes, which allows {self._limit}"
            )
        devices: dict[str, torch.device] = {}
        if moves:
            copies = {id(tensor): _without_data(tensor) for tensor in tensors}
        else:
            elsewhere = [*filter(host_copies.belongs_elsewhere, tensors)]
            copies = {id(tensor): self._memory.copy(tensor) for tensor in elsewhere}
            devices = {n: t.device for n, t in loaded_tensors(module) if id(t) in copies}
        state = _state(processing, copies, moves=moves)
        state.devices.update(devices)
        self.states.append(state)
        self._known[id(module)] = None
        return None

    def refuse(self, processing: Processing, why: str) -> None:
        """Keep the layout of a module that `keep` could not keep, without its weights.

        So the engine's loader can be traced on it, and the tensors of the checkpoint that belong to
        it are refused by name, and no others.
        """
        tensors = (tensor for _, tensor in loaded_tensors(processing.module))
        copies = {id(tensor): host_copies.without_memory(tensor) for tensor in tensors}
        state = _state(processing, copies, moves=False)
        self.states.append(replace(state, refused=why))
        self._known[id(processing.module)] = why

    def refused_names(self, model: torch.nn.Module) -> dict[str, frozenset[str]]:
        """Return the modules in a model that are refused, with the names of their weights."""
        refused = {id(one.module): one for one in self.states if one.refused is not None}
        return {
            path: frozenset(
                f"{path}.{name}".lstrip(".")
                for name, _ in loaded_tensors(refused[id(module)].before)
            )
            for path, module in model.named_modules()
            if id(module) in refused
        }

    def refusals(self, model: torch.nn.Module) -> dict[str, str]:
        """Return why weights of modules in a model are not updated, by name."""
        return {
            name: str(self._known[id(model.get_submodule(path))])
            for path, names in self.refused_names(model).items()
            for name in names
        }

    def release(self, size: int) -> None:
        """Count `size` bytes as kept no longer."""
        self.nbytes -= size

    def reserve(self, size: int) -> bool:
        """Count another `size` bytes as kept, if they fit; return whether they do."""
        fits = self.nbytes + size <= self._limit
        self.nbytes += size if fits else 0
        return fits

    def reserve_anew(self) -> Callable[[int], bool]:
        """Return `reserve` for what one trace keeps; what the trace before has kept is released."""
        self.release(self._traced)
        self._traced = 0

        def reserve(size: int) -> bool:
            fits = self.reserve(size)
            self._traced += size if fits else 0
            return fits

        return reserve


def _state(
    processing: Processing, copies: dict[int, torch.Tensor], *, moves: bool
) -> UnprocessedModule:
    """Return the state of a module; `copies` replace its tensors, by their `id`."""
    module = processing.module
    before = ModuleCopy(module, copies).root
    memory = {n: (storage_of(t), int(t.storage_offset())) for n, t in loaded_tensors(module)}
    shared = frozenset() if moves else _shared(module, before)
    return UnprocessedModule(module, before, processing.call, moves, memory, shared)


def _apply(changes: Iterable[Change], tensor: torch.Tensor) -> None:
    for change in changes:
        change.elements.within(tensor).put(change.new)


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
        address_range(t)
        for t in (one, other)
        if t.layout == torch.strided and not t.is_meta and t.numel()
    ]
    return len(ranges) == 2 and ranges[0][0] < ranges[1][1] and ranges[1][0] < ranges[0][1]


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a reference to a tensor's storage that does not keep it alive."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
