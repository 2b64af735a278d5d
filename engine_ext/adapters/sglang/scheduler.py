"""SGLang's scheduler side: a receiver in every rank, made when its models are loaded."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch

from engine_ext import settings
from engine_ext.adapters.observer import checkpoints, observations
from engine_ext.adapters.sglang import (
    draft,
    prefix_cache,
    refusals,
    token_versions,
)
from engine_ext.adapters.sglang.checkpoint import (
    Observer,
    load_format,
    load_function,
    observer_of,
    reload,
)
from engine_ext.adapters.sglang.external_updates import record_released, watch_external_updates
from engine_ext.adapters.sglang.pipeline import hold_operations
from engine_ext.adapters.sglang.postload import probe, processing_context, recomputations
from engine_ext.adapters.sglang.rpc import Call, HowToStop, Publish
from engine_ext.adapters.target_and_draft import TargetAndDraft
from engine_ext.errors import DeltaError, NotUpdatable, SyncInProgress, as_delta_error
from engine_ext.ranks import GroupRanks, RankGroup, among_replicas, run_on_all_or_none
from engine_ext.ranks.operations import (
    BeginPart,
    CommitSync,
    Operation,
    RankReport,
    Reply,
    ReplyT,
    RollBack,
    Serving,
    Stop,
    encode_answer,
)
from engine_ext.remote_parts import locator
from engine_ext.startup import LoadedModel, LoadingTrace, Reprocessing, UnprocessedModules
from engine_ext.sync import Receiver, make_receiver

# Attributes with copies of weights of a module's siblings (Kimi K3, Muse Spark). The search for
# copies takes them for copies of the module's own.
_COPIES_OF_OTHERS: Final = (
    *("_k3_fused_decode_args", "_attn_res_cw_cache"),
    *("_post_expert_norm_weight", "_finalize_norm_cache"),
)

logger = logging.getLogger(__name__)


def attach_receiver(runner: Any, chosen: settings.Settings, load: Callable[[], None]) -> None:
    """Load a runner's model and give the runner its receiver, before anything is served.

    With a draft model, the target's runner gets it when both are loaded.

    Raises:
        RuntimeError: nothing can be certified. SGLang does not start then.
    """
    if runner.is_draft_worker:
        draft.load(runner, load)
        return
    prefix_cache.install()
    token_versions.follow_batches()
    loading, states = LoadingTrace(), UnprocessedModules(chosen.shadow_bytes)
    target = observer_of(draft.target_role(runner), runner, loading, states)
    with target:
        load()

    def attach(observed: Sequence[Observer]) -> None:
        ranks = among_replicas(_replica(), _ranks_of_replica())
        receiver = build_receiver(observed, chosen, loading, states, ranks)
        watch_external_updates(receiver)
        if _stages() > 1:
            hold_operations()
        runner.delta_receiver = receiver
        runner.delta_runners = [one.engine.runner for one in observed]

    if target.role.path:
        draft.expect(target, loading, states, attach)
    else:
        attach([target])


def build_receiver(
    observed: Sequence[Observer],
    chosen: settings.Settings,
    loading: LoadingTrace,
    states: UnprocessedModules,
    ranks: RankGroup,
) -> Receiver:
    """Trace and certify the models of one rank and make its receiver; see `attach_receiver`."""
    from sglang.srt.runtime_context import get_parallel

    runners = [one.engine.runner for one in observed]
    runner = runners[0]
    if any(one.startup_weight_load is not None for one in runners):
        raise RuntimeError(refusals.LATE_WEIGHTS.message)
    if get_parallel().attn_dp_size > 1:
        raise RuntimeError("delta updates do not work with DP attention yet")
    for reason in filter(None, map(in_place_refusal, runners)):
        raise RuntimeError(f"delta updates: {reason}")
    model, replaced = runner.model, list[str]()
    if len(observed) > 1:
        model = TargetAndDraft(model, runners[1].model, observed[1].role.prefix)
        replaced = model.shared()
        model.dropped = loading.forget(replaced)
    seen = observations(observed, replaced)
    loaded = LoadedModel(
        model=model,
        load_weights=load_function(runner, model),
        checkpoint=checkpoints(observed, [one.model for one in runners]),
        reload=functools.partial(reload, runner),
        ranks=ranks,
        repacks=seen.repacks,
        refusals=seen.refusals,
        learned=seen.learned,
        constants=seen.constants,
        recomputations=recomputations(model),
        loading=loading,
        reprocessing=Reprocessing(
            states=states,
            loader=lambda copy: load_function(runner, copy),
            context=lambda: processing_context(runner.model_config.dtype),
            probe=probe,
        ),
        locate=locator(chosen, several_hosts=get_parallel().nnodes > 1),
        load_format=load_format(runner),
    )
    return make_receiver(loaded, chosen)


def answer(updater: Any, request: Any) -> Any:
    """Carry out one operation on this rank and answer for all of its replica.

    Every rank enters the gather, whatever failed on it, so that none waits for another forever.
    An error of SGLang's own pause or flush is passed on, and ends the engine, as it does without
    delta updates: requests might have been taken away, and on this rank alone.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    try:
        call = Call.from_manifest(request.manifest)
    except msgspec.ValidationError as error:
        # Every rank gets the same request, so all of them return here.
        message = f"deltas are sent to the delta endpoints ({error})"
        return UpdateWeightFromDiskReqOutput(success=False, message=message)
    stop = None if call.stop is None else _stop(updater, call.stop)
    refusal = None if stop is None else stop.refusal
    try:
        own = encode_answer(lambda: _reply(updater, call, refusal))
        gathered = _ranks_of_replica().all_gather([own, stop and msgspec.to_builtins(stop)])
        message = call.reply([answer for answer, _ in gathered], _replica(), _of_all(gathered))
        return UpdateWeightFromDiskReqOutput(success=True, message=message)
    except Exception as error:
        logger.exception("delta updates: the ranks' answers could not be gathered")
        failure = call.failure(f"{type(error).__name__}: {error}", _replica())
        return UpdateWeightFromDiskReqOutput(success=False, message=failure)


def _ranks_of_replica() -> RankGroup:
    """Return the ranks of this rank's replica, those of all its pipeline stages."""
    from sglang.srt.runtime_context import get_parallel

    return GroupRanks(get_parallel().world_group.cpu_group)


def _stages() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def _replica() -> int:
    """Return the number of this rank's data parallel replica, from 0."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().dp_rank or 0


def _of_all(gathered: Sequence[Sequence[Any]]) -> Stop | None:
    """Return how the first rank has stopped, with the refusal of any rank of its replica."""
    stops = [msgspec.convert(stop, Stop) for _, stop in gathered if stop is not None]
    if not stops:
        return None
    refusal = next((stop.refusal for stop in stops if stop.refusal is not None), None)
    return msgspec.structs.replace(stops[0], refusal=refusal)


def _reply(updater: Any, call: Call, refusal: dict[str, Any] | None) -> Reply:
    request = msgspec.structs.replace(call.request(), refusal=refusal)
    if isinstance(request, Publish):
        return _publish(updater.scheduler, request)
    receiver: Receiver | None = getattr(updater.tp_worker.model_runner, "delta_receiver", None)
    if receiver is None:
        raise DeltaError("this rank was started without --enable-delta-updates")
    record_released(receiver, updater)
    if isinstance(request, BeginPart):
        # A replica decides alone, and the others forget the part if it refuses: a replica that
        # hangs must not keep them from generating.
        run_on_all_or_none(_ranks_of_replica(), lambda: _refuse_here(updater))
    elif isinstance(request, CommitSync | RollBack) and refusal is None:
        request = _checked(updater, request)
    reply: Reply = receiver.execute(request)
    if isinstance(reply, RankReport):
        return msgspec.structs.replace(reply, serving=_serving(updater))
    return reply


def _checked(updater: Any, request: Operation[ReplyT]) -> Operation[ReplyT]:
    """Return a write with this rank's reason against it, if there is one, for the vote on it.

    Image embeddings are dropped: requests in flight compute theirs again.
    """
    try:
        _refuse_here(updater)
        prefix_cache.drop_image_embeddings(updater.tp_worker.model_runner.model)
    except Exception as error:
        return msgspec.structs.replace(request, refusal=as_delta_error(error).to_wire())
    return request


def _publish(scheduler: Any, request: Publish) -> Reply:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    scheduler.record_weight_version_change(request.version)
    if request.resumes:
        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    return Reply()


def _stop(updater: Any, how: HowToStop) -> Stop:
    """Stop this rank's scheduler between two forward passes, and treat its KV.

    Requests in flight stay; they are computed again if the KV is flushed.
    """
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    begun = time.perf_counter()
    mode = "retract" if how.flushes else "in_place"
    updater.scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
    refusal: dict[str, Any] | None = None
    try:
        # A forward pass might still run on a stream of its own. If its error surfaces here, on
        # this rank alone, the ranks learn of it in their vote.
        torch.get_device_module().synchronize()
    except Exception as error:
        refusal = as_delta_error(error).to_wire()
    stopped = time.perf_counter()
    if how.flushes and not updater.scheduler.flush_cache():
        refusal = as_delta_error(RuntimeError("SGLang did not flush its cache")).to_wire()
    if how.salt is not None:
        prefix_cache.SALTS.change(how.salt, updater.scheduler)
    ended = time.perf_counter()
    times = {"stop_ms": (stopped - begun) * 1e3, "caches_ms": (ended - stopped) * 1e3}
    return Stop(**times, refusal=refusal)


def _serving(updater: Any) -> Serving:
    from sglang.srt.runtime_context import get_serving

    version = str(get_serving().weight_version)
    return Serving(idle=updater.scheduler.is_fully_idle(), weight_version=version)


def _refuse_here(updater: Any) -> None:
    """Refuse a sync that this rank would not serve correctly now."""
    if updater._session is not None:
        raise SyncInProgress("SGLang's own weight update has begun and not ended")
    runners = updater.tp_worker.model_runner.delta_runners
    for reason in filter(None, map(in_place_refusal, runners)):
        raise NotUpdatable(reason)


def in_place_refusal(runner: Any) -> str | None:
    """Return why new weights would not reach all that SGLang computes from them, or None.

    SGLang refuses its own updates of some models; of others it does not know.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    found: str | None = weight_updater._unsupported_derived_weight_cache_error(runner.model)
    if found is not None:
        return found
    for path, module in runner.model.named_modules():
        for name in _COPIES_OF_OTHERS:
            if vars(module).get(name, module._buffers.get(name)) is not None:
                return f"SGLang keeps {path}.{name}, a copy of another module's weights"
    return None
