"""The first sync of an engine that was started without a checkpoint's weights.

Without known bytes in memory nothing can be certified, so such an engine accepts only a ``full``
sync. It is loaded like a checkpoint: by the engine's own reload path, or where the engine quantises
or packs weights, into the unprocessed model, and the processing is repeated. The result is
certified against the sync's own bytes, and from then on the engine accepts deltas like any other.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.format import DecodedPart, Digest, ParamDelta, tensor_digest
from engine_ext.model import Known, extent, is_filled, is_processed
from engine_ext.placement import (
    Segment,
    TensorSpec,
    boxes,
    covered,
    resolve,
    uncertified,
)
from engine_ext.ranks import run_on_all_or_none
from engine_ext.startup import (
    LaterCopies,
    LoadedModel,
    Traced,
    certify_model,
    load_checkpoint,
    trace_model,
)
from engine_ext.sync.applier import Applier, Scan
from engine_ext.sync.masked import densify
from engine_ext.sync.staged import StagedParam, StagedPart, UndoLog
from engine_ext.sync.tied import tied_differ
from engine_ext.sync.unwritten import Unwritten, unloaded


class InitialSyncApplier(Applier):
    """Applies the first ``full`` sync; see `engine_ext.sync.applier.Applier`.

    Args:
        loaded: without a checkpoint.
        later: made of the model before anything is generated.

    Attributes:
        on_initial_sync: called on every rank after the sync, with the certified placement; to be
            set before it.
    """

    name = "reload"
    plan = None

    digest = Digest.ZERO  # nothing is covered yet
    digests: Mapping[str, Digest] = {}

    def __init__(self, loaded: LoadedModel, later: LaterCopies) -> None:
        self.copies: dict[str, Digest] = {}
        self.on_initial_sync: Callable[[Traced], None]
        self._loaded, self._later = loaded, later
        self._traced: Traced

    def stage(self, part: DecodedPart) -> StagedPart:
        """Stage a part; raise BaseMismatch if it is not of a ``full`` sync."""
        if not part.manifest.full:
            raise BaseMismatch(
                "the engine was started without a checkpoint's weights; send a full sync first"
            )
        return StagedPart(
            part.manifest, [StagedParam.of(delta, keep=True) for delta in part.deltas]
        )

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        """Check that the engine's loader would write every live weight of this rank from the sync.

        Raises:
            NotUpdatable: names the tensors that are refused, tied ones that differ, or the live
                weights that are not covered. Nothing was written.
        """
        deltas = list(_deltas(staged))
        counts = Counter(delta.name for delta in deltas)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            raise NotUpdatable(f"two parts send the same tensors: {repeated}", tensors=repeated)
        self._traced = self._trace_sync(staged)
        refused = uncertified(self._traced.placement)
        if refused:
            raise NotUpdatable(
                f"this engine cannot load these exactly: {refused}",
                tensors=sorted(refused),
                reasons=refused,
            )
        sent = {delta.name: delta for delta in deltas}
        for name, other in self._traced.tied.items():
            one, tied = sent[name].values, sent[other].values
            if one.tobytes() != tied.tobytes():
                raise tied_differ(name, other)
        left_out = _left_out(self._traced, self._loaded.constants)
        if left_out:
            raise NotUpdatable(
                f"a full sync must cover every live weight; (parts of) {left_out} are missing",
                missing=left_out,
            )

    def scan(self) -> Scan:
        """Return nothing: no weight is known."""
        return Scan({}, [], {})

    def check_rollback(self, logs: Sequence[UndoLog]) -> None:
        """Do nothing: there is no sync to undo."""

    def check_base(self, staged: Sequence[StagedPart]) -> None:
        """Accept any base: no old values were read."""

    def rank_summary(self, staged: Sequence[StagedPart]) -> dict[str, Any]:
        """Return what this rank would hold and what the digest would cover, as JSON."""
        placement = self._traced.placement
        digested = {name: covered(placed) for name, placed in placement.items() if placed.segments}
        used = [name for name, placed in placement.items() if placed.used]
        return {"boxes": boxes(placement), "covered": digested, "used": used}

    def agree(self, staged: Sequence[StagedPart], summaries: Sequence[dict[str, Any]]) -> None:
        """Check the sync by the summaries of all ranks.

        Raises:
            NotUpdatable: no rank would hold a tensor, or the ranks together not all of it.
            BaseMismatch: a declared digest is not that of the sync's bytes, or is the digest of a
                change from unknown weights.
        """
        placement = self._traced.placement
        resolve(placement, [summary["boxes"] for summary in summaries])
        absent = placement.keys() - {n for one in summaries for n in one["boxes"]}
        # A loader that reads a tensor might keep something of it that was not found.
        used = absent.intersection(n for one in summaries for n in one["used"])
        lost, ignored = sorted({*uncertified(placement), *used}), sorted(absent - used)
        if lost:
            raise NotUpdatable(f"the engine would not hold all of these: {lost}", tensors=lost)
        declared = {p.manifest.digest_after for p in staged if p.manifest.digest_after is not None}
        if ignored and declared:  # a sender's digest must not cover what no engine holds
            raise NotUpdatable(
                f"the engine ignores these: {ignored}; leave them out",
                tensors=ignored,
                ignored=ignored,
            )
        for part in staged:
            skipped = {param.name: param.nnz for param in part.params if param.name in ignored}
            part.skipped.update(skipped)
        if any(part.manifest.digest_part is not None for part in staged):
            raise BaseMismatch("the engine's weights are unknown: leave digest_part out")
        if declared:
            after = Digest.ZERO
            for delta in _deltas(staged):
                if all(summary["covered"].get(delta.name, True) for summary in summaries):
                    after += tensor_digest(delta.name, delta.values)
            if declared != {after.hex()}:
                raise BaseMismatch(
                    f"the digest of this sync's bytes is {after.hex()}, but its parts declare "
                    f"{sorted(declared)}",
                    actual=after.hex(),
                )

    def write(self, staged: Sequence[StagedPart], given_up: Sequence[UndoLog] = ()) -> None:
        """Load the engine's weights from the sync, and certify the result.

        Raises:
            Exception: the engine's own, or RuntimeError if some tensor's bytes are not the sync's
                afterwards. The weights are uncertain then.
        """
        sync = functools.partial(_tensors, staged)

        def load() -> Traced:
            load_checkpoint(self._loaded, self._traced, sync)
            # Traced again, because that might have moved weights and replaced derived tensors.
            return self._trace_sync(staged)

        traced = self._traced = run_on_all_or_none(self._loaded.ranks, load)
        certify_model(self._loaded, traced, sync)
        wrong = uncertified(traced.placement)
        if wrong:
            raise RuntimeError(f"after they were loaded these are not exact: {wrong}")

    def undo(self, staged: Sequence[StagedPart]) -> None:
        """Raise RuntimeError: there is nothing to restore."""
        raise RuntimeError("the weights before the first full sync were not kept")

    def finish(self, staged: Sequence[StagedPart]) -> None:
        """Pass the certified placement on. All ranks must call it."""
        self.on_initial_sync(self._traced)

    def roll_back(self, log: UndoLog) -> None:
        """Raise RuntimeError, as `undo` does."""
        self.undo([])

    def unwritten(self) -> Unwritten:
        """Copy all but the weights."""
        again = self._loaded.reprocessing
        before = () if again is None else [one.before for one in again.states.states]
        return Unwritten(unloaded(self._loaded.model, before))

    def describe(self) -> dict[str, Any]:
        """Return the apply mode and state of this rank, as JSON."""
        known = {"certification": {}, "uncertified": {}, "digest": self.digest.hex()}
        return {"apply": self.name, "awaits": "full sync", **known}

    def _trace_sync(self, staged: Sequence[StagedPart]) -> Traced:
        specs = [_spec(delta) for delta in _deltas(staged)]
        return trace_model(self._loaded, self._later, specs, functools.partial(_tensors, staged))


def _deltas(staged: Sequence[StagedPart]) -> Iterator[ParamDelta]:
    for part in staged:
        for param in part.params:
            assert param.delta is not None  # kept by `stage`
            yield param.delta


def _spec(delta: ParamDelta) -> TensorSpec:
    return TensorSpec(delta.name, delta.shape, TORCH_DTYPE[delta.dtype])


def _tensors(staged: Sequence[StagedPart]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the sync as a checkpoint; each tensor is a copy that the loader can keep."""
    for delta in _deltas(staged):
        yield delta.name, densify(delta)


def _left_out(traced: Traced, constant: Known) -> list[str]:
    """Return the tensors of the model's state with elements that nothing gives their values.

    They are neither written, recomputed nor constant; or the constructor's values, all of them the
    same number, are there for a checkpoint to replace: a norm's ones, unlike a scale that the
    processing of a module reads, which a checkpoint can omit. A buffer of different numbers is
    computed.
    """
    segments: dict[str, list[Segment]] = {}
    for segment in [*(s for p in traced.placement.values() for s in p.segments), *traced.others]:
        segments.setdefault(segment.live.name, []).append(segment)
    state = dict(_state(traced.dry_run.model))
    computed = {path for one in traced.recomputed for path in one.paths}
    computed |= {name for one in traced.rebuilds for name in one.computed}
    missing = []
    for entry in traced.dry_run.index.entries:
        if entry.name not in state or entry.name in computed:
            continue
        around = {other.name for other in traced.dry_run.index.holding(entry.tensor)} - {entry.name}
        if entry.name not in segments and around & segments.keys():
            continue  # a view of another live tensor, which is checked itself
        written = torch.zeros(extent(entry.tensor), dtype=torch.bool)
        for segment in segments.get(entry.name, []):
            written.as_strided(segment.sizes, segment.strides, segment.offset).fill_(True)
        if written.as_strided(entry.tensor.shape, entry.tensor.stride(), 0).all():
            continue
        waits = not state[entry.name] and is_filled(entry.tensor)
        if waits or not constant(entry.name, entry.tensor):
            missing.append(entry.name)
    return missing


def _state(model: torch.nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield the names of a model's parameters and of the floating-point buffers of its state.

    Each comes with whether its module takes part in post-load processing.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        processed = is_processed(module)
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            yield dot + name, processed
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield dot + name, processed
