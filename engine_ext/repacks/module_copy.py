"""Copies of a module that share nothing its post-load processing could write to."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from engine_ext.model.fingerprint import fingerprint

PROCESSING = "process_weights_after_loading"
"""The name that both engines give it, of a quant method, a scheme, a layer or a model."""

_DEPTH = 6


def state_of(module: torch.nn.Module) -> list[Any]:
    """Everything by which a module would show that something wrote to it."""
    state: list[Any] = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        address = 0 if tensor.is_meta else tensor.data_ptr()
        state.append((name, id(tensor), address, fingerprint(tensor)))
    for name, part in module.named_modules():
        for thing in (part, getattr(part, "quant_method", None)):
            if hasattr(thing, "__dict__"):
                state.append((name, [(key, id(value)) for key, value in vars(thing).items()]))
    return state


class ModuleCopy:
    """A copy of a module and of everything that its processing may write to.

    Copied are the module and those below it, the objects on them that take part in post-load
    processing (quant methods, schemes, attention backends), and plain containers. Tensors are
    cloned; the rest is shared.

    Args:
        module: the live module.
        probes: what stands in for its parameters, by the `id` of the parameter.
    """

    def __init__(self, module: torch.nn.Module, probes: dict[int, torch.Tensor]) -> None:
        self._probes = probes
        self._made: dict[int, Any] = {}
        self._copies: list[tuple[str, Any, Any]] = []
        modules = [(path, part, self._begin(path, part)) for path, part in module.named_modules()]
        for path, part, twin in modules:
            self._fill(path, part, twin)
        self.root = modules[0][2]

    def _begin(self, path: str, original: Any) -> Any:
        twin = object.__new__(type(original))
        self._made[id(original)] = twin
        self._copies.append((path, original, twin))
        return twin

    def _fill(self, path: str, original: Any, twin: Any) -> None:
        for name, value in vars(original).items():
            vars(twin)[name] = self._copied(f"{path}.{name}".lstrip("."), value)

    def _copied(self, path: str, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        twin = value
        if isinstance(value, torch.Tensor):
            twin = self._made[id(value)] = self._tensor(value)
        elif type(value) is dict:
            twin = self._made[id(value)] = {}
            twin.update({name: self._copied(f"{path}.{name}", v) for name, v in value.items()})
        elif type(value) is list:
            twin = self._made[id(value)] = []
            twin.extend(self._copied(path, item) for item in value)
        elif type(value) is set:
            twin = set(value)
        elif callable(getattr(type(value), PROCESSING, None)) and not isinstance(
            value, torch.nn.Module
        ):
            twin = self._begin(path, value)
            self._fill(path, value, twin)
        return twin

    def _tensor(self, original: torch.Tensor) -> torch.Tensor:
        twin = self._probes.get(id(original))
        if twin is None:
            twin = original.detach().clone()
        if isinstance(original, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=False)
        twin.__class__ = type(original)
        vars(twin).update(vars(original))
        return twin

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The parameters of these names, and all tensors found that lie elsewhere."""
        parameters: dict[str, torch.Tensor] = dict(self.root.named_parameters())
        found = {name: parameters[name] for name in names if name in parameters}
        memory = {_memory(tensor) for tensor in found.values()}
        seen = {id(twin) for _, _, twin in self._copies}
        for path, original, twin in self._copies:
            for name, value in vars(twin).items():
                if value is not vars(original).get(name):
                    for place, tensor in _tensors(f"{path}.{name}", value, seen):
                        if _memory(tensor) not in memory:
                            found[re.sub(r"^\.|_(parameters|buffers)\.", "", place)] = tensor
        return found

    def dissolve(self) -> None:
        """Let go of every tensor, cycles or not."""
        for _, _, twin in self._copies:
            vars(twin).clear()


def _memory(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _tensors(
    path: str, value: Any, seen: set[int], depth: int = _DEPTH
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a value: itself, in containers, on plain objects, in closures."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth and id(value) not in seen and not isinstance(value, torch.nn.Module):
        seen.add(id(value))
        for name, inner in _parts(value):
            yield from _tensors(f"{path}.{name}", inner, seen, depth - 1)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, functools.partial):
        return [*enumerate(value.args), *value.keywords.items(), ("func", value.func)]
    if isinstance(value, types.FunctionType):
        captured = inspect.getclosurevars(value).nonlocals
        return [*captured.items(), *enumerate(value.__defaults__ or ())]
    attributes: dict[str, Any] = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    return attributes.items()
