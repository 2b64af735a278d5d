"""SGLang's scheduler side: a receiver in every rank, made right after the model is loaded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch

from engine_ext import settings
from engine_ext.adapters.sglang.external_updates import OtherChanges
from engine_ext.adapters.sglang.postload import repack_learner
from engine_ext.adapters.sglang.recomputations import recomputations
from engine_ext.adapters.sglang.rpc import Call
from engine_ext.errors import (
    Conflict,
    DeltaError,
    NotUpdatable,
    SyncInProgress,
    as_delta_error,
    from_wire,
)
from engine_ext.model.constants import ConstantsWatch
from engine_ext.receiver.receiver import Receiver
from engine_ext.receiver.startup import LoadedModel, make_receiver
from engine_ext.repacks.load_hook import RepackLearner
from engine_ext.tracing.trace import LoadWeights

logger = logging.getLogger(__name__)

_WRITES = ("commit", "rollback")


def attach_receiver(runner: Any, chosen: settings.Settings, load: Callable[[], None]) -> None:
    """Load a runner's model and give the runner its receiver.

    Args:
        runner: SGLang's model runner; no KV cache is allocated yet.
        chosen: the user's flags.
        load: loads the model.

    Raises:
        RuntimeError: nothing can be certified. SGLang then does not start.
    """
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import get_parallel

    watch = ConstantsWatch(loader, "_initialize_model")
    with repack_learner() as learner, watch as constants:
        load()

    ranks = TensorRanks(get_parallel().tp_group.cpu_group)
    receiver = build_receiver(runner, chosen, learner, constants, ranks)
    OtherChanges(receiver).watch()
    runner.delta_receiver = receiver


def build_receiver(
    runner: Any,
    chosen: settings.Settings,
    learner: RepackLearner,
    constants: ConstantsWatch,
    ranks: TensorRanks,
) -> Receiver:
    """Trace and certify the runner's model and make its receiver."""
    from sglang.srt.runtime_context import get_parallel

    if runner.startup_weight_load is not None:
        raise RuntimeError("delta updates need the weights before SGLang serves, not while it does")
    parallel = get_parallel()
    if parallel.num_dp_ranks > 1 or parallel.pp_size > 1:
        raise RuntimeError("delta updates do not work with data or pipeline parallel yet")
    if runner.model_config.is_multimodal:
        raise RuntimeError("delta updates: SGLang keeps embeddings of images of older weights")
    kept = refusal(runner)
    if kept is not None:
        raise RuntimeError(f"delta updates: {kept}")
    loaded = LoadedModel(
        model=runner.model,
        load_weights=_loader(runner),
        checkpoint=functools.partial(checkpoint, runner) if _reads(runner) else None,
        reload=functools.partial(_reload, runner),
        ranks=ranks,
        repacks=learner.repacks,
        refusals=learner.refusals,
        learned=learner.complete,
        constants=constants.known,
        recomputations=recomputations(runner.model),
    )
    return make_receiver(loaded, chosen)


def answer(updater: Any, request: Any) -> Any:
    """Carry out one operation on this rank and answer for all of them; never raises.

    Every rank comes to the gather, whatever went wrong on it, so that none waits for another.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    try:
        call = Call.of(request.manifest)
    except msgspec.ValidationError as error:
        # The same request is on every rank, so all of them leave here.
        return UpdateWeightFromDiskReqOutput(
            success=False, message=f"deltas are sent to the delta endpoints ({error})"
        )
    try:
        answers = TensorRanks(updater.tp_cpu_group).all_gather(_handle(updater, call))
        return UpdateWeightFromDiskReqOutput(success=True, message=call.reply(answers))
    except Exception as error:
        logger.exception("delta updates: the ranks' answers could not be gathered")
        return UpdateWeightFromDiskReqOutput(
            success=False, message=call.failure(f"{type(error).__name__}: {error}")
        )


def _handle(updater: Any, call: Call) -> dict[str, Any]:
    """This rank's answer; never raises."""
    try:
        if call.operation == "serving":
            return {"ok": _serving(updater)}
        runner = updater.tp_worker.model_runner
        receiver: Receiver | None = getattr(runner, "delta_receiver", None)
        if receiver is None:
            raise DeltaError("this rank was started without --enable-delta-updates")
        receiver.state.asleep = "weights" in updater.offload_tags
        if call.operation in ("begin", *_WRITES):
            _refuse_together(updater, writes=call.operation in _WRITES)
        if call.operation in _WRITES:
            # A forward pass may still run on a stream of its own.
            torch.get_device_module().synchronize()
        return receiver.handle(call.operation, call.arguments)
    except Exception as error:
        return {"error": as_delta_error(error).to_wire()}


def _serving(updater: Any) -> dict[str, Any]:
    """What no HTTP process knows of the others: whether any request runs; the weight version."""
    from sglang.srt.runtime_context import get_serving

    return {
        "idle": updater.scheduler.is_fully_idle(),
        "weight_version": get_serving().weight_version,
    }


def _refuse_together(updater: Any, *, writes: bool) -> None:
    """Refuse what the engine, as it is now, would not compute with; all ranks must call it.

    Raises:
        DeltaError: as `_refuse_here` raised on some rank; all ranks raise alike.
    """
    mine: dict[str, Any] | None = None
    try:
        _refuse_here(updater, writes)
    except Exception as error:
        mine = as_delta_error(error).to_wire()
    refusals = TensorRanks(updater.tp_cpu_group).all_gather(mine)
    for found in filter(None, refusals):
        raise from_wire(found)


def _refuse_here(updater: Any, writes: bool) -> None:
    """As `_refuse_together`, of this rank.

    Raises:
        SyncInProgress: another update of SGLang's own has begun.
        NotUpdatable: the engine keeps something that would not follow.
        Conflict: something has let generation go on during the commit.
    """
    if updater._session is not None:
        raise SyncInProgress("SGLang's own weight update has begun and not ended")
    scheduler = updater.scheduler
    kept = refusal(updater.tp_worker.model_runner) or _storage_refusal(scheduler)
    if kept is not None:
        raise NotUpdatable(kept)
    if writes and not scheduler._engine_paused and not scheduler.is_fully_idle():
        raise Conflict("generation goes on: something has resumed it during the commit")


def refusal(runner: Any) -> str | None:
    """Why SGLang could not take new weights in place: what it says itself of its own updates."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    found: str | None = weight_updater._unsupported_derived_weight_cache_error(runner.model)
    return found


def _storage_refusal(scheduler: Any) -> str | None:
    """Why old KV would outlive a flush."""
    if not getattr(scheduler, "enable_hicache_storage", False):
        return None
    return "the attached storage of SGLang's hierarchical cache keeps KV of old weights; detach it"


def _reads(runner: Any) -> bool:
    """Whether the load format reads a checkpoint's tensors one by one."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return isinstance(runner.loader, DefaultModelLoader)


def checkpoint(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors as SGLang's own loader reads them, on the CPU."""
    weights: Iterator[tuple[str, torch.Tensor]] = runner.loader._get_all_weights(
        runner.model_config, runner.model
    )
    return weights


def _loader(runner: Any) -> LoadWeights:
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        with set_default_torch_dtype(runner.model_config.dtype):
            return runner.model.load_weights(weights)

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
    """The ranks of a tensor parallel group, over its CPU group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = int(torch.distributed.get_rank(group))

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        size = torch.distributed.get_world_size(self._group)
        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values
