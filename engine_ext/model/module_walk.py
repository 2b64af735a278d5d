"""Walk everything that is reachable from a model's modules.

Engines keep tensors not only as parameters and buffers but also as plain attributes, in lists and
dicts, in fields of plain objects, in partial functions, bound methods and closures, and on other
tensors (``weight.scale``). One recursive walk, `walk`, finds them all; the functions here select
what a caller needs from it.

Paths are written as in Python: ``name``, ``name[0]``, ``name['key']``, ``name.field``.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Final

import torch

# Levels of attributes and items below a module's own attributes.
DEPTH: Final = 6
# Modules whose objects hold no tensors of the model: own objects of libraries, configurations, and
# groups of ranks: some of their buffers are other ranks' memory.
_OPAQUE: Final = (
    *("torch.", "transformers.", "numpy.", "threading", "logging", "_thread"),
    *("vllm.distributed.", "sglang.srt.distributed."),
)
# Types without parts, which most values have.
_ATOMS: Final = frozenset({type(None), bool, int, float, str})
# Types that a module has many empty ones of: its hooks.
_HOOKS: Final = (dict, OrderedDict, list)
_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")
# Attributes that torch's compiler gives the tensors that it meets; they hold none.
_MARKS: Final = "_dynamo_"
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_CONTAINERS: Final = frozenset({dict, *_SEQUENCES})  # without attributes
_NO_LEAVES: Final = (
    *(torch.nn.Module, type, types.ModuleType, types.FunctionType),
    *(dict, *_SEQUENCES),
)


PROCESSING: Final = "process_weights_after_loading"
"""The method's name in both engines, on a quant method, a scheme, a layer or a model."""


def takes_part(value: object) -> bool:
    """Return whether an object that is no module takes part in post-load processing."""
    is_object = not isinstance(value, torch.nn.Module) and hasattr(value, "__dict__")
    return is_object and callable(getattr(type(value), PROCESSING, None))


def is_processed(module: torch.nn.Module) -> bool:
    """Return whether a module, or an object on it, takes part in post-load processing."""
    own = callable(getattr(type(module), PROCESSING, None))
    return own or any(takes_part(value) for value in vars(module).values())


def reachable_tensors(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Yield every tensor that is reachable from a module, once for each such module.

    Each comes as the module's path in the model, the module, the tensor's path on it, the tensor.
    """
    tensorless: dict[int, int] = {}
    for path, module in model.named_modules():
        seen: dict[int, int] = {}
        for registry in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, registry).items():
                if tensor is not None:
                    for attribute, found in walk(tensor, name, seen, tensorless):
                        if isinstance(found, torch.Tensor):
                            yield path, module, attribute, found
        for name, value in module.__dict__.items():
            if name not in _REGISTRIES and type(value) not in _ATOMS and not _is_empty(value):
                for attribute, found in walk(value, name, seen, tensorless):
                    if isinstance(found, torch.Tensor):
                        yield path, module, attribute, found


def reachable_containers(model: torch.nn.Module) -> Iterator[dict[Any, Any] | list[Any]]:
    """Yield every dict and list reachable from a module, and the ``__dict__`` of other objects."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name in _REGISTRIES or type(value) in _ATOMS:
                continue
            if _is_empty(value):
                yield value
                continue
            for _, found in walk(value, name, seen, {}):
                if isinstance(found, (dict, list)):
                    yield found
                attributes = getattr(found, "__dict__", None)
                if isinstance(attributes, dict) and not isinstance(found, torch.Tensor):
                    yield attributes


def walk(
    value: object,
    name: str,
    seen: dict[int, int],
    tensorless: dict[int, int],
    *,
    opaque: tuple[str, ...] = _OPAQUE,
    leaves: dict[str, Any] | None = None,
) -> list[tuple[str, Any]]:
    """List the tensors and the objects with parts, other than modules, reachable from a value.

    Args:
        value, name: where to start, and its path; it is listed too.
        seen: by the id of an object, the levels below it that were walked. It is left out unless
            more levels are left now. Listed objects are added.
        tensorless: the same for objects without tensors, shared by all modules.
        opaque: prefixes of modules whose classes' instances are not entered.
        leaves: gets the objects without parts by their paths, such as numbers; modules and classes
            are left out.

    Returns:
        The path and the object of each, an object before its parts.
    """
    found: list[tuple[str, Any]] = []
    entered: dict[int, int] = {}  # objects that are being walked, with their depth
    # Objects that reach tensors only through an entered object: their depth, and its depth.
    cyclic: dict[int, tuple[int, int]] = {}

    def visit(value: object, name: str, depth: int) -> tuple[bool, int]:
        """Return whether there is a tensor in the value, and the depth that a cycle leads to."""
        key = id(value)
        if tensorless.get(key, -1) >= depth:
            return False, depth
        if key in entered or cyclic.get(key, (-1, 0))[0] >= depth:
            return False, entered[key] if key in entered else cyclic[key][1]
        if seen.get(key, -1) >= depth:  # its tensors are listed already
            return True, depth
        is_tensor = isinstance(value, torch.Tensor)
        parts = _parts(value, name, opaque)
        if not parts and not isinstance(value, (dict, list, torch.Tensor)):
            if leaves is not None and _is_leaf(value, opaque):
                leaves[name] = value
            return False, depth
        if key not in seen:
            found.append((name, value))
        if is_tensor:  # listed now, whatever it holds
            seen[key] = depth if parts else DEPTH
        if depth == 0 or (is_tensor and not parts):
            return is_tensor, depth
        cyclic.pop(key, None)
        seen[key] = entered[key] = top = depth
        has_tensor = is_tensor
        for path, part in parts:
            if type(part) in _ATOMS:
                if leaves is not None:
                    leaves[path] = part
            else:
                has_one, back = visit(part, path, depth - 1)
                has_tensor, top = has_tensor or has_one, max(top, back)
        del entered[key]
        mine = {key: depth} | {k: d for k, (d, back) in cyclic.items() if back <= depth}
        for one in mine:
            cyclic.pop(one, None)
        if not has_tensor and top > depth:
            cyclic.update((k, (d, top)) for k, d in mine.items())
        elif not has_tensor:
            tensorless.update(mine)
        return has_tensor, top

    if type(value) not in _ATOMS:
        visit(value, name, DEPTH)
    elif leaves is not None:
        leaves[name] = value
    return found


def _parts(value: object, name: str, opaque: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Return an object's items, attributes or captured variables, each with its path."""
    if isinstance(value, torch.Tensor):
        own = vars(value).items()
        return [(f"{name}.{part}", item) for part, item in own if not part.startswith(_MARKS)]
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{name}[{key!r}]", item) for key, item in list(value.items())]
    elif isinstance(value, _SEQUENCES):
        items = [(f"{name}[{number}]", item) for number, item in enumerate(tuple(value))]
    if type(value) in _CONTAINERS:
        return items
    if isinstance(value, functools.partial):
        return [(f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords")]
    if isinstance(value, types.MethodType):
        return [(f"{name}.__self__", value.__self__), (f"{name}.__func__", value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        captured = [(f"{name}.{variable}", cell) for variable, cell in cells if _is_filled(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [(path, cell.cell_contents) for path, cell in captured] + [
            (f"{name}.__defaults__[{number}]", item) for number, item in enumerate(defaults)
        ]
    if isinstance(value, (torch.nn.Module, type, types.ModuleType)):
        return []
    if opaque and type(value).__module__.startswith(opaque):
        return items
    fields = {slot: getattr(value, slot) for slot in _slots(type(value)) if hasattr(value, slot)}
    fields |= getattr(value, "__dict__", {})
    return items + [(f"{name}.{part}", item) for part, item in fields.items()]


def _slots(cls: type) -> list[str]:
    """Return the slots of a class and of its bases; private names are mangled."""
    slotted = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    return [
        name
        for attributes in slotted
        for name, member in attributes.items()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _is_empty(value: Any) -> bool:
    """Return whether a value is a dict or list with nothing in it."""
    return type(value) in _HOOKS and not value


def _is_leaf(value: object, opaque: tuple[str, ...]) -> bool:
    """Return whether an object without known parts might still have contents."""
    if isinstance(value, _NO_LEAVES):
        return False
    return type(value).__module__.startswith(opaque) or not hasattr(value, "__dict__")


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable was never assigned
        return False
