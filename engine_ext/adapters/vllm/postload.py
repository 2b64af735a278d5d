"""Tensors that vLLM computes from the weights after loading: repacked and derived ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine_ext.model import Known, is_default
from engine_ext.startup import (
    BeforeProcessing,
    Processing,
    Recomputation,
    RepackLearner,
    UnprocessedModules,
    apply_to_rows,
    probe_linear,
)


def repack_learner(
    before: BeforeProcessing | None = None,
    states: UnprocessedModules | None = None,
) -> RepackLearner:
    """Return a learner of vLLM's post-load processing; use it around `load_model`."""
    from vllm.model_executor.model_loader import base_loader

    return RepackLearner(
        *(base_loader, "process_weights_after_loading", _processings, before),
        keep=None if states is None else states.keep,
        keep_moved=states is not None and states.moved_too,
    )


@contextlib.contextmanager
def online_processing(states: UnprocessedModules) -> Iterator[None]:
    """Keep each module that vLLM quantises while it loads, just before it does.

    One that does not fit is refused: its tensors are not updated.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.reload import layerwise

    def keeping(original: Callable[..., None]) -> Callable[..., None]:
        def process(*args: Any) -> None:
            layer = args[-2]  # the last one is what vLLM records of it
            method = getattr(layer, "quant_method", None)
            if method is None:
                original(*args)
                return
            process_now = method.process_weights_after_loading

            def keep_and_process(module: Any) -> None:
                del method.process_weights_after_loading
                processing = Processing(module, method, _process_copy)
                why_not = states.keep(processing, False)
                if why_not is not None:
                    states.refuse(processing, why_not)
                process_now(module)

            method.process_weights_after_loading = keep_and_process
            original(*args)

        return process

    places = [(layerwise, "_layerwise_process"), (DummyModelLoader, "_process_online_quant_layer")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, keeping(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


@contextlib.contextmanager
def constants_kept() -> Iterator[None]:
    """Keep buffers, and what the constructor has filled with one number, from dummy weights.

    Scales and zero points that a checkpoint can omit have such defaults, and no checkpoint has the
    buffers that a constructor computes.
    """
    from vllm.model_executor.model_loader import dummy_loader

    original = dummy_loader.initialize_single_dummy_weight

    def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensor, torch.nn.Parameter) and not is_default(tensor):
            original(tensor, *args, **kwargs)

    dummy_loader.initialize_single_dummy_weight = initialize
    try:
        yield
    finally:
        dummy_loader.initialize_single_dummy_weight = original


def probe(module: torch.nn.Module) -> torch.Tensor | None:
    """Return the outputs of a linear layer or an output head for random rows; None for others."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layer: Any = module
    if isinstance(module, LinearBase):
        return probe_linear(layer)
    if isinstance(module, VocabParallelEmbedding):
        return apply_to_rows(layer, layer.embedding_dim, layer.params_dtype)
    return None


def copied_on_first_use(model: torch.nn.Module) -> dict[str, str]:
    """Return, by name, why tensors cannot be updated that vLLM copies, where no search sees it.

    These are router gates that are fused with the gate of a shared expert; the coefficients of a
    learned rotary table, whose buffer is there before; and what FlashInfer keeps on attention
    layers that are processed anew if the scales of their KV cache change: sinks, and on Blackwell
    the scale of the output projection's inputs.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    copied, scales = list[Any](), list[str]()
    for path, module in model.named_modules():
        layer: Any = module
        if getattr(layer, "_fse_fuse_gate", False):
            copied += [*layer.gate.parameters(), *layer.shared_expert_gate.parameters()]
        if type(layer).__name__ == "FourierRotaryEmbedding":
            copied += [layer.cos_coef, layer.sin_coef]
        if hasattr(layer, "_o_scale_float") and _fuses_quantisation(getattr(layer, "impl", None)):
            scales += _input_scales(model, path.rpartition(".")[0])
    copied += _sinks_copies(model).values()
    why = "vLLM keeps a copy of it from its first forward pass on"
    found = [*(names[id(one)] for one in copied if id(one) in names), *scales]
    return dict.fromkeys(found, why)


def with_sinks_copies(known: Known, model: torch.nn.Module) -> Known:
    """Return a function that also knows copies of sinks; `copied_on_first_use` refuses these."""
    copies = _sinks_copies(model).keys()
    return lambda path, tensor: path in copies or known(path, tensor)


def _sinks_copies(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the model's sinks that attention layers with a quant method copy, by the copy's path.

    The search finds a copy of anything that is no parameter of the model, and so has no name.
    """
    found, named = {}, {id(parameter) for parameter in model.parameters()}
    for path, layer in model.named_modules():
        impl: Any = getattr(layer, "impl", None)
        sinks: Any = getattr(impl, "_sinks_source", None)
        if id(sinks) in named and impl.sinks is not sinks and _has_method(layer):
            found[f"{path}.impl.sinks"] = sinks
    return found


def _fuses_quantisation(impl: Any) -> bool:
    """Return whether FlashInfer's attention can quantise its outputs, by a number on its layer."""
    if type(impl).__name__ != "FlashInferImpl":
        return False
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8StaticTensorSym,
        kNvfp4Dynamic,
    )

    return any(map(impl.fused_output_quant_supported, (kFp8StaticTensorSym, kNvfp4Dynamic)))


def _input_scales(model: torch.nn.Module, block: str) -> list[str]:
    """Return the names of the input scales of an attention block's output projections.

    Processing can have replaced them; a sync is refused by their names before that.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    return [
        f"{block}.{path}.{name}".lstrip(".")
        for path, linear in model.get_submodule(block).named_modules()
        if isinstance(linear, RowParallelLinear)
        and not isinstance(linear.quant_method, UnquantizedLinearMethod)
        for name in ("input_scale", "input_global_scale")
    ]


def processing_context(config: Any, device: torch.device) -> contextlib.ExitStack:
    """Return the context in which vLLM's loader processes a module."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    stack = contextlib.ExitStack()
    stack.enter_context(set_current_vllm_config(config))
    stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
    stack.enter_context(device)
    return stack


def recomputations(model: torch.nn.Module, config: Any) -> list[Recomputation]:
    """Return vLLM's own function for every attention layer that it processes after loading.

    Layers whose processing gathers from other ranks (replicated decode queries) are left out:
    not every rank would run it equally often. Nothing is run yet.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return [
        Recomputation((path,), functools.partial(_process, module, config))
        for path, module in model.named_modules()
        if is_deferred_attention_layer(module) and not getattr(module, "dcp_q_replicate", False)
    ]


def _processings(
    model: torch.nn.Module, model_config: Any, *args: Any, **kwargs: Any
) -> Iterator[Processing]:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    packed = {
        id(part) for module in model.modules() if _packs_parts(module) for part in module.modules()
    }
    for module in model.modules():
        if _has_method(module) and id(module) not in packed:
            yield Processing(module, module.quant_method, _process_copy)
        if _packs_parts(module):
            yield Processing(
                module, module, functools.partial(_process_whole, dtype=model_config.dtype)
            )
        elif is_deferred_attention_layer(module):
            # An attention layer's own tensors can be recomputed, see `recomputations`.
            yield Processing(
                module,
                module,
                lambda copy: copy.process_weights_after_loading(model_config.dtype),
                recomputed=True,
            )


def _has_method(module: Any) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)


def _packs_parts(module: torch.nn.Module) -> bool:
    """Return whether a layer packs the weights of the layers in it, and drops them.

    MLA does so on CPUs with AMX. Elsewhere it leaves the weights, and might keep what it computed.
    """
    return bool(getattr(module, "is_amx_bmm_enabled", False))


def _process_copy(copy: Any) -> None:
    copy.quant_method.process_weights_after_loading(copy)


def _process_whole(copy: Any, *, dtype: torch.dtype) -> None:
    """Process the layers in an attention layer, and then itself, as vLLM's loader does."""
    for part in copy.modules():
        if _has_method(part):
            _process_copy(part)
    copy.process_weights_after_loading(dtype)


def _process(layer: Any, config: Any) -> None:
    """Process one attention layer as vLLM's loader does."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        layer.process_weights_after_loading(dtype)
