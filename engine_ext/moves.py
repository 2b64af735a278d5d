"""What becomes of checkpoint tensors between the loader's hands and live memory.

A loader may clone, permute, concatenate or pad tensors before it copies them. Each operator that
only moves elements is kept, with its arguments, as a step that made or changed a temporary; when
such a temporary reaches live memory, the steps that led to it are run again on element numbers,
which tells for every element where it comes from. Operators that could compute are not run again:
what they touch is known to be changed, with the operator's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from engine_ext.affine import Numbers

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

# Casts that keep every value.
_LOSSLESS: Final[dict[torch.dtype, tuple[torch.dtype, ...]]] = {
    torch.float8_e4m3fn: (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.float8_e5m2: (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.uint8: (torch.int16, torch.int32, torch.int64),
    torch.int8: (torch.int16, torch.int32, torch.int64),
    torch.int16: (torch.int32, torch.int64),
    torch.int32: (torch.int64,),
}

# Memory that the element numbers of one write may take.
_MOST_BYTES: Final = 1 << 33


class NotFollowed(Exception):
    """What is written cannot be traced back element by element."""


@dataclass(slots=True, eq=False)
class Cell:
    """A storage that holds checkpoint elements.

    Attributes:
        dtype: of its elements.
        elements: how many it has room for.
        names: the checkpoint tensors that some of them come from.
        live: names of live tensors that some of them were read back from.
        source: the checkpoint tensor that it is itself, if it is one.
        spoiled: what was done to it that is more than a move; empty: nothing.
        narrowed: whether some elements were cast to `dtype` from one that holds more.
        steps: what wrote to it, in order.
    """

    dtype: torch.dtype
    elements: int
    names: frozenset[str] = frozenset()
    live: frozenset[str] = frozenset()
    source: str | None = None
    spoiled: str = ""
    narrowed: bool = False
    steps: list[_Step] = field(default_factory=list)

    def spoil(self, reason: str) -> None:
        """Note what makes its elements unknown; the first reason stands."""
        self.spoiled = self.spoiled or reason

    def take(self, other: Cell) -> None:
        """Some elements of another cell are written to this one."""
        self.names |= other.names
        self.live |= other.live
        if other.spoiled:
            self.spoil(other.spoiled)
        elif other.dtype != self.dtype:
            if other.narrowed:
                self.spoil(f"a cast to {other.dtype} loses what it holds")
            self.narrowed |= self.dtype not in _LOSSLESS.get(other.dtype, ())
        else:
            self.narrowed |= other.narrowed


@dataclass(frozen=True, slots=True)
class _View:
    """A strided view of a cell."""

    cell: Cell
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Other:
    """A tensor whose elements are moved but are no checkpoint tensor's."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One operator that moved elements.

    Attributes:
        number: its place in the order of all steps.
        arguments: by name; `_View` and `_Other` stand for the tensors whose elements it moved.
        made: views of the cells that it made; it writes into its arguments where there are none.
    """

    number: int
    func: Any
    arguments: dict[str, Any]
    made: tuple[_View, ...]

    @property
    def read(self) -> list[Cell]:
        """What it reads, and what it changes in place."""
        return [v.cell for v in tree_leaves(self.arguments) if isinstance(v, _View)]

    @property
    def touched(self) -> list[Cell]:
        """What it reads or writes."""
        return self.read + [view.cell for view in self.made]


class Moves:
    """The cells that the loader has made so far, and how."""

    def __init__(self) -> None:
        self._cells: dict[int, Cell] = {}
        self._steps = 0
        # A storage's key is its address: what is tracked must stay alive.
        self._alive: list[torch.Tensor] = []
        self._last: tuple[Cell, int, Numbers, list[str]] | None = None

    def add_source(self, tensor: torch.Tensor, name: str) -> None:
        """Follow a contiguous tensor that stands for a checkpoint tensor."""
        cell = self._make(tensor)
        cell.source, cell.names = name, frozenset([name])

    def find(self, tensor: torch.Tensor) -> Cell | None:
        """The cell that a tensor is a view of, if its storage is followed."""
        return self._cells.get(_key(tensor))

    def touched(self, tensors: Iterable[torch.Tensor]) -> list[Cell]:
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
            step = _Step(self._steps, func, kept, tuple(self._view(t) for t in made))
            for cell in dict.fromkeys(targets):
                cell.steps.append(step)
        self._steps += 1

    def numbers(self, tensor: torch.Tensor) -> tuple[Numbers, list[str]]:
        """Which checkpoint elements a followed tensor holds.

        Returns:
            The numbers, shaped like the tensor, and the checkpoint tensors that are the sources.

        Raises:
            NotFollowed: something in it is not known, or the numbers would take too much memory.
        """
        view = self._view(tensor)
        cell = view.cell
        if cell.spoiled:
            raise NotFollowed(cell.spoiled)
        if not _plain(tensor, cell):
            raise NotFollowed(f"a copy sees it as {tensor.dtype}")
        if self._last is None or self._last[:2] != (cell, len(cell.steps)):
            self._last = None
            self._last = (cell, len(cell.steps), *_replayed(cell))
        _, _, whole, names = self._last
        values = whole.values.as_strided(view.sizes, view.strides, view.offset)
        return Numbers(values, whole.starts), names

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
            return self._view(leaf) if self.find(leaf) else _Other(tuple(leaf.shape))

        return tree_map(keep, value)

    def _view(self, tensor: torch.Tensor) -> _View:
        cell = self._cells[_key(tensor)]
        return _View(cell, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def _make(self, tensor: torch.Tensor) -> Cell:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._alive.append(tensor)
        return self._cells.setdefault(_key(tensor), Cell(tensor.dtype, elements))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _plain(tensor: torch.Tensor, cell: Cell) -> bool:
    """Whether a tensor's elements are the cell's as they stand."""
    return tensor.dtype == cell.dtype and not tensor.is_neg() and not tensor.is_conj()


def _replayed(cell: Cell) -> tuple[Numbers, list[str]]:
    """The element numbers of a whole cell, 1-D, and the checkpoint tensors they count."""
    steps, cells = _history(cell)
    starts: dict[Cell, int] = {}
    end = 1
    for number, source in enumerate(c for c in cells if c.source is not None):
        starts[source] = end
        # Unequal gaps, so that no stride leads from one source through the next to a third.
        end += source.elements + number + 1
    dtype = torch.int32 if end < 1 << 31 else torch.int64
    if sum(c.elements for c in cells) * dtype.itemsize > _MOST_BYTES:
        raise NotFollowed("its elements are too many to be followed through temporaries")
    memory: dict[Cell, torch.Tensor] = {}
    last_use = {c: step.number for step in steps for c in step.touched}
    for step in steps:
        for one in step.touched:
            if one not in memory:
                memory[one] = _fresh(one, starts, dtype)
        _replay(step, memory)
        for done in [c for c in memory if c is not cell and last_use[c] == step.number]:
            del memory[done]
    return Numbers(memory[cell], [*starts.values(), end]), [str(c.source) for c in starts]


def _fresh(cell: Cell, starts: dict[Cell, int], dtype: torch.dtype) -> torch.Tensor:
    if cell.source is None:
        return torch.zeros(cell.elements, dtype=dtype)
    return torch.arange(starts[cell], starts[cell] + cell.elements, dtype=dtype)


def _history(cell: Cell) -> tuple[list[_Step], list[Cell]]:
    """The steps that a cell is the result of, in order, and all cells that they touch."""
    found: dict[int, _Step] = {}
    cells: dict[Cell, None] = {}
    open_ends: list[tuple[Cell, float]] = [(cell, float("inf"))]
    while open_ends:
        one, before = open_ends.pop()
        cells[one] = None
        for step in one.steps:
            if step.number >= before:
                break
            if step.number not in found:
                found[step.number] = step
                open_ends += [(c, step.number) for c in step.read if c is not one]
                cells.update(dict.fromkeys(step.touched))
    return [found[number] for number in sorted(found)], list(cells)


def _replay(step: _Step, memory: dict[Cell, torch.Tensor]) -> None:
    """Run one step again, on element numbers."""

    def seen(view: _View) -> torch.Tensor:
        return memory[view.cell].as_strided(view.sizes, view.strides, view.offset)

    def bring(leaf: Any) -> Any:
        if isinstance(leaf, _View):
            return seen(leaf)
        if isinstance(leaf, _Other):
            return torch.zeros((), dtype=next(iter(memory.values())).dtype).expand(leaf.sizes)
        return leaf

    arguments = {name: tree_map(bring, value) for name, value in step.arguments.items()}
    outputs = tree_leaves(_call(step.func, arguments))
    for view, output in zip(step.made, outputs if step.made else (), strict=True):
        _aten.copy_.default(seen(view), output)


def _call(func: Any, arguments: dict[str, Any]) -> Any:
    """What the operator makes of element numbers; what it fills in are no elements."""
    if func in (_aten.clone.default, _aten._to_copy.default):
        return arguments["self"]
    if func in (_aten.zero_.default, _aten.fill_.Scalar):
        return _aten.zero_.default(arguments["self"])
    if func is _aten.constant_pad_nd.default:
        return func(arguments["self"], arguments["pad"], 0)
    return func(**arguments)
