"""The draft model of vLLM's speculative decoding, which is updated together with the target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine_ext.adapters import target_and_draft
from engine_ext.adapters.refusals import Refusal
from engine_ext.adapters.target_and_draft import DRAFT, PREFIX, TARGET
from engine_ext.adapters.vllm import refusals
from engine_ext.ranks import replicas

_NO_WEIGHTS: Final = ("ngram", "ngram_gpu", "suffix")
_FOLLOWED: Final = ("draft_model", "eagle", "mtp")
_NOT_FOLLOWED: Final = ("gemma4_mtp", "step3p5_mtp", "step5_mtp")


@dataclass(frozen=True, slots=True)
class ModelRole(target_and_draft.ModelRole):
    """A model that a worker loads.

    Attributes:
        model_config, load_config: vLLM's.
    """

    model_config: Any
    load_config: Any


def roles(config: Any) -> list[ModelRole]:
    """Return the models that a worker loads and that syncs must reach, in the order of loading.

    Raises:
        RuntimeError: syncs might not reach all weights of the draft model. vLLM does not start
            then.
    """
    speculative, target = config.speculative_config, config.model_config
    if speculative is None or speculative.method in _NO_WEIGHTS:
        return [ModelRole("", "", True, target, config.load_config)]
    refusal = _unsupported(config, speculative)
    if refusal is not None:
        raise RuntimeError(refusal.message)
    first = ModelRole(TARGET, "", True, target, config.load_config)
    draft = speculative.draft_model_config
    if (draft.model, draft.revision) == (target.model, target.revision):
        return [first, ModelRole(DRAFT, "", False, target, config.load_config)]
    return [first, ModelRole(DRAFT, PREFIX, True, draft, _load_config(config))]


def _unsupported(config: Any, speculative: Any) -> Refusal | None:
    if speculative.method not in _FOLLOWED:
        return refusals.DRAFT_METHOD
    if _architecture(speculative) in _NOT_FOLLOWED:
        return refusals.DRAFT_ARCHITECTURE
    if getattr(speculative, "draft_lm_head_quantization", None) is not None:  # since 0.33
        return refusals.DRAFT_HEAD
    if speculative.parallel_drafting:
        return refusals.DRAFT_IN_PARALLEL
    if speculative.draft_model_config.dtype != config.model_config.dtype:
        return refusals.DRAFT_DTYPE
    if config.lora_config is not None:
        return refusals.DRAFT_WITH_LORA
    if config.parallel_config.pipeline_parallel_size > 1:
        return refusals.DRAFT_WITH_STAGES
    if replicas.count() > 1:
        return refusals.DRAFT_WITH_REPLICAS
    return None


def _architecture(speculative: Any) -> str | None:
    name: str | None = getattr(speculative.draft_model_config.hf_config, "model_type", None)
    return name


def _load_config(config: Any) -> Any:
    """Return how vLLM loads the draft model."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    if config.speculative_config.method == "draft_model":
        return config.load_config
    return get_draft_load_config(config)


def always_shares(draft: torch.nn.Module) -> bool:
    """Return whether a draft model shares the same tensors with the target whatever the weights.

    vLLM lets an EAGLE head that has an embedding or output head of its own share the target's
    while they are equal.
    """
    flags = ("has_own_embed_tokens", "has_own_lm_head")
    return not any(getattr(draft, flag, False) for flag in flags)


@contextlib.contextmanager
def around_load(runner: Any, hooks: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a context while a model runner's drafter loads its model, inside of this block."""
    drafter = getattr(runner, "drafter", None) or runner.speculator
    original = drafter.load_model

    def load_model(*args: Any, **kwargs: Any) -> None:
        with hooks:
            original(*args, **kwargs)

    drafter.load_model = load_model
    try:
        yield
    finally:
        del drafter.load_model
