"""Placement by tracing: the engine's own loader, run on tensors that have no data.

The checkpoint's tensors are given to ``load_weights`` as meta tensors. Every write that reaches
a live tensor is recorded and suppressed. A recorded copy whose source is a view of one of those
meta tensors tells exactly which checkpoint elements go where; anything else that carries a
checkpoint tensor into live memory makes that tensor uncertified, with the reason, and so does
anything else that is written over the same elements. The model's memory is not written, and its
tensors are checked to be the same objects at the same addresses afterwards.

`rehearse` does the same for the tensors of one sync: a loader may need tensors together, or fill
in the ones that it was not given.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_ext.placement import Placed, Placement, Segment, Status, TensorSpec
from engine_ext.storage_index import LiveTensor, StorageIndex, extent, live_tensors

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# What replaces ``Tensor.copy_`` is visible in every thread of the process; one at a time may.
COPY_REPLACED = threading.Lock()


class TracingError(RuntimeError):
    """Tracing changed the model, so nothing that it found can be believed."""


def trace_placement(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    index: StorageIndex,
    beside: list[Segment] | None = None,
) -> Placement:
    """Find where every checkpoint tensor lies in the model's live memory.

    Args:
        model: the loaded model, in serving state.
        load_weights: the model's own loader; takes (name, tensor) pairs.
        specs: every tensor of the checkpoint, in the order in which the engine loads them.
        index: the storage index of `model`.
        beside: if given, gets the boxes of live memory that the loader writes something other
            than a checkpoint tensor to (padding); they have no source.

    Returns:
        One `Placed` per spec. Those with segments are `UNJUDGED` (certification comes next),
        those that nothing was copied from are `NOT_ON_RANK`, the others are `UNCERTIFIED`.

    Raises:
        TracingError: the model's tensors are not the ones they were. No weight was written.
    """
    before = _identities(model)
    placement = {spec.name: Placed(spec) for spec in specs}
    run = _run(model, load_weights, specs, index, placement)
    others = run.other_writes
    if run.failure is not None:
        others = []
        for spec in specs:
            placement[spec.name] = Placed(spec)
            others += _explain(model, load_weights, spec, index, placement, run.failure)
    _require_same(model, before)
    for placed in placement.values():
        if placed.status is Status.UNJUDGED and not placed.segments:
            placed.status = Status.NOT_ON_RANK
    _refuse_shared_memory(placement, others)
    if beside is not None:
        beside += others
    return placement


def rehearse(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    names: Sequence[str],
    placement: Placement,
    index: StorageIndex,
) -> dict[str, str]:
    """Trace the loader on some tensors, and compare with what is certified.

    Args:
        names: the tensors, all with segments, that the loader is to be given in one call.
        placement: of the whole checkpoint, certified.

    Returns:
        Tensors for which the loader would do something else than their placement says, each with
        the reason; empty if it would write exactly the certified segments.

    Raises:
        TracingError: as `trace_placement`.
    """
    before = _identities(model)
    trial = {name: Placed(placement[name].spec) for name in names}
    run = _run(model, load_weights, [p.spec for p in trial.values()], index, trial)
    _require_same(model, before)
    if run.failure is not None:
        reason = f"the loader fails without the other tensors: {_brief(run.failure)}"
        return dict.fromkeys(names, reason)
    different = {
        name: "the loader treats it otherwise without the other tensors"
        for name, placed in trial.items()
        if placed.status is not Status.UNJUDGED or placed.segments != placement[name].segments
    }
    if different or not run.other_writes:
        return different
    segments = [_Box.of(s, name) for name, p in placement.items() for s in p.segments]
    for one, other in _overlaps(segments + [_Box.of(s, None) for s in run.other_writes]):
        if None in (one.name, other.name):
            reason = f"without the other tensors the loader writes over {one.name or other.name}"
            return dict.fromkeys(names, reason)
    return {}


@dataclass(frozen=True, slots=True)
class _Run:
    """What one call of the loader did, beside what it recorded in the placement.

    Attributes:
        failure: what it raised.
        other_writes: boxes of live memory that it wrote something other than a checkpoint
            tensor to; they have no source.
    """

    failure: Exception | None
    other_writes: list[Segment]


def _run(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    index: StorageIndex,
    placement: Placement,
) -> _Run:
    recorder = _Recorder(index, placement)
    weights = [(spec.name, recorder.source(spec)) for spec in specs]
    failure = None
    with _kept_attributes(model, recorder):
        try:
            with torch.no_grad(), _marked_copies(recorder), recorder:
                load_weights(iter(weights))
        except Exception as error:
            failure = error
    return _Run(failure, recorder.other_writes)


def _explain(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    spec: TensorSpec,
    index: StorageIndex,
    placement: Placement,
    joint: Exception,
) -> list[Segment]:
    """Trace one tensor alone, because the loader failed on all of them together."""
    placed = placement[spec.name]
    run = _run(model, load_weights, [spec], index, placement)
    if run.failure is not None:
        placed.refuse(f"the loader fails on a tensor without data: {_brief(run.failure)}")
    elif not placed.segments:
        placed.refuse(f"the loader copies nothing from it alone, and all fail: {_brief(joint)}")
    return run.other_writes


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes into live memory and keeps them from happening."""

    def __init__(self, index: StorageIndex, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.python_copy = False
        self.other_writes: list[Segment] = []
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
            if not outputs and not all(t.is_meta for t in inputs):
                raise RuntimeError(f"the loader reads data that is not there, with {func}")
            for tensor in written:
                if _key(tensor) in self._names:
                    self._refuse([self._names[_key(tensor)]], f"the loader changes it with {func}")
            fresh = [t for t in [*outputs, *written] if _key(t) not in self._names]
            self._derive(fresh, names, str(func))
        return out

    def kept_in(self, tensors: Iterable[torch.Tensor], place: str) -> None:
        """Refuse the checkpoint tensors whose data these, which hang on a module, carry."""
        names, _ = self._origin(tensors)
        self._refuse(names, f"the loader also keeps it in {place}, which is no parameter")

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self._placement[name].refuse(reason)

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
            if args[1].dtype != placed.spec.dtype or destination.dtype != entry.tensor.dtype:
                placed.refuse(f"the loader copies its bits to {entry.name} as {args[1].dtype}")
            else:
                placed.segments.append(_segment(destination, entry, args[1], self.python_copy))
            return
        names, op = self._origin(inputs)
        self._refuse(
            names,
            f"{op} changes it before it is copied to {entry.name}"
            if op
            else f"the loader writes it to {entry.name} with {func}, not with a copy",
        )
        if not names:
            for t, entry in live:
                whole = t if t.dtype == entry.tensor.dtype else entry.tensor
                self.other_writes.append(_segment(whole, entry, whole, False))


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
    with COPY_REPLACED:
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


@contextmanager
def _kept_attributes(model: torch.nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Put back the tensors that hang on modules, and refuse what the loader put in them.

    An attribute that the loader makes is removed again.
    """
    modules = dict(model.named_modules())
    before = [
        (path, module, name, value)
        for path, module in modules.items()
        for name, value in module.__dict__.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    ]
    names = {path: set(module.__dict__) for path, module in modules.items()}
    try:
        yield
    finally:
        for path, module in modules.items():
            for name in set(module.__dict__) - names[path]:
                if isinstance(value := module.__dict__.pop(name), torch.Tensor):
                    recorder.kept_in([value], f"{path}.{name}".lstrip("."))
        for path, module, name, value in before:
            now = module.__dict__.get(name)
            tensors = [value, now] if isinstance(now, torch.Tensor) else [value]
            recorder.kept_in(tensors, f"{path}.{name}".lstrip("."))
            module.__dict__[name] = value


def _identities(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    return {
        name: (id(t), t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)
        for name, t in live_tensors(model)
    }


def _require_same(model: torch.nn.Module, before: dict[str, tuple[object, ...]]) -> None:
    if _identities(model) != before:
        raise TracingError("tracing the loader changed the model's tensors; refusing to go on")


@dataclass(frozen=True, slots=True)
class _Box:
    """A segment by the addresses of its bytes; `name` is None for what is no checkpoint tensor."""

    start: int
    end: int
    name: str | None
    segment: Segment

    @classmethod
    def of(cls, segment: Segment, name: str | None) -> _Box:
        view = segment.live_view()
        start = view.data_ptr()
        return cls(start, start + extent(view) * view.element_size(), name, segment)

    @property
    def dense(self) -> bool:
        """Whether it holds every byte from its first to its last."""
        width = self.segment.live.tensor.element_size()
        return math.prod(self.segment.sizes) * width == self.end - self.start

    def mark(self, memory: torch.Tensor, first: int, unit: int) -> torch.Tensor:
        """Its view of `memory`, of which each element stands for `unit` bytes from `first` on."""
        width = self.segment.live.tensor.element_size() // unit
        strides = [stride * width for stride in self.segment.strides]
        offset = (self.start - first) // unit
        return memory.as_strided([*self.segment.sizes, width], [*strides, 1], offset)


def _refuse_shared_memory(placement: Placement, others: Sequence[Segment]) -> None:
    """Refuse tensors whose live elements are not theirs alone.

    Two tensors lie in the same elements where an engine ties weights that the checkpoint keeps
    apart: a delta for one would silently change the other. And what the loader writes beside the
    checkpoint's tensors (`others`) it would write again, over elements that a delta leaves out.
    """
    boxes = [_Box.of(s, name) for name, placed in placement.items() for s in placed.segments]
    for one, other in _overlaps(boxes + [_Box.of(segment, None) for segment in others]):
        for box, by in ((one, other), (other, one)):
            if box.name is None:
                continue
            if by.name is None:
                reason = f"the loader also writes other values over it, in {box.segment.live.name}"
            else:
                reason = f"shares the memory of {box.segment.live.name} with {by.name}"
            placement[box.name].refuse(reason)


def _overlaps(boxes: Iterable[_Box]) -> Iterator[tuple[_Box, _Box]]:
    """Pairs of boxes of different names that have an element in common."""
    found = sorted(boxes, key=lambda box: (box.start, box.end))
    for position, one in enumerate(found):
        for other in found[position + 1 :]:
            if other.start >= one.end:
                break
            if one.name != other.name and (one.dense or _common(one, other)):
                yield one, other


def _common(one: _Box, other: _Box) -> bool:
    """Whether two boxes have a byte in common; `one` starts first."""
    widths = [box.segment.live.tensor.element_size() for box in (one, other)]
    unit = math.gcd(*widths, other.start - one.start)
    memory = torch.zeros((max(one.end, other.end) - one.start) // unit, dtype=torch.bool)
    one.mark(memory, one.start, unit).fill_(True)
    return bool(other.mark(memory, one.start, unit).any())
