"""What SGLang loads in one rank: the target, and its draft model if it has one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from engine_ext.adapters.sglang.postload import constants_kept, repack_learner
from engine_ext.adapters.target_and_draft import Part, TargetAndDraft, read
from engine_ext.model import ConstantsWatch
from engine_ext.startup import LoadingStates, LoadingTrace, LoadWeights

_COLLECTIVE: Final = ("fastsafetensors", "instanttensor")

Reader = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class Observed:
    """Context manager in which a runner loads its model.

    Attributes:
        learner, constants: of its loading.
    """

    def __init__(
        self, part: Part, runner: Any, loading: LoadingTrace, states: LoadingStates
    ) -> None:
        self.part, self.runner = part, runner
        self._loading, self._states = loading, states
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Observed:
        from sglang.srt.model_loader import loader

        self._hooks.enter_context(constants_kept())
        self.learner = self._hooks.enter_context(repack_learner(self._trace, self._states))
        # It keeps the function that it finds, which is the learner's by now.
        watch = ConstantsWatch(loader, "_initialize_model")
        self.constants = self._hooks.enter_context(watch)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _trace(self, model: torch.nn.Module) -> None:
        """Trace the loader of the model, which is not processed yet."""
        part, reader = self.part, checkpoint(self.runner, model)
        self._states.moved_too = reader is None
        load = load_function(self.runner, model)
        self._loading.trace(model, load, reader, path=part.path, prefix=part.prefix)

    def known(self, path: str, tensor: torch.Tensor) -> bool:
        """Return `ConstantsWatch.known`, by the path in the receiver's model."""
        return self.constants.known(self.part.inside(path), tensor)


def load_format(runner: Any) -> str:
    """Return the name of the format that a runner loads its model from."""
    found = runner.load_config.load_format
    return str(getattr(found, "value", found))


def checkpoint(runner: Any, model: torch.nn.Module) -> Reader | None:
    """Return what reads the loaded checkpoint's tensors on the CPU, or None if there is none.

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


def checkpoints(observed: Sequence[Observed]) -> Reader | None:
    """Return what reads the checkpoints of all models, or None if one has none."""
    readers = [checkpoint(one.runner, one.runner.model) for one in observed]
    if None in readers:
        return None
    parts = [one.part for one in observed]
    return lambda: read(parts, [reader() for reader in readers if reader is not None])


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
