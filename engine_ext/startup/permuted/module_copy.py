"""Copy a module so that nothing its post-load processing could write to is shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from engine_ext.model import DEPTH, PROCESSING, hash_tensor, same_leaf, walk


def loaded_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, which a loader can write to, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def state_of(module: torch.nn.Module) -> list[Any]:
    """Return everything that shows whether a module was written to; compare two with ``==``."""
    state: list[Any] = []
    for name, tensor in loaded_tensors(module):
        address = 0 if tensor.is_meta else tensor.data_ptr()
        state.append((name, id(tensor), address, hash_tensor(tensor)))
    for name, part in module.named_modules():
        for thing in (part, getattr(part, "quant_method", None)):
            if hasattr(thing, "__dict__"):
                state.append((name, {key: _Same(value) for key, value in vars(thing).items()}))
    return state


class _Same:
    """A value that equals the same one, or the same object; see `same_leaf`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and same_leaf(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]


class ModuleCopy:
    """A copy of a module and of everything that its processing might write to.

    The module and its submodules are copied, the objects on them that take part in post-load
    processing (quant methods, schemes, attention backends), and plain containers. Tensors are
    cloned; everything else is shared. `probes` replace parameters and buffers, given by `id`;
    `root` is the copied module.
    """

    def __init__(self, module: torch.nn.Module, probes: dict[int, torch.Tensor]) -> None:
        self._probes = probes
        self._copy_of: dict[int, Any] = {}
        self._copies: list[tuple[str, Any, Any]] = []
        modules = [(path, part, self._begin(path, part)) for path, part in module.named_modules()]
        for path, part, copy in modules:
            self._fill(path, part, copy)
        self.root = modules[0][2]

    def _begin(self, path: str, original: Any) -> Any:
        copy = object.__new__(type(original))
        self._copy_of[id(original)] = copy
        self._copies.append((path, original, copy))
        return copy

    def _fill(self, path: str, original: Any, copy: Any) -> None:
        for name, value in vars(original).items():
            vars(copy)[name] = self._copied(f"{path}.{name}".lstrip("."), value)

    def _copied(self, path: str, value: Any) -> Any:
        if id(value) in self._copy_of:
            return self._copy_of[id(value)]
        copy = value
        if isinstance(value, torch.nn.Module):
            return value
        if isinstance(value, torch.Tensor):
            copy = self._copy_of[id(value)] = self._tensor(value)
        elif type(value) is dict:
            copy = self._copy_of[id(value)] = {}
            copy.update({name: self._copied(f"{path}.{name}", v) for name, v in value.items()})
        elif type(value) is list:
            copy = self._copy_of[id(value)] = []
            copy.extend(self._copied(path, item) for item in value)
        elif type(value) is set:
            copy = set(value)
        elif callable(getattr(type(value), PROCESSING, None)):
            copy = self._begin(path, value)
            self._fill(path, value, copy)
        return copy

    def _tensor(self, original: torch.Tensor) -> torch.Tensor:
        copy = self._probes.get(id(original))
        if copy is None:
            copy = original.detach().clone()
        if isinstance(original, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=False)
        copy.__class__ = type(original)
        vars(copy).update(vars(original))
        return copy

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return what is loaded under these names, and all reachable tensors in other memory.

        The latter are those that the processing has made or kept a copy of, by path.
        """
        loaded = dict(loaded_tensors(self.root))
        found = {name: loaded[name] for name in names if name in loaded}
        memory = {_memory(tensor) for tensor in found.values()}
        seen = {id(copy): DEPTH for _, _, copy in self._copies}
        for path, original, copy in self._copies:
            prefix = f"{path}." if path else ""
            for name, value in vars(copy).items():
                if value is vars(original).get(name):
                    continue
                # The paths of parameters and buffers do not show the dict that holds them.
                is_registry = name in ("_parameters", "_buffers") and isinstance(value, dict)
                for key, item in (value if is_registry else {name: value}).items():
                    for place, tensor in walk(item, prefix + key, seen, {}, opaque=()):
                        if isinstance(tensor, torch.Tensor):
                            del seen[id(tensor)]  # list it under each of its paths
                            if _memory(tensor) not in memory:
                                found[place] = tensor
        return found

    def release(self) -> None:
        """Drop every tensor, also those in reference cycles."""
        for _, _, copy in self._copies:
            vars(copy).clear()


def _memory(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
