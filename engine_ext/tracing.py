"""Placement by tracing: the engine's own loader, run on tensors that have no data.

The checkpoint's tensors are given to ``load_weights`` as meta tensors. Every write that reaches
a live tensor is recorded and suppressed. A recorded copy whose source is a view of one of those
meta tensors tells exactly which checkpoint elements go where; anything else that carries a
checkpoint tensor into live memory makes that tensor uncertified, with the reason. The model's
memory is not written, and its tensors are checked to be the same objects at the same addresses
afterwards.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_ext.placement import Placed, Placement, Segment, Status, TensorSpec
from engine_ext.storage_index import LiveTensor, StorageIndex, extent, live_tensors

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


class TracingError(RuntimeError):
    """Tracing changed the model, so nothing that it found can be believed."""


def trace_placement(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    index: StorageIndex,
) -> Placement:
    """Find where every checkpoint tensor lies in the model's live memory.

    Args:
        model: the loaded model, in serving state.
        load_weights: the model's own loader; takes (name, tensor) pairs.
        specs: every tensor of the checkpoint, in the order in which the engine loads them.
        index: the storage index of `model`.

    Returns:
        One `Placed` per spec. Those with segments are `UNJUDGED` (certification comes next),
        those that nothing was copied from are `NOT_ON_RANK`, the others are `UNCERTIFIED`.

    Raises:
        TracingError: the model's tensors are not the ones they were. No weight was written.
    """
    before = _identities(model)
    placement = {spec.name: Placed(spec) for spec in specs}
    failure = _run(load_weights, specs, index, placement)
    if failure is not None:
        for spec in specs:
            placement[spec.name] = Placed(spec)
            _explain(load_weights, spec, index, placement, failure)
    if _identities(model) != before:
        raise TracingError("tracing the loader changed the model's tensors; refusing to go on")
    for placed in placement.values():
        if placed.status is Status.UNJUDGED and not placed.segments:
            placed.status = Status.NOT_ON_RANK
    _refuse_shared_memory(placement)
    return placement


def _run(
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    index: StorageIndex,
    placement: Placement,
) -> Exception | None:
    recorder = _Recorder(index, placement)
    weights = [(spec.name, recorder.source(spec)) for spec in specs]
    try:
        with torch.no_grad(), _marked_copies(recorder), recorder:
            load_weights(iter(weights))
    except Exception as error:
        return error
    return None


def _explain(
    load_weights: LoadWeights,
    spec: TensorSpec,
    index: StorageIndex,
    placement: Placement,
    joint: Exception,
) -> None:
    """Trace one tensor alone, because the loader failed on all of them together."""
    placed = placement[spec.name]
    failure = _run(load_weights, [spec], index, placement)
    if failure is not None:
        placed.refuse(f"the loader fails on a tensor without data: {_brief(failure)}")
    elif not placed.segments:
        placed.refuse(f"the loader copies nothing from it alone, and all fail: {_brief(joint)}")


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes into live memory and keeps them from happening."""

    def __init__(self, index: StorageIndex, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.python_copy = False
        self._index = index
        self._placement = placement
        self._names: dict[int, str] = {}
        # Storages made from checkpoint tensors by an operator: which, and by which operator.
        self._derived: dict[int, tuple[frozenset[str], str]] = {}
        # A storage's key is its address: what is tracked must stay alive while tracing.
        self._alive: list[torch.Tensor] = []

    def source(self, spec: TensorSpec) -> torch.Tensor:
        """A meta tensor that stands for a checkpoint tensor."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._names[_key(tensor)] = spec.name
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        live = [(t, entry) for t in written if (entry := self._index.find(t)) is not None]
        if live:
            self._record(func, args, inputs, live)
            return _written_result(func, args, kwargs, written)
        names, _ = self._origin(inputs)
        if names and any(not t.is_meta for t in written):
            # Data that is not there cannot be copied into a real temporary: follow it instead.
            self._derive(written, names, str(func))
            return _written_result(func, args, kwargs, written)
        out = func(*args, **kwargs)
        if names:
            outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            fresh = [t for t in [*outputs, *written] if _key(t) not in self._names]
            self._derive(fresh, names, str(func))
        return out

    def _derive(self, tensors: Iterable[torch.Tensor], names: frozenset[str], op: str) -> None:
        for tensor in tensors:
            known, first_op = self._derived.get(_key(tensor), (frozenset[str](), op))
            self._derived[_key(tensor)] = (known | names, first_op)
            self._alive.append(tensor)

    def _origin(self, tensors: Iterable[torch.Tensor]) -> tuple[frozenset[str], str]:
        """The checkpoint tensors whose data these carry, and the operator that mixed them."""
        names: set[str] = set()
        op = ""
        for tensor in tensors:
            key = _key(tensor)
            if key in self._names:
                names.add(self._names[key])
            elif key in self._derived:
                more, op = self._derived[key]
                names |= more
        return frozenset(names), op

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        inputs: list[torch.Tensor],
        live: list[tuple[torch.Tensor, LiveTensor]],
    ) -> None:
        destination, entry = live[0]
        if func is torch.ops.aten.copy_.default and _key(args[1]) in self._names:
            placed = self._placement[self._names[_key(args[1])]]
            placed.segments.append(_segment(destination, entry, args[1], self.python_copy))
            return
        names, op = self._origin(inputs)
        for name in names:
            self._placement[name].refuse(
                f"{op} changes it before it is copied to {entry.name}"
                if op
                else f"the loader writes it to {entry.name} with {func}, not with a copy"
            )


def _segment(
    destination: torch.Tensor, entry: LiveTensor, source: torch.Tensor, python_copy: bool
) -> Segment:
    source = source.expand(destination.shape)
    return Segment(
        live=entry,
        offset=(destination.data_ptr() - entry.start) // destination.element_size(),
        strides=destination.stride(),
        sizes=tuple(destination.shape),
        source_offset=int(source.storage_offset()),
        source_strides=source.stride(),
        python_copy=python_copy,
    )


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operator's schema says it writes to."""
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return written


def _written_result(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
) -> Any:
    """What the suppressed operator would have returned: the tensors it writes to."""
    returns = len(func._schema.returns)
    if returns == 0:
        return None
    return written[0] if returns == 1 else tuple(written)


@contextmanager
def _marked_copies(recorder: _Recorder) -> Iterator[None]:
    """Let the recorder tell ``Tensor.copy_`` calls from other writes that end in a copy."""
    original = torch.Tensor.copy_
    owner = threading.get_ident()

    def copy_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.get_ident() != owner:
            return original(self, *args, **kwargs)
        recorder.python_copy = True
        try:
            return original(self, *args, **kwargs)
        finally:
            recorder.python_copy = False

    torch.Tensor.copy_ = copy_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]


def _identities(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    return {
        name: (id(t), t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)
        for name, t in live_tensors(model)
    }


def _refuse_shared_memory(placement: Placement) -> None:
    """Refuse tensors of which two lie in the same live elements.

    This happens where an engine ties weights that the checkpoint keeps apart: a delta for one
    would silently change the other.
    """
    boxes: dict[str, list[tuple[int, int, str, Segment]]] = defaultdict(list)
    for name, placed in placement.items():
        for segment in placed.segments:
            end = segment.offset + extent(segment.live_view())
            boxes[segment.live.name].append((segment.offset, end, name, segment))
    for live_name, found in boxes.items():
        found.sort(key=lambda box: box[:3])
        for position, (_, end, name, segment) in enumerate(found):
            for start, _, other, candidate in found[position + 1 :]:
                if start >= end:
                    break
                if other != name and _overlap(segment, candidate):
                    placement[name].refuse(f"shares the memory of {live_name} with {other}")
                    placement[other].refuse(f"shares the memory of {live_name} with {name}")


def _overlap(a: Segment, b: Segment) -> bool:
    mark = torch.zeros(extent(a.live.flat()), dtype=torch.bool)
    mark.as_strided(a.sizes, a.strides, a.offset).fill_(True)
    return bool(mark.as_strided(b.sizes, b.strides, b.offset).any())
