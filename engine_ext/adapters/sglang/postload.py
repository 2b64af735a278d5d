"""Tensors that SGLang computes from the weights after loading: repacked and derived ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from engine_ext.model import PROCESSING, is_default
from engine_ext.startup import (
    BeforeProcessing,
    Processing,
    Recomputation,
    RepackLearner,
    UnprocessedModules,
    probe_linear,
)


@contextlib.contextmanager
def repack_learner(before: BeforeProcessing, states: UnprocessedModules) -> Iterator[RepackLearner]:
    """Learn SGLang's post-load processing; use it around the loading of a model.

    Most of SGLang's loaders process a model by a function that they share. Those for dummy weights
    and some formats call the modules' quant methods themselves; the first call is preceded then.

    Args:
        before: called with the model before it is processed, see `RepackLearner`.
        states: keeps what cannot be followed; `before` can still set its `moved_too`.
    """
    from sglang.srt.model_loader import loader

    watched: list[Any] = []
    make_now = loader._initialize_model

    def unwatch() -> None:
        while watched:
            vars(watched.pop()).pop(PROCESSING, None)

    def learn_now(model: torch.nn.Module) -> AbstractSet[str]:
        unwatch()  # the learner copies the quant methods
        filled = before(model)
        learner.keep_moved = states.moved_too
        return filled

    owner, name = loader.DefaultModelLoader, "postprocess_weights"
    learner = RepackLearner(owner, name, _processings, learn_now, states.keep)

    @functools.wraps(make_now)
    def make_model(*args: Any, **kwargs: Any) -> Any:
        model = make_now(*args, **kwargs)
        for _, method in loader._modules_with_quant_method(model):
            if PROCESSING not in vars(method):
                watched.append(method)
                setattr(method, PROCESSING, _preceded(method, lambda: learner.learn(model)))
        return model

    loader._initialize_model = make_model
    try:
        with learner:
            yield learner
    finally:
        loader._initialize_model = make_now
        unwatch()


def _preceded(method: Any, run: Callable[[], None]) -> Callable[[Any], None]:
    """Return a quant method's processing, after a call of `run`."""
    process = method.process_weights_after_loading

    def run_and_process(module: Any) -> None:
        run()
        process(module)

    return run_and_process


@contextlib.contextmanager
def constants_kept() -> Iterator[None]:
    """Keep buffers, and what the constructor has filled with one number, from dummy weights."""
    from sglang.srt.model_loader import loader

    original = loader.initialize_dummy_weights

    def initialize(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        constants = [*model.buffers(), *filter(is_default, model.parameters())]
        kept = [(one, one.clone()) for one in constants]
        original(model, *args, **kwargs)
        with torch.no_grad():
            for tensor, default in kept:
                tensor.copy_(default)

    loader.initialize_dummy_weights = initialize
    try:
        yield
    finally:
        loader.initialize_dummy_weights = original


def probe(module: torch.nn.Module) -> torch.Tensor | None:
    """Return a linear layer's outputs for random rows; None for other modules."""
    from sglang.srt.layers.linear import LinearBase

    return probe_linear(module) if isinstance(module, LinearBase) else None


def processing_context(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which SGLang's loader processes a model of this dtype."""
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    context: contextlib.AbstractContextManager[Any] = set_default_torch_dtype(dtype)
    return context


def recomputations(model: torch.nn.Module) -> list[Recomputation]:
    """Return SGLang's own function for every layer with latent attention (MLA); runs nothing.

    Only models that load as DeepSeek-V2 does have one.
    """
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin

    found = []
    for path, loader in model.named_modules():
        if not isinstance(loader, DeepseekV2WeightLoaderMixin):
            continue
        for name, _ in loader.named_modules():
            if name.endswith(".self_attn.kv_b_proj"):
                # The loader finds the layer by the name of the weight.
                run = functools.partial(loader.post_load_weights, weight_names=[f"{name}.weight"])
                attention = f"{path}.{name.removesuffix('.kv_b_proj')}".lstrip(".")
                found.append(Recomputation((attention,), run))
    return found


def _processings(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[Processing]:
    from sglang.srt.model_loader.loader import _modules_with_quant_method

    for module, method in _modules_with_quant_method(model):
        yield Processing(module, method, _process_copy)


class _RecordingDispatcher:
    """Replaces the live dispatcher in a copy of an experts module.

    Attributes:
        quant_config: the configuration that processing has set, or None.
    """

    def __init__(self, dispatcher: Any) -> None:
        self.quant_config: dict[str, Any] | None = None
        self._dispatcher = dispatcher

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        self.quant_config = quant_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)


def _process_copy(copy: Any) -> None:
    """Process a copy of a module without changing the dispatcher that it shares with the live one.

    Raises:
        RuntimeError: the live dispatcher has another configuration.
    """
    dispatcher = getattr(copy, "dispatcher", None)
    if dispatcher is None:
        copy.quant_method.process_weights_after_loading(copy)
        return
    copy.dispatcher = recording = _RecordingDispatcher(dispatcher)
    copy.quant_method.process_weights_after_loading(copy)
    copy.dispatcher = dispatcher
    known = dispatcher.quant_config  # empty before the live module is processed
    if known and recording.quant_config is not None and recording.quant_config != known:
        raise RuntimeError("processing sets another quant_config of the dispatcher than before")
