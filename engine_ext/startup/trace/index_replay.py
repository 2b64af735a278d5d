"""Replay the operators that moved elements between storages on element ids.

Each step that moved checkpoint elements is run again on tensors that hold the elements' ids
instead of their values. The result says for every element where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from engine_ext.startup.trace.strided_boxes import ElementIds, is_contiguous, strided_ids

_aten: Final = torch.ops.aten

# Casts that preserve every value: from the key to each of the values.
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

# Bytes that the element ids of one write can take.
_MAX_BYTES: Final = 1 << 33

# Elements of an index tensor up to which it is compared to see whether two histories are alike.
_MAX_COMPARED: Final = 1 << 12


class UntraceableError(Exception):
    """A write cannot be traced back element by element; the message says why."""


@dataclass(slots=True, eq=False)
class TrackedStorage:
    """A storage that holds checkpoint elements.

    Attributes:
        elements: how many it has room for.
        names: the checkpoint tensors that some elements come from.
        live: names of live tensors that some elements were read back from.
        source: the checkpoint tensor that it stands for, if any.
        untraceable: what was done to it that is more than a move; empty if nothing.
        narrowed: whether some elements were cast to `dtype` from one that holds more values.
        recast: whether some elements were cast at all.
        steps: the steps that wrote to it, in order.
    """

    dtype: torch.dtype
    elements: int
    names: frozenset[str] = frozenset()
    live: frozenset[str] = frozenset()
    source: str | None = None
    untraceable: str = ""
    narrowed: bool = False
    recast: bool = False
    steps: list[Step] = field(default_factory=list)

    def mark_untraceable(self, reason: str) -> None:
        """Note why its elements cannot be traced; the first reason is kept."""
        self.untraceable = self.untraceable or reason

    def merge(self, other: TrackedStorage) -> None:
        """Note that elements of another storage are written to this one."""
        self.names |= other.names
        self.live |= other.live
        self.recast |= other.recast or other.dtype != self.dtype
        if other.untraceable:
            self.mark_untraceable(other.untraceable)
        elif other.dtype != self.dtype:
            if other.narrowed:
                self.mark_untraceable(f"a cast to {other.dtype} loses what it holds")
            self.narrowed |= self.dtype not in _LOSSLESS.get(other.dtype, ())
        else:
            self.narrowed |= other.narrowed


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a tracked storage; offset and strides in elements."""

    storage: TrackedStorage
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is the whole storage, in order."""
        is_all = math.prod(self.sizes) == self.storage.elements
        return is_all and is_contiguous(self.sizes[::-1], self.strides[::-1])


@dataclass(frozen=True, slots=True)
class UntrackedTensor:
    """A tensor whose elements are moved, but come from no checkpoint tensor."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operator that moved elements.

    Attributes:
        arguments: by name; a `View` or `UntrackedTensor` stands for each tensor whose elements it
            moved.
        outputs: views of the storages that it created; empty if it writes into its arguments.
    """

    number: int
    func: Any
    arguments: dict[str, Any]
    outputs: tuple[View, ...]

    @property
    def inputs(self) -> list[TrackedStorage]:
        """The storages that it reads or changes in place."""
        return [v.storage for v in tree_leaves(self.arguments) if isinstance(v, View)]

    @property
    def storages(self) -> list[TrackedStorage]:
        """The storages that it reads or writes."""
        return self.inputs + [view.storage for view in self.outputs]


class Provenance:
    """The steps that a storage is the result of.

    Attributes:
        sources: the checkpoint tensors that its elements can come from.
        signature: what was done, without the tensors' names. Two storages with equal signatures
            have equal element ids. None if comparing them would be expensive.
    """

    def __init__(self, storage: TrackedStorage) -> None:
        self._storage = storage
        self._steps, self._storages = _history(storage)
        self.sources = [s.source for s in self._storages if s.source is not None]
        self.signature = _signature(self._steps, self._storages)

    def replay(self) -> ElementIds:
        """Return the element ids of the whole storage, 1-D; source i is ``sources[i]``.

        Takes four bytes per element of the temporaries needed at one time (eight if the sources
        have 2**31 elements together), and as much again for one that is not contiguous.

        Raises:
            UntraceableError: that is too much memory.
        """
        starts: dict[TrackedStorage, int] = {}
        end = 1
        for number, source in enumerate(s for s in self._storages if s.source is not None):
            starts[source] = end
            # Unequal gaps, so that no stride leads from one source through the next to a third.
            end += source.elements + number + 1
        dtype = torch.int32 if end < 1 << 31 else torch.int64
        temporaries = sum(s.elements for s in self._storages if s.source is None)
        if temporaries * dtype.itemsize > _MAX_BYTES:
            raise UntraceableError("it has too many elements to be followed through temporaries")
        memory = _IdMemory(starts, dtype)
        last_use = {s: step.number for step in self._steps for s in step.storages}
        for step in self._steps:
            memory.replay(step)
            for done in [s for s in memory.contents if last_use[s] == step.number]:
                if done is not self._storage:
                    del memory.contents[done]
        return ElementIds(memory.contents[self._storage], [*starts.values(), end])


class _IdMemory:
    """Storages with ids in place of elements; `starts` has the first id of each source."""

    def __init__(self, starts: dict[TrackedStorage, int], dtype: torch.dtype) -> None:
        self.contents: dict[TrackedStorage, torch.Tensor] = {}
        self._starts = starts
        self._dtype = dtype

    def replay(self, step: Step) -> None:
        """Run one step again."""

        def with_ids(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return self._read(leaf)
            if isinstance(leaf, UntrackedTensor):
                return torch.zeros((), dtype=self._dtype).expand(leaf.sizes)
            return leaf

        arguments = {name: tree_map(with_ids, value) for name, value in step.arguments.items()}
        outputs = tree_leaves(_call(step.func, arguments))
        for view, output in zip(step.outputs, outputs if step.outputs else (), strict=True):
            if view.whole and self._is_fresh(output):
                self.contents[view.storage] = output.view(-1)
            else:
                _aten.copy_.default(self._read(view), output)

    def _read(self, view: View) -> torch.Tensor:
        if view.storage in self._starts:  # contiguous, without the ids of the whole source
            first = view.offset + self._starts[view.storage]
            return strided_ids(first, view.sizes, view.strides, self._dtype)
        if view.storage not in self.contents:
            self.contents[view.storage] = torch.zeros(view.storage.elements, dtype=self._dtype)
        return self.contents[view.storage].as_strided(view.sizes, view.strides, view.offset)

    def _is_fresh(self, output: torch.Tensor) -> bool:
        """Return whether a tensor has its memory to itself, and fills it in order."""
        storage = output.untyped_storage()
        taken = {memory.untyped_storage()._cdata for memory in self.contents.values()}
        alone = storage.nbytes() == output.numel() * output.element_size()
        return alone and output.is_contiguous() and storage._cdata not in taken


def _signature(steps: list[Step], storages: list[TrackedStorage]) -> Hashable | None:
    """Describe what steps do without the tensors' names; None if an index tensor is too large."""
    numbers = {storage: number for number, storage in enumerate(storages)}

    def described(leaf: Any) -> Hashable:
        if isinstance(leaf, View):
            return (numbers[leaf.storage], leaf.offset, leaf.sizes, leaf.strides)
        if isinstance(leaf, torch.Tensor):
            if leaf.numel() > _MAX_COMPARED:
                raise ValueError
            return (str(leaf.dtype), tuple(leaf.shape), tuple(leaf.reshape(-1).tolist()))
        return leaf if isinstance(leaf, UntrackedTensor) else repr(leaf)

    kinds = tuple((s.elements, s.dtype, s.source is None) for s in storages)
    try:
        done = tuple(
            (
                str(step.func),
                str(tree_structure(step.arguments)),
                tuple(map(described, tree_leaves(step.arguments))),
                tuple(map(described, step.outputs)),
            )
            for step in steps
        )
    except ValueError:
        return None
    return kinds, done


def _history(storage: TrackedStorage) -> tuple[list[Step], list[TrackedStorage]]:
    """Return the steps that a storage is the result of, in order, and all storages they touch."""
    found: dict[int, Step] = {}
    storages: dict[TrackedStorage, None] = {}
    pending: list[tuple[TrackedStorage, float]] = [(storage, float("inf"))]
    while pending:
        one, before = pending.pop()
        storages[one] = None
        for step in one.steps:
            if step.number >= before:
                break
            if step.number not in found:
                found[step.number] = step
                pending += [(s, step.number) for s in step.inputs if s is not one]
                storages.update(dict.fromkeys(step.storages))
    return [found[number] for number in sorted(found)], list(storages)


def _call(func: Any, arguments: dict[str, Any]) -> Any:
    """Run the operator on ids; constants that it fills in become 0, the id of no element."""
    if func in (_aten.clone.default, _aten._to_copy.default):
        return arguments["self"]
    if func in (_aten.zero_.default, _aten.fill_.Scalar):
        return _aten.zero_.default(arguments["self"])
    if func is _aten.constant_pad_nd.default:
        return func(arguments["self"], arguments["pad"], 0)
    return func(**arguments)
