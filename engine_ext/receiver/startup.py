"""From a loaded model to its receiver: trace, follow repacks, certify, plan.

An adapter says what the engine has loaded and how its loader is called; everything after that is
the same for every engine.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine_ext.apply.applier import Applier
from engine_ext.apply.initial_sync import InitialSyncApplier, Reload, Traced
from engine_ext.apply.masked_applier import MaskedApplier
from engine_ext.apply.scatter import ScatterApplier
from engine_ext.derived.find import find_derived, refuse_derived
from engine_ext.derived.proof import prove
from engine_ext.derived.recompute import Recomputation, add_recomputed
from engine_ext.kernels.gather_scatter import warm_up
from engine_ext.model.constants import Known, is_constant
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.certify import certify, summary
from engine_ext.placement.plan import make_plan
from engine_ext.placement.segments import Repack, Segment, Status, TensorSpec
from engine_ext.ranks import Ranks
from engine_ext.receiver.receiver import Receiver
from engine_ext.repacks.infer import compose
from engine_ext.settings import Settings
from engine_ext.tracing.trace import LoadWeights, trace_placement
from engine_ext.wire import Limits, exponent_planes, gap_streams, ulp_differences

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What an adapter knows of the model that one rank has loaded.

    Attributes:
        model: in serving state.
        load_weights: its own loader; takes (name, tensor) pairs.
        checkpoint: reads the checkpoint that it was loaded from, anew with each call: (name,
            tensor) pairs on the CPU, in the engine's order. None: its weights are no checkpoint's.
        reload: the engine's own way to load other weights into the running model.
        ranks: this rank among the engine's.
        repacks: moves of live tensors after loading, by the live tensor's name.
        refusals: live tensors whose moves cannot be followed, with the reason.
        learned: whether these two tell of everything that the engine does to weights after loading.
        constants: which tensors beside the weights are known not to be made of them.
        recomputations: the engine's functions for what it keeps beside the weights.
        refuse_while: as of `trace_placement`.
    """

    model: torch.nn.Module
    load_weights: LoadWeights
    checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None
    reload: Reload
    ranks: Ranks
    repacks: Mapping[str, Repack] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    learned: bool = True
    constants: Known = is_constant
    recomputations: Sequence[Recomputation] = ()
    refuse_while: Callable[[torch.nn.Module], str | None] | None = None


def make_receiver(loaded: LoadedModel, chosen: Settings) -> Receiver:
    """Trace and certify a model and make its receiver. All ranks must call it.

    Args:
        loaded: the model; no KV cache needs to be allocated yet.
        chosen: the user's flags.

    Raises:
        RuntimeError: nothing can be certified. The engine must not start.
        TracingError: tracing changed the model. The engine must not start.
    """
    if loaded.checkpoint is None:
        seed = _seed_applier(loaded)
        receiver = _receiver(loaded, chosen, seed)

        def seeded(traced: Traced) -> None:
            receiver.adopt(_applier(loaded, chosen, traced))

        seed.seeded = seeded
        return receiver
    start = time.perf_counter()
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in loaded.checkpoint()]
    traced = _trace(loaded, specs)
    traced_s = time.perf_counter() - start
    certify(
        traced.placement,
        loaded.checkpoint(),
        chosen.certify_sample,
        moves_known=loaded.learned,
    )
    certified_s = time.perf_counter() - start - traced_s
    applier = _applier(loaded, chosen, traced)
    logger.info("traced in %.2f s, certified in %.2f s", traced_s, certified_s)
    return _receiver(loaded, chosen, applier)


def _receiver(loaded: LoadedModel, chosen: Settings, applier: Applier) -> Receiver:
    warm_up()
    for streams in (gap_streams, exponent_planes, ulp_differences):
        streams.warm_up()
    return Receiver(
        applier,
        loaded.ranks,
        base_version=chosen.base_version,
        stage_timeout=chosen.stage_timeout,
        read_workers=chosen.read_workers,
        undo_bytes=chosen.undo_bytes,
        limits=Limits(max_part_bytes=chosen.max_body_bytes),
    )


def _trace(loaded: LoadedModel, specs: Sequence[TensorSpec]) -> Traced:
    """Where the tensors of a checkpoint lie, repacks followed, nothing certified yet, and which
    derived tensors follow them."""
    index = StorageIndex(loaded.model)
    others: list[Segment] = []
    placement = trace_placement(
        loaded.model,
        loaded.load_weights,
        specs,
        index,
        others,
        refuse_while=loaded.refuse_while,
    )
    compose(placement, loaded.repacks, loaded.refusals)
    derived = find_derived(loaded.model, placement, loaded.constants)
    recomputed, failed = prove(loaded.model, placement, derived, loaded.recomputations)
    refuse_derived(placement, derived, {path for one in recomputed for path in one.paths}, failed)
    add_recomputed(placement, recomputed)
    return Traced(index, placement, others, recomputed)


def _seed_applier(loaded: LoadedModel) -> InitialSyncApplier:
    """What takes the first sync of a model without a checkpoint.

    Raises:
        RuntimeError: the engine moves weights after loading them, which its reload path is not
            known to do again.
    """
    moved = sorted({*loaded.repacks, *loaded.refusals})
    if moved:
        raise RuntimeError(
            "delta updates need a checkpoint to start from: the engine repacks "
            f"{', '.join(moved[:3])}{' and others' if len(moved) > 3 else ''} after loading, "
            "which its reload path does not do again"
        )
    logger.info("no checkpoint to certify against; waiting for a full sync")
    return InitialSyncApplier(loaded.model, functools.partial(_trace, loaded), loaded.reload)


def _applier(loaded: LoadedModel, chosen: Settings, traced: Traced) -> ScatterApplier:
    """The applier that the user has chosen, for a certified placement. All ranks must call it.

    Raises:
        RuntimeError: nothing in it is certified.
    """
    plan = make_plan(traced.placement, loaded.ranks)
    _log(traced)
    if not plan.targets:
        raise RuntimeError("delta updates: no tensor of this model can be certified")
    threads = torch.get_num_threads()
    if chosen.apply != "masked":
        return ScatterApplier(
            loaded.model,
            traced.index,
            plan,
            undo_bytes=chosen.undo_bytes,
            threads=threads,
            recomputed=traced.recomputed,
        )
    return MaskedApplier(
        loaded.model,
        traced.index,
        plan,
        undo_bytes=chosen.undo_bytes,
        threads=threads,
        recomputed=traced.recomputed,
        load_weights=loaded.load_weights,
        chunk_bytes=chosen.chunk_bytes,
    )


def _log(traced: Traced) -> None:
    placement = traced.placement
    counts = ", ".join(f"{count} {status}" for status, count in summary(placement).items())
    logger.info("delta updates: of %d tensors %s", len(placement), counts)
    paths = [path for one in traced.recomputed for path in one.paths]
    if paths:
        logger.info("delta updates: the engine's own function recomputes %s", ", ".join(paths))
    for name, placed in placement.items():
        if placed.status is Status.UNCERTIFIED:
            logger.warning("delta updates will refuse %s: %s", name, placed.reason)
