"""Steps that moved elements between storages, run again on element numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from engine_ext.tracing.strided_boxes import ElementIds

_aten: Final = torch.ops.aten

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


# Elements of an index by which two tensors are told to be moved alike.
_MOST_COMPARED: Final = 1 << 12


class NotFollowed(Exception):
    """What is written cannot be traced back element by element."""


@dataclass(slots=True, eq=False)
class TrackedStorage:
    """A storage that holds checkpoint elements.

    Attributes:
        dtype: of its elements.
        elements: how many it has room for.
        names: the checkpoint tensors that some of them come from.
        live: names of live tensors that some of them were read back from.
        source: the checkpoint tensor that it is itself, if it is one.
        spoiled: what was done to it that is more than a move; empty: nothing.
        narrowed: whether some elements were cast to `dtype` from one that holds more.
        recast: whether some elements were cast at all.
        steps: what wrote to it, in order.
    """

    dtype: torch.dtype
    elements: int
    names: frozenset[str] = frozenset()
    live: frozenset[str] = frozenset()
    source: str | None = None
    spoiled: str = ""
    narrowed: bool = False
    recast: bool = False
    steps: list[Step] = field(default_factory=list)

    def spoil(self, reason: str) -> None:
        """Note what makes its elements unknown; the first reason stands."""
        self.spoiled = self.spoiled or reason

    def take(self, other: TrackedStorage) -> None:
        """Some elements of another cell are written to this one."""
        self.names |= other.names
        self.live |= other.live
        self.recast |= other.recast or other.dtype != self.dtype
        if other.spoiled:
            self.spoil(other.spoiled)
        elif other.dtype != self.dtype:
            if other.narrowed:
                self.spoil(f"a cast to {other.dtype} loses what it holds")
            self.narrowed |= self.dtype not in _LOSSLESS.get(other.dtype, ())
        else:
            self.narrowed |= other.narrowed


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a cell."""

    cell: TrackedStorage
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is all of the cell, in order."""
        return math.prod(self.sizes) == self.cell.elements and _contiguous(self)


@dataclass(frozen=True, slots=True)
class Other:
    """A tensor whose elements are moved but are no checkpoint tensor's."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operator that moved elements.

    Attributes:
        number: its place in the order of all steps.
        arguments: by name; `View` and `Other` stand for the tensors whose elements it moved.
        made: views of the cells that it made; it writes into its arguments where there are none.
    """

    number: int
    func: Any
    arguments: dict[str, Any]
    made: tuple[View, ...]

    @property
    def read(self) -> list[TrackedStorage]:
        """What it reads, and what it changes in place."""
        return [v.cell for v in tree_leaves(self.arguments) if isinstance(v, View)]

    @property
    def touched(self) -> list[TrackedStorage]:
        """What it reads or writes."""
        return self.read + [view.cell for view in self.made]


class Provenance:
    """The steps that a cell is the result of.

    Attributes:
        sources: the checkpoint tensors that its elements may come from.
        shape: what was done, but for the tensors' names: where it is the same for two cells, the
            same numbers come out. None where that cannot be told at little cost.
    """

    def __init__(self, cell: TrackedStorage) -> None:
        self._cell = cell
        self._steps, self._cells = _history(cell)
        self.sources = [c.source for c in self._cells if c.source is not None]
        self.shape = _shape(self._steps, self._cells)

    def replay(self) -> ElementIds:
        """The element numbers of the whole cell, 1-D; its sources are `sources`.

        Takes four bytes per element of the temporaries that are needed at one time (eight where
        the sources have 2^31 elements together), and once more for one that is not contiguous.

        Raises:
            NotFollowed: that is too much memory.
        """
        starts: dict[TrackedStorage, int] = {}
        end = 1
        for number, source in enumerate(c for c in self._cells if c.source is not None):
            starts[source] = end
            # Unequal gaps, so that no stride leads from one source through the next to a third.
            end += source.elements + number + 1
        dtype = torch.int32 if end < 1 << 31 else torch.int64
        temporaries = sum(c.elements for c in self._cells if c.source is None)
        if temporaries * dtype.itemsize > _MOST_BYTES:
            raise NotFollowed("its elements are too many to be followed through temporaries")
        memory = _Memory(starts, dtype)
        last_use = {c: step.number for step in self._steps for c in step.touched}
        for step in self._steps:
            memory.replay(step)
            for done in [c for c in memory.cells if last_use[c] == step.number]:
                if done is not self._cell:
                    del memory.cells[done]
        return ElementIds(memory.cells[self._cell], [*starts.values(), end])


class _Memory:
    """Element numbers in the place of elements."""

    def __init__(self, starts: dict[TrackedStorage, int], dtype: torch.dtype) -> None:
        self.cells: dict[TrackedStorage, torch.Tensor] = {}
        self._starts = starts
        self._dtype = dtype

    def replay(self, step: Step) -> None:
        """Run one step again."""

        def bring(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return self._seen(leaf)
            if isinstance(leaf, Other):
                return torch.zeros((), dtype=self._dtype).expand(leaf.sizes)
            return leaf

        arguments = {name: tree_map(bring, value) for name, value in step.arguments.items()}
        outputs = tree_leaves(_call(step.func, arguments))
        for view, output in zip(step.made, outputs if step.made else (), strict=True):
            if view.whole and self._is_fresh(output):
                self.cells[view.cell] = output.view(-1)
            else:
                _aten.copy_.default(self._seen(view), output)

    def _seen(self, view: View) -> torch.Tensor:
        if view.cell in self._starts:
            return self._counted(view)
        if view.cell not in self.cells:
            self.cells[view.cell] = torch.zeros(view.cell.elements, dtype=self._dtype)
        return self.cells[view.cell].as_strided(view.sizes, view.strides, view.offset)

    def _is_fresh(self, output: torch.Tensor) -> bool:
        """Whether a tensor is alone in its memory, and fills it in order."""
        storage = output.untyped_storage()
        taken = {memory.untyped_storage()._cdata for memory in self.cells.values()}
        alone = storage.nbytes() == output.numel() * output.element_size()
        return alone and output.is_contiguous() and storage._cdata not in taken

    def _counted(self, view: View) -> torch.Tensor:
        """A view of a source, of which only the viewed elements are made; contiguous."""
        counted = torch.full((1,) * len(view.sizes), view.offset + self._starts[view.cell])
        counted = counted.to(self._dtype)
        for dim, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
            line = torch.arange(size, dtype=self._dtype) * stride
            counted = counted + line.view([-1 if d == dim else 1 for d in range(len(view.sizes))])
        return counted


def _shape(steps: list[Step], cells: list[TrackedStorage]) -> Hashable | None:
    """What steps do, but for the tensors' names; None where large indices would be compared."""
    numbers = {cell: number for number, cell in enumerate(cells)}

    def shown(leaf: Any) -> Hashable:
        if isinstance(leaf, View):
            return (numbers[leaf.cell], leaf.offset, leaf.sizes, leaf.strides)
        if isinstance(leaf, torch.Tensor):
            if leaf.numel() > _MOST_COMPARED:
                raise ValueError
            return (str(leaf.dtype), tuple(leaf.shape), tuple(leaf.view(-1).tolist()))
        return leaf if isinstance(leaf, Other) else repr(leaf)

    kinds = tuple((cell.elements, cell.dtype, cell.source is None) for cell in cells)
    try:
        done = tuple(
            (
                str(step.func),
                str(tree_structure(step.arguments)),
                tuple(map(shown, tree_leaves(step.arguments))),
                tuple(map(shown, step.made)),
            )
            for step in steps
        )
    except ValueError:
        return None
    return kinds, done


def _history(cell: TrackedStorage) -> tuple[list[Step], list[TrackedStorage]]:
    """The steps that a cell is the result of, in order, and all cells that they touch."""
    found: dict[int, Step] = {}
    cells: dict[TrackedStorage, None] = {}
    open_ends: list[tuple[TrackedStorage, float]] = [(cell, float("inf"))]
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


def _contiguous(view: View) -> bool:
    inner = 1
    for size, stride in reversed(list(zip(view.sizes, view.strides, strict=True))):
        if size != 1 and stride != inner:
            return False
        inner *= size
    return True


def _call(func: Any, arguments: dict[str, Any]) -> Any:
    """What the operator makes of element numbers; what it fills in are no elements."""
    if func in (_aten.clone.default, _aten._to_copy.default):
        return arguments["self"]
    if func in (_aten.zero_.default, _aten.fill_.Scalar):
        return _aten.zero_.default(arguments["self"])
    if func is _aten.constant_pad_nd.default:
        return func(arguments["self"], arguments["pad"], 0)
    return func(**arguments)
