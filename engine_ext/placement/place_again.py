"""Follow live tensors that something has moved since the placement was certified.

A certified placement says where elements are in a live tensor. If the tensor has other memory by
now, but the same layout, and the engine's loader writes the same elements to the same places in it,
the placement holds there, too. The contents of the new memory are not known, so only a ``full``
sync can be written to it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from engine_ext.placement.ownership import box_of
from engine_ext.placement.plan import Plan
from engine_ext.placement.segments import Placed, Placement, Segment, Status
from engine_ext.placement.targets import make_targets

_GIVEN_UP = (Status.UNCERTIFIED, Status.IGNORED, Status.NOT_ON_RANK)


def place_again(plan: Plan, traced: Placement, moved: Set[str]) -> tuple[Plan, list[str]]:
    """Return the plan of the moved tensors' new memory. Its ranks and digests are the same.

    Args:
        plan: certified; its placement is updated in place, unless some tensor cannot be followed.
        traced: of the same checkpoint, traced anew; not certified.
        moved: names of the live tensors.

    Returns:
        The plan, and the tensors of the checkpoint that the loader would write elsewhere. If there
        are any, it is the same plan.
    """
    affected = {
        name: placed
        for name, placed in plan.placement.items()
        if placed.status not in _GIVEN_UP and any(s.live.name in moved for s in placed.segments)
    }
    elsewhere = [name for name, placed in affected.items() if not _is_alike(placed, traced[name])]
    if elsewhere:
        return plan, sorted(elsewhere)
    targets = dict(plan.targets)
    for name, placed in affected.items():
        placed.segments[:] = traced[name].segments
        holders = {box_of(target.segment): target.ranks for target in targets[name]}
        targets[name] = make_targets(placed.segments, holders)
    return replace(plan, targets=targets), []


def _is_alike(placed: Placed, traced: Placed) -> bool:
    """Return whether two placements of one tensor differ by the addresses alone."""
    return list(map(_relative, placed.segments)) == list(map(_relative, traced.segments))


def _relative(segment: Segment) -> tuple[Any, ...]:
    return (
        *(segment.live.name, segment.offset, segment.strides, segment.sizes),
        *(segment.source_offset, segment.source_strides),
        *(segment.python_copy, segment.repack, segment.recast),
    )
