"""Trace the loader before post-load processing, to see what that processing loses.

Post-load processing can replace a parameter by one whose loader does nothing (vLLM does for AWQ).
The loader of the processed model then copies nothing from a tensor that the engine has loaded, and
reports no error. Processing can also let parameters share memory that were loaded apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import prod

import torch

from engine_ext.model import StorageIndex
from engine_ext.placement import Placement, Segment, Status, TensorSpec
from engine_ext.startup.trace.dropped_aliases import dropped_aliases
from engine_ext.startup.trace.dry_run import LoaderDryRun, LoadWeights, young_collections

_REPLACED = (
    "the engine loaded it, and post-load processing replaced what the loader would write to; "
    "its elements were not found in the processed model"
)


# Offset, sizes and strides in live memory; offset and strides in the checkpoint tensor.
Strides = tuple[int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


@dataclass
class _Loaded:
    """One model as it was loaded.

    Attributes:
        ranges: addresses of every parameter and buffer, by name.
        specs: every tensor of the checkpoint, in the engine's order; None if it was not traced.
        placed: these, by name.
        written: how many elements the loader writes of each to which live tensors.
        boxes: of each, what the loader writes where, by the live tensor's name.
        dropped: see `dropped_aliases`.
    """

    ranges: dict[str, range]
    specs: list[TensorSpec] | None = None
    placed: Placement = field(default_factory=dict)
    written: dict[str, Counter[str]] = field(default_factory=dict)
    boxes: dict[str, dict[str, list[Strides]]] = field(default_factory=dict)
    dropped: dict[str, TensorSpec] = field(default_factory=dict)


class LoadingTrace:
    """What the loader does with each checkpoint tensor before post-load processing.

    If the receiver's model consists of several, which the engine loads one after the other, each is
    traced.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Loaded] = {}  # by path in the receiver's model

    @property
    def specs(self) -> list[TensorSpec] | None:
        """Every tensor of the checkpoint, in the engine's order; None if it was not traced."""
        found = [one.specs for one in self._models.values()]
        if not found or None in found:
            return None
        return list({spec.name: spec for specs in found for spec in specs or ()}.values())

    @property
    def dropped(self) -> dict[str, TensorSpec]:
        """The other names of tied tensors that the loader drops; none if there are two models."""
        return next(iter(self._models.values())).dropped if len(self._models) == 1 else {}

    @young_collections()
    def trace(
        self,
        model: torch.nn.Module,
        load_weights: LoadWeights,
        checkpoint: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None,
        refuse_while: Callable[[torch.nn.Module], str | None] | None = None,
        *,
        path: str = "",
        prefix: str = "",
    ) -> frozenset[str]:
        """Trace a model that is loaded, just before its post-load processing.

        The other arguments and errors are those of `LoaderDryRun`. If there is no checkpoint, or
        while `refuse_while` has a reason, the loader is not traced.

        Args:
            path: the model's in the receiver's model, if that consists of several.
            prefix: what the names of its checkpoint's tensors have before them there.

        Returns:
            The live tensors that the loader copies checkpoint tensors to, by each name in `model`;
            none if the loader was not traced now.
        """
        filled: set[str] = set()
        if path in self._models:
            return frozenset()
        index = StorageIndex(model)
        loaded = self._models[path] = _Loaded(
            {_join(path, n): r for n, r in _ranges(index).items()}
        )
        if checkpoint is None or (refuse_while is not None and refuse_while(model)):
            return frozenset()
        specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in checkpoint()]
        dry_run = LoaderDryRun(model, load_weights, index, refuse_while)
        placement = dry_run.trace(specs)
        loaded.dropped = dropped_aliases(dry_run, placement)
        for name, placed in placement.items():
            written = loaded.written[prefix + name] = Counter[str]()
            boxes = loaded.boxes[prefix + name] = dict[str, list[Strides]]()
            for segment in placed.segments:
                live = _join(path, segment.live.name)
                filled.update([segment.live.name, *segment.live.aliases])
                written[live] += prod(segment.sizes)
                boxes.setdefault(live, []).append(_box(segment))
            placed.segments = []  # they keep memory alive that processing might free
            loaded.placed[prefix + name] = placed
        loaded.specs = [replace(spec, name=prefix + spec.name) for spec in specs]
        return frozenset(filled)

    def forget(self, modules: Iterable[str]) -> set[str]:
        """Forget modules, given by path, that the engine has since replaced by others.

        Returns:
            The checkpoint tensors that their model's loader wrote to nothing but these modules.
        """
        gone = tuple(f"{path}." for path in modules)
        found = set()
        for one in self._models.values():
            one.ranges = {n: r for n, r in one.ranges.items() if not n.startswith(gone)}
            for name, written in one.written.items():
                if written and all(live.startswith(gone) for live in written):
                    one.placed[name].status = Status.NOT_ON_RANK
                    one.written[name] = Counter()
                    one.boxes.pop(name, None)
                    found.add(name)
        return found

    def was_dropped(self, name: str, other: str) -> bool:
        """Return whether the loader that took the tensor `other` made nothing of that `name`.

        If nothing was traced, the loader of the processed model is all that is known.
        """
        models = [one for one in self._models.values() if one.specs is not None]
        own = [one for one in models if name in one.boxes and other in one.boxes]
        return not any(one.boxes[name] for one in own) if own else not models

    def tied(self, index: StorageIndex) -> dict[str, str]:
        """Return the checkpoint tensors that processing has tied, each with the one it is tied to.

        They are all that the loader wrote to two live tensors, alike, and these have become one.

        Args:
            index: of the processed model.
        """
        found: dict[str, str] = {}
        for one in self._models.values():
            writers: dict[str, list[str]] = {}
            for name, boxes in one.boxes.items():
                for live in boxes:
                    writers.setdefault(live, []).append(name)
            for entry in index.entries:
                names = [writers.get(live, []) for live in (entry.name, *entry.aliases)]
                for own in names[1:]:
                    if len(own) == len(names[0]) == 1 and own != names[0]:
                        boxes, of_first = one.boxes[own[0]], one.boxes[names[0][0]]
                        if len(boxes) == 1 and [*boxes.values()] == [*of_first.values()]:
                            found[own[0]] = names[0][0]
        return found

    def sharing_changed(
        self,
        model: torch.nn.Module,
        traced: torch.nn.Module,
        tied: Mapping[str, str],
    ) -> dict[str, str]:
        """Return why parameters and buffers cannot be written alone, by each of their names.

        They share memory in the processed `model` that they did not share before, or they did, but
        do not in the model that is `traced` (`model` itself, or the unprocessed one). Those of
        `tied` tensors are left out: a sync gives these the same values.
        """
        known = {name for one in self._models.values() for name in one.ranges}
        now = _ranges(StorageIndex(model))
        let_share = _overlapping(now, known) - self._shared(now.keys())
        let_share -= {
            pair
            for name, other in tied.items()
            for one in self._models.values()
            for of_name in one.boxes.get(name, ())
            for of_other in one.boxes.get(other, ())
            for pair in ((of_name, of_other), (of_other, of_name))
        }
        if traced is not model:
            now = _ranges(StorageIndex(traced))
        parted = self._shared(now.keys()) - _overlapping(now, known)
        reasons = {n: f"post-load processing parted it from {o}" for n, o in parted}
        return reasons | {n: "post-load processing let it share memory" for n, _ in let_share}

    def _shared(self, names: AbstractSet[str]) -> set[tuple[str, str]]:
        """Return the pairs of `names` that shared memory before processing.

        Those of one model: the next one might get memory that processing of the first has freed.
        """
        found = (_overlapping(one.ranges, names) for one in self._models.values())
        return set[tuple[str, str]]().union(*found)

    def refuse_lost(self, placement: Placement, *, reads: bool) -> None:
        """Refuse what the processed model seems to drop, in whole or in part.

        A tensor must not be missing in the traced placement unless the loader dropped it before
        processing, too. If that is not known though the engine `reads` a checkpoint, it is refused
        unless another rank holds it. Without a checkpoint, an engine that repacks does not start.
        """
        models = self._models.values()
        for name, placed in placement.items():
            before = [one.placed[name] for one in models if name in one.placed]
            absent = placed.status is Status.NOT_ON_RANK
            if not before:
                placed.used |= reads and absent
                continue
            placed.used |= any(one.used for one in before)
            elements = sum(one.written[name].total() for one in models if name in one.written)
            gone = absent and any(one.status is not Status.NOT_ON_RANK for one in before)
            fewer = sum(prod(segment.sizes) for segment in placed.segments) < elements
            if gone or (placed.status is Status.UNJUDGED and fewer):
                placed.refuse(_REPLACED)


def _box(segment: Segment) -> Strides:
    sizes, strides = segment.sizes, segment.strides
    return segment.offset, sizes, strides, segment.source_offset, segment.source_strides


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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


def _ranges(index: StorageIndex) -> dict[str, range]:
    return {n: range(e.start, e.end) for e in index.entries for n in (e.name, *e.aliases)}
