"""Compare a live module with one that was processed anew, attribute by attribute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch

from engine_ext.model import (
    PLAIN,
    PROCESSING,
    hash_memory,
    is_cache,
    layout,
    leaves_of,
    same_leaf,
    walk,
)
from engine_ext.startup.recomputed.plain_objects import is_plain, opaque_part

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
        """Return whether a write to the tensor, or to the innermost container, still shows.

        It also shows in a view of the same memory that has taken the tensor's place: Triton's
        kernels make one of the scales at each forward pass.
        """
        for container, key, value in self.way:
            found = _item(container, key)
            if found is not value and not _has_same_memory(found, value):
                return False
        return self.address is None or self.way[-1][2].data_ptr() == self.address


def _has_same_memory(one: object, other: object) -> bool:
    """Return whether both are tensors over the very same bytes, in the same order."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return (
        one.data_ptr() == other.data_ptr() != 0
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and (one.shape, one.stride(), one.itemsize) == (other.shape, other.stride(), other.itemsize)
    )


def module_place(model: torch.nn.Module, path: str) -> Place:
    """Return where a module is in the model."""
    way = []
    module = model
    for name in path.split(".") if path else ():
        children: Any = module._modules
        module = children[name]
        way.append((children, name, module))
    return Place(tuple(way), None)


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

    @property
    def is_same(self) -> bool:
        """Whether these are values, and equal."""
        text = None if self.is_tensor else _text(self.live)
        return text is not None and text == _text(self.new)

    @property
    def fingerprint(self) -> str | None:
        """A text that identifies the new value; None for an object that is no value."""
        if self.is_tensor:
            return hash_memory(self.new) if self.new.numel() else ""
        return _text(self.new)


def pairs(live: torch.nn.Module, new: torch.nn.Module) -> Iterator[Pair]:
    """Yield what can differ between two modules: tensors, values, and objects that are not shared.

    Both were made by the same processing, so that they have the same attributes. Modules, the
    objects on them that take part in processing, dicts, lists and plain objects are entered, and of
    a tensor's own attributes the numbers and those that hold tensors.

    Raises:
        RebuildError: an attribute is on one of them only, or is of another kind or layout.
    """
    # By the ids of what was visited on the new module, those on the live one; and the other way.
    counterparts: dict[int, int] = {}
    originals: dict[int, int] = {}
    found: list[Pair] = []

    def is_known(path: str, live: Any, new: Any) -> bool:
        """Return whether two objects were visited as counterparts; they are from now on."""
        if counterparts.get(id(new)) == id(live):
            return True
        if id(new) in counterparts or id(live) in originals:
            raise RebuildError(f"{path} is an object that is elsewhere, too, on one of them only")
        counterparts[id(new)], originals[id(live)] = id(live), id(new)
        return False

    def visit(path: str, way: _Way, container: Any, key: Any, live: Any, new: Any) -> None:
        inside = (*way, (container, key, live))
        if is_cache(path):  # the engine makes it once the model is loaded
            return
        if isinstance(live, torch.Tensor) or isinstance(new, torch.Tensor):
            if live is new:
                return
            _check_tensors(path, live, new)
            if not is_known(path, live, new):
                place = Place(inside, live.data_ptr())
                found.append(Pair(path, container, key, live, new, place))
                enter(path, inside, vars(live), _computed(live), _computed(new))
        elif type(live) is not type(new):
            raise RebuildError(f"{path} is a {type(live).__name__}, or a {type(new).__name__}")
        elif _is_entered(live, new):
            if live is not new and not is_known(path, live, new):
                of_live, of_new = _parts(live), _parts(new)
                enter(path, inside, of_live, of_live, of_new)
        elif _text(live) is not None or (live is not new and not _are_equal_sets(live, new)):
            found.append(Pair(path, container, key, live, new, Place(way, None)))

    def enter(path: str, way: _Way, container: Any, of_live: Any, of_new: Any) -> None:
        if isinstance(of_live, (list, tuple)):
            if len(of_live) != len(of_new):
                raise RebuildError(f"{path} has another length")
            for number, (one, other) in enumerate(zip(of_live, of_new, strict=True)):
                visit(f"{path}[{number}]", way, container, number, one, other)
            return
        odd = (of_live.keys() ^ of_new.keys()) - _LATER
        if odd:
            names = ", ".join(sorted(map(str, odd)))
            raise RebuildError(f"{path or 'the module'} has other attributes: {names}")
        for key, value in of_live.items():
            if key not in _LATER:
                inner = path if key in _REGISTRIES else f"{path}.{key}".lstrip(".")
                visit(inner, way, container, key, value, of_new[key])

    is_known("", live, new)
    enter("", (), vars(live), vars(live), vars(new))
    for pair in found:
        one, other = pair.live, pair.new
        alike = isinstance(one, MethodType) and one.__func__ is other.__func__
        if not alike or counterparts.get(id(other.__self__)) != id(one.__self__):
            yield pair


def _parts(value: Any) -> Any:
    """Return an entered object's attributes; a dict, list or tuple itself."""
    return value if isinstance(value, (dict, list, tuple)) else vars(value)


def _computed(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor that might have been computed from it."""
    return {name: value for name, value in vars(tensor).items() if _may_be_computed(value)}


def _may_be_computed(value: Any) -> bool:
    reached = walk(value, "", {}, {})
    return isinstance(value, (bool, int, float, complex)) or any(
        isinstance(one, torch.Tensor) for _, one in reached
    )


def _item(container: Any, key: Any) -> Any:
    """Return what a dict or sequence has under a key; None if that is gone."""
    try:
        return container[key]
    except (KeyError, IndexError):
        return None


def _is_entered(live: Any, new: Any) -> bool:
    if isinstance(live, (torch.nn.Module, dict, list)):
        return True
    if callable(getattr(type(live), PROCESSING, None)):
        return True
    if type(live) is tuple:
        held = any(isinstance(item, torch.Tensor) for item in live)
        return held or (any(map(is_plain, live)) and opaque_part(live, new) is None)
    return is_plain(live) and opaque_part(live, new) is None


def _text(value: Any) -> str | None:
    """Return a text that identifies a value, or a tuple of values; None for any other object."""
    values = value if isinstance(value, tuple) else (value,)
    return repr(value) if all(isinstance(item, PLAIN) for item in values) else None


def _are_equal_sets(live: Any, new: Any) -> bool:
    both = isinstance(live, (set, frozenset))
    return both and all(isinstance(item, PLAIN) for item in live) and bool(live == new)


def check_replaceable(pair: Pair) -> None:
    """Raise RebuildError unless an object that is no tensor can be replaced by the new one.

    Compiled code has the numbers that it was compiled with, and kernels that were called might have
    kept them. What a handle holds besides, its user reads from it each time.
    """
    of_live, of_new = leaves_of(pair.live), leaves_of(pair.new)
    for path in sorted(of_live.keys() | of_new.keys()):
        old, new = of_live.get(path), of_new.get(path)
        if isinstance(old, PLAIN) and isinstance(new, PLAIN) and not same_leaf(old, new):
            raise RebuildError(
                f"{pair.path}{path} would be {new!r} and no more {old!r}, which compiled code and "
                "kernels might keep"
            )


def _check_tensors(path: str, live: Any, new: Any) -> None:
    if not isinstance(live, torch.Tensor) or not isinstance(new, torch.Tensor):
        raise RebuildError(f"{path} is a tensor on one of them only")
    if layout(live) != layout(new):
        raise RebuildError(
            f"{path} comes out as {new.dtype} {tuple(new.shape)}, strides {new.stride()}, "
            f"not as {live.dtype} {tuple(live.shape)}, strides {live.stride()}"
        )
