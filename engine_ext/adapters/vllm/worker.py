"""vLLM's worker side: a receiver in every worker, made right after the model is loaded."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from engine_ext import settings
from engine_ext.adapters.vllm.layerwise_reload import active_wrapper
from engine_ext.adapters.vllm.postload import repack_learner
from engine_ext.adapters.vllm.recomputations import recomputations
from engine_ext.model.constants import ConstantsWatch
from engine_ext.receiver.receiver import Receiver
from engine_ext.receiver.startup import LoadedModel, make_receiver
from engine_ext.repacks.load_hook import RepackLearner
from engine_ext.tracing.trace import LoadWeights


def attach_receiver(worker: Any, chosen: settings.Settings) -> None:
    """Give one worker its receiver, once it has loaded its model, and the methods that the front
    end calls by name.

    Args:
        worker: is about to end its constructor.
        chosen: the user's flags.
    """
    from vllm.model_executor.model_loader import base_loader

    load_model, sleep, wake_up = worker.load_model, worker.sleep, worker.wake_up

    def loaded(*args: Any, **kwargs: Any) -> None:
        _keep_checkpoint_layout()
        watch = ConstantsWatch(base_loader, "initialize_model")
        with repack_learner() as learner, watch as constants:
            load_model(*args, **kwargs)
        worker.delta_receiver = build_receiver(worker, chosen, learner, constants)

    def slept(level: int = 1) -> None:
        worker.delta_receiver.weights_released()
        if level > 1:
            # Level 2 throws the weights away; what wakes up is not what any version was.
            worker.delta_receiver.weights_replaced("vLLM's sleep at level 2")
        sleep(level)

    def woken(tags: list[str] | None = None) -> None:
        wake_up(tags)
        if tags is None or "weights" in tags:
            worker.delta_receiver.state.asleep = False

    def updates(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = worker.delta_receiver.handle(operation, arguments)
        return answer

    worker.load_model = loaded
    worker.sleep, worker.wake_up = slept, woken
    for name in ("reload_weights", "update_weights", "finish_weight_update", "reset_weights"):
        setattr(worker, name, _noted(worker, name))
    if not hasattr(worker, "delta_updates"):  # a patched vLLM has the method in its own source
        worker.delta_updates = updates
    worker.delta_buffer_checksums = functools.partial(buffer_checksums, worker)


def _noted(worker: Any, name: str) -> Callable[..., Any]:
    """The worker's method, which changes weights; the receiver learns of it before it does."""
    original: Callable[..., Any] = getattr(worker, name)

    @functools.wraps(original)
    def replace(*args: Any, **kwargs: Any) -> Any:
        worker.delta_receiver.weights_replaced(f"vLLM's {name}")
        return original(*args, **kwargs)

    return replace


def _keep_checkpoint_layout() -> None:
    """On CPU, keep linear weights where the checkpoint's elements can be found.

    vLLM otherwise packs them into opaque oneDNN or SGL handles and leaves empty tensors behind.
    """
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
    worker: Any, chosen: settings.Settings, learner: RepackLearner, constants: ConstantsWatch
) -> Receiver:
    """Trace and certify the worker's model and make its receiver.

    Args:
        worker: has loaded its model, but allocated no KV cache.
        chosen: the user's flags.
        learner: what it learned while the model was loaded.
        constants: what it saw meanwhile.

    Raises:
        RuntimeError: nothing can be certified. vLLM then does not start.
    """
    config = worker.vllm_config
    parallel = config.parallel_config
    several = (parallel.data_parallel_size, parallel.pipeline_parallel_size, parallel.nnodes)
    if max(several) > 1 or parallel.enable_eplb:
        raise RuntimeError(
            "delta updates do not work with data or pipeline parallel, several hosts, or experts "
            "that move between the ranks (EPLB) yet"
        )
    model = worker.model_runner.get_model()
    loaded = LoadedModel(
        model=model,
        load_weights=_loader(model, config),
        checkpoint=functools.partial(checkpoint, model, config) if _reads(config) else None,
        # The class's: the worker's own tells the receiver that somebody else has loaded weights.
        reload=lambda w: type(worker).reload_weights(worker, weights_iterator=iter(w)),
        ranks=WorldRanks(),
        repacks=learner.repacks,
        refusals=learner.refusals,
        learned=learner.complete,
        constants=constants.known,
        recomputations=recomputations(model, config),
        refuse_while=active_wrapper,
    )
    return make_receiver(loaded, chosen)


def _reads(config: Any) -> bool:
    """Whether the load format reads a checkpoint's tensors one by one."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return isinstance(get_model_loader(config.load_config), DefaultModelLoader)


def checkpoint(model: torch.nn.Module, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors as vLLM's own loader reads them, on the CPU."""
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
    """sha256 of every registered buffer of the model, keyed like vLLM's weight checksums."""
    prefix = worker._weight_checksum_prefix()
    return {
        prefix + name: hashlib.sha256(
            buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        ).hexdigest()
        for name, buffer in worker.model_runner.get_model().named_buffers()
        if buffer.numel() and not buffer.is_meta
    }


class WorldRanks:
    """All ranks of the engine, over the CPU group that vLLM keeps."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_world_group

        self._group = get_world_group()
        self.rank = int(self._group.rank_in_group)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        if self._group.world_size == 1:
            return [value]
        values: list[Any] = [None] * self._group.world_size
        torch.distributed.all_gather_object(values, value, group=self._group.cpu_group)
        return values
