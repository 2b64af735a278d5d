"""Start-up: make the receiver of a loaded model.

The model's loader is traced, repacks are followed, derived tensors found, the placement certified,
and the plan agreed with the other ranks. An adapter describes what its engine has loaded
(`LoadedModel`); everything after that is the same for every engine.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

import torch

from engine_ext.derived import LaterCopies, add_recomputed, find_derived, prove, refuse_derived
from engine_ext.errors import NotUpdatable
from engine_ext.format import gap_streams
from engine_ext.kernels import warm_up
from engine_ext.model import ModelStateGuard, StorageIndex
from engine_ext.placement import (
    Certified,
    Placement,
    Segment,
    Status,
    TensorSpec,
    certify_placement,
    make_plan,
    summary,
    uncertified,
)
from engine_ext.ranks import cores_per_rank, together
from engine_ext.rebuild import (
    ModuleRebuild,
    Rebuild,
    load_again,
    make_twin,
    prove_rebuilds,
    rebuild_by_loading,
    share_in_place,
    share_views,
)
from engine_ext.repacks import compose
from engine_ext.settings import Settings
from engine_ext.sync.applier import Applier
from engine_ext.sync.delta_applier import DeltaApplier, Writer
from engine_ext.sync.initial_sync import CheckpointReader, InitialSyncApplier, Traced
from engine_ext.sync.loaded_model import LoadedModel, Rebuilding
from engine_ext.sync.masked import MaskedWriter
from engine_ext.sync.rebuilds import Rebuilds
from engine_ext.sync.receiver import Receiver
from engine_ext.sync.scatter import ScatterWriter
from engine_ext.tracing import (
    LoadingTrace,
    dropped_aliases,
    place_tied,
    trace_placement,
    young_collections,
)

logger = logging.getLogger(__name__)


@young_collections()
def make_receiver(loaded: LoadedModel, settings: Settings) -> Receiver:
    """Trace and certify a model and make its receiver. All ranks must call it.

    No KV cache needs to be allocated yet.

    Raises:
        RuntimeError: nothing can be certified. The engine must not start.
        TracingError: tracing changed the model. The engine must not start.
    """
    later = LaterCopies(loaded.model, loaded.constants)
    if loaded.checkpoint is None:
        initial = _initial_sync_applier(loaded, later)
        receiver = _receiver(loaded, settings, initial)

        def on_initial_sync(traced: Traced) -> None:
            receiver.adopt(_delta_applier(loaded, settings, traced, later))

        initial.on_initial_sync = on_initial_sync
        return receiver
    start = time.perf_counter()
    specs = None if loaded.loading is None else loaded.loading.specs
    if specs is None:
        specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in loaded.checkpoint()]
    traced = _trace(loaded, later, specs, loaded.checkpoint)
    traced.dropped.update(_dropped_aliases(loaded, traced))
    traced_s = time.perf_counter() - start
    _certify(loaded, traced, loaded.checkpoint)
    certified_s = time.perf_counter() - start - traced_s
    applier = _delta_applier(loaded, settings, traced, later)
    logger.info(
        "delta updates: traced in %.2f s, certified in %.2f s; %d modules are rebuilt",
        *(traced_s, certified_s, len(traced.rebuilds)),
    )
    return _receiver(loaded, settings, applier)


def _receiver(loaded: LoadedModel, settings: Settings, applier: Applier) -> Receiver:
    warm_up()
    gap_streams.warm_up()
    return Receiver(
        applier,
        loaded.ranks,
        base_version=settings.base_version,
        stage_timeout=settings.stage_timeout,
        read_workers=settings.read_workers,
        undo_bytes=settings.undo_bytes,
        scrub_interval=settings.scrub_interval,
        locate=loaded.locate,
    )


def _certify(loaded: LoadedModel, traced: Traced, checkpoint: CheckpointReader) -> None:
    """Mark what holds a loaded checkpoint's bytes, and what is rebuilt from them.

    All ranks must call it.
    """

    threads = cores_per_rank(loaded.ranks)

    def certify() -> Certified:
        moves_known = loaded.learned
        return certify_placement(
            traced.placement, checkpoint(), moves_known=moves_known, threads=threads
        )

    traced.certified.update(together(loaded.ranks, certify))
    for name, other in traced.tied.items():
        one, placed = traced.placement[name], traced.placement[other]
        if one.status is Status.UNCERTIFIED is not placed.status:
            one.reason = (
                f"the engine ties it to {other} and uses that in its place, but the checkpoint's "
                "values of the two differ; for a head of its own set tie_word_embeddings to false "
                "in the checkpoint's config"
            )
    # Other pipeline stages may have some where this one has none.
    anywhere = any(loaded.ranks.all_gather(bool(traced.rebuilds)))
    if loaded.rebuilding is not None and anywhere:
        guard = ModelStateGuard(loaded.model, bits=bool(traced.rebuilds))
        proven = prove_rebuilds(
            loaded.model, traced.rebuilds, traced.placement, loaded.rebuilding.probe, loaded.ranks
        )
        traced.rebuilds[:] = proven
        guard.restore()
        guard.verify()


def _trace(
    loaded: LoadedModel,
    later: LaterCopies,
    specs: Sequence[TensorSpec],
    checkpoint: CheckpointReader,
) -> Traced:
    """Trace the tensors of a checkpoint, follow repacks, and prove what can be recomputed."""
    model, load_weights, again = loaded.model, loaded.load_weights, loaded.rebuilding
    rebuilds: list[Rebuild] = []
    index = live = StorageIndex(model)
    if again is not None and again.states.states:
        model, index, rebuilds = _twin(loaded.model, live, again)
        load_weights = again.loader(model)
    others: list[Segment] = []
    placement = trace_placement(
        model, load_weights, specs, index, others, refuse_while=loaded.refuse_while
    )
    untraceable = uncertified(placement).keys()
    refusals = dict(loaded.refusals)
    loading = LoadingTrace() if loaded.loading is None else loaded.loading
    tied = place_tied(placement, index, loading.tied(live), loading.was_dropped)
    if loaded.loading is not None:
        loading.refuse_lost(placement, reads=loaded.checkpoint is not None)
        refusals |= loading.sharing_changed(loaded.model, model, tied)
    compose(placement, loaded.repacks, refusals)
    outputs = {one.path: frozenset(one.names) for one in rebuilds}
    if again is not None:
        by_loading = rebuild_by_loading(
            *(model, again.loader, again.context, placement, index, checkpoint),
            names=untraceable,
            reserve=again.states.reserve,
            shadowed=outputs.keys(),
            processed={*loaded.repacks, *refusals},
        )
        outputs |= {
            o: frozenset([one.segment().live.name]) for one in by_loading for o in one.computed
        }
        rebuilds += by_loading
    derived = find_derived(loaded.model, placement, later.known, rebuilt=outputs)
    later.remember(derived, outputs)
    recomputed, failed = prove(loaded.model, placement, derived, loaded.recomputations)
    if model is not loaded.model:
        # What the loader has computed is the old in a rebuild, too.
        before = find_derived(model, placement, loaded.constants)
        found = (d for d in before if d.path not in refusals)
        derived += [d for d in found if any(r.contains(d.path) for r in rebuilds)]
    refuse_derived(placement, derived, {path for one in recomputed for path in one.paths}, failed)
    add_recomputed(placement, recomputed)
    return Traced(
        *(model, load_weights, index, placement, others, live, recomputed, rebuilds), tied=tied
    )


def _twin(
    model: torch.nn.Module, live: StorageIndex, rebuilding: Rebuilding
) -> tuple[torch.nn.Module, StorageIndex, list[Rebuild]]:
    """Return the model as its loader knows it, its index, and what is computed from it."""
    paths = {id(module): path for path, module in model.named_modules()}
    kept = rebuilding.states
    states = [one for one in kept.states if id(one.module) in paths]
    rebuilds = [
        ModuleRebuild(paths[id(one.module)], one, rebuilding.context, rebuilding.probe)
        for one in states
        if not one.moves
    ]
    share_views(model, states)
    for one in rebuilds:
        kept.release(share_in_place(one, live))
    twin = make_twin(model, states)
    index = StorageIndex(twin)
    for one in rebuilds:
        one.bind(index)
    return twin, index, [*rebuilds]


def _initial_sync_applier(loaded: LoadedModel, later: LaterCopies) -> InitialSyncApplier:
    """Make the applier of a model without a checkpoint.

    Raises:
        RuntimeError: the engine processes weights in a way that cannot be repeated.
    """
    again = loaded.rebuilding
    refused = dict(loaded.refusals)
    if again is None or not again.states.moved_too:
        refused |= dict.fromkeys(loaded.repacks, "the engine's reload path does not repack it")
    if refused:
        name = min(refused)
        raise RuntimeError(
            f"delta updates need a checkpoint to start from: {name}: {refused[name]}"
            f"{f', and {len(refused) - 1} others' if len(refused) > 1 else ''}"
        )

    def load(traced: Traced, checkpoint: CheckpointReader) -> None:
        if again is None or not again.states.states:
            loaded.reload(checkpoint())
            return
        written = {s.live.name for placed in traced.placement.values() for s in placed.segments}
        rebuilds = [one for one in traced.rebuilds if not written.isdisjoint(one.names)]
        loading = again.loader, again.context, checkpoint()
        load_again(loaded.model, again.states.states, rebuilds, *loading)
        for recompute in traced.recomputed:
            recompute()

    logger.warning(
        "delta updates: the load format %s reads no checkpoint to certify against; the first sync "
        "must be full, and others are refused until then",
        loaded.load_format,
    )
    trace = functools.partial(_trace, loaded, later)
    certify = functools.partial(_certify, loaded)
    return InitialSyncApplier(trace, load, certify, loaded.constants, loaded.ranks)


def _dropped_aliases(loaded: LoadedModel, traced: Traced) -> dict[str, TensorSpec]:
    """Return the other names of tied tensors that the loader drops before processing."""
    if loaded.loading is not None:
        return loaded.loading.dropped
    own = {name: placed for name, placed in traced.placement.items() if name not in traced.tied}
    return dropped_aliases(traced.model, traced.load_weights, own, traced.index)


def _delta_applier(
    loaded: LoadedModel, settings: Settings, traced: Traced, later: LaterCopies
) -> DeltaApplier:
    """Make the applier of a certified placement. All ranks must call it."""
    plan = make_plan(traced.placement, loaded.ranks, traced.dropped, traced.tied)
    _log_summary(traced)
    if not any(loaded.ranks.all_gather(bool(plan.targets))):
        raise RuntimeError("delta updates: no tensor of this model can be certified")
    threads = cores_per_rank(loaded.ranks)

    def trace_again(index: StorageIndex, moved: Sequence[str]) -> Placement:
        devices = {
            index.by_name[name].tensor.device.type for name in moved if name in index.by_name
        }
        if loaded.captures and devices - {"cpu"}:
            raise NotUpdatable(
                f"something moved {list(moved)[:8]} after start-up, and graphs that the engine has "
                "captured read the memory before; restart the engine",
                tensors=list(moved),
            )
        specs = [placed.spec for placed in traced.placement.values()]
        placement = trace_placement(
            *(traced.model, traced.load_weights, specs, index), refuse_while=loaded.refuse_while
        )
        place_tied(placement, index, traced.tied, lambda name, other: False)
        compose(placement, loaded.repacks)
        return placement

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
        threads=threads,
        recomputed=traced.recomputed,
        rebuilds=rebuilds,
        certified=traced.certified,
        ranks=loaded.ranks,
        checks_first=any(loaded.ranks.all_gather(bool(traced.recomputed))),
        trace_again=trace_again,
        later=later,
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
