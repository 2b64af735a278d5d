"""How SGLang reads a checkpoint and loads it into a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine_ext.adapters.observer import ModelLoadObserver
from engine_ext.adapters.sglang.postload import constants_kept, repack_learner
from engine_ext.adapters.target_and_draft import ModelRole, TargetAndDraft
from engine_ext.startup import (
    CheckpointReader,
    LoadingTrace,
    LoadWeights,
    UnprocessedModules,
)

_COLLECTIVE: Final = ("fastsafetensors", "instanttensor")


@dataclass(frozen=True, slots=True)
class RunnerLoad:
    """How a runner loads its model; see `engine_ext.adapters.observer.EngineLoad`.

    Attributes:
        runner: SGLang's.
    """

    role: ModelRole
    runner: Any

    constants_kept = staticmethod(constants_kept)
    learner = staticmethod(repack_learner)

    def constructor(self) -> tuple[Any, str]:
        from sglang.srt.model_loader import loader

        return loader, "_initialize_model"

    def check(self, model: torch.nn.Module) -> None:
        """Accept every model: what SGLang cannot update is refused elsewhere."""

    def reader(self, model: torch.nn.Module) -> CheckpointReader | None:
        return checkpoint(self.runner, model)

    def load_function(self, model: Any) -> LoadWeights:
        return load_function(self.runner, model)

    def refuse_while(self, model: torch.nn.Module) -> str | None:
        return None  # SGLang wraps no loaders


Observer = ModelLoadObserver[RunnerLoad]


def observer_of(
    role: ModelRole, runner: Any, loading: LoadingTrace, states: UnprocessedModules
) -> Observer:
    """Return the context in which a runner loads its model."""
    return ModelLoadObserver(RunnerLoad(role, runner), loading, states)


def load_format(runner: Any) -> str:
    """Return the name of the format that a runner loads its model from."""
    found = runner.load_config.load_format
    return str(getattr(found, "value", found))


def checkpoint(runner: Any, model: torch.nn.Module) -> CheckpointReader | None:
    """Return a reader of the loaded checkpoint's tensors on the CPU, or None if there is none.

    The formats whose readers need all ranks at once, or whose tensors are gone after the reading,
    read the same files as ``safetensors``.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    load_config = runner.load_config
    if load_format(runner) in _COLLECTIVE:
        plain = {"load_format": "safetensors", "model_loader_extra_config": {}}
        load_config = dataclasses.replace(load_config, **plain)
    # While it loads its model, the runner has not got the loader yet.
    loader: Any = get_model_loader(load_config, runner.model_config)
    reads = isinstance(loader, DefaultModelLoader)
    return (lambda: loader._get_all_weights(runner.model_config, model)) if reads else None


def load_function(runner: Any, model: Any) -> LoadWeights:
    """Return SGLang's function that loads a model, which renames some formats' tensors first."""
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    device = torch.device(runner.device)

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        both = isinstance(model, TargetAndDraft)
        with set_default_torch_dtype(runner.model_config.dtype):
            for one, own in model.split(weights) if both else [(model, weights)]:
                DefaultModelLoader.load_weights_only(one, own, device)

    return load_weights


def reload(runner: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights into the running model as SGLang's own disk updates do.

    Only an engine without a checkpoint is loaded so, which has no draft model.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    device = torch.device(runner.device)
    with set_default_torch_dtype(runner.model_config.dtype):
        DefaultModelLoader.restore_weights_before_loading(runner.model, device)
        DefaultModelLoader.load_weights_and_postprocess(runner.model, iter(weights), device)
