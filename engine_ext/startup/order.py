"""Start-up in order, from a model that the engine has loaded to a plan.

The adapter has watched the load (`LoadingTrace`, `RepackLearner`, `UnprocessedModules`) and
describes what it has seen as a `LoadedModel`. Then, the same for every engine:

1. `trace_model`: run the loader dry, follow repacks, find what the engine computes from weights,
   and prove its own functions for that;
2. `certify_model`: compare live memory with the checkpoint, and prove the rebuilds;
3. `agree_on_plan`: let all ranks agree on who holds and counts what.

If any of it shows that the model was changed, the engine must not start. The engine refuses by name
what cannot be proven, and starts without it. An engine without a checkpoint's weights does the
same in its first full sync (`check_repeatable`, `load_checkpoint`). `trace_again` follows tensors
that something has moved since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from engine_ext.errors import NotUpdatable
from engine_ext.model import ModelStateGuard, StorageIndex, is_default
from engine_ext.placement import (
    Certified,
    Placement,
    Plan,
    Segment,
    Status,
    TensorSpec,
    certify_placement,
    make_plan,
    summary,
    uncertified,
)
from engine_ext.ranks import cores_per_rank, run_on_all_or_none
from engine_ext.startup.derived import (
    LaterCopies,
    add_recomputed,
    find_derived,
    prove,
    refuse_derived,
)
from engine_ext.startup.loaded_model import CheckpointReader, LoadedModel, Reprocessing, Traced
from engine_ext.startup.permuted import compose, loaded_tensors
from engine_ext.startup.recomputed import (
    ModuleRebuild,
    Rebuild,
    load_and_process,
    make_unprocessed_model,
    prove_rebuilds,
    rebuild_by_loading,
    share_in_place,
    share_views,
)
from engine_ext.startup.trace import (
    LoaderDryRun,
    LoadingTrace,
    LoadWeights,
    dropped_aliases,
    place_tied,
)

logger = logging.getLogger(__name__)


def plan_model(loaded: LoadedModel, later: LaterCopies) -> tuple[Traced, Plan]:
    """Trace and certify a model that was loaded from a checkpoint. All ranks must call it.

    Args:
        later: made of the model before this.

    Raises:
        RuntimeError: nothing can be certified. The engine must not start.
        TracingError: tracing changed the model. The engine must not start.
    """
    assert loaded.checkpoint is not None
    start = time.perf_counter()
    specs = None if loaded.loading is None else loaded.loading.specs
    if specs is None:
        specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in loaded.checkpoint()]
    traced = trace_model(loaded, later, specs, loaded.checkpoint)
    traced.dropped.update(_dropped_aliases(loaded, traced))
    traced_s = time.perf_counter() - start
    certify_model(loaded, traced, loaded.checkpoint)
    certified_s = time.perf_counter() - start - traced_s
    logger.info(
        "delta updates: traced in %.2f s, certified in %.2f s; %d modules are rebuilt",
        *(traced_s, certified_s, len(traced.rebuilds)),
    )
    return traced, agree_on_plan(loaded, traced)


# 1. Trace ---------------------------------------------------------------------------------------


def trace_model(
    loaded: LoadedModel,
    later: LaterCopies,
    specs: Sequence[TensorSpec],
    checkpoint: CheckpointReader,
) -> Traced:
    """Trace the tensors of a checkpoint, follow repacks, and prove what can be recomputed.

    Args:
        later: learns what was found here, so that it does not count as new when the engine has
            generated.
        specs: every tensor of the checkpoint, in the order in which the engine loads them.

    Raises:
        TracingError: tracing changed the model, which must not be served then.
    """
    again, live = loaded.reprocessing, StorageIndex(loaded.model)
    model, load_weights, index = loaded.model, loaded.load_weights, live
    rebuilds: list[Rebuild] = []
    if again is not None and again.states.states:
        model, index, rebuilds = _unprocessed(loaded.model, live, again)
        load_weights = again.loader(model)
    dry_run = LoaderDryRun(model, load_weights, index, loaded.refuse_while)
    others: list[Segment] = []
    placement = dry_run.trace(specs, others)
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
        outputs |= again.states.refused_names(loaded.model)
        by_loading = rebuild_by_loading(
            *(dry_run, again.loader, again.context, placement, checkpoint),
            names=untraceable,
            reserve=again.states.reserve_anew(),
            rebuilt=outputs.keys(),
            processed={*loaded.repacks, *refusals},
        )
        outputs |= {
            o: frozenset([one.segment().live.name]) for one in by_loading for o in one.computed
        }
        rebuilds += by_loading
    compared = _compared(outputs, rebuilds, placement)
    derived = find_derived(loaded.model, placement, later.known, rebuilt=compared)
    later.remember(derived, outputs, compared)
    recomputed, failed = prove(loaded.model, placement, derived, loaded.recomputations)
    if model is not loaded.model:
        # In a rebuild, too, the values that the loader has computed are the old ones.
        before = find_derived(model, placement, loaded.constants)
        found = (d for d in before if d.path not in refusals)
        derived += [d for d in found if any(r.contains(d.path) for r in rebuilds)]
    refuse_derived(placement, derived, {path for one in recomputed for path in one.paths}, failed)
    add_recomputed(placement, recomputed)
    return Traced(dry_run, placement, others, live, recomputed, rebuilds, tied=tied)


def _compared(
    outputs: Mapping[str, frozenset[str]], rebuilds: Iterable[Rebuild], placement: Placement
) -> dict[str, frozenset[str]]:
    """Return the modules and tensors in which the search for computed tensors finds nothing new.

    They are all that is rebuilt, but for modules whose unprocessed weights are all defaults, as
    those of an attention layer are if the checkpoint has no scales of its KV cache. No sync changes
    what processing makes of these, its parameters and buffers. All else on them is searched.
    """
    written = {s.live.name for placed in placement.values() for s in placed.segments}
    found = dict(outputs)
    for one in rebuilds:
        if not isinstance(one, ModuleRebuild) or not written.isdisjoint(one.names):
            continue
        if all(is_default(tensor) for _, tensor in one.weights()):
            del found[one.path]
            tensors = (name for name, _ in loaded_tensors(one.module))
            found |= {f"{one.path}.{name}".lstrip("."): frozenset() for name in tensors}
    return found


def _unprocessed(
    model: torch.nn.Module, live: StorageIndex, reprocessing: Reprocessing
) -> tuple[torch.nn.Module, StorageIndex, list[Rebuild]]:
    """Return the model as its loader knows it, its index, and what is computed from it."""
    paths = {id(module): path for path, module in model.named_modules()}
    kept = reprocessing.states
    states = [one for one in kept.states if id(one.module) in paths]
    rebuilds = [
        ModuleRebuild(paths[id(one.module)], one, reprocessing.context, reprocessing.probe)
        for one in states
        if not one.moves and one.refused is None
    ]
    share_views(model, states)
    for one in rebuilds:
        kept.release(share_in_place(one, live))
    unprocessed = make_unprocessed_model(model, states)
    index = StorageIndex(unprocessed)
    for one in rebuilds:
        one.bind(index)
    return unprocessed, index, [*rebuilds]


def _dropped_aliases(loaded: LoadedModel, traced: Traced) -> dict[str, TensorSpec]:
    """Return the other names of tied tensors that the loader drops before processing."""
    if loaded.loading is not None:
        return loaded.loading.dropped
    own = {name: placed for name, placed in traced.placement.items() if name not in traced.tied}
    return dropped_aliases(traced.dry_run, own)


# 2. Certify -------------------------------------------------------------------------------------


def certify_model(loaded: LoadedModel, traced: Traced, checkpoint: CheckpointReader) -> None:
    """Mark what holds a loaded checkpoint's bytes, and what is rebuilt from them.

    All ranks must call it.
    """

    threads = cores_per_rank(loaded.ranks)

    def certify() -> Certified:
        moves_known = loaded.learned
        return certify_placement(
            traced.placement, checkpoint(), moves_known=moves_known, threads=threads
        )

    traced.certified.update(run_on_all_or_none(loaded.ranks, certify))
    for name, other in traced.tied.items():
        one, placed = traced.placement[name], traced.placement[other]
        if one.status is Status.UNCERTIFIED is not placed.status:
            one.reason = (
                f"the engine ties it to {other} and uses that in its place, but the checkpoint's "
                "values of the two differ; for a head of its own set tie_word_embeddings to false "
                "in the checkpoint's config"
            )
    # Other pipeline stages might have some where this one has none.
    anywhere = any(loaded.ranks.all_gather(bool(traced.rebuilds)))
    if loaded.reprocessing is not None and anywhere:
        guard = ModelStateGuard(loaded.model, bits=bool(traced.rebuilds))
        proven = prove_rebuilds(
            loaded.model, traced.rebuilds, traced.placement, loaded.reprocessing.probe, loaded.ranks
        )
        traced.rebuilds[:] = proven
        guard.restore()
        guard.verify()


# 3. Plan ----------------------------------------------------------------------------------------


def agree_on_plan(loaded: LoadedModel, traced: Traced) -> Plan:
    """Make the plan of a certified model. All ranks must call it.

    Raises:
        RuntimeError: nothing is certified on any rank. The engine must not start.
    """
    plan = make_plan(traced.placement, loaded.ranks, traced.dropped, traced.tied)
    _log_summary(traced)
    if not any(loaded.ranks.all_gather(bool(plan.targets))):
        raise RuntimeError("delta updates: no tensor of this model can be certified")
    return plan


def _log_summary(traced: Traced) -> None:
    placement = traced.placement
    counts = ", ".join(f"{count} {status}" for status, count in summary(placement).items())
    logger.info("delta updates: %d tensors: %s", len(placement), counts)
    paths = [path for one in traced.recomputed for path in one.paths]
    if paths:
        logger.info("delta updates: the engine's own function recomputes %s", ", ".join(paths))
    for name, reason in uncertified(placement).items():
        logger.warning("delta updates will refuse %s: %s", name, reason)


# After start-up ---------------------------------------------------------------------------------


def trace_again(
    loaded: LoadedModel,
    model: torch.nn.Module,
    load_weights: LoadWeights,
    before: Placement,
    tied: Mapping[str, str],
    index: StorageIndex,
    moved: Sequence[str],
) -> Placement:
    """Trace the whole checkpoint through the loader again, after something has moved tensors.

    Args:
        model: that was traced; its loader is `load_weights`.
        before: the placement that it gave, of the same checkpoint; so did `tied`.
        index: of the traced model as it is now.
        moved: the live tensors that were moved, by name.

    Raises:
        NotUpdatable: writes to their new places would not reach what the engine computes with.
        TracingError: tracing changed the model.
    """
    devices = {index.by_name[name].tensor.device.type for name in moved if name in index.by_name}
    if loaded.captures and devices - {"cpu"}:
        raise NotUpdatable(
            f"something moved {list(moved)[:8]} after start-up, and graphs that the engine has "
            "captured read the memory before; restart the engine",
            tensors=list(moved),
        )
    dry_run = LoaderDryRun(model, load_weights, index, loaded.refuse_while)
    placement = dry_run.trace([placed.spec for placed in before.values()])
    place_tied(placement, index, tied, lambda name, other: False)
    compose(placement, loaded.repacks)
    return placement


# Without a checkpoint's weights -----------------------------------------------------------------


def check_repeatable(loaded: LoadedModel) -> None:
    """Check that all that the engine does to weights after loading can be done again.

    Raises:
        RuntimeError: it cannot be repeated on other weights. The engine must not start.
    """
    again = loaded.reprocessing
    refused = dict(loaded.refusals)
    if again is None or not again.states.moved_too:
        refused |= dict.fromkeys(loaded.repacks, "the engine's reload path does not repack it")
    if refused:
        name = min(refused)
        raise RuntimeError(
            f"delta updates need a checkpoint to start from: {name}: {refused[name]}"
            f"{f', and {len(refused) - 1} others' if len(refused) > 1 else ''}"
        )


def load_checkpoint(loaded: LoadedModel, traced: Traced, checkpoint: CheckpointReader) -> None:
    """Load a checkpoint into the running model, and repeat what the engine does after loading.

    All ranks must call it.

    Raises:
        Exception: the engine's own. The weights are mixed.
    """
    again = loaded.reprocessing
    if again is None or not again.states.states:
        loaded.reload(checkpoint())
        return
    written = {s.live.name for placed in traced.placement.values() for s in placed.segments}
    rebuilds = [one for one in traced.rebuilds if not written.isdisjoint(one.names)]
    loading = again.loader, again.context, checkpoint()
    load_and_process(loaded.model, again.states.states, rebuilds, *loading)
    for recompute in traced.recomputed:
        recompute()
