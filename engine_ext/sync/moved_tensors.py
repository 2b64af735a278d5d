"""Notice live tensors that something has moved, and follow them to their new places.

The addresses of a model's tensors are fixed once it is loaded. A worker extension or a migration
can give a parameter other memory all the same (``param.data = ...``). The plan then reads and
writes memory that the engine does not compute with any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.model import LiveTensor, StorageIndex, address_range, reachable_tensors
from engine_ext.placement import Placement, Plan, place_again
from engine_ext.sync.post_load import PostLoad

TraceAgain = Callable[[StorageIndex, Sequence[str]], Placement]
"""Trace the whole checkpoint through the loader again, given an index of the model as it is now and
the live tensors that were moved. Raises NotUpdatable if writes to their new places would not do."""


class MovedTensors:
    """The live tensors of one rank that are not where they were when they were placed.

    Args:
        model: that was traced: the live one, or the unprocessed one.
        index: of it, made before the certification.
        placement: certified.
        trace: None if moved tensors cannot be followed.

    Attributes:
        index: the model's, of the places that the plan has.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        index: StorageIndex,
        placement: Placement,
        post_load: PostLoad,
        trace: TraceAgain | None,
    ) -> None:
        self._model, self.index, self._placement = model, index, placement
        self._post_load, self._trace = post_load, trace
        self._constants = self._unwritten_buffers()

    def tensors(self) -> list[str]:
        """Return the tensors of the checkpoint that have moved; live ones that hold none of it."""
        live = set(self._live())
        if not live:
            return []
        found, explained = set[str](), set[str]()
        for name, placed in self._placement.items():
            held = {n for s in placed.segments for n in (s.live.name, *s.live.aliases)}
            held.update(placed.recomputed)
            if not held.isdisjoint(live):
                found.add(name)
                explained |= held
        for name in live:
            sources = self._post_load.sources(name)
            if sources:
                found |= sources
                explained.add(name)
        return sorted(found | (live - explained))

    def check(self) -> None:
        """Check that nothing has moved.

        Raises:
            BaseMismatch: names what has, as `tensors` does. Nothing was written.
        """
        moved = self.tensors()
        if moved:
            raise BaseMismatch(
                f"something moved these after start-up: {moved[:8]}; send a full sync",
                tensors=moved,
                moved=moved,
            )

    def follow(self, plan: Plan) -> Plan:
        """Return the plan of the new places.

        Raises:
            NotUpdatable: the tensors cannot be followed there. Nothing was changed.
            TracingError: the dry run of the engine's loader has changed the model.
        """
        names = self._live()
        now = StorageIndex(self._model)
        self._check_followable(names, now)
        assert self._trace is not None
        plan, elsewhere = place_again(plan, self._trace(now, names), {*names})
        if elsewhere:
            raise _lost(elsewhere, "the loader writes them elsewhere now")
        self.index = now
        self._post_load.follow()
        return plan

    def _live(self) -> list[str]:
        """Return the live tensors and modules that have moved, by name."""
        moved = self._post_load.moved(self._model).union(self.index.moved(self._model))
        return sorted(moved - self._constants)

    def _check_followable(self, names: Sequence[str], now: StorageIndex) -> None:
        """Check that the moved tensors have new places like the old ones, which nothing refers to.

        Raises:
            NotUpdatable: names those that do not.
        """
        if self._trace is None:
            raise _lost(names, "it is not known what loads them")
        known = {n: e for e in self.index.entries for n in (e.name, *e.aliases)}
        own = set(self.index.moved(self._model))
        others = [name for name in names if name not in own or self._post_load.contains(name)]
        if others:
            raise _lost(others, "the engine computes them from weights")
        unlike = self.index.differences(now, names)
        if unlike:
            raise _lost(unlike, "they have another layout, or share memory with others, by now")
        placed = {s.live.name for one in self._placement.values() for s in one.segments}
        within = [entry for entry in self.index.entries if entry.name in placed]
        left = [n for n in names if not any(_holds(one, known[n]) for one in within)]
        if left:
            raise _lost(left, "no tensor of the checkpoint is in them")
        stale = self._stale({name: known[name] for name in names})
        if stale:
            raise _lost(stale, "they still refer to the memory before")

    def _stale(self, moved: Mapping[str, LiveTensor]) -> list[str]:
        """Return the paths of tensors that are (views of) the memory that was left."""
        found = []
        for path, _, attribute, tensor in reachable_tensors(self._post_load.model):
            if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
                continue
            start, end = address_range(tensor)
            if any(start < one.end and one.start < end for one in moved.values()):
                found.append(f"{path}.{attribute}".lstrip("."))
        return sorted(found)

    def _unwritten_buffers(self) -> set[str]:
        """Return the buffers that no sync writes to, by all of their names.

        vLLM replaces some at the first forward pass (rotary embeddings in another dtype).
        """
        written = {path for one in self._post_load.recomputed for path in one.paths}
        for placed in self._placement.values():
            for segment in placed.segments:
                written.update((segment.live.name, *segment.live.aliases))
        return {
            name
            for name, _ in self._model.named_buffers(remove_duplicate=False)
            if name not in written and not self._post_load.contains(name)
        }


def _holds(outer: LiveTensor, inner: LiveTensor) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end


def _lost(names: Sequence[str], why: str) -> NotUpdatable:
    return NotUpdatable(
        f"something moved {list(names)[:8]} after start-up, and no sync can follow: {why}; "
        "restart the engine",
        tensors=list(names),
    )
