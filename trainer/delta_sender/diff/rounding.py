"""Cast the trainer's tensors to the checkpoint's dtypes, and count what that rounds in a sync."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass
class Rounded:
    """Tensors that were given in a wider dtype than the checkpoint has, and so are rounded.

    Attributes:
        tensors: How many.
        elements: Of all of them.
        first: Name and dtypes of the first one.
    """

    tensors: int = 0
    elements: int = 0
    first: str = ""


_counted: ContextVar[Rounded | None] = ContextVar("rounded", default=None)


@contextmanager
def counting() -> Iterator[Rounded]:
    """Count what this thread rounds inside the block, also in generators that it reads."""
    rounded = Rounded()
    before = _counted.set(rounded)
    try:
        yield rounded
    finally:
        _counted.reset(before)


def count(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Count a tensor that is about to be cast, if the cast rounds."""
    rounded = _counted.get()
    if rounded is not None and torch.promote_types(tensor.dtype, dtype) != dtype:
        rounded.first = rounded.first or f"{name}, {tensor.dtype} to {dtype}".replace("torch.", "")
        rounded.tensors += 1
        rounded.elements += tensor.numel()


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the checkpoint's dtype, rounded to nearest even; maybe no copy."""
    if tensor.dtype == dtype:
        return tensor
    count(name, tensor, dtype)
    return tensor.to(dtype)
