"""Find what an engine computes from weights after start-up, at a forward pass of its own.

Some models keep a copy (in another dtype, merged, transposed) from their first forward pass on, or
a number that was an element of a tensor. The search at start-up cannot find it, and no sync would
reach it. So the model is searched again once the engine has generated. A tensor that was not there
before might be computed from weights. A buffer that was there before any weight was loaded, and
still has its memory, is the engine's working memory, whatever it holds by now. A table of position
embeddings can grow, for a larger image; by its name and its beginning it is the table it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch

from engine_ext.model import Known, hash_tensor, is_constant, is_filled, location
from engine_ext.placement import Placement, uncertified
from engine_ext.startup.derived.find import (
    NOTHING,
    Derived,
    find_derived,
    refuse_derived,
    weights_around,
)

# Numbers that no kernel takes from a weight, and those of a switch that is on or off.
_PLAIN: Final = (0.0, 1.0)
_SMALL: Final = 1 << 20  # elements
# Of positions and masks, which models keep of an input. Packed weights are int32 at the most.
_INPUTS: Final = frozenset([torch.int64, torch.bool])
# Names of tables of positions, which are computed from no weight.
_POSITIONS: Final = re.compile(r"(^|_)pos(itions?|itional)?_", re.IGNORECASE)
# Most values of a module are of these; they have no attributes.
_WITHOUT_FIELDS: Final = frozenset({type(None), bool, int, str, dict, list, tuple, set})
# Ends of the names of classes.
_SETTINGS: Final = ("Config", "Args")


class LaterCopies:
    """The search for one model.

    Args:
        model: in serving state, before any forward pass.
        known: returns whether a tensor is known not to be computed from weights.
    """

    def __init__(self, model: torch.nn.Module, known: Known) -> None:
        self._model, self._known = model, known
        self._numbers = dict(_numbers(model))
        self._before: dict[str, tuple[object, ...]] = {}
        self._tables: dict[str, _Table] = {}
        self._not_persistent = {
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        self._found: set[str] = set()
        self._rebuilt = self._compared = NOTHING
        self._attributes: list[int] = []  # hashes of the names on each module, at the last search

    def known(self, path: str, tensor: torch.Tensor) -> bool:
        """Return what `known` does, and remember where such a tensor is."""
        if not self._known(path, tensor):
            return False
        self._before[path] = location(tensor)
        is_table = path in self._not_persistent and _POSITIONS.search(path.rpartition(".")[2])
        if is_table and not is_constant(path, tensor):
            self._tables[path] = _Table(tensor)
        return True

    def remember(
        self,
        derived: Iterable[Derived],
        rebuilt: Mapping[str, frozenset[str]],
        compared: Mapping[str, frozenset[str]],
    ) -> None:
        """Leave out what the search at start-up has found or left out.

        Args:
            derived: what it has found.
            rebuilt: what the engine's processing computes; numbers in it are left out.
            compared: the parts of it in which tensors are left out.
        """
        self._found |= {one.path for one in derived}
        self._rebuilt, self._compared = rebuilt, compared

    def refuse(self, placement: Placement) -> dict[str, str]:
        """Search again, and mark the weights that something new might be computed from.

        Args:
            placement: certified; refused tensors are marked in place.

        Returns:
            Why tensors are refused that were not before, by name.
        """
        self._attributes = _attributes(self._model)
        before = uncertified(placement)
        tables = {one.spec.dtype for one in placement.values() if len(one.spec.shape) > 1}
        inputs = _INPUTS - tables

        def known(path: str, tensor: torch.Tensor) -> bool:
            return tensor.dtype in inputs or self._is_known(path, tensor)

        found = find_derived(self._model, placement, known, rebuilt=self._compared)
        found += self._new_numbers(placement)
        new = [one for one in found if one.path not in self._found]
        if not new:
            return {}
        self._found |= {one.path for one in new}
        refuse_derived(placement, new, since=" since it has generated")
        return {n: why for n, why in uncertified(placement).items() if n not in before}

    def has_grown(self) -> bool:
        """Return whether modules have attributes that they lacked when they were searched.

        Takes 2 µs for each module, and misses what is new in an attribute that is an object.
        """
        return self._attributes != _attributes(self._model)

    def _is_known(self, path: str, tensor: torch.Tensor) -> bool:
        if self._before.get(path) == location(tensor) or self._known(path, tensor):
            return True
        table = self._tables.get(path)
        return table is not None and table.has_grown_to(tensor)

    def _new_numbers(self, placement: Placement) -> list[Derived]:
        """List the floats of modules that are new, or others than at start-up.

        Those of a module's objects count if they are an element of the module's tensors: objects
        have numbers of many kinds, and a number that is taken of a tensor has its value.
        """
        new = [
            (path, name)
            for (path, name), value in _numbers(self._model)
            if value not in _PLAIN and not _same(self._numbers.get((path, name)), value)
            if "." not in name or _is_element(value, self._model.get_submodule(path))
        ]
        if not new:
            return []
        around = weights_around(self._model, placement, self._rebuilt)
        return [
            Derived(path, name, (), torch.float64, weights)
            for path, name in new
            if (weights := around(path))
        ]


class _Table:
    """A buffer that no checkpoint has, which an engine makes anew when it needs more of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        # A placeholder's values say nothing.
        self._digest = None if is_filled(tensor) else hash_tensor(tensor)

    def has_grown_to(self, tensor: torch.Tensor) -> bool:
        """Return whether another tensor begins with all that this one had."""
        if self._digest is None or tensor.dtype != self._dtype or tensor.dim() != len(self._shape):
            return False
        if any(now < before for now, before in zip(tensor.shape, self._shape, strict=True)):
            return False
        begin = tensor[tuple(slice(size) for size in self._shape)]
        return hash_tensor(begin.contiguous()) == self._digest


def _is_element(value: float, module: torch.nn.Module) -> bool:
    """Return whether a small floating-point parameter or buffer of a module has an element."""
    tensors = (*module.parameters(), *module.buffers())
    small = (t for t in tensors if t.is_floating_point() and not t.is_meta and t.numel() <= _SMALL)
    return any(bool((tensor.detach().float() == value).any()) for tensor in small)


def _attributes(model: torch.nn.Module) -> list[int]:
    """Return a hash of the names on each module that are not None.

    A new parameter or buffer is not among them: it counts as one that has moved.
    """
    return [
        hash(tuple(name for name, one in vars(module).items() if one is not None))
        for module in model.modules()
    ]


def _same(one: float | None, other: float) -> bool:
    return one is not None and (one == other or (math.isnan(one) and math.isnan(other)))


def _numbers(model: torch.nn.Module) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the floats on modules, and on objects that these have, by module and path on it."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is float:
                yield (path, name), value
            elif type(value) in _WITHOUT_FIELDS:
                continue
            elif not isinstance(value, (torch.nn.Module, torch.Tensor, type)):
                fields = getattr(value, "__dict__", None)
                if not fields or _is_configuration(value, fields):
                    continue
                for field, part in fields.items():
                    if type(part) is float:
                        yield (path, f"{name}.{field}"), part


def _is_configuration(value: object, fields: Mapping[str, object]) -> bool:
    """Return whether an object has an engine's settings, which it completes when it starts."""
    if not type(value).__name__.endswith(_SETTINGS):
        return False
    return not any(isinstance(part, torch.Tensor) for part in fields.values())
