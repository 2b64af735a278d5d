"""The interface between the suite and a receiver.

Only torch is needed here. A receiver of another project is put under test by a class with the
three members of `Subject`, and a function without arguments that makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of a sync for one checkpoint tensor.

    Attributes:
        name, shape, dtype: as in the checkpoint.
        indices: int64 [nnz], ascending unique flat indices; None where every element is sent.
        values: the new elements, flat, of `dtype`: [nnz] or [numel].
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    indices: torch.Tensor | None
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of an engine that is starting.

    Attributes:
        model: made, nothing loaded yet; it has `load_weights`.
        checkpoint: every tensor of the base checkpoint, whole.
        load: gives the checkpoint to the model's `load_weights`.
        process: runs the engine's post-load processing on the loaded model.
    """

    model: nn.Module
    checkpoint: Mapping[str, torch.Tensor]
    load: Callable[[], None]
    process: Callable[[], None]


class Subject(Protocol):
    """A receiver under test. It is made anew for every sync."""

    name: str

    def serve(self, ranks: Sequence[Rank]) -> None:
        """Start the engine, that is call `load` and then `process` of every rank once each, and
        do whatever the receiver does before, between and after.

        Raises:
            Exception: the receiver will not serve this model, which counts as a refusal.
        """

    def apply(self, deltas: Sequence[Delta]) -> None:
        """Bring all ranks to the target checkpoint.

        Raises:
            Exception: refused; no rank's memory must have changed.
        """


SubjectFactory = Callable[[], Subject]
