"""Know modules apart that look alike, so that only those share what was learned of one of them.

Nothing of a layer's number or name shows whether its processing goes by that. Where elements are
moved or computed otherwise than in the module that was probed, certification sees it, unless all
elements of a tensor are the same. Tensors that processing attaches are looked for elsewhere.
Numbers show only when the engine has processed the modules: `LookAlikes` compares these.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import torch

from engine_ext.model import same_leaf, takes_part
from engine_ext.placement import flat_bits

# These almost always show it if the elements of a tensor are not all the same.
_FIRST: Final = 64
_NUMBERS: Final = (bool, int, float, complex, np.ndarray, np.generic)


def signature_of(
    module: torch.nn.Module, method: object, tensors: Mapping[str, torch.Tensor]
) -> Hashable:
    """Return what distinguishes modules before they are processed.

    Args:
        method: the object that processes the module.
        tensors: loaded ones, by name.
    """
    return (
        type(module),
        type(method),
        _traits(method),
        tuple((n, t.shape, t.stride(), t.dtype, t.device.type) for n, t in tensors.items()),
        tuple((name, _traits(part)) for name, part in module.named_modules()),
    )


def all_equal(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, and all have the same bits."""
    bits = flat_bits(tensor)
    return bits.numel() > 0 and all(bool((some == bits[0]).all()) for some in (bits[:_FIRST], bits))


@dataclass(frozen=True, slots=True)
class _Processed:
    module: torch.nn.Module
    numbers: Mapping[str, Any]
    names: frozenset[str]

    def changed(self) -> dict[str, Any]:
        """Return the numbers that are new or others than before, by path."""
        now = dict(_numbers(self.module))
        return {
            path: value
            for path, value in now.items()
            if path not in self.numbers or not same_leaf(value, self.numbers[path])
        }


class LookAlikes:
    """Modules that the engine is about to process, in groups that share what was learned."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, list[_Processed]] = {}
        self._left_out: set[int] = set()

    def leave_out(self, module: torch.nn.Module) -> None:
        """Leave a module out, and those around it: what its weights give is known otherwise."""
        self._left_out.update(id(part) for part in module.modules())

    def add(self, group: Hashable, module: torch.nn.Module, names: Iterable[str]) -> None:
        """Add a module to a group; the first of each is the one that was probed.

        Args:
            names: of its live tensors in the model.
        """
        one = _Processed(module, dict(_numbers(module)), frozenset(names))
        self._groups.setdefault(group, []).append(one)

    def refusals(self) -> dict[str, str]:
        """Return why live tensors are refused, by name, once the engine has processed the modules.

        Processing has given their module a number that it has not given to the one that was probed.
        It might be computed from the weights.
        """
        found: dict[str, str] = {}
        for group in self._groups.values():
            ids = ({id(part) for part in one.module.modules()} for one in group)
            alone = [
                one for one, own in zip(group, ids, strict=True) if own.isdisjoint(self._left_out)
            ]
            known = alone[0].changed() if len(alone) > 1 else {}
            for one in alone[1:]:
                new = [p for p, value in one.changed().items() if not _is_known(p, value, known)]
                if new:
                    reason = (
                        f"post-load processing gives its module {', '.join(sorted(new))}, "
                        "which one like it does not have"
                    )
                    found |= dict.fromkeys(one.names, reason)
        self._groups.clear()
        return found


def _is_known(path: str, value: Any, known: Mapping[str, Any]) -> bool:
    """Return whether the probed module was given such a number; integers might be a layer's."""
    if path not in known:
        return False
    return isinstance(value, int) or same_leaf(value, known[path])


def _traits(thing: object) -> tuple[Any, ...]:
    """Return an object's attributes with their types, and the values of switches.

    Other values do not count: a layer's number differs between modules that are alike.
    """
    return tuple(
        (name, value if isinstance(value, (bool, Enum, torch.dtype)) else type(value))
        for name, value in sorted(vars(thing).items())
    )


def _numbers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a module, its objects that take part in processing, and its tensors.

    So are those directly in their dicts and lists. Nothing else is entered: configurations that
    modules share have thousands.
    """
    for path, part in module.named_modules():
        owners = [(path, vars(part))]
        for name, value in vars(part).items():
            if takes_part(value):
                owners.append((f"{path}.{name}", vars(value)))
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                owners.append((f"{path}.{name}", vars(tensor)))
        for place, attributes in owners:
            for name, value in attributes.items():
                for key, item in _items(name, value):
                    if isinstance(item, _NUMBERS):
                        yield f"{place}.{key}".lstrip("."), item


def _items(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if type(value) is dict:
        return [(f"{name}[{key!r}]", item) for key, item in value.items()]
    if type(value) in (list, tuple):
        return [(f"{name}[{number}]", item) for number, item in enumerate(value)]
    return [(name, value)]
