"""Find tensors on a model that might have been computed from its weights.

An engine computes some tensors from weights after loading and keeps them (the absorbed projections
of latent attention, scales of a quantised layer). They do not follow when the weights are written
in place. Which tensors those are cannot be seen, so every tensor counts that no placement covers
and that is not known to be constant (`engine_ext.model.constants`). If nothing can recompute one,
the weights of its module are uncertified.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from engine_ext.model import (
    Known,
    StorageIndex,
    address_range,
    extent,
    is_constant,
    reachable_tensors,
)
from engine_ext.placement import Placement

NOTHING: Final[Mapping[str, frozenset[str]]] = {}


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that might have been computed from weights.

    Attributes:
        module: path of the module that it is attached to.
        attribute: its path on that module, as ``name``, ``name[0]`` or ``name.field``.
        weights: the live tensors that it might have been computed from, by their names in the
            storage index: those of its module, or of the nearest parent that has any.
    """

    module: str
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weights: frozenset[str]

    @property
    def path(self) -> str:
        """The module's path and the attribute."""
        return f"{self.module}.{self.attribute}".lstrip(".")


def find_derived(
    model: torch.nn.Module,
    placement: Placement,
    known: Known = is_constant,
    *,
    rebuilt: Mapping[str, frozenset[str]] = NOTHING,
) -> list[Derived]:
    """List the tensors on a model that might have been computed from weights.

    Args:
        model: in serving state; it is only read.
        known: returns whether a tensor is known not to be computed from weights.
        rebuilt: modules or tensors that are compared as a whole (see
            `engine_ext.startup.recomputed`), with the names of their unprocessed weights, none if
            no sync changes these; what they hold is left out.

    Returns:
        Parameters and buffers that no segment covers, and every other tensor that is reachable
        from a module (see `engine_ext.model.module_walk`) and is no view of covered memory, nor
        made of views of it, once for each such module. Also the Python numbers that a module keeps
        of a weight for kernels that take no tensor, such as ``k_scale_float`` of ``k_scale``.
    """
    index, whole = StorageIndex(model), _modules_in(model, rebuilt)
    covered = _covered(placement, index, rebuilt)
    found = []
    for path, module, attribute, tensor in reachable_tensors(model):
        if id(module) in whole or _top(f"{path}.{attribute}", rebuilt) is not None:
            continue
        # Any entry counts: a registered view of a weight has an entry of its own.
        if any((entry.start, entry.end) in covered for entry in index.holding(tensor)):
            continue
        if known(f"{path}.{attribute}".lstrip("."), tensor):
            continue
        if _is_made_of(tensor, index, covered):
            continue
        weights = _weights(model, path, module, index, covered, rebuilt)
        found.append(Derived(path, attribute, tuple(tensor.shape), tensor.dtype, weights))
    return [*found, *_float_copies(model, index, covered, rebuilt)]


def _is_made_of(tensor: torch.Tensor, index: StorageIndex, covered: set[tuple[int, int]]) -> bool:
    """Return whether each byte from a tensor's first to its last is that of a covered live tensor.

    So it is if an engine fuses the memory of several parameters, which are views of it then. Those
    with gaps between their elements do not count.
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
        return False
    start, end = address_range(tensor)
    for entry in index.overlapping(tensor):  # by address
        dense = extent(entry.tensor) == entry.tensor.numel()
        if dense and (entry.start, entry.end) in covered and entry.start <= start:
            start = max(start, entry.end)
    return start >= end


def _top(name: str, paths: Iterable[str]) -> str | None:
    """Return which of some modules or tensors a tensor is in, or None."""
    return next((p for p in paths if not p or f"{name}.".startswith(f"{p}.")), None)


def _modules_in(model: torch.nn.Module, paths: Iterable[str]) -> set[int]:
    """Return the `id` of all modules on or below some paths, under whichever path they are met.

    Paths of tensors have none.
    """
    found: set[int] = set()
    for path in paths:
        with contextlib.suppress(AttributeError):
            found |= {id(part) for part in model.get_submodule(path).modules()}
    return found


def refuse_derived(
    placement: Placement,
    derived: Iterable[Derived],
    recomputed: Container[str] = (),
    failed: Mapping[str, str] | None = None,
    *,
    since: str = "",
) -> None:
    """Mark the weights that some tensor might have been computed from as uncertified.

    Args:
        placement: of the whole checkpoint; refused tensors are marked in place.
        recomputed: paths of the derived tensors that the engine is proven to recompute; these do
            not count.
        failed: why the engine's own function for a derived tensor was not proven, by path.
        since: says from when on the engine keeps them.
    """
    by_weight: dict[str, list[str]] = defaultdict(list)
    for one in derived:
        if one.path not in recomputed:
            for name in one.weights:
                by_weight[name].append(one.path)
    for placed in placement.values():
        for segment in placed.segments:
            paths = by_weight.get(segment.live.name)
            if paths:
                reasons = {failed[path]: None for path in paths if failed and path in failed}
                why = f" (the engine's own function is not relied on: {'; '.join(reasons)})"
                placed.refuse(
                    f"the engine keeps {', '.join(paths)}{since}, which might be computed from it "
                    f"and would not follow{why if reasons else ''}"
                )


def weights_around(
    model: torch.nn.Module, placement: Placement, rebuilt: Mapping[str, frozenset[str]] = NOTHING
) -> Callable[[str], frozenset[str]]:
    """Return a function that lists the weights that something on a module might be computed from.

    It takes the module's path; see `Derived.weights`. The list is empty for what is rebuilt.
    """
    index = StorageIndex(model)
    covered = _covered(placement, index, rebuilt)

    def around(path: str) -> frozenset[str]:
        if _top(path, rebuilt) is not None:
            return frozenset()
        return _weights(model, path, model.get_submodule(path), index, covered, rebuilt)

    return around


def _covered(
    placement: Placement, index: StorageIndex, rebuilt: Mapping[str, frozenset[str]]
) -> set[tuple[int, int]]:
    """Return the address ranges that a sync writes to, or that are rebuilt."""
    segments = [segment for placed in placement.values() for segment in placed.segments]
    covered = {(segment.live.start, segment.live.end) for segment in segments}
    return covered | {(e.start, e.end) for e in index.entries if _top(e.name, rebuilt) is not None}


def _float_copies(
    model: torch.nn.Module,
    index: StorageIndex,
    covered: set[tuple[int, int]],
    rebuilt: Mapping[str, frozenset[str]],
) -> list[Derived]:
    """List the Python numbers that are named after a covered live tensor of the same module.

    Those of what is rebuilt are left out.
    """
    found = []
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            entry = None if tensor is None else index.find(tensor)
            if entry is None or (entry.start, entry.end) not in covered:
                continue
            top = _top(entry.name, rebuilt)
            if top is not None and not rebuilt[top]:
                continue
            for attribute in (f"{name}_float", f"_{name}_float"):
                if isinstance(vars(module).get(attribute), float) and (
                    _top(f"{path}.{attribute}".lstrip("."), rebuilt) is None
                ):
                    weights = frozenset([entry.name])
                    found.append(Derived(path, attribute, (), torch.float64, weights))
    return found


def _weights(
    model: torch.nn.Module,
    path: str,
    module: torch.nn.Module,
    index: StorageIndex,
    covered: set[tuple[int, int]],
    rebuilt: Mapping[str, frozenset[str]],
) -> frozenset[str]:
    """Return the covered live tensors of a module, or of the nearest parent that has any.

    Anything rebuilt in it counts by its unprocessed weights, even if it has no live tensor left.
    """
    while True:
        entries = [index.find(p) for p in [*module.parameters(), *module.buffers()]]
        found = {e.name for e in entries if e is not None and (e.start, e.end) in covered}
        in_tops = {name: top for name in found if (top := _top(name, rebuilt)) is not None}
        tops = {*in_tops.values()} | {top for top in rebuilt if _top(top, [path]) is not None}
        names = {name for name in found if name not in in_tops or rebuilt[in_tops[name]]}
        names = names.union(*(rebuilt[top] for top in tops))
        if names or not path:
            return frozenset(names)
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
