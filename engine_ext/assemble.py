"""From a loaded model to its receiver: trace, follow repacks, certify, plan.

An adapter says what the engine has loaded and how its loader is called; everything after that is
the same for every engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine_ext.applier import MaskedApplier
from engine_ext.certify import certify, summary
from engine_ext.kernels import warm_up
from engine_ext.placement import Placement, Repack, Status, TensorSpec
from engine_ext.plan import make_plan
from engine_ext.ranks import Ranks
from engine_ext.receiver import Receiver
from engine_ext.repack import compose
from engine_ext.scatter import ScatterApplier
from engine_ext.settings import Settings
from engine_ext.storage_index import StorageIndex
from engine_ext.tracing import LoadWeights, trace_placement
from engine_ext.wire import Limits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What an adapter knows of the model that one rank has loaded.

    Attributes:
        model: in serving state.
        load_weights: its own loader; takes (name, tensor) pairs.
        checkpoint: reads the checkpoint that it was loaded from, anew with each call: (name,
            tensor) pairs on the CPU, in the engine's order.
        ranks: this rank among the engine's.
        repacks: moves of live tensors after loading, by the live tensor's name.
        refusals: live tensors whose moves cannot be followed, with the reason.
    """

    model: torch.nn.Module
    load_weights: LoadWeights
    checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ranks: Ranks
    repacks: Mapping[str, Repack] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)


def make_receiver(loaded: LoadedModel, chosen: Settings) -> Receiver:
    """Trace and certify a model and make its receiver. All ranks must call it.

    Args:
        loaded: the model; no KV cache needs to be allocated yet.
        chosen: the user's flags.

    Raises:
        RuntimeError: nothing can be certified. The engine must not start.
        TracingError: tracing changed the model. The engine must not start.
    """
    applier = certified_applier(loaded, chosen)
    warm_up()
    return Receiver(
        applier,
        loaded.ranks,
        base_version=chosen.base_version,
        stage_timeout=chosen.stage_timeout,
        read_workers=chosen.read_workers,
        limits=Limits(max_part_bytes=chosen.max_body_bytes),
    )


def certified_applier(loaded: LoadedModel, chosen: Settings) -> ScatterApplier:
    """Certify the model against its checkpoint.

    Raises:
        RuntimeError, TracingError: as `make_receiver`.
    """
    start = time.perf_counter()
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in loaded.checkpoint()]
    index, placement = trace(loaded, specs)
    traced = time.perf_counter()
    certify(placement, loaded.checkpoint(), chosen.certify_sample)
    certified = time.perf_counter()
    applier = applier_for(loaded, chosen, index, placement)
    _log(placement, traced - start, certified - traced)
    return applier


def trace(loaded: LoadedModel, specs: Sequence[TensorSpec]) -> tuple[StorageIndex, Placement]:
    """Where the tensors of a checkpoint lie, repacks followed, nothing certified yet."""
    index = StorageIndex(loaded.model)
    placement = trace_placement(loaded.model, loaded.load_weights, specs, index)
    compose(placement, loaded.repacks, loaded.refusals)
    return index, placement


def applier_for(
    loaded: LoadedModel, chosen: Settings, index: StorageIndex, placement: Placement
) -> ScatterApplier:
    """The applier that the user has chosen, for a certified placement. All ranks must call it.

    Raises:
        RuntimeError: nothing in it is certified.
    """
    plan = make_plan(placement, loaded.ranks)
    if not plan.targets:
        raise RuntimeError("delta updates: no tensor of this model can be certified")
    threads = torch.get_num_threads()
    if chosen.apply != "masked":
        return ScatterApplier(
            loaded.model, index, plan, undo_bytes=chosen.undo_bytes, threads=threads
        )
    return MaskedApplier(
        loaded.model,
        index,
        plan,
        undo_bytes=chosen.undo_bytes,
        threads=threads,
        load_weights=loaded.load_weights,
        chunk_bytes=chosen.chunk_bytes,
    )


def _log(placement: Placement, traced_s: float, certified_s: float) -> None:
    logger.info(
        "delta updates: %s (traced in %.2f s, certified in %.2f s)",
        ", ".join(f"{count} {status}" for status, count in summary(placement).items()),
        traced_s,
        certified_s,
    )
    for name, placed in placement.items():
        if placed.status is Status.UNCERTIFIED:
            logger.warning("delta updates will refuse %s: %s", name, placed.reason)
