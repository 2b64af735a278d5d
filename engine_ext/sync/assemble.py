"""Make the receiver of a loaded model.

`engine_ext.startup` traces, certifies and plans it; what applies syncs by that plan is made here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from engine_ext.format import gap_streams
from engine_ext.placement import DeviceMemory, Plan
from engine_ext.ranks import cores_per_rank
from engine_ext.settings import Settings
from engine_ext.startup import (
    LaterCopies,
    LoadedModel,
    Traced,
    agree_on_plan,
    check_repeatable,
    plan_model,
    trace_again,
    young_collections,
)
from engine_ext.sync.applier import Applier
from engine_ext.sync.delta_applier import DeltaApplier
from engine_ext.sync.initial_sync import InitialSyncApplier
from engine_ext.sync.masked import MaskedApplier
from engine_ext.sync.post_load import PostLoad
from engine_ext.sync.receiver import Receiver

logger = logging.getLogger(__name__)


@young_collections()
def make_receiver(loaded: LoadedModel, settings: Settings) -> Receiver:
    """Trace and certify a model and make its receiver. All ranks must call it.

    No KV cache needs to be allocated yet.

    Raises:
        RuntimeError: nothing can be certified; or without a checkpoint, the engine processes
            weights in a way that cannot be repeated. The engine must not start.
        TracingError: tracing changed the model. The engine must not start.
    """
    later = LaterCopies(loaded.model, loaded.constants)
    # Before the engine measures what is left for its KV cache.
    memory = DeviceMemory(settings.device_bytes, _devices_of(loaded.model))
    if loaded.checkpoint is not None:
        traced, plan = plan_model(loaded, later)
        return wrap_applier(
            *(loaded, settings),
            make_delta_applier(loaded, settings, traced, plan, later, memory),
        )
    check_repeatable(loaded)
    logger.warning(
        "delta updates: the load format %s reads no checkpoint to certify against; the first sync "
        "must be full, and others are refused until then",
        loaded.load_format,
    )
    initial = InitialSyncApplier(loaded, later)
    receiver = wrap_applier(loaded, settings, initial)

    def on_initial_sync(traced: Traced) -> None:
        plan = agree_on_plan(loaded, traced)
        receiver.adopt(make_delta_applier(loaded, settings, traced, plan, later, memory))

    initial.on_initial_sync = on_initial_sync
    return receiver


def wrap_applier(loaded: LoadedModel, settings: Settings, applier: Applier) -> Receiver:
    """Make the receiver that applies syncs by an applier."""
    gap_streams.warm_up()
    return Receiver(applier, loaded.ranks, settings, loaded.locate)


def make_delta_applier(
    loaded: LoadedModel,
    settings: Settings,
    traced: Traced,
    plan: Plan,
    later: LaterCopies,
    memory: DeviceMemory | None = None,
) -> DeltaApplier:
    """Make the applier of a certified model by its plan. All ranks must call it.

    Args:
        memory: of the model's devices, for what syncs keep there; None: nothing is reserved.
    """
    post_load = PostLoad(
        *(loaded.model, traced.live, traced.placement, loaded.ranks),
        rebuilds=traced.rebuilds,
        recomputed=traced.recomputed,
        memory=memory,
    )
    dry_run = traced.dry_run
    make: Callable[..., DeltaApplier]
    make = functools.partial(DeltaApplier, dry_run.model, dry_run.index)
    if settings.apply == "masked":
        make = functools.partial(MaskedApplier, dry_run, chunk_bytes=settings.chunk_bytes)
    return make(
        plan,
        undo_bytes=settings.undo_bytes,
        threads=cores_per_rank(loaded.ranks),
        post_load=post_load,
        certified=traced.certified,
        ranks=loaded.ranks,
        # Not with `traced`, whose index would keep a parameter that something has replaced.
        trace_again=functools.partial(
            trace_again,
            loaded,
            *(dry_run.model, dry_run.load_weights, traced.placement, traced.tied),
        ),
        later=later,
        memory=memory,
    )


def _devices_of(model: torch.nn.Module) -> set[torch.device]:
    """Return the accelerators that hold parameters or buffers of a model."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return {device for device in devices if device.type not in ("cpu", "meta")}
