"""Rebuild one module: process a copy with other weights, and compare it with live memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch

from engine_ext.kernels import host_bits
from engine_ext.model import extent
from engine_ext.placement import DeviceElements, HostElements, LiveElements, flat_bits
from engine_ext.rebuild.compare import Pair, Place, RebuildError, pairs
from engine_ext.rebuild.elements import AttributeElements, Replacement
from engine_ext.rebuild.loading_states import LoadingState, loaded_tensors
from engine_ext.repacks import ModuleCopy

# Elements compared at a time.
_CHUNK: Final = 1 << 20

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Change(Protocol):
    """Elements of the shadow and their new bits."""

    @property
    def elements(self) -> Any: ...

    @property
    def new(self) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Elements of live memory, or an attribute, and what a rebuild makes of them.

    Attributes:
        path: from the module.
        place: of a tensor or attribute that need not stay there; None for a parameter.
    """

    path: str
    elements: LiveElements
    new: Any
    place: Place | None = None


class ModuleRebuild:
    """One module of the live model, which is computed from its shadow.

    Args:
        path: of the module in the model.
        context: what the engine's processing runs in.

    Attributes:
        numel: elements of the shadow.
    """

    def __init__(self, path: str, state: LoadingState, context: Context) -> None:
        self.path = path
        self.module = state.module
        self.state = state
        self.numel = sum(tensor.numel() for _, tensor in state.shadow())
        self._context = context
        self._prefix = f"{path}." if path else ""
        self._attributes: dict[str, AttributeElements] = {}

    def rebuild(self, changes: Mapping[str, Iterable[Change]]) -> list[Difference]:
        """Return what is different in live memory once the shadow has changed. Nothing is written.

        Takes the memory of a copy of the module while it runs.

        Args:
            changes: of the tensors of the shadow, by their names in the module.

        Raises:
            RebuildError: processing leaves something else than on the live module.
            Exception: the engine's own.
        """
        copy = ModuleCopy(self.state.before, {})
        for name, tensor in loaded_tensors(copy.root):
            for change in changes.get(name, ()):
                change.elements.within(tensor).put(change.new)
        with self._processing():
            self.state.process(copy.root)
        found = [one for pair in pairs(self.module, copy.root) for one in self._compare(pair)]
        handles = [one for one in found if isinstance(one.new, Replacement)]
        if handles:
            # A handle may have the address of a tensor that it was made with.
            made = [*copy.root.parameters(), *copy.root.buffers()]
            kept = [tensor.detach() for tensor in made if tensor.numel()]
            for one in handles:
                one.new.keeps.extend(kept)
        copy.release()
        return found

    def shadow(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers before processing, by their names in the module."""
        yield from self.state.shadow()

    def shares(self, name: str) -> bool:
        """Return whether processing may reach a tensor of the shadow by another way."""
        return name in self.state.shared

    def keeps(self, name: str) -> bool:
        """Return whether the live module still has a tensor of the shadow, with elements."""
        return any(n == name and tensor.numel() for n, tensor in loaded_tensors(self.module))

    def holds(self, name: str) -> bool:
        """Return whether a tensor of the twin, given by its name in the model, is in the module."""
        return name.startswith(self._prefix)

    def name_within(self, name: str) -> str:
        """Return the name in the module of a tensor that it holds."""
        return name.removeprefix(self._prefix)

    def live_tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the live module."""
        return [*self.module.parameters(), *self.module.buffers()]

    def _compare(self, pair: Pair) -> Iterator[Difference]:
        if not pair.is_tensor:
            elements = self._attributes.setdefault(
                pair.path, AttributeElements(pair.container, pair.key, self._shadow_bytes())
            )
            new = Replacement(pair.new, [], elements.size)
            yield Difference(pair.path, elements, new, pair.place)
            return
        for one in tensor_differences(pair.path, pair.live, pair.new):
            yield replace(one, place=pair.place)

    def _shadow_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.state.shadow())

    @contextlib.contextmanager
    def _processing(self) -> Iterator[None]:
        devices = {t.device.index for t in self.live_tensors() if t.device.type == "cuda"}
        with torch.random.fork_rng(sorted(devices)), torch.no_grad(), self._context():
            yield


def tensor_differences(path: str, live: torch.Tensor, new: torch.Tensor) -> Iterator[Difference]:
    """Yield the elements of a live tensor whose bits differ in another one of its layout.

    Raises:
        RebuildError: there are gaps between its elements.
    """
    if extent(live) != live.numel():
        raise RebuildError(f"{path} has gaps between its elements")
    memory, other = flat_bits(live), flat_bits(new)
    if memory.device.type != "cpu":
        found = (memory != other).nonzero().view(-1)
        if len(found):
            yield Difference(path, DeviceElements(memory, found), other[found])
        return
    of_live, of_new = host_bits(memory), host_bits(other)
    dtype = np.int32 if len(of_live) < 1 << 31 else np.int64
    for start in range(0, len(of_live), _CHUNK):
        part = slice(start, start + _CHUNK)
        offsets = np.flatnonzero(of_live[part] != of_new[part])
        if len(offsets):
            offsets = (offsets + start).astype(dtype)
            yield Difference(path, HostElements(of_live, offsets), of_new[offsets])
