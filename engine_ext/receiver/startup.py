"""Start-up: make the receiver of a loaded model.

The model's loader is traced, repacks are followed, derived tensors found, the placement certified,
and the plan agreed with the other ranks. An adapter describes what its engine has loaded
(`LoadedModel`); everything after that is the same for every engine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_ext.apply import (
    Applier,
    DeltaApplier,
    InitialSyncApplier,
    MaskedWriter,
    Rebuilds,
    Reload,
    ScatterWriter,
    Traced,
    Writer,
)
from engine_ext.derived import Recomputation, add_recomputed, find_derived, prove, refuse_derived
from engine_ext.kernels import warm_up
from engine_ext.model import Known, ModelStateGuard, StorageIndex, is_constant
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
from engine_ext.rebuild import (
    LoadingStates,
    ModuleRebuild,
    Rebuild,
    make_twin,
    prove_rebuilds,
    rebuild_by_loading,
    share_views,
)
from engine_ext.receiver.receiver import Receiver
from engine_ext.repacks import compose
from engine_ext.settings import Settings
from engine_ext.tracing import LoadingTrace, LoadWeights, trace_placement
from engine_ext.wire import Limits, exponent_planes, gap_streams, ulp_differences

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilding:
    """How the engine's post-load processing is repeated on one rank.

    Attributes:
        states: the modules that need it, as they were before.
        loader: returns the loader of a twin of the model (see `engine_ext.rebuild.make_twin`).
        context: what the engine's processing runs in.
        probe: see `engine_ext.rebuild.prove`.
    """

    states: LoadingStates
    loader: Callable[[torch.nn.Module], LoadWeights]
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    probe: Callable[[torch.nn.Module], torch.Tensor | None]


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
        rebuilding: None if the engine's processing cannot be repeated.
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
    rebuilding: Rebuilding | None = None


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
    if loaded.rebuilding is not None:
        guard = ModelStateGuard(loaded.model, bits=True)
        rebuilds, probe = traced.rebuilds, loaded.rebuilding.probe
        traced.rebuilds[:] = prove_rebuilds(rebuilds, traced.placement, probe)
        guard.restore()
        guard.verify()
    rebuilt_s = time.perf_counter() - start - traced_s - certified_s
    applier = _delta_applier(loaded, settings, traced)
    logger.info(
        "delta updates: traced in %.2f s, certified in %.2f s, %d modules rebuilt in %.2f s",
        *(traced_s, certified_s, len(traced.rebuilds), rebuilt_s),
    )
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
    model, load_weights, again = loaded.model, loaded.load_weights, loaded.rebuilding
    rebuilds: list[Rebuild] = []
    if again is not None and again.states.states:
        model, rebuilds = _twin(loaded.model, again)
        load_weights = again.loader(model)
    index = StorageIndex(model)
    others: list[Segment] = []
    placement = trace_placement(
        model, load_weights, specs, index, others, refuse_while=loaded.refuse_while
    )
    untraceable = uncertified(placement).keys()
    refusals = dict(loaded.refusals)
    if loaded.loading is not None:
        loaded.loading.refuse_lost(placement, reads=loaded.checkpoint is not None)
        refusals |= loaded.loading.sharing_changed(loaded.model, model)
    compose(placement, loaded.repacks, refusals)
    outputs = {
        one.path: frozenset(f"{one.path}.{name}".lstrip(".") for name, _ in one.shadow())
        for one in rebuilds
    }
    if again is not None and loaded.checkpoint is not None:
        by_loading = rebuild_by_loading(
            *(model, again.loader, again.context, placement, index, loaded.checkpoint),
            names=untraceable,
            reserve=again.states.reserve,
            shadowed=outputs.keys(),
            processed={*loaded.repacks, *refusals},
        )
        outputs |= {
            o: frozenset([one.segment().live.name]) for one in by_loading for o in one.outputs
        }
        rebuilds += by_loading
    derived = find_derived(loaded.model, placement, loaded.constants, rebuilt=outputs)
    recomputed, failed = prove(loaded.model, placement, derived, loaded.recomputations)
    if model is not loaded.model:
        # What the loader has computed is the old in a rebuild, too.
        before = find_derived(model, placement, loaded.constants)
        found = (d for d in before if d.path not in refusals)
        derived += [d for d in found if any(r.holds(d.path) for r in rebuilds)]
    refuse_derived(placement, derived, {path for one in recomputed for path in one.paths}, failed)
    add_recomputed(placement, recomputed)
    live = index if model is loaded.model else StorageIndex(loaded.model)
    return Traced(model, load_weights, index, placement, others, live, recomputed, rebuilds)


def _twin(model: torch.nn.Module, rebuilding: Rebuilding) -> tuple[torch.nn.Module, list[Rebuild]]:
    """Return the model as its loader knows it, and the modules that are computed from it."""
    paths = {id(module): path for path, module in model.named_modules()}
    states = [one for one in rebuilding.states.states if id(one.module) in paths]
    rebuilds: list[Rebuild] = [
        ModuleRebuild(paths[id(one.module)], one, rebuilding.context)
        for one in states
        if not one.moves
    ]
    share_views(model, states)
    return make_twin(model, states), rebuilds


def _initial_sync_applier(loaded: LoadedModel) -> InitialSyncApplier:
    """Make the applier of a model without a checkpoint; refuse a model with repacks."""
    kept = [] if loaded.rebuilding is None else loaded.rebuilding.states.states
    moved = sorted({*loaded.repacks, *loaded.refusals, *(type(s.module).__name__ for s in kept)})
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
    rebuilds = None
    if loaded.rebuilding is not None:
        own, placement = traced.rebuilds, traced.placement
        rebuilds = Rebuilds(loaded.model, traced.live, own, placement, loaded.ranks)
    writer: Writer = ScatterWriter()
    if settings.apply == "masked":
        writer = MaskedWriter(
            traced.model,
            traced.index,
            plan.placement,
            load_weights=traced.load_weights,
            chunk_bytes=settings.chunk_bytes,
        )
    return DeltaApplier(
        traced.model,
        traced.index,
        plan,
        writer,
        undo_bytes=settings.undo_bytes,
        threads=torch.get_num_threads(),
        recomputed=traced.recomputed,
        rebuilds=rebuilds,
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
