"""Every tensor that a model holds, and its bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

Memory = dict[str, tuple[Any, ...]]
"""Layout and bits of tensors, by their path in the model."""


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and the tensors that hang on a module, in containers and objects too."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found.update(_within(f"{path}.{name}".lstrip("."), value))
    return found


def _within(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _within(f"{path}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _within(f"{path}.{number}", inner)
    elif isinstance(value, SimpleNamespace):
        yield from _within(path, vars(value))


def memory(model: nn.Module) -> Memory:
    """Layout and bits of every tensor, the memory between a view's elements too."""
    return {name: _bits(tensor) for name, tensor in tensors(model).items()}


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    if tensor.is_meta:
        return (*layout, None)
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return (*layout, whole.numpy().tobytes())


def different(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """The tensors that are not the same in both, or in one of them only."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
