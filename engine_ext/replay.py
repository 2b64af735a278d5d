"""Steps that moved elements between storages, run again on element numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from engine_ext.affine import Numbers

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
    steps: list[Step] = field(default_factory=list)

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
class View:
    """A strided view of a cell."""

    cell: Cell
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


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
    def read(self) -> list[Cell]:
        """What it reads, and what it changes in place."""
        return [v.cell for v in tree_leaves(self.arguments) if isinstance(v, View)]

    @property
    def touched(self) -> list[Cell]:
        """What it reads or writes."""
        return self.read + [view.cell for view in self.made]


def replayed(cell: Cell) -> tuple[Numbers, list[str]]:
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


def _history(cell: Cell) -> tuple[list[Step], list[Cell]]:
    """The steps that a cell is the result of, in order, and all cells that they touch."""
    found: dict[int, Step] = {}
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


def _replay(step: Step, memory: dict[Cell, torch.Tensor]) -> None:
    """Run one step again, on element numbers."""

    def seen(view: View) -> torch.Tensor:
        return memory[view.cell].as_strided(view.sizes, view.strides, view.offset)

    def bring(leaf: Any) -> Any:
        if isinstance(leaf, View):
            return seen(leaf)
        if isinstance(leaf, Other):
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
