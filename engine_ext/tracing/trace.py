"""Placement by tracing: the engine's own loader, run on tensors that have no data.

The checkpoint's tensors are given to ``load_weights`` as meta tensors. Every write that reaches
a live tensor is recorded and suppressed. What is copied there tells exactly which checkpoint
elements go where, also where the loader has cloned, permuted or joined tensors before
(`engine_ext.tracing.provenance`) or hands them to threads (`engine_ext.tracing.thread_propagation`). Anything else that carries
a checkpoint tensor into live memory makes that tensor uncertified, with the reason, and so does
anything else that is written over the same elements. The model comes out as it was: bits, objects
and addresses are compared, and what can be put back is.

`rehearse` does the same for the tensors of one sync: a loader may need tensors together, or fill
in the ones that it was not given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine_ext.model.state_guard import ModelStateGuard, TracingError
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.segments import Placed, Placement, Segment, Status, TensorSpec
from engine_ext.tracing.memory_overlap import ByteRange, Write, overlaps, refuse_shared_memory
from engine_ext.tracing.recorder import Recorder, Watch
from engine_ext.tracing.thread_propagation import followed

__all__ = ["COPY_REPLACED", "LoadWeights", "TracingError", "rehearse", "trace_placement"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# What replaces ``Tensor.copy_`` is visible in every thread of the process; one at a time may.
COPY_REPLACED = threading.Lock()


def trace_placement(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    index: StorageIndex,
    beside: list[Segment] | None = None,
    *,
    refuse_while: Callable[[torch.nn.Module], str | None] | None = None,
) -> Placement:
    """Find where every checkpoint tensor lies in the model's live memory.

    Args:
        model: the loaded model, in serving state.
        load_weights: the model's own loader; takes (name, tensor) pairs.
        specs: every tensor of the checkpoint, in the order in which the engine loads them.
        index: the storage index of `model`.
        beside: if given, gets the boxes of live memory that the loader writes something other
            than a checkpoint tensor to (padding); they have no source.
        refuse_while: tells why the loader would now do something else than load (an engine may
            wrap it while it reloads or quantises); None if it would not.

    Returns:
        One `Placed` per spec. Those with segments are `UNJUDGED` (certification comes next),
        those that nothing was copied from are `NOT_ON_RANK`, the others are `UNCERTIFIED`.

    Raises:
        TracingError: the model is not what it was and could not be put back, its loader leaves
            threads behind, or `refuse_while` has a reason.
    """
    reason = refuse_while(model) if refuse_while is not None else None
    if reason:
        raise TracingError(f"the loader cannot be traced now: {reason}")
    untouched = ModelStateGuard(model, bits=True)
    placement = {spec.name: Placed(spec) for spec in specs}
    run = _run(untouched, load_weights, specs, index, placement)
    writes = run.writes
    if run.failure is not None:
        writes = []
        for spec in specs:
            placement[spec.name] = Placed(spec)
            writes += _explain(untouched, load_weights, spec, index, placement, run.failure)
    untouched.require()
    for placed in placement.values():
        if placed.status is Status.UNJUDGED and not placed.segments:
            placed.status = Status.NOT_ON_RANK
    refuse_shared_memory(placement, writes)
    if beside is not None:
        beside += _others(writes)
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
        TracingError: as `trace_placement`, but that the bits are not compared: `trace_placement`
            has seen that every way in which this loader writes is followed.
    """
    untouched = ModelStateGuard(model, bits=False)
    trial = {name: Placed(placement[name].spec) for name in names}
    run = _run(untouched, load_weights, [p.spec for p in trial.values()], index, trial)
    untouched.require()
    if run.failure is not None:
        reason = f"the loader fails without the other tensors: {_brief(run.failure)}"
        return dict.fromkeys(names, reason)
    different = {
        name: "the loader treats it otherwise without the other tensors"
        for name, placed in trial.items()
        if placed.status is not Status.UNJUDGED or placed.segments != placement[name].segments
    }
    others = _others(run.writes)
    if different or not others:
        return different
    segments = [ByteRange.of(s, name, 0) for name, p in placement.items() for s in p.segments]
    for one, other in overlaps(segments + [ByteRange.of(s, None, 1) for s in others]):
        reason = f"without the other tensors the loader writes over {one.name or other.name}"
        return dict.fromkeys(names, reason)
    return {}


@dataclass(frozen=True, slots=True)
class _Run:
    """What one call of the loader did, beside what it recorded in the placement.

    Attributes:
        failure: what it raised.
        writes: all that it wrote to live memory.
    """

    failure: Exception | None
    writes: list[Write]


def _others(writes: Iterable[Write]) -> list[Segment]:
    """What was written that is no checkpoint tensor's."""
    return [segment for write in writes for name, segment in write if name is None]


def _run(
    untouched: ModelStateGuard,
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    index: StorageIndex,
    placement: Placement,
) -> _Run:
    recorder = Recorder(index, placement)
    weights = [(spec.name, recorder.source(spec)) for spec in specs]
    failure = None
    try:
        with _marked_copies(recorder), followed(lambda: Watch(recorder)):
            load_weights(iter(weights))
    except TracingError:
        raise
    except Exception as error:
        failure = error
    finally:
        _put_back(untouched, recorder)
    return _Run(failure, recorder.writes)


def _put_back(untouched: ModelStateGuard, recorder: Recorder) -> None:
    """Put the model's tensors back, and refuse what the loader put in their places."""
    for held in untouched.registered:
        if held.changed:
            recorder.replaced(held.path, held.memory, held.now)
    for held in untouched.attributes:
        now = [] if held.now is None else [held.now]
        recorder.kept_in([held.memory, *now], held.path)
    for path, tensor in untouched.made():
        recorder.kept_in([tensor], path)
    recorder.close()
    untouched.put_back()


def _explain(
    untouched: ModelStateGuard,
    load_weights: LoadWeights,
    spec: TensorSpec,
    index: StorageIndex,
    placement: Placement,
    joint: Exception,
) -> list[Write]:
    """Trace one tensor alone, because the loader failed on all of them together."""
    placed = placement[spec.name]
    run = _run(untouched, load_weights, [spec], index, placement)
    if run.failure is not None:
        placed.refuse(f"the loader fails on a tensor without data: {_brief(run.failure)}")
    elif not placed.segments:
        placed.refuse(f"the loader copies nothing from it alone, and all fail: {_brief(joint)}")
    return run.writes


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


@contextmanager
def _marked_copies(recorder: Recorder) -> Iterator[None]:
    """Let the recorder tell ``Tensor.copy_`` calls from other writes that end in a copy.

    Only the calling thread's count: a masked apply cannot replace those of other threads.
    """
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
