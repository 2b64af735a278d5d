"""Everything that hangs on a model's modules, also in containers and plain objects."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, Final

import torch

# How far an attribute's own attributes and items are followed.
_DEPTH: Final = 6
# What has no tensors that are the model's: torch's own objects, and configurations.
_FOREIGN: Final = ("torch.", "transformers.", "numpy.", "threading", "logging", "_thread")
_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")


def hanging(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Every tensor on every module: the module's path and itself, where on it, and the tensor."""
    barren: dict[int, int] = {}
    for path, module in model.named_modules():
        seen: set[int] = set()
        for registry in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, registry).items():
                if tensor is not None:
                    seen.add(id(tensor))
                    yield path, module, name, tensor
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for attribute, tensor in _tensors(value, name, _DEPTH, seen, barren):
                    yield path, module, attribute, tensor


def _tensors(
    value: object, name: str, depth: int, seen: set[int], barren: dict[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value, with their paths.

    Args:
        seen: objects that need not be looked at again for this module.
        barren: objects without tensors, with the depth to which they were looked at.
    """
    if id(value) in seen or barren.get(id(value), -1) >= depth:
        return
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        yield name, value
        return
    parts = _parts(value, name)
    if not parts or depth == 0:
        return
    seen.add(id(value))
    found = False
    for path, part in parts:
        for pair in _tensors(part, path, depth - 1, seen, barren):
            found = True
            yield pair
    if not found:
        barren[id(value)] = depth


def _parts(value: object, name: str) -> list[tuple[str, Any]]:
    """What an object holds, with paths; nothing for modules, classes and foreign objects."""
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", item) for key, item in list(value.items())]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"{name}[{number}]", item) for number, item in enumerate(value)]
    if isinstance(value, functools.partial):
        return [(f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords")]
    if isinstance(value, types.MethodType):
        return [(f"{name}.__self__", value.__self__), (f"{name}.__func__", value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        held = [(f"{name}.{variable}", cell) for variable, cell in cells if _filled(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [(path, cell.cell_contents) for path, cell in held] + [
            (f"{name}.__defaults__[{number}]", item) for number, item in enumerate(defaults)
        ]
    if isinstance(value, (torch.nn.Module, type, types.ModuleType)):
        return []
    if type(value).__module__.startswith(_FOREIGN):
        return []
    slots = [slot for cls in type(value).__mro__ for slot in _slots(cls)]
    fields = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
    fields |= getattr(value, "__dict__", {})
    return [(f"{name}.{part}", item) for part, item in fields.items()]


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def containers(model: torch.nn.Module) -> Iterator[dict[Any, Any] | list[Any]]:
    """Every dict and list that hangs on a module, and the dicts of plain objects' attributes."""
    seen: set[int] = set()
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name not in _REGISTRIES:
                yield from _containers(value, _DEPTH, seen)


def _containers(value: object, depth: int, seen: set[int]) -> Iterator[dict[Any, Any] | list[Any]]:
    parts = [] if id(value) in seen or isinstance(value, torch.Tensor) else _parts(value, "")
    if not parts and not isinstance(value, (dict, list)):
        return
    seen.add(id(value))
    if isinstance(value, (dict, list)):
        yield value
    elif isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield attributes
    if depth:
        for _, part in parts:
            yield from _containers(part, depth - 1, seen)
