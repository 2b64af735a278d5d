"""How vLLM reads a checkpoint and loads it into a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine_ext.adapters.vllm import refusals
from engine_ext.adapters.vllm.draft import ModelRole
from engine_ext.adapters.vllm.layerwise_reload import active_wrapper
from engine_ext.adapters.vllm.postload import constants_kept, repack_learner
from engine_ext.startup import CheckpointReader, LoadWeights

_COLLECTIVE: Final = ("fastsafetensors", "instanttensor")


@functools.cache
def register_load_format(name: str) -> None:
    """Let vLLM know a load format that reads a checkpoint as ``auto`` does; once per process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class AutoLoader(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: Any) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="auto"))

    register_model_loader(name)(AutoLoader)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How a worker loads one model; see `engine_ext.adapters.observer.EngineLoad`.

    Attributes:
        config: vLLM's, of the worker.
    """

    role: ModelRole
    config: Any

    constants_kept = staticmethod(constants_kept)
    learner = staticmethod(repack_learner)

    def constructor(self) -> tuple[Any, str]:
        from vllm.model_executor.model_loader import base_loader

        return base_loader, "initialize_model"

    def check(self, model: torch.nn.Module) -> None:
        if getattr(model, "_expert_substitutions", None) is not None:  # since 0.33
            raise RuntimeError(refusals.EXPERT_SUBSTITUTION.message)

    def reader(self, model: torch.nn.Module) -> CheckpointReader | None:
        reads = reads_checkpoint(self.role)
        return functools.partial(checkpoint, model, self.role) if reads else None

    def load_function(self, model: Any) -> LoadWeights:
        return load_function(model, self.config)

    def refuse_while(self, model: torch.nn.Module) -> str | None:
        return active_wrapper(model)


def reads_checkpoint(config: Any) -> bool:
    """Return whether the load format reads a checkpoint's tensors one by one.

    Takes a `ModelRole`, or a configuration of vLLM.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return isinstance(get_model_loader(config.load_config), DefaultModelLoader)


def checkpoint(model: torch.nn.Module, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors as vLLM's own loader reads them, on the CPU.

    The formats whose readers need all ranks at once read the same files as ``safetensors``.

    Args:
        config: a `ModelRole`, or a configuration of vLLM.
    """
    from vllm.model_executor.model_loader import get_model_loader

    load_config = dataclasses.replace(config.load_config, use_tqdm_on_load=False)
    if load_config.load_format in _COLLECTIVE:
        load_config = dataclasses.replace(load_config, load_format="safetensors")
    loader: Any = get_model_loader(load_config)
    weights: Iterator[tuple[str, torch.Tensor]] = loader.get_all_weights(config.model_config, model)
    return weights


def load_function(model: Any, config: Any) -> LoadWeights:
    """Return vLLM's function that loads checkpoint tensors into a model."""
    from vllm.config import set_current_vllm_config

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        with set_current_vllm_config(config):
            return model.load_weights(weights)

    return load_weights
