"""vLLM's own function for sparse weight patches, as a subject.

It is called as its documentation says: on every rank, with sparse patches of unique indices. A
dense param goes as a patch of every index, because one call takes no mixture of both kinds, and
its dense kind needs a reload around it. The function promises neither a check of the layout nor a
rollback; what the suite finds are facts about models outside of its contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine_ext.conformance.subject import Delta, Rank


class VllmOwn:
    """`load_checkpoint_weight_patches` on the models of all ranks."""

    name = "vLLM's own function"

    def __init__(self) -> None:
        from vllm.model_executor.model_loader import checkpoint_weight_patch

        self._module: Any = checkpoint_weight_patch
        self._ranks: Sequence[Rank] = []

    def serve(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        for rank in ranks:
            rank.load()
            rank.process()

    def apply(self, deltas: Sequence[Delta]) -> None:
        """Every rank is called, as an executor calls its workers; the first error counts."""
        errors: list[Exception] = []
        for rank in self._ranks:
            try:
                self._module.load_checkpoint_weight_patches(
                    rank.model, [self._patch(delta) for delta in deltas]
                )
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _patch(self, delta: Delta) -> Any:
        indices = delta.indices
        if indices is None:
            indices = torch.arange(delta.values.numel())
        return self._module.CheckpointWeightPatch(
            delta.name, delta.shape, delta.dtype, delta.values.clone(), indices
        )


def make() -> VllmOwn:
    """The subject; needs an installed vLLM.

    Raises:
        ImportError: there is none, or one without the function.
    """
    return VllmOwn()
