"""What the loader writes to live memory, recorded and kept from happening.

A `Recorder` sees every operator of the loader's threads below Python. Copies of checkpoint
tensors into live memory become segments; what the loader does with the tensors before is followed
by `engine_ext.tracing.provenance`, and what cannot be followed refuses the tensor, with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine_ext.model.storage_index import LiveTensor, StorageIndex, extent
from engine_ext.placement.repacked import smallest_block
from engine_ext.placement.segments import Placement, Repack, Segment, TensorSpec
from engine_ext.tracing.index_replay import NotFollowed, Provenance, TrackedStorage
from engine_ext.tracing.memory_overlap import Write
from engine_ext.tracing.permutations import by_source, shuffle
from engine_ext.tracing.provenance import ProvenanceTracker
from engine_ext.tracing.strided_boxes import ElementIds, StridedBox, boxes

# Segments that one write may take; above the lower number, an order of elements is preferred.
_MOST_SEGMENTS: Final = 1024
_MANY_SEGMENTS: Final = 64
_COPY: Final = torch.ops.aten.copy_.default

# A segment and which of the sources its elements come from; None: they are constants.
_Piece = tuple[int | None, Segment]


class Recorder:
    """Records writes into live memory.

    Args:
        index: what is live memory.
        placement: what is found is added to it.

    Attributes:
        writes: all writes to live memory, whatever was written.
    """

    def __init__(self, index: StorageIndex, placement: Placement) -> None:
        self.writes: list[Write] = []
        self._index = index
        self._placement = placement
        self._moves = ProvenanceTracker()
        self._lock = threading.RLock()
        self._python_copies = threading.local()
        self._known: dict[Hashable, list[_Piece]] = {}
        # Live tensors whose elements are written elsewhere in live memory too, with the place.
        self._read_back: list[tuple[str, str]] = []

    def source(self, spec: TensorSpec) -> torch.Tensor:
        """A meta tensor that stands for a checkpoint tensor."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._moves.add_source(tensor, spec.name)
        return tensor

    @property
    def python_copy(self) -> bool:
        """Whether this thread is within a call of ``Tensor.copy_``."""
        return getattr(self._python_copies, "now", False)

    @python_copy.setter
    def python_copy(self, now: bool) -> None:
        self._python_copies.now = now

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the loader asks for, but for writes into live memory, and remember it."""
        with self._lock:
            return self._run(func, args, kwargs)

    def kept_in(self, tensors: Iterable[torch.Tensor], place: str) -> None:
        """Refuse the checkpoint tensors whose data these, which hang on a module, carry."""
        for cell in self._moves.touched(tensors):
            self._refuse(cell, f"the loader also keeps it in {place}, which is no parameter")

    def replaced(self, name: str, before: torch.Tensor, now: torch.Tensor | None) -> None:
        """Refuse what the loader wrote to a live tensor that it has put another in place of."""
        reason = f"the loader puts other memory in place of {name}"
        entry = self._index.find(before)
        for placed in self._placement.values():
            if any(segment.live is entry for segment in placed.segments):
                placed.refuse(reason)
        for cell in self._moves.touched([now] if now is not None else []):
            self._refuse(cell, reason)

    def close(self) -> None:
        """Come to an end: judge what only all writes together can tell."""
        self._moves.forget()
        for name in self._moves.used:
            self._placement[name].used = True
        for source, destination in self._read_back:
            for placed in self._placement.values():
                if any(segment.live.name == source for segment in placed.segments):
                    placed.refuse(f"the loader reads it back from {source} into {destination}")

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = _named(func, args, kwargs)
        written = _written(func, arguments)
        inputs = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
        live = [(t, entry) for t in written if (entry := self._index.find(t)) is not None]
        read = frozenset(
            entry.name
            for t in inputs
            if not any(t is w for w in written) and (entry := self._index.find(t)) is not None
        )
        if live:
            self._record(func, arguments, inputs, live, read)
            return _written_result(func, written)
        cells = self._moves.touched(inputs)
        if not cells and not read:
            return func(*args, **kwargs)
        # What was only read back from live memory is there, and may be looked at.
        absent = any(cell.names for cell in cells)
        if absent and any(not t.is_meta for t in written):
            # Data that is not there cannot be copied into a real temporary: follow it instead.
            self._moves.record(func, arguments, [], written, read)
            return _written_result(func, written)
        on_meta = any(t.is_meta for t in inputs)
        out = _run_on_meta(func, args, kwargs) if on_meta else func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if absent and not outputs and not all(t.is_meta for t in inputs):
            raise RuntimeError(f"the loader reads data that is not there, with {func}")
        for cell in self._moves.touched(written):
            if cell.source is not None:
                self._placement[cell.source].refuse(f"the loader changes it with {func}")
        self._moves.record(func, arguments, outputs, written, read)
        return out

    def _record(
        self,
        func: Any,
        arguments: dict[str, Any],
        inputs: list[torch.Tensor],
        live: list[tuple[torch.Tensor, LiveTensor]],
        read: frozenset[str],
    ) -> None:
        destination, entry = live[0]
        cells = self._moves.touched(inputs)
        for source in read.union(*(cell.live for cell in cells)):
            self._read_back.append((source, entry.name))
        if func is _COPY and cells:
            try:
                write = self._copied(destination, entry, arguments["src"], cells[0])
            except NotFollowed as reason:
                self._refuse(cells[0], f"{reason} before it is copied to {entry.name}")
            else:
                self.writes.append(write)
                for name, segment in write:
                    if name is not None:
                        self._placement[name].segments.append(segment)
                return
        else:
            for cell in cells:
                self._refuse(
                    cell,
                    f"{cell.spoiled} before it is copied to {entry.name}"
                    if cell.spoiled
                    else f"the loader writes it to {entry.name} with {func}, not with a copy",
                )
        for t, entry in live:
            whole = t if t.dtype == entry.tensor.dtype else entry.tensor
            self.writes.append([(None, _segment(whole, entry, whole, False))])

    def _copied(
        self,
        destination: torch.Tensor,
        entry: LiveTensor,
        source: torch.Tensor,
        cell: TrackedStorage,
    ) -> Write:
        """What a copy of a followed tensor writes to live memory."""
        if cell.spoiled:
            raise NotFollowed(cell.spoiled)
        if cell.dtype != source.dtype or destination.dtype != entry.tensor.dtype:
            raise NotFollowed(f"its bits are seen as {source.dtype}")
        if source.is_neg() or source.is_conj():
            raise NotFollowed("the loader negates it")
        if cell.source is not None:
            return [(cell.source, _segment(destination, entry, source, self.python_copy))]
        if cell.narrowed and cell.dtype != entry.tensor.dtype:
            raise NotFollowed(f"a cast to {cell.dtype} loses what it holds")
        python_copy = self.python_copy
        history = self._moves.history(source)
        return [
            (
                None if number is None else history.sources[number],
                replace(segment, live=entry, python_copy=python_copy, recast=cell.recast),
            )
            for number, segment in self._pieces(destination, entry, source, history)
        ]

    def _pieces(
        self,
        destination: torch.Tensor,
        entry: LiveTensor,
        source: torch.Tensor,
        history: Provenance,
    ) -> list[_Piece]:
        """The segments of a copy, with the numbers of their sources in the history.

        Layers are alike, so what was found for one is kept for the next.
        """
        views = [(t.shape, t.stride(), t.storage_offset()) for t in (destination, source)]
        key = (history.shape, str(views), _offset(destination, entry), extent(entry.tensor))
        if history.shape is None or key not in self._known:
            numbers = self._moves.numbers(source, history)
            numbers = ElementIds(numbers.values.expand(destination.shape), numbers.starts)
            self._known[key] = _pieces(numbers, destination, entry)
        return self._known[key]

    def _refuse(self, cell: TrackedStorage, reason: str) -> None:
        for name in cell.names:
            self._placement[name].refuse(reason)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands the operators of one thread to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recorder.run(func, args, kwargs or {})


def _segment(
    destination: torch.Tensor, entry: LiveTensor, source: torch.Tensor, python_copy: bool
) -> Segment:
    source = source.expand(destination.shape)
    return Segment(
        live=entry,
        offset=_offset(destination, entry),
        strides=destination.stride(),
        sizes=tuple(destination.shape),
        source_offset=int(source.storage_offset()),
        source_strides=source.stride(),
        python_copy=python_copy,
    )


def _pieces(numbers: ElementIds, destination: torch.Tensor, entry: LiveTensor) -> list[_Piece]:
    """The segments that bring elements of these numbers to live memory.

    Raises:
        NotFollowed: they are too many.
    """
    pieces: list[_Piece] = []
    for box, repack in _arranged(numbers, _offset(destination, entry), destination.stride(), entry):
        number = numbers.source(box.first)
        start = numbers.starts[number] if number >= 0 else 0
        segment = Segment(
            entry, box.offset, box.strides, box.sizes, box.first - start, box.steps, False, repack
        )
        pieces.append((number if number >= 0 else None, segment))
    return pieces


def _arranged(
    numbers: ElementIds, offset: int, strides: tuple[int, ...], entry: LiveTensor
) -> Iterator[tuple[StridedBox, Repack | None]]:
    """Boxes that hold all the elements, with the order within each."""
    found = boxes(numbers, offset, strides, _MANY_SEGMENTS)
    parts = [(numbers, offset)] if found is not None else by_source(numbers, offset, strides)
    for part, start in parts:
        if found is None or len(parts) > 1:
            found = boxes(part, start, strides, _MANY_SEGMENTS)
        shuffled = shuffle(part, strides) if found is None else None
        if shuffled is not None:
            first, places = shuffled
            box = StridedBox(start, (len(places),), (1,), first, (1,))
            yield box, _repack(places, start, extent(entry.tensor))
            continue
        if found is None:
            found = boxes(part, start, strides, _MOST_SEGMENTS)
        if found is None:
            raise NotFollowed(
                f"its elements are put in an order that takes more than {_MOST_SEGMENTS} segments"
            )
        yield from ((box, None) for box in found)


def _repack(places: NDArray[np.int32], offset: int, size: int) -> Repack:
    """The order of a stretch of `len(places)` elements of a live tensor, as a repack of it."""
    if offset % len(places) == 0 and size % len(places) == 0:
        return Repack(smallest_block(places))
    whole = np.arange(size, dtype=np.int32 if size < 1 << 31 else np.int64)
    whole[offset : offset + len(places)] = places.astype(whole.dtype) + offset
    return Repack(whole)


def _offset(destination: torch.Tensor, entry: LiveTensor) -> int:
    return (destination.data_ptr() - entry.start) // destination.element_size()


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by their names in its schema."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _written(func: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operator's schema says it writes to."""
    written: list[torch.Tensor] = []
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = arguments.get(argument.name)
            written += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return written


def _written_result(func: Any, written: list[torch.Tensor]) -> Any:
    """What the suppressed operator would have returned: the tensors it writes to."""
    returns = len(func._schema.returns)
    if returns == 0:
        return None
    return written[0] if returns == 1 else tuple(written)


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of which some tensors are on meta, on meta if it takes no mixture."""
    if func is torch.ops.aten._to_copy.default:
        # What is not there cannot be brought to a device, nor pinned.
        kwargs = {k: v for k, v in kwargs.items() if k in ("dtype", "layout", "memory_format")}
    try:
        return func(*args, **kwargs)
    except (RuntimeError, ValueError):
        if all(t.is_meta for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
            raise

    def on_meta(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = tree_map(on_meta, (args, kwargs))
    return func(*args, **kwargs)
