"""What becomes of checkpoint tensors between the loader's hands and live memory.

A loader may clone, permute, concatenate or pad tensors before it copies them. Each operator that
only moves elements is kept, with its arguments, as a step that made or changed a temporary; when
such a temporary reaches live memory, the steps that led to it are run again on element numbers,
which tells for every element where it comes from. Operators that could compute are not run again:
what they touch is known to be changed, with the operator's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from engine_ext.tracing.index_replay import (
    NotFollowed,
    Other,
    Provenance,
    Step,
    TrackedStorage,
    View,
)
from engine_ext.tracing.strided_boxes import ElementIds

_aten: Final = torch.ops.aten

# Operators that only move elements, and their arguments whose elements are moved. All other
# tensor arguments say where to, and must be known.
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
    """The cells that the loader has made so far, and how.

    Attributes:
        used: checkpoint tensors that it has read the elements of, other than for live memory.
    """

    def __init__(self) -> None:
        self._cells: dict[int, TrackedStorage] = {}
        self._steps = 0
        self.used: set[str] = set()
        # A storage's key is its address: what is tracked must stay alive.
        self._alive: list[torch.Tensor] = []
        self._last: tuple[tuple[TrackedStorage, int], ElementIds] | None = None

    def add_source(self, tensor: torch.Tensor, name: str) -> None:
        """Follow a contiguous tensor that stands for a checkpoint tensor."""
        cell = self._make(tensor)
        cell.source, cell.names = name, frozenset([name])

    def find(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """The cell that a tensor is a view of, if its storage is followed."""
        return self._cells.get(_key(tensor))

    def touched(self, tensors: Iterable[torch.Tensor]) -> list[TrackedStorage]:
        """The cells that these tensors are views of."""
        return [cell for t in tensors if (cell := self.find(t)) is not None]

    def record(
        self,
        func: Any,
        arguments: dict[str, Any],
        outputs: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        live: frozenset[str],
    ) -> None:
        """Note what an operator did.

        Args:
            func: the operator.
            arguments: its arguments, by name; some are of followed storages, or live.
            outputs: the tensors that it returned.
            written: those of its arguments that it wrote to.
            live: live tensors that it read.
        """
        inputs = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
        keys = {_key(t) for t in inputs}
        made = [t for t in outputs if _key(t) not in keys]
        if not made and not written:
            return
        self.used.update(*(cell.names for cell in self.touched(inputs)))
        problem = self._problem(func, arguments, live)
        targets = [self.find(t) or self._make(t) for t in [*made, *written]]
        for cell in targets:
            for other in self.touched(inputs):
                if other is not cell:
                    cell.take(other)
            cell.live |= live
            if problem:
                cell.spoil(problem)
        for tensor in [*made, *written]:
            if not _plain(tensor, self._cells[_key(tensor)]):
                self._cells[_key(tensor)].spoil(f"{func} sees it as {tensor.dtype}")
        if not problem:
            data = _MOVES[func]
            kept = {n: self._kept(v, n in data) for n, v in arguments.items()}
            step = Step(self._steps, func, kept, tuple(self._view(t) for t in made))
            for cell in dict.fromkeys(targets):
                cell.steps.append(step)
        self._steps += 1

    def history(self, tensor: torch.Tensor) -> Provenance:
        """How a followed tensor came to be.

        Raises:
            NotFollowed: something in it is not known.
        """
        cell = self._cells[_key(tensor)]
        if cell.spoiled:
            raise NotFollowed(cell.spoiled)
        if not _plain(tensor, cell):
            raise NotFollowed(f"a copy sees it as {tensor.dtype}")
        return Provenance(cell)

    def numbers(self, tensor: torch.Tensor, history: Provenance) -> ElementIds:
        """Which elements of the history's sources a tensor with that history holds.

        Raises:
            NotFollowed: the numbers would take too much memory.
        """
        view = self._view(tensor)
        state = (view.cell, len(view.cell.steps))
        if self._last is None or self._last[0] != state:
            self._last = None
            self._last = (state, history.replay())
        whole = self._last[1]
        values = whole.values.as_strided(view.sizes, view.strides, view.offset)
        return ElementIds(values, whole.starts)

    def forget(self) -> None:
        """Free the numbers of the last tensor that was asked for."""
        self._last = None

    def _problem(self, func: Any, arguments: dict[str, Any], live: frozenset[str]) -> str:
        """Why the operator cannot be run again on element numbers; empty: it can."""
        if func not in _MOVES or arguments.get("accumulate"):
            return f"{func} changes it"
        if live:
            return f"it is read back from {sorted(live)[0]}"
        for name, value in arguments.items():
            for tensor in tree_leaves(value):
                if not isinstance(tensor, torch.Tensor):
                    continue
                cell = self.find(tensor)
                if name not in _MOVES[func] and (tensor.is_meta or cell is not None):
                    return f"{func} moves it to places that are not known"
                if cell is not None and not _plain(tensor, cell):
                    return f"{func} sees it as {tensor.dtype}"
        return ""

    def _kept(self, value: Any, data: bool) -> Any:
        """An argument as a step keeps it."""

        def keep(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not data:
                return leaf.detach().cpu().clone()
            return self._view(leaf) if self.find(leaf) else Other(tuple(leaf.shape))

        return tree_map(keep, value)

    def _view(self, tensor: torch.Tensor) -> View:
        cell = self._cells[_key(tensor)]
        return View(cell, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def _make(self, tensor: torch.Tensor) -> TrackedStorage:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._alive.append(tensor)
        return self._cells.setdefault(_key(tensor), TrackedStorage(tensor.dtype, elements))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _plain(tensor: torch.Tensor, cell: TrackedStorage) -> bool:
    """Whether a tensor's elements are the cell's as they stand."""
    return tensor.dtype == cell.dtype and not tensor.is_neg() and not tensor.is_conj()
