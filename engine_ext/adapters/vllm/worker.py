"""vLLM's worker side: a receiver in every worker, made right after the model is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from engine_ext import replicas, settings
from engine_ext.adapters.vllm.layerwise_reload import active_wrapper
from engine_ext.adapters.vllm.lora import without_lora
from engine_ext.adapters.vllm.lora_adapters import LoadedAdapters
from engine_ext.adapters.vllm.postload import (
    constants_kept,
    copied_on_first_use,
    online_processing,
    probe,
    processing_context,
    recomputations,
    repack_learner,
)
from engine_ext.model import ConstantsWatch
from engine_ext.ranks import GroupRanks, Ranks
from engine_ext.rebuild import LoadingStates, make_twin
from engine_ext.receiver import (
    AdapterReceivers,
    LoadedModel,
    Rebuilding,
    Receiver,
    make_receiver,
)
from engine_ext.repacks import RepackLearner
from engine_ext.replicas import among_replicas
from engine_ext.tracing import LoadingTrace, LoadWeights


def attach_receiver(worker: Any, chosen: settings.Settings) -> None:
    """Wrap a worker's methods so that it makes its receiver when it has loaded its model.

    The worker also gets the methods that the front end calls by name: `delta_updates`, and
    `delta_buffer_checksums` for tests of the engine's state. Call it at the end of its constructor.
    """
    from vllm.model_executor.model_loader import base_loader

    original_load, sleep_now, wake_up_now = worker.load_model, worker.sleep, worker.wake_up
    discarded: list[int] = []

    def load_model(*args: Any, **kwargs: Any) -> None:
        if chosen.keep_plain:
            _keep_checkpoint_layout()
        watch = ConstantsWatch(base_loader, "initialize_model")
        loading, reads = LoadingTrace(), _reads(worker.vllm_config)
        states = LoadingStates(chosen.shadow_bytes, moved_too=not reads)

        def trace(model: torch.nn.Module) -> None:
            config, twin = worker.vllm_config, make_twin(model, states.states)
            loading.trace(twin, _loader(twin, config), _reader(model, config), active_wrapper)

        with contextlib.ExitStack() as hooks:
            hooks.enter_context(online_processing(states.keep))
            hooks.enter_context(constants_kept())
            learner = hooks.enter_context(repack_learner(trace, states))
            constants = hooks.enter_context(watch)
            original_load(*args, **kwargs)
        worker.delta_receiver = build_receiver(worker, chosen, learner, constants, loading, states)

    def sleep(level: int = 1) -> None:
        worker.delta_receiver.weights_released()
        if level > 1:
            # Level 2 discards the weights; what wakes up is of no version.
            worker.delta_receiver.weights_replaced("vLLM's sleep at level 2")
            discarded.append(level)
        sleep_now(level)

    def wake_up(tags: list[str] | None = None) -> None:
        wake_up_now(tags)
        if tags is None or "weights" in tags:
            if discarded:  # the places of LoRA adapters, too
                worker.model_runner.reset_lora_state()
                discarded.clear()
            worker.delta_receiver.set_asleep(False)

    def delta_updates(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = worker.delta_receiver.handle(operation, arguments)
        return answer

    worker.load_model = load_model
    worker.sleep, worker.wake_up = sleep, wake_up
    for name in ("reload_weights", "update_weights", "finish_weight_update", "reset_weights"):
        setattr(worker, name, _reporting(worker, name))
    if not hasattr(worker, "delta_updates"):  # a patched vLLM has the method in its own source
        worker.delta_updates = delta_updates
    worker.delta_buffer_checksums = functools.partial(buffer_checksums, worker)


def _reporting(worker: Any, name: str) -> Callable[..., Any]:
    """Wrap a method that changes weights, so that the receiver knows before it runs."""
    original: Callable[..., Any] = getattr(worker, name)

    @functools.wraps(original)
    def replace(*args: Any, **kwargs: Any) -> Any:
        worker.delta_receiver.weights_replaced(f"vLLM's {name}")
        return original(*args, **kwargs)

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
    learner: RepackLearner,
    constants: ConstantsWatch,
    loading: LoadingTrace,
    states: LoadingStates,
) -> Receiver | AdapterReceivers:
    """Trace and certify a worker's model and make its receiver, and what makes its adapters'.

    The worker has loaded its model, observed by `learner`, `constants` and `loading`, and has no KV
    cache yet.

    Raises:
        RuntimeError: nothing can be certified. vLLM does not start then.
    """

    config = worker.vllm_config
    parallel = config.parallel_config
    if parallel.nnodes > 1 or parallel.enable_eplb:  # EPLB moves experts between the ranks
        raise RuntimeError("delta updates do not work with several hosts or EPLB yet")
    model = worker.model_runner.get_model()
    if config.lora_config is not None:
        model = without_lora(model)
    loaded = LoadedModel(
        model=model,
        load_weights=_loader(model, config),
        checkpoint=_reader(model, config),
        # The class's method: the worker's own is wrapped by `_reporting`.
        reload=lambda w: type(worker).reload_weights(worker, weights_iterator=iter(w)),
        ranks=_ranks(parallel),
        repacks=learner.repacks,
        refusals={**learner.refusals, **copied_on_first_use(model)},
        learned=learner.complete,
        constants=constants.known,
        recomputations=recomputations(model, config),
        refuse_while=active_wrapper,
        loading=loading,
        rebuilding=Rebuilding(
            states=states,
            loader=lambda twin: _loader(twin, config),
            context=lambda: processing_context(config, worker.device),
            probe=probe,
        ),
    )
    receiver = make_receiver(loaded, chosen)
    if config.lora_config is None or replicas.count() > 1:  # replicas load adapters on their own
        return receiver
    adapters = LoadedAdapters(worker.model_runner.lora_manager)
    return AdapterReceivers(receiver, adapters, loaded.ranks, chosen)


def _ranks(parallel: Any) -> Ranks:
    """Return the ranks of this worker's replica, or of all if the server has several.

    Raises:
        RuntimeError: the replicas share experts.
    """
    from vllm.distributed.parallel_state import get_world_group

    if parallel.data_parallel_size > 1:
        # vLLM makes replicas of dense models independent.
        raise RuntimeError(
            "--enable-delta-updates does not work with --data-parallel-size and a mixture of "
            "experts yet: the experts' places over all replicas are not proven"
        )
    return among_replicas(parallel.data_parallel_index, GroupRanks(get_world_group().cpu_group))


def _reader(
    model: torch.nn.Module, config: Any
) -> Callable[[], Iterable[tuple[str, torch.Tensor]]] | None:
    """Return what reads the loaded checkpoint, or None if there is none."""
    return functools.partial(checkpoint, model, config) if _reads(config) else None


def _reads(config: Any) -> bool:
    """Return whether the load format reads a checkpoint's tensors one by one."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return isinstance(get_model_loader(config.load_config), DefaultModelLoader)


def checkpoint(model: torch.nn.Module, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors as vLLM's own loader reads them, on the CPU."""
    from vllm.model_executor.model_loader import get_model_loader

    loader: Any = get_model_loader(dataclasses.replace(config.load_config, use_tqdm_on_load=False))
    weights: Iterator[tuple[str, torch.Tensor]] = loader.get_all_weights(config.model_config, model)
    return weights


def _loader(model: Any, config: Any) -> LoadWeights:
    from vllm.config import set_current_vllm_config

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        with set_current_vllm_config(config):
            return model.load_weights(weights)

    return load_weights


def buffer_checksums(worker: Any) -> dict[str, str]:
    """Return the SHA-256 of every registered buffer, keyed like vLLM's weight checksums.

    Also of the slots of LoRA adapters, which vLLM does not register.
    """
    prefix, model = worker._weight_checksum_prefix(), worker.model_runner.get_model()
    buffers = dict(model.named_buffers())
    for path, module in model.named_modules():
        for slots in ("lora_a_stacked", "lora_b_stacked"):
            for number, tensor in enumerate(vars(module).get(slots, ())):
                buffers[f"{path}.{slots}.{number}"] = tensor
    return {
        prefix + name: hashlib.sha256(
            buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        ).hexdigest()
        for name, buffer in buffers.items()
        if buffer.numel() and not buffer.is_meta
    }
