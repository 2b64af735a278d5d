"""SGLang's scheduler side: a receiver in every rank, made right after the model is loaded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch

from engine_ext import settings
from engine_ext.adapters.sglang.external_updates import ExternalUpdates
from engine_ext.adapters.sglang.postload import recomputations, repack_learner
from engine_ext.adapters.sglang.rpc import Call, GetServing, Serving
from engine_ext.errors import (
    Conflict,
    DeltaError,
    NotUpdatable,
    SyncInProgress,
    as_delta_error,
    from_wire,
)
from engine_ext.model import ConstantsWatch
from engine_ext.receiver import LoadedModel, Receiver, make_receiver
from engine_ext.repacks import RepackLearner
from engine_ext.tracing import LoadingTrace, LoadWeights
from engine_ext.wire.operations import BeginPart, CommitSync, Reply, RollBack, encode_answer

logger = logging.getLogger(__name__)


def attach_receiver(runner: Any, chosen: settings.Settings, load: Callable[[], None]) -> None:
    """Load a runner's model and give the runner its receiver.

    Args:
        runner: SGLang's model runner; no KV cache is allocated yet.
        chosen: the user's flags.
        load: loads the model.

    Raises:
        RuntimeError: nothing can be certified. SGLang does not start then.
    """
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import get_parallel

    watch = ConstantsWatch(loader, "_initialize_model")
    loading = LoadingTrace()

    def trace(model: torch.nn.Module) -> None:
        loading.trace(model, _loader(runner, model), _reader(runner, model))

    with repack_learner(trace) as learner, watch as constants:
        load()

    ranks = TensorRanks(get_parallel().tp_group.cpu_group)
    receiver = build_receiver(runner, chosen, learner, constants, loading, ranks)
    ExternalUpdates(receiver).watch()
    runner.delta_receiver = receiver


def build_receiver(
    runner: Any,
    chosen: settings.Settings,
    learner: RepackLearner,
    constants: ConstantsWatch,
    loading: LoadingTrace,
    ranks: TensorRanks,
) -> Receiver:
    """Trace and certify a runner's model and make its receiver; see `attach_receiver`."""
    from sglang.srt.runtime_context import get_parallel

    if runner.startup_weight_load is not None:
        raise RuntimeError("delta updates need the weights to be loaded before SGLang serves")
    parallel = get_parallel()
    if parallel.num_dp_ranks > 1 or parallel.pp_size > 1:
        raise RuntimeError("delta updates do not work with data or pipeline parallel yet")
    if runner.model_config.is_multimodal:
        raise RuntimeError("delta updates: SGLang caches image embeddings of older weights")
    reason = in_place_refusal(runner)
    if reason is not None:
        raise RuntimeError(f"delta updates: {reason}")
    loaded = LoadedModel(
        model=runner.model,
        load_weights=_loader(runner, runner.model),
        checkpoint=_reader(runner, runner.model),
        reload=functools.partial(_reload, runner),
        ranks=ranks,
        repacks=learner.repacks,
        refusals=learner.refusals,
        learned=learner.complete,
        constants=constants.known,
        recomputations=recomputations(runner.model),
        loading=loading,
    )
    return make_receiver(loaded, chosen)


def answer(updater: Any, request: Any) -> Any:
    """Carry out one operation on this rank and answer for all of them; never raises.

    Every rank enters the gather, whatever failed on it, so that none waits for another forever.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    try:
        call = Call.from_manifest(request.manifest)
    except msgspec.ValidationError as error:
        # Every rank gets the same request, so all of them return here.
        return UpdateWeightFromDiskReqOutput(
            success=False, message=f"deltas are sent to the delta endpoints ({error})"
        )
    try:
        own = encode_answer(lambda: _carry_out(updater, call))
        answers = TensorRanks(updater.tp_cpu_group).all_gather(own)
        return UpdateWeightFromDiskReqOutput(success=True, message=call.reply(answers))
    except Exception as error:
        logger.exception("delta updates: the ranks' answers could not be gathered")
        return UpdateWeightFromDiskReqOutput(
            success=False, message=call.failure(f"{type(error).__name__}: {error}")
        )


def _carry_out(updater: Any, call: Call) -> Reply:
    request = call.request()
    if isinstance(request, GetServing):
        return _serving(updater)
    receiver: Receiver | None = getattr(updater.tp_worker.model_runner, "delta_receiver", None)
    if receiver is None:
        raise DeltaError("this rank was started without --enable-delta-updates")
    receiver.set_asleep("weights" in updater.offload_tags)
    writes = isinstance(request, CommitSync | RollBack)
    if writes or isinstance(request, BeginPart):
        _refuse_together(updater, writes=writes)
    if writes:
        # A forward pass may still run on a stream of its own.
        torch.get_device_module().synchronize()
    reply: Reply = receiver.execute(request)
    return reply


def _serving(updater: Any) -> Serving:
    from sglang.srt.runtime_context import get_serving

    return Serving(
        idle=updater.scheduler.is_fully_idle(), weight_version=str(get_serving().weight_version)
    )


def _refuse_together(updater: Any, *, writes: bool) -> None:
    """Refuse a sync that the engine would not serve correctly now; all ranks must call it.

    Raises:
        DeltaError: `_refuse_here` has raised on some rank; all ranks raise the same.
    """
    own: dict[str, Any] | None = None
    try:
        _refuse_here(updater, writes)
    except Exception as error:
        own = as_delta_error(error).to_wire()
    refusals = TensorRanks(updater.tp_cpu_group).all_gather(own)
    for refusal in filter(None, refusals):
        raise from_wire(refusal)


def _refuse_here(updater: Any, writes: bool) -> None:
    """Refuse a sync that this rank would not serve correctly now.

    Raises:
        SyncInProgress: an update of SGLang's own has begun and not ended.
        NotUpdatable: the engine caches something that a sync would not update.
        Conflict: generation was resumed during the commit.
    """
    if updater._session is not None:
        raise SyncInProgress("SGLang's own weight update has begun and not ended")
    scheduler = updater.scheduler
    reason = in_place_refusal(updater.tp_worker.model_runner) or _storage_refusal(scheduler)
    if reason is not None:
        raise NotUpdatable(reason)
    if writes and not scheduler._engine_paused and not scheduler.is_fully_idle():
        raise Conflict("generation was resumed during the commit")


def in_place_refusal(runner: Any) -> str | None:
    """Return why SGLang refuses new weights in its own updates, or None if it takes them."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    found: str | None = weight_updater._unsupported_derived_weight_cache_error(runner.model)
    return found


def _storage_refusal(scheduler: Any) -> str | None:
    """Return why KV of old weights would survive a flush, or None."""
    if not getattr(scheduler, "enable_hicache_storage", False):
        return None
    return "the attached storage of SGLang's hierarchical cache keeps KV of old weights; detach it"


def _reads(runner: Any) -> bool:
    """Return whether the load format reads a checkpoint's tensors one by one."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return isinstance(runner.loader, DefaultModelLoader)


def _reader(
    runner: Any, model: torch.nn.Module
) -> Callable[[], Iterable[tuple[str, torch.Tensor]]] | None:
    """Return what reads the loaded checkpoint, or None if there is none."""
    return functools.partial(checkpoint, runner, model) if _reads(runner) else None


def checkpoint(runner: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors as SGLang's own loader reads them, on the CPU."""
    weights: Iterator[tuple[str, torch.Tensor]] = runner.loader._get_all_weights(
        runner.model_config, model
    )
    return weights


def _loader(runner: Any, model: Any) -> LoadWeights:
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        with set_default_torch_dtype(runner.model_config.dtype):
            return model.load_weights(weights)

    return load_weights


def _reload(runner: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights into the running model as SGLang's own disk updates do.

    Raises:
        RuntimeError: the loader failed.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    device = torch.device(runner.device)
    with set_default_torch_dtype(runner.model_config.dtype):
        DefaultModelLoader.restore_weights_before_loading(runner.model, device)
        DefaultModelLoader.load_weights_and_postprocess(runner.model, iter(weights), device)


class TensorRanks:
    """The ranks of a tensor-parallel group, over its CPU group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = int(torch.distributed.get_rank(group))

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        size = torch.distributed.get_world_size(self._group)
        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values
