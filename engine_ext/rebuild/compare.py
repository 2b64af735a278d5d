"""Compare a live module with one that was processed anew, attribute by attribute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any, Final

import torch

from engine_ext.model import layout
from engine_ext.repacks import PROCESSING

# Values that are compared by ``==``; any other object is replaced as a whole.
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")
# Set on every module after loading.
_LATER: Final = frozenset(["training"])

_Way = tuple[tuple[Any, Any, Any], ...]


class RebuildError(RuntimeError):
    """Why a module cannot be rebuilt."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a value is on the live module.

    Attributes:
        way: from the module, each container with a key and the value that it had there. The last
            value is the tensor; it is left out if the value is another object.
        address: of the tensor, or None.
    """

    way: _Way
    address: int | None

    def unchanged(self) -> bool:
        """Return whether a write to the tensor, or to the innermost container, still shows."""
        if any(_item(container, key) is not value for container, key, value in self.way):
            return False
        return self.address is None or self.way[-1][2].data_ptr() == self.address


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """An attribute of the live module, and of the one that was processed anew.

    Attributes:
        path: from the module.
        container, key: what holds the live value, and under which key.
    """

    path: str
    container: Any
    key: Any
    live: Any
    new: Any
    place: Place

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.live, torch.Tensor)


def pairs(live: torch.nn.Module, new: torch.nn.Module) -> Iterator[Pair]:
    """Yield what may differ between two modules: tensors, and objects that are not the same.

    Both were made by the same processing, so that they have the same attributes. Modules, the
    objects on them that take part in processing, dicts and lists are entered; what they share is
    left out.

    Raises:
        RebuildError: an attribute is on one of them only, or is of another kind or layout.
    """
    counterparts: dict[int, int] = {}
    found: list[Pair] = []

    def visit(path: str, way: _Way, container: Any, key: Any, live: Any, new: Any) -> None:
        if live is new or counterparts.get(id(new)) == id(live):
            return
        if id(new) in counterparts:
            raise RebuildError(f"{path} is an object that is elsewhere, too, on one of them only")
        if isinstance(live, torch.Tensor) or isinstance(new, torch.Tensor):
            _check_tensors(path, live, new)
            place = Place((*way, (container, key, live)), live.data_ptr())
            found.append(Pair(path, container, key, live, new, place))
        elif type(live) is not type(new):
            raise RebuildError(f"{path} is a {type(live).__name__}, or a {type(new).__name__}")
        elif _is_entered(live):
            counterparts[id(new)] = id(live)
            enter(path, (*way, (container, key, live)), live, new)
        elif not _is_same(live, new):
            found.append(Pair(path, container, key, live, new, Place(way, None)))

    def enter(path: str, way: _Way, live: Any, new: Any) -> None:
        if isinstance(live, (list, tuple)):
            if len(live) != len(new):
                raise RebuildError(f"{path} has another length")
            for number, (one, other) in enumerate(zip(live, new, strict=True)):
                visit(f"{path}[{number}]", way, live, number, one, other)
            return
        of_live, of_new = (x if isinstance(x, dict) else vars(x) for x in (live, new))
        odd = (of_live.keys() ^ of_new.keys()) - _LATER
        if odd:
            names = ", ".join(sorted(map(str, odd)))
            raise RebuildError(f"{path or 'the module'} has other attributes: {names}")
        for key, value in of_live.items():
            if key in _LATER:
                continue
            inner = path if key in _REGISTRIES else f"{path}.{key}".lstrip(".")
            visit(inner, way, of_live, key, value, of_new[key])

    counterparts[id(new)] = id(live)
    enter("", (), live, new)
    for pair in found:
        one, other = pair.live, pair.new
        alike = isinstance(one, MethodType) and one.__func__ is other.__func__
        if not alike or counterparts.get(id(other.__self__)) != id(one.__self__):
            yield pair


def _item(container: Any, key: Any) -> Any:
    """Return what a dict or sequence has under a key; None if that is gone."""
    try:
        return container[key]
    except (KeyError, IndexError):
        return None


def _is_entered(value: Any) -> bool:
    return (
        isinstance(value, (torch.nn.Module, dict, list))
        or (type(value) is tuple and any(isinstance(item, torch.Tensor) for item in value))
        or callable(getattr(type(value), PROCESSING, None))
    )


def _is_same(live: Any, new: Any) -> bool:
    """Return whether two objects of a type are equal, if ``==`` can show that."""
    if isinstance(live, (tuple, set, frozenset)):
        return all(isinstance(item, _PLAIN) for item in live) and bool(live == new)
    if isinstance(live, float) and math.isnan(live):
        return math.isnan(new)
    return isinstance(live, _PLAIN) and bool(live == new)


def _check_tensors(path: str, live: Any, new: Any) -> None:
    if not isinstance(live, torch.Tensor) or not isinstance(new, torch.Tensor):
        raise RebuildError(f"{path} is a tensor on one of them only")
    if layout(live) != layout(new):
        raise RebuildError(
            f"{path} comes out as {new.dtype} {tuple(new.shape)}, strides {new.stride()}, "
            f"not as {live.dtype} {tuple(live.shape)}, strides {live.stride()}"
        )
