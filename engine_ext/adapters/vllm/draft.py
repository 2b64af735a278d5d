"""The draft model of speculative decoding, which is updated together with the target.

The receiver sees both models as one (`TargetAndDraft`): a sync is one transaction of one version
over both. If the draft model has a checkpoint of its own, its tensors are sent with `PREFIX` before
their names. If it reads the target's checkpoint, as MTP layers do, they have their names there, and
both loaders get every tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from engine_ext import replicas
from engine_ext.adapters.refusals import Refusal
from engine_ext.adapters.vllm import refusals

PREFIX: Final = "draft."
# The places of both models in `TargetAndDraft`.
TARGET: Final = "target"
DRAFT: Final = "draft"

_T = TypeVar("_T")

_NO_WEIGHTS: Final = ("ngram", "ngram_gpu", "suffix")
_FOLLOWED: Final = ("draft_model", "eagle", "mtp")


class TargetAndDraft(torch.nn.Module):
    """Both models, as they are, with one loader.

    Args:
        prefix: what the names of the draft model's tensors begin with; empty if they are names of
            the target's checkpoint.

    Attributes:
        dropped: names of the tensors that the draft model's loader is not given.
    """

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module, prefix: str) -> None:
        super().__init__()
        self.target, self.draft = target, draft
        self.dropped: set[str] = set()
        self._prefix = prefix

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give each tensor to the loader of its model; to both loaders if there is no prefix."""
        pairs, prefix = list(weights), self._prefix
        kept = ((n, t) for n, t in pairs if n not in self.dropped)
        of_draft = [(n.removeprefix(prefix), t) for n, t in kept if n.startswith(prefix)]
        of_target = [pair for pair in pairs if not (prefix and pair[0].startswith(prefix))]
        models: tuple[Any, ...] = (self.target, self.draft)
        for model, own in zip(models, (of_target, of_draft), strict=True):
            if own:  # some loaders fail, or fill in, if they are given nothing
                model.load_weights(iter(own))

    def shared(self) -> list[str]:
        """Return the paths of the draft model's modules that are the target's."""
        of_target = {id(module) for module in self.target.modules()}
        found = self.draft.named_modules(prefix=DRAFT, remove_duplicate=False)
        return [path for path, module in found if id(module) in of_target]

    def always_shares(self) -> bool:
        """Return whether what is shared does not depend on the weights.

        vLLM lets an EAGLE head that has an embedding or output head of its own share the target's
        while they are equal.
        """
        flags = ("has_own_embed_tokens", "has_own_lm_head")
        return not any(getattr(self.draft, flag, False) for flag in flags)


@dataclass(frozen=True, slots=True)
class Part:
    """A model that a worker loads.

    Attributes:
        path: its place in the receiver's model; empty if it is that model.
        prefix: what the names of its checkpoint's tensors have before them in a sync.
        own: whether it has a checkpoint that no other part has.
        model_config, load_config: vLLM's.
    """

    path: str
    prefix: str
    own: bool
    model_config: Any
    load_config: Any


def parts(config: Any) -> list[Part]:
    """Return the models that a worker loads and that syncs must reach, in the order of loading.

    Raises:
        RuntimeError: the weights of the draft model are not known to be reached. vLLM does not
            start then.
    """
    speculative, target = config.speculative_config, config.model_config
    if speculative is None or speculative.method in _NO_WEIGHTS:
        return [Part("", "", True, target, config.load_config)]
    refusal = _unsupported(config, speculative)
    if refusal is not None:
        raise RuntimeError(refusal.message)
    first = Part(TARGET, "", True, target, config.load_config)
    draft = speculative.draft_model_config
    if (draft.model, draft.revision) == (target.model, target.revision):
        return [first, Part(DRAFT, "", False, target, config.load_config)]
    return [first, Part(DRAFT, PREFIX, True, draft, _load_config(config))]


def _unsupported(config: Any, speculative: Any) -> Refusal | None:
    if speculative.method not in _FOLLOWED:
        return refusals.DRAFT_METHOD
    if speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp():
        return refusals.DRAFT_ARCHITECTURE
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


def _load_config(config: Any) -> Any:
    """Return how vLLM loads the draft model."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    if config.speculative_config.method == "draft_model":
        return config.load_config
    return get_draft_load_config(config)


def read(
    parts: Sequence[Part], checkpoints: Iterable[Iterable[tuple[str, torch.Tensor]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all checkpoints by the names that they have in a sync.

    Raises:
        RuntimeError: a name of the target's checkpoint looks like one of the draft model's.
    """
    prefixes = tuple(part.prefix for part in parts if part.prefix)
    for part, tensors in zip(parts, checkpoints, strict=True):
        for name, tensor in tensors if part.own else ():
            if not part.prefix and name.startswith(prefixes):
                raise RuntimeError(
                    f"delta updates: {name} of the target's checkpoint has the name of a tensor of "
                    "the draft model"
                )
            yield part.prefix + name, tensor


def outside(modules: Iterable[str], found: Mapping[str, _T]) -> dict[str, _T]:
    """Return what was found on tensors, by path, but not in some modules."""
    inside = tuple(f"{path}." for path in modules)
    return {name: one for name, one in found.items() if not name.startswith(inside)}


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
