"""vLLM's worker side: a receiver in every worker, made right after the model is loaded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine_ext import settings
from engine_ext.adapters.observer import ModelLoadObserver, checkpoints, observations
from engine_ext.adapters.target_and_draft import TargetAndDraft
from engine_ext.adapters.vllm import refusals
from engine_ext.adapters.vllm.buffer_checksums import buffer_checksums
from engine_ext.adapters.vllm.checkpoint import (
    WorkerLoad,
    load_function,
    reads_checkpoint,
)
from engine_ext.adapters.vllm.draft import always_shares, around_load, roles
from engine_ext.adapters.vllm.features import RESET_WEIGHTS, may_span_hosts, weight_changes
from engine_ext.adapters.vllm.layerwise_reload import active_wrapper
from engine_ext.adapters.vllm.lora import with_adapters, without_lora
from engine_ext.adapters.vllm.lora_adapters import LoadedAdapters
from engine_ext.adapters.vllm.postload import (
    copied_on_first_use,
    online_processing,
    probe,
    processing_context,
    recomputations,
    with_sinks_copies,
)
from engine_ext.adapters.vllm.prefix_cache import forget_pooled_rows
from engine_ext.adapters.vllm.transfer_frontend import is_chosen, register_backend
from engine_ext.ranks import GroupRanks, RankGroup, among_replicas, replicas
from engine_ext.remote_parts import locator
from engine_ext.startup import (
    LoadedModel,
    LoadingTrace,
    Reprocessing,
    UnprocessedModules,
)
from engine_ext.sync import AdapterReceivers, Receiver, make_receiver

_WEIGHTS, _KV_CACHE = "weights", "kv_cache"  # vLLM's tags of the memory that it can release


def attach_receiver(worker: Any, chosen: settings.Settings) -> None:
    """Wrap a worker's methods so that it makes its receiver when it has loaded its model.

    The worker also gets the methods that the front end calls by name: `delta_updates`, and
    `delta_buffer_checksums` for tests of the engine's state. Call it in its constructor.
    """
    original_load = worker.load_model
    sleep_now, wake_up_now, discard_now = worker.sleep, worker.wake_up, worker.discard
    released: set[str] = set()  # by vLLM's names
    discarded: list[str] = []  # by what the weights were lost

    def load_model(*args: Any, **kwargs: Any) -> None:
        if chosen.keep_plain:
            _keep_checkpoint_layout()
        config, loading = worker.vllm_config, LoadingTrace()
        models = roles(config)
        reads = all(map(reads_checkpoint, models))
        if len(models) > 1 and not reads:
            raise RuntimeError(refusals.DRAFT_WITHOUT_CHECKPOINT.message)
        states = UnprocessedModules(chosen.shadow_bytes, moved_too=not reads)
        observed = [ModelLoadObserver(WorkerLoad(role, config), loading, states) for role in models]
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(online_processing(states))
            hooks.enter_context(observed[0])
            for draft in observed[1:]:
                hooks.enter_context(around_load(worker.model_runner, draft))
            original_load(*args, **kwargs)
        worker.delta_receiver = build_receiver(worker, chosen, observed, loading, states)
        forget_pooled_rows(worker.model_runner)

    def sleep(level: int = 1) -> None:
        earlier = released.copy()
        worker.delta_receiver.weights_released()
        if level > 1:
            # Level 2 discards the weights; what wakes up is of no version.
            worker.delta_receiver.weights_discarded("vLLM's sleep at level 2")
            discarded.append("sleep")
        released.update((_WEIGHTS, _KV_CACHE))
        try:
            sleep_now(level)
        except BaseException:
            # vLLM takes the engine for awake, and would not wake it up.
            released.intersection_update(earlier)
            discarded.clear()
            note_released()
            raise

    def discard(tags: Sequence[str]) -> None:
        if _WEIGHTS in tags:
            worker.delta_receiver.weights_released()
            worker.delta_receiver.weights_discarded("vLLM's discard of its weights")
            discarded.append("discard")
        released.update(tags)
        note_released()
        discard_now(tags)

    def wake_up(tags: list[str] | None = None) -> None:
        wake_up_now(tags)
        released.difference_update((_WEIGHTS, _KV_CACHE) if tags is None else tags)
        if discarded and _WEIGHTS not in released:  # the places of LoRA adapters, too
            worker.delta_receiver.weights_returned()
            worker.model_runner.reset_lora_state()
            discarded.clear()
        note_released()

    def note_released() -> None:
        worker.delta_receiver.set_asleep(_WEIGHTS in released, other=bool(released))

    def delta_updates(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = worker.delta_receiver.handle(operation, arguments)
        return answer

    worker.load_model = load_model
    worker.sleep, worker.wake_up, worker.discard = sleep, wake_up, discard
    own_transfer = is_chosen(worker.vllm_config.weight_transfer_config)
    for name in weight_changes(own_transfer=own_transfer):
        setattr(worker, name, _reporting(worker, name))
    if own_transfer:
        register_backend()
        worker.delta_transfer = functools.partial(_transfer, worker)
    worker.delta_updates = delta_updates
    worker.delta_buffer_checksums = functools.partial(buffer_checksums, worker)


def _transfer(worker: Any, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Carry out an operation of `transfer_group`; the worker has loaded its model."""
    answer: dict[str, Any] = worker.weight_transfer_engine.group.handle(operation, arguments)
    return answer


def _reporting(worker: Any, name: str) -> Callable[..., Any]:
    """Wrap a method that changes weights, so that the receiver knows before it runs."""
    original: Callable[..., Any] = getattr(worker, name)

    @functools.wraps(original)
    def replace(*args: Any, **kwargs: Any) -> Any:
        if name != RESET_WEIGHTS.name:
            worker.delta_receiver.weights_replaced(f"vLLM's {name}")
            return original(*args, **kwargs)
        worker.delta_receiver.weights_discarded(f"vLLM's {name}")
        try:
            return original(*args, **kwargs)
        finally:
            worker.delta_receiver.weights_returned()

    return replace


def _keep_checkpoint_layout() -> None:
    """Keep linear weights on CPU in their tensors, instead of packing them into opaque handles."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    def check_cpu_sgl_kernel(n: int, k: int, dtype: torch.dtype) -> bool:
        return False

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = check_cpu_sgl_kernel


def build_receiver(
    worker: Any,
    chosen: settings.Settings,
    observed: Sequence[ModelLoadObserver[WorkerLoad]],
    loading: LoadingTrace,
    states: UnprocessedModules,
) -> Receiver | AdapterReceivers:
    """Trace and certify a worker's model and make its receiver, and what makes its adapters'.

    The worker has loaded its model, and its draft model if it has one, as `observed`, and has no KV
    cache yet.

    Raises:
        RuntimeError: nothing can be certified. vLLM does not start then.
    """

    config = worker.vllm_config
    parallel = config.parallel_config
    if parallel.enable_eplb:  # it moves experts between the ranks
        raise RuntimeError("delta updates do not work with EPLB yet")
    model = worker.model_runner.get_model()
    if config.lora_config is not None:
        model = without_lora(model)
    models, replaced = [model], list[str]()
    if len(observed) > 1:
        models.append(_draft_model(worker, observed[1]))
        model = TargetAndDraft(model, models[1], observed[1].role.prefix)
        replaced = model.shared()
        lost = loading.forget(replaced)
        if always_shares(models[1]):  # then no engine uses them
            model.dropped = lost
    seen = observations(observed, replaced)
    loaded = LoadedModel(
        model=model,
        load_weights=load_function(model, config),
        checkpoint=checkpoints(observed, models),
        # The class's method: the worker's own is wrapped by `_reporting`.
        reload=lambda w: type(worker).reload_weights(worker, weights_iterator=iter(w)),
        ranks=_ranks(parallel),
        repacks=seen.repacks,
        refusals={**seen.refusals, **states.refusals(model), **copied_on_first_use(model)},
        learned=seen.learned,
        constants=with_sinks_copies(with_adapters(seen.constants), model),
        recomputations=recomputations(model, config),
        refuse_while=active_wrapper,
        loading=loading,
        reprocessing=Reprocessing(
            states=states,
            loader=lambda copy: load_function(copy, config),
            context=lambda: processing_context(config, worker.device),
            probe=probe,
        ),
        captures=not config.model_config.enforce_eager,
        locate=locator(chosen, several_hosts=may_span_hosts(parallel)),
        load_format=str(config.load_config.load_format),
    )
    receiver = make_receiver(loaded, chosen)
    # Replicas load adapters each on its own, and with stages adapters are not tested.
    apart = replicas.count() > 1 or parallel.pipeline_parallel_size > 1
    if config.lora_config is None or apart:
        return receiver
    adapters = LoadedAdapters(worker.model_runner.lora_manager)
    return AdapterReceivers(receiver, adapters, loaded.ranks, chosen)


def _draft_model(worker: Any, observed: ModelLoadObserver[WorkerLoad]) -> torch.nn.Module:
    model: torch.nn.Module = worker.get_draft_model()
    if model is not observed.model:
        raise RuntimeError("delta updates: vLLM did not load its draft model as it usually does")
    return model


def _ranks(parallel: Any) -> RankGroup:
    """Return the ranks of this worker's replica, or of all if the server has several.

    Raises:
        RuntimeError: the replicas share experts.
    """
    from vllm.distributed.parallel_state import get_world_group

    if parallel.data_parallel_size > 1:
        # vLLM makes replicas of dense models independent.
        raise RuntimeError(refusals.EXPERTS_OF_REPLICAS.message)
    return among_replicas(parallel.data_parallel_index, GroupRanks(get_world_group().cpu_group))
