"""Trace the loader before post-load processing, to see what that processing loses.

Post-load processing may replace a parameter by one whose loader does nothing (vLLM does for AWQ).
The loader of the processed model then copies nothing from a tensor that the engine has loaded, and
reports no error. Processing may also let parameters share memory that were loaded apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import prod

import torch

from engine_ext.model import StorageIndex
from engine_ext.placement import Placed, Placement, Status, TensorSpec
from engine_ext.tracing.trace import LoadWeights, trace_placement

_REPLACED = (
    "the engine loaded it, and post-load processing replaced what the loader would write to; "
    "its elements were not found in the processed model"
)


class LoadingTrace:
    """What the loader does with each checkpoint tensor before post-load processing.

    If the receiver's model is several that an engine loads one after the other, each is traced.
    """

    def __init__(self) -> None:
        self._specs: dict[str, list[TensorSpec] | None] = {}  # by the model's path
        self._placed: dict[str, list[Placed]] = {}
        self._elements: Counter[str] = Counter()
        # The addresses of every parameter and buffer of each model, by name.
        self._ranges: list[dict[str, range]] = []

    @property
    def specs(self) -> list[TensorSpec] | None:
        """Every tensor of the checkpoint, in the engine's order; None if it was not traced."""
        if not self._specs or None in self._specs.values():
            return None
        found = (spec for specs in self._specs.values() for spec in specs or ())
        return list({spec.name: spec for spec in found}.values())

    def trace(
        self,
        model: torch.nn.Module,
        load_weights: LoadWeights,
        checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None,
        refuse_while: Callable[[torch.nn.Module], str | None] | None = None,
        *,
        path: str = "",
        prefix: str = "",
    ) -> None:
        """Trace a model that is loaded, just before its post-load processing.

        The other arguments and errors are those of `trace_placement`. If there is no checkpoint, or
        while `refuse_while` has a reason, the loader is not traced.

        Args:
            path: the model's in the receiver's model, if that consists of several.
            prefix: what the names of its checkpoint's tensors have before them there.
        """
        if path in self._specs:
            return
        self._specs[path] = None
        self._ranges.append({f"{path}.{n}".lstrip("."): r for n, r in _ranges(model).items()})
        if checkpoint is None or (refuse_while is not None and refuse_while(model)):
            return
        specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in checkpoint()]
        for name, placed in trace_placement(
            model, load_weights, specs, StorageIndex(model)
        ).items():
            self._elements[prefix + name] += _elements(placed)
            self._placed.setdefault(prefix + name, []).append(placed)
            placed.segments = []  # they keep memory alive that processing may free
        self._specs[path] = [replace(spec, name=prefix + spec.name) for spec in specs]

    def forget(self, modules: Iterable[str]) -> None:
        """Forget modules, given by path, that the engine has since replaced by others."""
        gone = tuple(f"{path}." for path in modules)
        self._ranges = [
            {name: one for name, one in ranges.items() if not name.startswith(gone)}
            for ranges in self._ranges
        ]

    def sharing_changed(self, model: torch.nn.Module, traced: torch.nn.Module) -> dict[str, str]:
        """Return why parameters and buffers cannot be written alone, by each of their names.

        They share memory in the processed `model` that they did not share before, or they did, but
        do not in the model that is `traced` (`model` itself, or its twin).
        """
        now, known = _ranges(model), {name for ranges in self._ranges for name in ranges}
        let_share = _overlapping(now, known) - self._shared(now.keys())
        now = _ranges(traced)
        parted = self._shared(now.keys()) - _overlapping(now, known)
        reasons = {n: f"post-load processing parted it from {o}" for n, o in parted}
        return reasons | {n: "post-load processing let it share memory" for n, _ in let_share}

    def _shared(self, names: AbstractSet[str]) -> set[tuple[str, str]]:
        """Return the pairs of `names` that shared memory before processing.

        Those of one model: the next one may get memory that processing of the first has freed.
        """
        return set().union(*(_overlapping(ranges, names) for ranges in self._ranges))

    def refuse_lost(self, placement: Placement, *, reads: bool) -> None:
        """Refuse what the processed model seems to drop, in whole or in part.

        A tensor may be missing in the traced placement only if the loader dropped it before
        processing, too. If that is not known though the engine `reads` a checkpoint, it is refused
        unless another rank holds it. Without a checkpoint, an engine that repacks does not start.
        """
        for name, placed in placement.items():
            before = self._placed.get(name)
            if before is None:
                placed.used |= reads and placed.status is Status.NOT_ON_RANK
                continue
            placed.used |= any(one.used for one in before)
            gone = placed.status is Status.NOT_ON_RANK and any(
                one.status is not placed.status for one in before
            )
            fewer = _elements(placed) < self._elements[name]
            if gone or (placed.status is Status.UNJUDGED and fewer):
                placed.refuse(_REPLACED)


def _overlapping(ranges: Mapping[str, range], names: AbstractSet[str]) -> set[tuple[str, str]]:
    """Return the pairs of `names` whose addresses overlap, both ways round."""
    found: set[tuple[str, str]] = set()
    open_ranges: list[tuple[str, range]] = []
    known = sorted(((n, r) for n, r in ranges.items() if n in names), key=lambda x: x[1].start)
    for name, addresses in known:
        open_ranges = [(n, r) for n, r in open_ranges if r.stop > addresses.start]
        found.update(pair for n, _ in open_ranges for pair in ((name, n), (n, name)))
        open_ranges.append((name, addresses))
    return found


def _elements(placed: Placed) -> int:
    return sum(prod(segment.sizes) for segment in placed.segments)


def _ranges(model: torch.nn.Module) -> dict[str, range]:
    index = StorageIndex(model).entries
    return {n: range(e.start, e.end) for e in index for n in (e.name, *e.aliases)}
