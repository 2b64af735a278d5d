"""The masked applier: staged like a scatter, written through the engine's own loader.

It is the base line that the scatter apply is measured against, and its oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine_ext.apply import masked
from engine_ext.apply.scatter import ScatterApplier
from engine_ext.apply.staged import StagedPart, Write
from engine_ext.derived.recompute import Recomputed
from engine_ext.errors import NotUpdatable
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.plan import Plan
from engine_ext.tracing.trace import LoadWeights, rehearse
from engine_ext.wire import ParamDelta


class MaskedApplier(ScatterApplier):
    """Writes through the model's loader (see `engine_ext.apply.masked`).

    Args:
        model, index, plan, undo_bytes, threads, recomputed: as of `ScatterApplier`.
        load_weights: the model's loader.
        chunk_bytes: bytes of full-shape tensors that one call of the loader gets at most.
    """

    name = "masked"

    def __init__(
        self,
        model: torch.nn.Module,
        index: StorageIndex,
        plan: Plan,
        *,
        undo_bytes: int,
        threads: int,
        load_weights: LoadWeights,
        chunk_bytes: int,
        recomputed: Sequence[Recomputed] = (),
    ) -> None:
        super().__init__(
            model, index, plan, undo_bytes=undo_bytes, threads=threads, recomputed=recomputed
        )
        self._load_weights = load_weights
        self._chunk_bytes = chunk_bytes
        self._rehearsed: list[list[str]] = []

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        """As of `ScatterApplier`; also refuses when the loader would do something else with just
        these tensors than it did with all of them.
        """
        super().check_sync(staged, full=full)
        self._rehearse(self._mine(staged))

    def write(self, staged: Sequence[StagedPart]) -> None:
        """Write, read back, and let the derived tensors follow.

        Raises:
            Exception: the loader's own, or RuntimeError if an element does not hold its new
                bits afterwards. Some elements may be written then.
        """
        for write in (write for part in staged for write in part.writes):
            write.remember()
        masked.apply_masked(self._load_weights, self._index, self._mine(staged), self._chunk_bytes)
        for part in staged:
            for param in part.params:
                if not all(self._each(param.writes, Write.holds)):
                    raise RuntimeError(
                        f"{param.delta.name} does not hold its new bits after the write"
                    )
        self._recompute(self._written(staged))

    def _refusal(self, delta: ParamDelta) -> str | None:
        placed = self.plan.placement[delta.name]
        return masked.refusal(delta, placed) if placed.segments else None

    def _mine(self, staged: Sequence[StagedPart]) -> list[ParamDelta]:
        """What the loader of this rank is given: each tensor of which some elements change here."""
        deltas = [param.delta for part in staged for param in part.params if param.delta.nnz]
        return masked.merge(d for d in deltas if self.plan.placement[d.name].segments)

    def _rehearse(self, deltas: list[ParamDelta]) -> None:
        calls = [[d.name for d in c] for c in masked.chunks(deltas, self._chunk_bytes)]
        if calls == self._rehearsed:
            return
        for names in calls:
            reasons: dict[str, Any] = rehearse(
                self._model, self._load_weights, names, self.plan.placement, self._index
            )
            if reasons:
                raise NotUpdatable(
                    f"this engine cannot update these exactly: {reasons}",
                    tensors=sorted(reasons),
                    reasons=reasons,
                )
        self._rehearsed = calls
