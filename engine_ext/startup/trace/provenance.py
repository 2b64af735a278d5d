"""Track the provenance of elements in the temporaries that a loader makes.

A loader can clone, permute, concatenate or pad tensors before it copies them to live memory. Each
operator that only moves elements is recorded, with its arguments, as a step that created or changed
a temporary. When such a temporary reaches live memory, the steps that led to it are replayed on
element ids (see `index_replay`), which gives the source of every element. An operator that
might compute is not replayed: the temporaries it writes become untraceable, with the operator's
name as the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from engine_ext.startup.trace.index_replay import (
    Provenance,
    Step,
    TrackedStorage,
    UntraceableError,
    UntrackedTensor,
    View,
)
from engine_ext.startup.trace.strided_boxes import ElementIds

_aten: Final = torch.ops.aten

# Operators that only move elements, and their arguments whose elements they move. Other tensor
# arguments are indices, and must have known values.
_MOVES: Final[dict[Any, tuple[str, ...]]] = {
    _aten.clone.default: ("self",),
    _aten._to_copy.default: ("self",),
    _aten.copy_.default: ("self", "src"),
    _aten.zero_.default: ("self",),
    _aten.fill_.Scalar: ("self",),
    _aten.cat.default: ("tensors",),
    _aten.stack.default: ("tensors",),
    _aten.unsafe_split.Tensor: ("self",),
    _aten.unsafe_split_with_sizes.default: ("self",),
    _aten.split_copy.Tensor: ("self",),
    _aten.split_with_sizes_copy.default: ("self",),
    _aten.flip.default: ("self",),
    _aten.roll.default: ("self",),
    _aten.rot90.default: ("self",),
    _aten.repeat.default: ("self",),
    _aten.constant_pad_nd.default: ("self",),
    _aten.channel_shuffle.default: ("self",),
    _aten.pixel_shuffle.default: ("self",),
    _aten.pixel_unshuffle.default: ("self",),
    _aten.index_select.default: ("self",),
    _aten.gather.default: ("self",),
    _aten.take.default: ("self",),
    _aten.index.Tensor: ("self",),
    _aten.index_copy_.default: ("self", "source"),
    _aten.index_put_.default: ("self", "values"),
    _aten.scatter_.src: ("self", "src"),
}


class ProvenanceTracker:
    """The storages that hold checkpoint elements, and the steps that made them so far.

    Attributes:
        used: checkpoint tensors whose elements were read by an operator that made or changed a
            temporary.
    """

    def __init__(self) -> None:
        self._storages: dict[int, TrackedStorage] = {}
        self._steps = 0
        self.used: set[str] = set()
        # The storages of temporaries that have data, by key; none else is ever at their addresses.
        self._made: set[int] = set()
        self._outside: dict[TrackedStorage, None] = {}
        # The key of a storage is its address, so what is tracked must stay alive.
        self._alive: list[torch.Tensor] = []
        self._cached: tuple[tuple[TrackedStorage, int], ElementIds] | None = None

    def add_source(self, tensor: torch.Tensor, name: str) -> None:
        """Track a contiguous tensor that stands for a checkpoint tensor."""
        storage = self._track(tensor)
        storage.source, storage.names = name, frozenset([name])

    def add_made(self, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        """Note the memory that an operator has made, which is in none of its inputs."""
        given = {_key(t) for t in inputs}
        self._made.update(_key(t) for t in outputs if _key(t) not in given)

    def kept_outside(self) -> list[TrackedStorage]:
        """Return the storages written to that were there before, and are no live tensor's."""
        return list(self._outside)

    def find(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """Return the tracked storage that a tensor is a view of, or None."""
        return self._storages.get(_key(tensor))

    def find_all(self, tensors: Iterable[torch.Tensor]) -> list[TrackedStorage]:
        """Return the tracked storages that tensors are views of, without those of none."""
        return [storage for t in tensors if (storage := self.find(t)) is not None]

    def record(
        self,
        func: Any,
        arguments: dict[str, Any],
        outputs: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        live: frozenset[str],
    ) -> None:
        """Record what an operator did.

        `written` are those of its arguments that it wrote to, and `live` the names of the live
        tensors that it read. Some arguments are views of tracked storages, or live.
        """
        inputs = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
        keys = {_key(t) for t in inputs}
        created = [t for t in outputs if _key(t) not in keys]
        self.add_made(created, ())
        if not created and not written:
            return
        self.used.update(*(storage.names for storage in self.find_all(inputs)))
        problem = self._problem(func, arguments, live)
        self._outside |= {
            self._track(t): None
            for t in written
            if t.numel() and not t.is_meta and _key(t) not in self._made
        }
        targets = [self.find(t) or self._track(t) for t in [*created, *written]]
        for storage in targets:
            for other in self.find_all(inputs):
                if other is not storage:
                    storage.merge(other)
            storage.live |= live
            if problem:
                storage.mark_untraceable(problem)
        for tensor in [*created, *written]:
            storage = self._storages[_key(tensor)]
            if not _has_its_values(tensor, storage):
                storage.mark_untraceable(f"{func} sees it as {tensor.dtype}")
        if not problem:
            moved = _MOVES[func]
            recorded = {n: self._recorded(v, n in moved) for n, v in arguments.items()}
            step = Step(self._steps, func, recorded, tuple(self._view(t) for t in created))
            for storage in dict.fromkeys(targets):
                storage.steps.append(step)
        self._steps += 1

    def provenance(self, tensor: torch.Tensor) -> Provenance:
        """Return the provenance of a tensor's storage; raises UntraceableError if it has none."""
        storage = self._storages[_key(tensor)]
        if storage.untraceable:
            raise UntraceableError(storage.untraceable)
        if not _has_its_values(tensor, storage):
            raise UntraceableError(f"a copy sees it as {tensor.dtype}")
        return Provenance(storage)

    def element_ids(self, tensor: torch.Tensor, provenance: Provenance) -> ElementIds:
        """Return a tensor's source elements; raises UntraceableError if they are too many."""
        view = self._view(tensor)
        state = (view.storage, len(view.storage.steps))
        if self._cached is None or self._cached[0] != state:
            self._cached = None
            self._cached = (state, provenance.replay())
        whole = self._cached[1]
        values = whole.values.as_strided(view.sizes, view.strides, view.offset)
        return ElementIds(values, whole.starts)

    def drop_cache(self) -> None:
        """Free the ids of the last storage asked for."""
        self._cached = None

    def _problem(self, func: Any, arguments: dict[str, Any], live: frozenset[str]) -> str:
        """Return why the operator cannot be replayed on element ids; empty if it can."""
        if func not in _MOVES or arguments.get("accumulate"):
            return f"{func} changes it"
        if live:
            return f"it is read back from {sorted(live)[0]}"
        for name, value in arguments.items():
            for tensor in tree_leaves(value):
                if not isinstance(tensor, torch.Tensor):
                    continue
                storage = self.find(tensor)
                if name not in _MOVES[func] and (tensor.is_meta or storage is not None):
                    return f"{func} moves it to places that are not known"
                if storage is not None and not _has_its_values(tensor, storage):
                    return f"{func} sees it as {tensor.dtype}"
        return ""

    def _recorded(self, value: Any, is_moved: bool) -> Any:
        """Return an argument as a step keeps it."""

        def recorded(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not is_moved:
                return leaf.detach().cpu().clone()
            return self._view(leaf) if self.find(leaf) else UntrackedTensor(tuple(leaf.shape))

        return tree_map(recorded, value)

    def _view(self, tensor: torch.Tensor) -> View:
        storage = self._storages[_key(tensor)]
        return View(storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def _track(self, tensor: torch.Tensor) -> TrackedStorage:
        """Return the storage of a tensor, tracked from now on."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._alive.append(tensor)
        return self._storages.setdefault(_key(tensor), TrackedStorage(tensor.dtype, elements))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_its_values(tensor: torch.Tensor, storage: TrackedStorage) -> bool:
    """Return whether a view shows its storage's elements unchanged."""
    return tensor.dtype == storage.dtype and not tensor.is_neg() and not tensor.is_conj()
