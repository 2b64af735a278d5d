"""The first sync of an engine that was started without a checkpoint's weights.

Nothing can be certified while there are no known bytes in memory. So such an engine takes only a
``full`` sync. It is written by the engine's own reload path, like a checkpoint, and then certified
against its own bytes; from then on the engine takes deltas as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_ext.apply.masked import densify
from engine_ext.apply.staged import StagedParam, StagedPart, UndoLog
from engine_ext.derived.recompute import Recomputed
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.model.storage_index import StorageIndex, extent
from engine_ext.placement.certify import certify
from engine_ext.placement.ownership import boxes, resolve
from engine_ext.placement.plan import covered
from engine_ext.placement.segments import Placement, Segment, Status, TensorSpec
from engine_ext.wire import ParamDelta, Part
from engine_ext.wire.digest import Digest, tensor_digest

Reload = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class Traced:
    """Where the tensors of a checkpoint would lie.

    Attributes:
        index: the model's storage index.
        placement: not certified.
        others: live boxes that the loader fills with something else (padding).
        recomputed: derived tensors that are proven to follow.
    """

    index: StorageIndex
    placement: Placement
    others: list[Segment]
    recomputed: list[Recomputed] = field(default_factory=list)


class InitialSyncApplier:
    """Stands in for an applier until the first ``full`` sync.

    Args:
        model: the live model.
        trace: traces tensors through the model's loader.
        reload: the engine's own way to load other weights into the running model.

    Attributes:
        seeded: called on every rank after the first sync, with its placement, certified.
    """

    name = "reload"
    plan = None

    def __init__(
        self,
        model: torch.nn.Module,
        trace: Callable[[Sequence[TensorSpec]], Traced],
        reload: Reload,
    ) -> None:
        self.digests: dict[str, Digest] = {}
        self.seeded: Callable[[Traced], None] = _nobody_listens
        self._model = model
        self._trace = trace
        self._reload = reload
        self._traced = Traced(StorageIndex(torch.nn.Module()), {}, [])

    @property
    def digest(self) -> Digest:
        """Nothing is covered yet."""
        return Digest.ZERO

    def stage(self, part: Part) -> StagedPart:
        """Keep a part of a ``full`` sync.

        Raises:
            BaseMismatch: it is a part of another sync.
        """
        if not part.manifest.full:
            raise BaseMismatch(
                "the engine was started without a checkpoint's weights; send a full sync first"
            )
        return StagedPart(part.manifest, [StagedParam(delta) for delta in part.deltas])

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        """Refuse a sync that the engine's loader would not spread over all of this rank.

        Raises:
            NotUpdatable: names the tensors, or the live weights that they leave out. Nothing was
                written.
        """
        deltas = list(_deltas(staged))
        counts = Counter(delta.name for delta in deltas)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            raise NotUpdatable(f"two parts send the same tensors: {repeated}", tensors=repeated)
        self._traced = self._trace([_spec(delta) for delta in deltas])
        refused = {
            name: placed.reason
            for name, placed in self._traced.placement.items()
            if placed.status is Status.UNCERTIFIED
        }
        if refused:
            raise NotUpdatable(
                f"this engine cannot be given these exactly: {refused}",
                tensors=sorted(refused),
                reasons=refused,
            )
        left_out = _left_out(self._model, self._traced)
        if left_out:
            raise NotUpdatable(
                f"a full sync must cover every live weight; it leaves out (parts of) {left_out}",
                missing=left_out,
            )

    def check_in_place(self) -> None:
        """There is nothing to go back to, so nothing to check."""

    def check_base(self, staged: Sequence[StagedPart]) -> None:
        """No old values were gathered."""

    def brief(self, staged: Sequence[StagedPart]) -> dict[str, Any]:
        """What the other ranks must know, as JSON: who would hold what, and what is covered."""
        placement = self._traced.placement
        return {
            "boxes": boxes(placement),
            "covered": {n: covered(p) for n, p in placement.items() if p.segments},
        }

    def agree(self, staged: Sequence[StagedPart], briefs: Sequence[dict[str, Any]]) -> None:
        """Judge the sync by what all ranks have said; every rank comes to the same end.

        Raises:
            NotUpdatable: no rank would hold a tensor, or not all of it.
            BaseMismatch: a digest in the parts is not that of their bytes, or is one of a change
                from weights that nobody knows.
        """
        placement = self._traced.placement
        resolve(placement, [brief["boxes"] for brief in briefs])
        lost = sorted(n for n, p in placement.items() if p.status is Status.UNCERTIFIED)
        ignored = sorted(placement.keys() - {n for b in briefs for n in b["boxes"]})
        if lost or ignored:
            raise NotUpdatable(
                f"the engine would not hold all of these: {lost + ignored}; leave out what it "
                "ignores",
                tensors=lost + ignored,
            )
        if any(part.manifest.digest_part is not None for part in staged):
            raise BaseMismatch("the engine's weights are no checkpoint's: leave digest_part out")
        declared = {p.manifest.digest_after for p in staged if p.manifest.digest_after is not None}
        if declared:
            after = Digest.ZERO
            for delta in _deltas(staged):
                if all(brief["covered"].get(delta.name, True) for brief in briefs):
                    after += tensor_digest(delta.name, delta.values)
            if declared != {after.hex()}:
                raise BaseMismatch(
                    f"the digest of this sync's bytes is {after.hex()}, its parts say "
                    f"{sorted(declared)}",
                    actual=after.hex(),
                )

    def write(self, staged: Sequence[StagedPart]) -> None:
        """Let the engine load the sync, and certify what it has made of it.

        Raises:
            Exception: the engine's own, or RuntimeError if some tensor's bytes are not the sync's
                afterwards. The weights are mixed then.
        """
        self._reload(_tensors(staged))
        # Anew, because the reload may have moved weights, and made other derived tensors of them.
        traced = self._traced = self._trace([_spec(delta) for delta in _deltas(staged)])
        certify(traced.placement, _tensors(staged))
        wrong = {
            name: placed.reason
            for name, placed in traced.placement.items()
            if placed.status is Status.UNCERTIFIED
        }
        if wrong:
            raise RuntimeError(f"after the engine's own reload these are not exact: {wrong}")

    def undo(self, staged: Sequence[StagedPart]) -> None:
        """Impossible.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the weights before were no checkpoint's, and were not kept")

    def finish(self, staged: Sequence[StagedPart]) -> None:
        """Hand the certified placement on. All ranks must call it."""
        self.seeded(self._traced)

    def roll_back(self, log: UndoLog) -> None:
        """Impossible; raises as `undo`."""
        self.undo([])

    def describe(self) -> dict[str, Any]:
        """Apply mode and state of this rank, as JSON."""
        return {
            "apply": self.name,
            "awaits": "full sync",
            "certification": {},
            "uncertified": {},
            "digest": self.digest.hex(),
        }


def _nobody_listens(traced: Traced) -> None:
    raise RuntimeError("no one takes over after the first sync")


def _deltas(staged: Sequence[StagedPart]) -> Iterator[ParamDelta]:
    for part in staged:
        for param in part.params:
            yield param.delta


def _spec(delta: ParamDelta) -> TensorSpec:
    return TensorSpec(delta.name, delta.shape, TORCH_DTYPE[delta.dtype])


def _tensors(staged: Sequence[StagedPart]) -> Iterator[tuple[str, torch.Tensor]]:
    """The sync as a checkpoint: each tensor a copy that the loader may keep."""
    for delta in _deltas(staged):
        yield delta.name, densify(delta)


def _left_out(model: torch.nn.Module, traced: Traced) -> list[str]:
    """Live parameters of which some element is written by nothing, and that do not follow."""
    segments: dict[str, list[Segment]] = {}
    for segment in [*(s for p in traced.placement.values() for s in p.segments), *traced.others]:
        segments.setdefault(segment.live.name, []).append(segment)
    entries = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    entries -= {path for one in traced.recomputed for path in one.paths}
    found = []
    for entry in traced.index.entries:
        around = {other.name for other in traced.index.holding(entry.tensor)} - {entry.name}
        if entry.name not in entries or (entry.name not in segments and around & segments.keys()):
            continue  # what it is a view of is looked at
        written = torch.zeros(extent(entry.tensor), dtype=torch.bool)
        for segment in segments.get(entry.name, []):
            written.as_strided(segment.sizes, segment.strides, segment.offset).fill_(True)
        if not written.as_strided(entry.tensor.shape, entry.tensor.stride(), 0).all():
            found.append(entry.name)
    return found
