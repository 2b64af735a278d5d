"""Run an engine's own loader dry: on tensors that have no data, with no write to the model.

The checkpoint's tensors are given to ``load_weights`` as meta tensors. Every write to a live
tensor is recorded and suppressed. The copies show exactly which checkpoint elements go where, also
if the loader clones, permutes or joins tensors first (`provenance`) or hands
them to threads (`thread_propagation`). A tensor that reaches live memory in any other way is
uncertified, with the reason, and so is one whose elements something else is written over.
Afterwards the model's objects are restored, and its bits, objects and addresses compared with those
before.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from engine_ext.model import ModelStateGuard, StorageIndex, TracingError
from engine_ext.placement import Placed, Placement, Segment, Status, TensorSpec
from engine_ext.startup.trace.memory_overlap import ByteRange, Write, overlaps, refuse_shared_memory
from engine_ext.startup.trace.recorder import Recorder, RecordingMode
from engine_ext.startup.trace.thread_propagation import traced_threads

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# A replacement of ``Tensor.copy_`` is visible in every thread of the process: one at a time.
COPY_REPLACED = threading.Lock()


class LoaderDryRun:
    """A model's loader, run on tensors without data to see what it would do with real ones.

    Everything that is asked about a loader is asked here: where it puts a checkpoint (`trace`),
    whether it treats some tensors alone as it treats them all (`rehearse`), what it writes for one
    tensor (`written_alone`), and whether it ignores some (`drops`). Each run leaves the model as it
    was.

    Args:
        model: in serving state, or not processed yet.
        load_weights: the model's own loader; takes (name, tensor) pairs.
        index: of the model.
        refuse_while: returns why the loader would not simply load now (an engine can wrap it while
            it reloads or quantises), or None.

    Every method raises:
        TracingError: the loader left threads running or changed the model in a way that could not
            be undone. The model must not be served then.
        RuntimeError: `refuse_while` has a reason. Nothing was run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load_weights: LoadWeights,
        index: StorageIndex,
        refuse_while: Callable[[torch.nn.Module], str | None] | None = None,
    ) -> None:
        self.model, self.load_weights, self.index = model, load_weights, index
        self._refuse_while = refuse_while

    def at(self, index: StorageIndex) -> LoaderDryRun:
        """Return the dry run of the same loader with the live tensors at other places."""
        return LoaderDryRun(self.model, self.load_weights, index, self._refuse_while)

    def trace(
        self, specs: Sequence[TensorSpec], other_writes: list[Segment] | None = None
    ) -> Placement:
        """Find where every checkpoint tensor is in the model's live memory.

        Args:
            specs: every tensor of the checkpoint, in the order in which the engine loads them.
            other_writes: if given, the segments of live memory that the loader writes something
                other than a checkpoint tensor to (padding) are appended; they have no source.

        Returns:
            One `Placed` per spec, by name. Those with segments are `UNJUDGED` (certification comes
            next), those that nothing was copied from are `NOT_ON_RANK`, the others `UNCERTIFIED`.
        """
        placement = {spec.name: Placed(spec) for spec in specs}
        with self._guarded(bits=True) as guard:
            done = self._run(guard, specs, placement)
            writes = done.writes
            if done.failure is not None:
                writes = []
                for spec in specs:
                    placement[spec.name] = Placed(spec)
                    writes += self._explain(guard, spec, placement, done.failure)
                    gc.collect(0)  # of each call some cycles are left, as large as the model's walk
        for placed in placement.values():
            if placed.status is Status.UNJUDGED and not placed.segments:
                placed.status = Status.NOT_ON_RANK
        refuse_shared_memory(placement, writes)
        if other_writes is not None:
            other_writes += _others(writes)
        return placement

    def rehearse(self, names: Sequence[str], placement: Placement) -> dict[str, str]:
        """Compare what the loader does with some tensors with their certified placement.

        A loader might need tensors together, or fill in those that it was not given. The tensors in
        `names` all have segments, and the loader is to be given them in one call. The bits of the
        model are not compared here: `trace` has shown that every write of this loader is seen.

        Returns:
            Why the loader would do something else than the placement says, by tensor name; empty if
            it would write exactly the certified segments.
        """
        trial = {name: Placed(placement[name].spec) for name in names}
        done = self._run_alone([placed.spec for placed in trial.values()], trial)
        if done.failure is not None:
            reason = f"the loader fails without the other tensors: {done.failure}"
            return dict.fromkeys(names, reason)
        different = {
            name: "the loader treats it differently without the other tensors"
            for name, placed in trial.items()
            if placed.status is not Status.UNJUDGED or placed.segments != placement[name].segments
        }
        others = _others(done.writes)
        if different or not others:
            return different
        segments = [ByteRange.of(s, name, 0) for name, p in placement.items() for s in p.segments]
        for one, other in overlaps(segments + [ByteRange.of(s, None, 1) for s in others]):
            reason = f"without the other tensors the loader writes over {one.name or other.name}"
            return dict.fromkeys(names, reason)
        return {}

    def written_alone(self, spec: TensorSpec) -> frozenset[str]:
        """Return the live parameters that the loader writes or replaces, given one tensor alone.

        Each is under all of its names. They are empty if the loader fails without data, writes to
        something else, too, or to memory that several parameters share.
        """
        done = self._run_alone([spec], {spec.name: Placed(spec)})
        written = [segment.live for write in done.writes for _, segment in write]
        names = frozenset(
            [*done.kept, *(name for live in written for name in (live.name, *live.aliases))]
        )
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        if done.failure is not None or not names <= parameters.keys():
            return frozenset()
        objects = [{id(parameters[n]) for n in (live.name, *live.aliases)} for live in written]
        return names if all(len(found) == 1 for found in objects) else frozenset()

    def drops(self, more: Sequence[TensorSpec], placement: Placement) -> bool:
        """Return whether the loader takes more tensors and makes nothing of any.

        It does if it neither copies nor reads one, before and after all those in `placement` (which
        `trace` has returned), and then treats these as without them.
        """
        others = [placed.spec for placed in placement.values()]
        for specs in ([*more, *others], [*others, *more]):
            trial = {one.name: Placed(one) for one in specs}
            done = self._run_alone(specs, trial)
            own = [trial[spec.name] for spec in more]
            if done.failure is not None or not all(_is_untouched(placed) for placed in own):
                return False
            if any(trial[name].segments != placed.segments for name, placed in placement.items()):
                return False
        return True

    def _run_alone(self, specs: Sequence[TensorSpec], placement: Placement) -> _Done:
        with self._guarded(bits=False) as guard:
            return self._run(guard, specs, placement)

    @contextmanager
    def _guarded(self, *, bits: bool) -> Iterator[ModelStateGuard]:
        """Verify after the block that the model is as before."""
        reason = self._refuse_while(self.model) if self._refuse_while is not None else None
        if reason:
            raise RuntimeError(f"the loader cannot be traced now: {reason}")
        with _no_collection():
            guard = ModelStateGuard(self.model, bits=bits)
            try:
                yield guard
                guard.verify()
            except TracingError:
                raise
            except Exception as error:
                raise TracingError(f"tracing the loader failed: {_brief(error)}") from error

    def _run(
        self, guard: ModelStateGuard, specs: Sequence[TensorSpec], placement: Placement
    ) -> _Done:
        """Call the loader with some tensors without data; what it copies goes to `placement`."""
        recorder = Recorder(self.index, placement)
        weights = [(spec.name, recorder.source(spec)) for spec in specs]
        failure = None
        try:
            with _marked_copies(recorder), traced_threads(lambda: RecordingMode(recorder)):
                self.load_weights(iter(weights))
        except TracingError:
            raise
        except Exception as error:
            # Its frames hold all that the loader had, and this one: a cycle for each tensor.
            failure = _brief(error)
        finally:
            replaced = [attached.path for attached in guard.registered if attached.changed]
            _refuse_changes(guard, recorder)
            kept = [*replaced, *recorder.kept]
            recorder.close()
            guard.restore()
        return _Done(failure, recorder.writes, kept)

    def _explain(
        self, guard: ModelStateGuard, spec: TensorSpec, placement: Placement, joint: str
    ) -> list[Write]:
        """Trace one tensor alone, after the loader failed on all of them together."""
        placed = placement[spec.name]
        done = self._run(guard, [spec], placement)
        if done.failure is not None:
            placed.refuse(f"the loader fails on a tensor without data: {done.failure}")
        elif not placed.segments:
            placed.refuse(f"the loader copies nothing from it alone, and all fail: {joint}")
        return done.writes


@dataclass(frozen=True, slots=True)
class _Done:
    """What one call of the loader has done.

    Attributes:
        failure: what it raised, briefly.
        writes: everything that it wrote to live memory.
        kept: paths of the parameters and buffers that it replaced, and of other tensors that it
            keeps elements in.
    """

    failure: str | None
    writes: list[Write]
    kept: list[str]


def _is_untouched(placed: Placed) -> bool:
    return placed.status is Status.UNJUDGED and not placed.segments and not placed.used


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage collection begin automatically: one of all an engine's objects takes longer.

    The many objects of a trace have no data, and most of them are gone when it ends.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def young_collections() -> Iterator[None]:
    """Let garbage collections leave out the objects that are there already.

    Those of an engine are so many that a collection of all of them takes longer than a trace.
    """
    if gc.get_freeze_count():  # the engine has done so, and `unfreeze` would undo that
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _others(writes: Iterable[Write]) -> list[Segment]:
    """Return the segments written with something other than a checkpoint tensor."""
    return [segment for write in writes for name, segment in write if name is None]


def _refuse_changes(guard: ModelStateGuard, recorder: Recorder) -> None:
    """Refuse the tensors that the loader kept elsewhere, or whose live tensors it replaced."""
    for attached in guard.registered:
        if attached.changed:
            recorder.refuse_replaced(attached.path, attached.memory, attached.current)
    for attached in guard.attributes:
        current = [] if attached.current is None else [attached.current]
        recorder.refuse_kept([attached.memory, *current], attached.path)
    for path, tensor in chain(guard.known_tensors(), guard.new_tensors()):
        recorder.refuse_kept([tensor], path)
    recorder.refuse_outside()


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


@contextmanager
def _marked_copies(recorder: Recorder) -> Iterator[None]:
    """Mark calls of ``Tensor.copy_``, as other operators end in a copy below Python too.

    Only the calling thread's calls are marked: a masked apply cannot replace those of others.
    """
    with COPY_REPLACED:
        original = torch.Tensor.copy_
        owner = threading.get_ident()

        def copy_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if threading.get_ident() != owner:
                return original(self, *args, **kwargs)
            recorder.thread.in_python_copy = True
            try:
                return original(self, *args, **kwargs)
            finally:
                recorder.thread.in_python_copy = False

        torch.Tensor.copy_ = copy_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.Tensor.copy_ = original  # type: ignore[method-assign]
