"""Find names of tied tensors that the loader takes and drops.

A checkpoint can hold a tied tensor under both of its names, or a trainer alone (Megatron's pipeline
stages each hold a copy). The engine has one memory for both. A sync's values for the name that the
loader drops are not written, but compared with those for the other one: two values that differ
cannot both be in that memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine_ext.model import StorageIndex
from engine_ext.placement import Placement, Status, TensorSpec
from engine_ext.startup.trace.dry_run import LoaderDryRun

# The head's name in nearly all checkpoints, whatever the engine calls it.
_HEAD = "lm_head.weight"
_NUMBER = re.compile(r"[0-9]+")


def dropped_aliases(dry_run: LoaderDryRun, placement: Placement) -> dict[str, TensorSpec]:
    """Return the other names of tied tensors that the loader drops, with the tensors' own specs.

    Engines keep not only the head under several names, but also small tensors of each layer, such
    as a router's gate. The names that differ in numbers alone are tried together, as each try runs
    the loader with the whole checkpoint; the loader drops all of them or none counts.

    Args:
        placement: traced by this dry run.

    Raises:
        TracingError: see `LoaderDryRun`.
    """
    alike: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
    for names, tied in _tied(placement, dry_run.index):
        for name in names:
            if name not in placement:
                alike[_NUMBER.sub("N", name)][name] = placement[tied].spec
    found: dict[str, TensorSpec] = {}
    for specs in alike.values():
        more = [replace(spec, name=name) for name, spec in specs.items()]
        if dry_run.drops(more, placement):
            found |= specs
    return found


def place_tied(
    placement: Placement,
    index: StorageIndex,
    tied_later: Mapping[str, str],
    was_dropped: Callable[[str, str], bool],
) -> dict[str, str]:
    """Let checkpoint tensors that the loader drops have the place of those that they are tied to.

    Such a tensor gets the segments of the other one, for the certification to show that its bytes
    are there, too. One of another shape or dtype is refused.

    Args:
        placement: traced, not certified.
        index: of the traced model.
        tied_later: the tensors that processing has tied, with those that they are tied to.
        was_dropped: whether nothing was made of one tensor before processing, by the loader that
            took another.

    Returns:
        The name of the tensor that each is tied to, by its own. Some of those that were tied later
        have a place of their own: the memory that they were loaded to, from which a rebuild starts.
    """
    found = {
        name: other
        for name, other in tied_later.items()
        if placement[name].segments and placement[other].segments
    }
    for names, tied in _tied(placement, index):
        other = placement[tied]
        for name in names:
            placed = placement.get(name)
            if placed is None or placed.status is not Status.NOT_ON_RANK or placed.used:
                continue
            if tied_later.get(name) != tied and not was_dropped(name, tied):
                continue
            if replace(placed.spec, name=tied) == other.spec:
                placed.segments, placed.status = [*other.segments], Status.UNJUDGED
                found[name] = tied
            elif names[name]:
                placed.refuse(
                    f"the engine uses {tied} in its place, which has another shape or dtype"
                )
    return found


def _tied(placement: Placement, index: StorageIndex) -> list[tuple[dict[str, bool], str]]:
    """List the live tensors with several names that one checkpoint tensor alone is written to.

    Returns:
        For each, the largest first, its names, and the checkpoint tensor's name. The largest has
        the head's name as well; whether the engine knows a name is its value.
    """
    writers: dict[str, set[str]] = defaultdict(set)
    for name, placed in placement.items():
        for segment in placed.segments:
            writers[segment.live.name].add(name)
    found: list[tuple[dict[str, bool], str]] = []
    for entry in sorted(index.entries, key=lambda entry: entry.start - entry.end):
        written_by = writers.get(entry.name, set())
        if entry.aliases and len(written_by) == 1:
            names = {} if found else {_HEAD: False}
            names |= dict.fromkeys((entry.name, *entry.aliases), True)
            found.append((names, next(iter(written_by))))
    return found
