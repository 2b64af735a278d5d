"""Record the loader's writes to live memory, and suppress them.

A `Recorder` sees every operator of the loader's threads below Python. Copies of checkpoint
tensors into live memory become segments. `provenance` tracks what the loader does with the tensors
before that; a tensor that cannot be traced is refused, with the reason.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from engine_ext.model import LiveTensor, StorageIndex, extent
from engine_ext.placement import Placement, Repack, Segment, TensorSpec, smallest_block
from engine_ext.startup.trace.index_replay import Provenance, TrackedStorage, UntraceableError
from engine_ext.startup.trace.memory_overlap import Write
from engine_ext.startup.trace.permutations import find_permutation, split_by_source
from engine_ext.startup.trace.provenance import ProvenanceTracker
from engine_ext.startup.trace.strided_boxes import ElementIds, StridedBox, find_boxes

# Segments that one write can take; above the lower number a permutation is preferred.
_MOST_SEGMENTS: Final = 1024
_MANY_SEGMENTS: Final = 64
_aten: Final = torch.ops.aten
_COPY: Final = _aten.copy_.default
_LIFT: Final = _aten.lift_fresh.default
# Operators that neither read elements nor write any, whatever their arguments; most of a loader's.
_VIEWS: Final = frozenset(
    {
        *(_aten.alias.default, _aten.as_strided.default, _aten.detach.default),
        *(_aten.expand.default, _aten.permute.default, _aten.select.int, _aten.slice.Tensor),
        *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.squeeze.dim, _aten.t.default),
        *(_aten.transpose.int, _aten.unbind.int, _aten.unsqueeze.default, _aten.view.default),
    }
)

# A segment, and the number of the source that its elements come from; None if none.
_Piece = tuple[int | None, Segment]


class _ThreadState(threading.local):
    in_python_copy = False


class Recorder:
    """Records writes to live memory as segments and refusals in a placement.

    Attributes:
        writes: all writes to live memory, whatever was written.
        kept: paths of other tensors that the loader keeps elements in; empty for one that is not
            reachable from the model.
        lock: held while an operator runs.
        thread: whether the thread that asks is in a call of ``Tensor.copy_``.
    """

    def __init__(self, index: StorageIndex, placement: Placement) -> None:
        self.writes: list[Write] = []
        self.kept: list[str] = []
        self._index = index
        self._placement = placement
        self._tracker = ProvenanceTracker()
        self.lock = threading.RLock()
        self.thread = _ThreadState()
        self._pieces_by_signature: dict[Hashable, list[_Piece]] = {}
        # (live tensor, other live tensor that its elements are written to)
        self._read_back: list[tuple[str, str]] = []

    def source(self, spec: TensorSpec) -> torch.Tensor:
        """Return a meta tensor that stands for a checkpoint tensor."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._tracker.add_source(tensor, spec.name)
        return tensor

    def refuse_kept(self, tensors: Iterable[torch.Tensor], path: str) -> None:
        """Refuse the checkpoint tensors whose elements the loader keeps in tensors at `path`."""
        for storage in self._tracker.find_all(t for t in tensors if t.numel()):
            self.kept.append(path)
            self._refuse(storage, f"the loader also keeps it in {path}, which is no parameter")

    def refuse_replaced(self, name: str, before: torch.Tensor, now: torch.Tensor | None) -> None:
        """Refuse the checkpoint tensors in a live tensor that the loader has replaced."""
        reason = f"the loader puts other memory in place of {name}"
        entry = self._index.find(before)
        for placed in self._placement.values():
            if any(segment.live is entry for segment in placed.segments):
                placed.refuse(reason)
        for storage in self._tracker.find_all([now] if now is not None else []):
            self._refuse(storage, reason)

    def refuse_outside(self) -> None:
        """Refuse the checkpoint tensors that the loader puts in memory that the model has not."""
        for storage in self._tracker.kept_outside():
            self.kept.append("")
            self._refuse(
                storage, "the loader also copies it to memory that was there before, of no module"
            )

    def close(self) -> None:
        """Refuse tensors for reasons that show only once all writes are known."""
        self._tracker.drop_cache()
        for name in self._tracker.used:
            self._placement[name].used = True
        for source, destination in self._read_back:
            for placed in self._placement.values():
                if any(segment.live.name == source for segment in placed.segments):
                    placed.refuse(f"the loader reads it back from {source} into {destination}")

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the loader and record it; writes to live memory are suppressed."""
        if func in _VIEWS:
            return func(*args, **kwargs)
        names, changed = _schema(func)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        written = [
            t
            for name in changed
            for t in tree_leaves(arguments.get(name))
            if isinstance(t, torch.Tensor)
        ]
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
        storages = self._tracker.find_all(inputs)
        if not storages and not read:
            out = func(*args, **kwargs)
            made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            # No operator returns what another library has made; it is lifted.
            self._tracker.add_made(made, () if func is _LIFT else inputs)
            return out
        # Elements that were only read back from live memory have data.
        absent = any(storage.names for storage in storages)
        if absent and any(not t.is_meta for t in written):
            # A meta tensor cannot be copied into a real temporary: track the copy instead.
            self._tracker.record(func, arguments, [], written, read)
            return _written_result(func, written)
        on_meta = any(t.is_meta for t in inputs)
        out = _run_on_meta(func, args, kwargs) if on_meta else func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if absent and not outputs and not all(t.is_meta for t in inputs):
            raise RuntimeError(f"the loader reads data of a meta tensor with {func}")
        for storage in self._tracker.find_all(written):
            if storage.source is not None:
                self._placement[storage.source].refuse(f"the loader changes it with {func}")
        self._tracker.record(func, arguments, outputs, written, read)
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
        storages = self._tracker.find_all(inputs)
        for source in read.union(*(storage.live for storage in storages)):
            self._read_back.append((source, entry.name))
        copied = self._tracker.find(arguments["src"]) if func is _COPY else None
        if copied is not None:
            # A view over several live tensors was written before, which is followed no further.
            for storage in storages:
                if storage is not copied:
                    self._refuse(storage, f"the loader also writes it over {entry.name}")
            try:
                write = self._copied(destination, entry, arguments["src"], copied)
            except UntraceableError as error:
                self._refuse(copied, f"{error} before it is copied to {entry.name}")
            else:
                self.writes.append(write)
                for name, segment in write:
                    if name is not None:
                        self._placement[name].segments.append(segment)
                return
        else:
            for storage in storages:
                reason = f"the loader writes it to {entry.name} with {func}, not with a copy"
                if storage.untraceable:
                    reason = f"{storage.untraceable} before it is copied to {entry.name}"
                self._refuse(storage, reason)
        for t, entry in live:
            whole = t if t.dtype == entry.tensor.dtype else entry.tensor
            self.writes.append([(None, _segment(whole, entry, whole, False))])

    def _copied(
        self,
        destination: torch.Tensor,
        entry: LiveTensor,
        source: torch.Tensor,
        storage: TrackedStorage,
    ) -> Write:
        """Return what a copy of a tracked tensor writes; raises UntraceableError."""
        if storage.untraceable:
            raise UntraceableError(storage.untraceable)
        if storage.dtype != source.dtype or destination.dtype != entry.tensor.dtype:
            raise UntraceableError(f"its bits are seen as {source.dtype}")
        if source.is_neg() or source.is_conj():
            raise UntraceableError("the loader negates it")
        python_copy = self.thread.in_python_copy
        if storage.source is not None:
            return [(storage.source, _segment(destination, entry, source, python_copy))]
        if storage.narrowed and storage.dtype != entry.tensor.dtype:
            raise UntraceableError(f"a cast to {storage.dtype} loses what it holds")
        provenance = self._tracker.provenance(source)
        return [
            (
                None if number is None else provenance.sources[number],
                replace(segment, live=entry, python_copy=python_copy, recast=storage.recast),
            )
            for number, segment in self._pieces(destination, entry, source, provenance)
        ]

    def _pieces(
        self,
        destination: torch.Tensor,
        entry: LiveTensor,
        source: torch.Tensor,
        provenance: Provenance,
    ) -> list[_Piece]:
        """Return a copy's segments with their source numbers; kept, because layers are alike."""
        views = [(t.shape, t.stride(), t.storage_offset()) for t in (destination, source)]
        signature = provenance.signature
        key = (signature, str(views), _offset(destination, entry), extent(entry.tensor))
        if signature is None or key not in self._pieces_by_signature:
            ids = self._tracker.element_ids(source, provenance)
            ids = ElementIds(ids.values.expand(destination.shape), ids.starts)
            self._pieces_by_signature[key] = _pieces(ids, destination, entry)
        return self._pieces_by_signature[key]

    def _refuse(self, storage: TrackedStorage, reason: str) -> None:
        for name in storage.names:
            self._placement[name].refuse(reason)


class RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that passes the operators of one thread to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with self._recorder.lock:
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


def _pieces(ids: ElementIds, destination: torch.Tensor, entry: LiveTensor) -> list[_Piece]:
    """Return the segments that copy elements with these ids; raises UntraceableError."""
    pieces: list[_Piece] = []
    for box, repack in _arranged(ids, _offset(destination, entry), destination.stride(), entry):
        number = ids.source(box.first)
        start = ids.starts[number] if number >= 0 else 0
        segment = Segment(
            entry, box.offset, box.strides, box.sizes, box.first - start, box.steps, False, repack
        )
        pieces.append((number if number >= 0 else None, segment))
    return pieces


def _arranged(
    ids: ElementIds, offset: int, strides: tuple[int, ...], entry: LiveTensor
) -> Iterator[tuple[StridedBox, Repack | None]]:
    """Yield boxes that together hold all elements, each with the permutation within it, if any."""
    boxes = find_boxes(ids, offset, strides, _MANY_SEGMENTS)
    parts = [(ids, offset)] if boxes is not None else split_by_source(ids, offset, strides)
    for part, start in parts:
        if boxes is None or len(parts) > 1:
            boxes = find_boxes(part, start, strides, _MANY_SEGMENTS)
        permutation = find_permutation(part, strides) if boxes is None else None
        if permutation is not None:
            first, places = permutation
            box = StridedBox(start, (len(places),), (1,), first, (1,))
            yield box, _repack(places, start, extent(entry.tensor))
            continue
        if boxes is None:
            boxes = find_boxes(part, start, strides, _MOST_SEGMENTS)
        if boxes is None:
            raise UntraceableError(
                f"its elements are put in an order that takes more than {_MOST_SEGMENTS} segments"
            )
        yield from ((box, None) for box in boxes)


def _repack(places: NDArray[np.int32], offset: int, size: int) -> Repack:
    """Return a permutation of the elements from `offset` on as a repack of the live tensor."""
    if offset % len(places) == 0 and size % len(places) == 0:
        return Repack(smallest_block(places))
    whole = np.arange(size, dtype=np.int32 if size < 1 << 31 else np.int64)
    whole[offset : offset + len(places)] = places.astype(whole.dtype) + offset
    return Repack(whole)


def _offset(destination: torch.Tensor, entry: LiveTensor) -> int:
    return (destination.data_ptr() - entry.start) // destination.element_size()


@functools.cache
def _schema(func: Any) -> tuple[list[str], list[str]]:
    """Return the names of the operator's arguments, and of those that it writes to."""
    arguments = func._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [argument.name for argument in arguments], written


def _written_result(func: Any, written: list[torch.Tensor]) -> Any:
    """Return what the suppressed operator would have: the tensors that it writes to."""
    returns = len(func._schema.returns)
    if returns == 0:
        return None
    return written[0] if returns == 1 else tuple(written)


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator some of whose tensors are on meta; all on meta if it takes no mixture."""
    if func is _aten._to_copy.default:
        # A meta tensor cannot be moved to a device or pinned.
        kwargs = {k: v for k, v in kwargs.items() if k in ("dtype", "layout", "memory_format")}
    try:
        return func(*args, **kwargs)
    except (RuntimeError, ValueError):
        if all(t.is_meta for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
            raise

    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    return func(*args, **kwargs)
