"""Trace the loader before post-load processing, to prove what it really drops.

Post-load processing may replace parameters by others that have another class, or a loader that does
nothing (vLLM does so for AWQ). The loader of the processed model then copies nothing from tensors
that the engine has loaded, and reports no error. Only the model before that processing shows which
tensors the loader drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch

from engine_ext.model import StorageIndex
from engine_ext.placement import Placed, Placement, Status, TensorSpec
from engine_ext.tracing.trace import LoadWeights, trace_placement

_REPLACED = (
    "the engine loaded it, and post-load processing replaced what the loader would write to; "
    "its elements were not found in the processed model"
)


class LoadingTrace:
    """What the loader does with each checkpoint tensor before post-load processing.

    Attributes:
        specs: every tensor of the checkpoint, in the engine's order; None if it was not traced.
    """

    def __init__(self) -> None:
        self.specs: list[TensorSpec] | None = None
        self._placed: Placement = {}
        self._elements: dict[str, int] = {}
        self._parameters: dict[str, Any] | None = None

    def trace(
        self,
        model: torch.nn.Module,
        load_weights: LoadWeights,
        checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None,
        refuse_while: Callable[[torch.nn.Module], str | None] | None = None,
    ) -> None:
        """Trace a model that is loaded, just before its post-load processing.

        Arguments and errors are those of `trace_placement`. If there is no checkpoint, or while
        `refuse_while` has a reason, nothing is traced.
        """
        if self._parameters is not None:  # a draft model is loaded after the model
            return
        self._parameters = _loaders(model)
        if checkpoint is None or (refuse_while is not None and refuse_while(model)):
            return
        self.specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in checkpoint()]
        self._placed = trace_placement(model, load_weights, self.specs, StorageIndex(model))
        self._elements = {name: _elements(placed) for name, placed in self._placed.items()}
        for placed in self._placed.values():
            placed.segments = []  # they keep memory alive that processing may free

    def refuse_lost(self, model: torch.nn.Module, placement: Placement) -> None:
        """Refuse the tensors that the processed model seems to drop, in whole or in part.

        A tensor may be missing in the traced placement only if the loader dropped it before
        processing too or, if nothing could be traced then, if processing replaced no parameter.
        """
        same = self._parameters is not None and _loaders(model) == self._parameters
        for name, placed in placement.items():
            before = self._placed.get(name)
            if before is None:
                if placed.status is Status.NOT_ON_RANK and not same:
                    placed.refuse(_REPLACED)
                continue
            placed.used |= before.used
            gone = placed.status is Status.NOT_ON_RANK and before.status is not placed.status
            fewer = _elements(placed) < self._elements[name]
            if gone or (placed.status is Status.UNJUDGED and fewer):
                placed.refuse(_REPLACED)


def _elements(placed: Placed) -> int:
    return sum(prod(segment.sizes) for segment in placed.segments)


def _loaders(model: torch.nn.Module) -> dict[str, Any]:
    """Return class, shape, dtype and loader of every parameter and buffer, by name."""
    named = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_buffers(remove_duplicate=False)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for name, tensor in named:
        loader = getattr(tensor, "weight_loader", None)
        # The function alone: a bound method would keep a replaced parameter alive.
        function = getattr(loader, "__func__", loader)
        found[name] = type(tensor), tuple(tensor.shape), tensor.dtype, function
    return found
