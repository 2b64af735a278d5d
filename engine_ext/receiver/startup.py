"""Start-up: make the receiver of a loaded model.

The model's loader is traced, repacks are followed, derived tensors found, the placement certified,
and the plan agreed with the other ranks. An adapter describes what its engine has loaded
(`LoadedModel`); everything after that is the same for every engine.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine_ext.apply import (
    Applier,
    DeltaApplier,
    InitialSyncApplier,
    MaskedWriter,
    Reload,
    ScatterWriter,
    Traced,
    Writer,
)
from engine_ext.derived import Recomputation, add_recomputed, find_derived, prove, refuse_derived
from engine_ext.kernels import warm_up
from engine_ext.model import Known, StorageIndex, is_constant
from engine_ext.placement import (
    Repack,
    Segment,
    TensorSpec,
    certify_placement,
    make_plan,
    summary,
    uncertified,
)
from engine_ext.ranks import Ranks
from engine_ext.receiver.receiver import Receiver
from engine_ext.repacks import compose
from engine_ext.settings import Settings
from engine_ext.tracing import LoadingTrace, LoadWeights, trace_placement
from engine_ext.wire import Limits, exponent_planes, gap_streams, ulp_differences

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What an adapter knows about the model that one rank has loaded.

    Attributes:
        model: in serving state.
        load_weights: its own loader; takes (name, tensor) pairs.
        checkpoint: reads the loaded checkpoint again with each call: (name, tensor) pairs on the
            CPU, in the engine's order. None if the weights are not a checkpoint's.
        reload: the engine's own function that loads other weights into the running model.
        repacks: moves of live tensors after loading, by the live tensor's name.
        refusals: live tensors whose moves cannot be followed, with the reason.
        learned: whether `repacks` and `refusals` include everything that the engine does to
            weights after loading.
        constants: returns whether a tensor that is not a weight is known not to be computed from
            weights.
        refuse_while: see `trace_placement`.
        loading: what the loader did before post-load processing; None if nothing is processed.
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
    loading: LoadingTrace | None = None


def make_receiver(loaded: LoadedModel, settings: Settings) -> Receiver:
    """Trace and certify a model and make its receiver. All ranks must call it.

    No KV cache needs to be allocated yet.

    Raises:
        RuntimeError: nothing can be certified. The engine must not start.
        TracingError: tracing changed the model. The engine must not start.
    """
    if loaded.checkpoint is None:
        initial = _initial_sync_applier(loaded)
        receiver = _receiver(loaded, settings, initial)

        def on_initial_sync(traced: Traced) -> None:
            receiver.adopt(_delta_applier(loaded, settings, traced))

        initial.on_initial_sync = on_initial_sync
        return receiver
    start = time.perf_counter()
    specs = None if loaded.loading is None else loaded.loading.specs
    if specs is None:
        specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in loaded.checkpoint()]
    traced = _trace(loaded, specs)
    traced_s = time.perf_counter() - start
    certify_placement(traced.placement, loaded.checkpoint(), moves_known=loaded.learned)
    certified_s = time.perf_counter() - start - traced_s
    applier = _delta_applier(loaded, settings, traced)
    logger.info("delta updates: traced in %.2f s, certified in %.2f s", traced_s, certified_s)
    return _receiver(loaded, settings, applier)


def _receiver(loaded: LoadedModel, settings: Settings, applier: Applier) -> Receiver:
    warm_up()
    for streams in (gap_streams, exponent_planes, ulp_differences):
        streams.warm_up()
    return Receiver(
        applier,
        loaded.ranks,
        base_version=settings.base_version,
        stage_timeout=settings.stage_timeout,
        read_workers=settings.read_workers,
        undo_bytes=settings.undo_bytes,
        limits=Limits(max_part_bytes=settings.max_body_bytes),
    )


def _trace(loaded: LoadedModel, specs: Sequence[TensorSpec]) -> Traced:
    """Trace the tensors of a checkpoint, follow repacks, and prove what can be recomputed."""
    index = StorageIndex(loaded.model)
    others: list[Segment] = []
    placement = trace_placement(
        loaded.model, loaded.load_weights, specs, index, others, refuse_while=loaded.refuse_while
    )
    if loaded.loading is not None:
        reads = loaded.checkpoint is not None
        loaded.loading.refuse_lost(loaded.model, placement, reads=reads)
    compose(placement, loaded.repacks, loaded.refusals)
    derived = find_derived(loaded.model, placement, loaded.constants)
    recomputed, failed = prove(loaded.model, placement, derived, loaded.recomputations)
    refuse_derived(placement, derived, {path for one in recomputed for path in one.paths}, failed)
    add_recomputed(placement, recomputed)
    return Traced(index, placement, others, recomputed)


def _initial_sync_applier(loaded: LoadedModel) -> InitialSyncApplier:
    """Make the applier of a model without a checkpoint; refuse a model with repacks."""
    moved = sorted({*loaded.repacks, *loaded.refusals})
    if moved:
        raise RuntimeError(
            "delta updates need a checkpoint to start from: the engine repacks "
            f"{', '.join(moved[:3])}{' and others' if len(moved) > 3 else ''} after loading, "
            "which its reload path does not repeat"
        )
    logger.info("delta updates: no checkpoint to certify against; waiting for a full sync")
    return InitialSyncApplier(loaded.model, functools.partial(_trace, loaded), loaded.reload)


def _delta_applier(loaded: LoadedModel, settings: Settings, traced: Traced) -> DeltaApplier:
    """Make the applier of a certified placement. All ranks must call it."""
    plan = make_plan(traced.placement, loaded.ranks)
    _log_summary(traced)
    if not plan.targets:
        raise RuntimeError("delta updates: no tensor of this model can be certified")
    writer: Writer = ScatterWriter()
    if settings.apply == "masked":
        writer = MaskedWriter(
            loaded.model,
            traced.index,
            plan.placement,
            load_weights=loaded.load_weights,
            chunk_bytes=settings.chunk_bytes,
        )
    return DeltaApplier(
        loaded.model,
        traced.index,
        plan,
        writer,
        undo_bytes=settings.undo_bytes,
        threads=torch.get_num_threads(),
        recomputed=traced.recomputed,
    )


def _log_summary(traced: Traced) -> None:
    placement = traced.placement
    counts = ", ".join(f"{count} {status}" for status, count in summary(placement).items())
    logger.info("delta updates: %d tensors: %s", len(placement), counts)
    paths = [path for one in traced.recomputed for path in one.paths]
    if paths:
        logger.info("delta updates: the engine's own function recomputes %s", ", ".join(paths))
    for name, reason in uncertified(placement).items():
        logger.warning("delta updates will refuse %s: %s", name, reason)
