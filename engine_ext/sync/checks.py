"""Checks of a sync on one rank.

Each raises `NotUpdatable` before anything is written; its operands name the tensors or sizes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from engine_ext.answers import prefix_hint
from engine_ext.dtypes import name_of
from engine_ext.errors import NotUpdatable
from engine_ext.format import ParamDelta
from engine_ext.placement import (
    DeviceElements,
    HostElements,
    Placed,
    Plan,
    Status,
    TensorSpec,
    uncertified,
)
from engine_ext.sync.staged import StagedParam, StagedPart
from engine_ext.sync.totals import totals

_RESTART: Final = "no full sync can replace it: restart the engine from a checkpoint of the weights"


def check_param(
    delta: ParamDelta,
    plan: Plan,
    refusal: Callable[[ParamDelta, Placed, bool], str | None],
    *,
    full: bool,
) -> None:
    """Check that a param is a tensor of the checkpoint that can be updated exactly.

    Args:
        refusal: returns why the apply mode cannot write a delta of a certified tensor, or None;
            its last argument is whether the digest covers the tensor.
        full: whether it is of a full sync.
    """
    name = delta.name
    placed = plan.placement.get(name)
    if placed is None:
        raise NotUpdatable(
            f"{name}: the checkpoint this engine was loaded from has no such tensor"
            f"{prefix_hint(name, plan.placement, whose='it')}",
            tensor=name,
        )
    _check_spec(delta, placed.spec)
    is_refused = placed.status is Status.UNCERTIFIED
    reason = placed.reason if is_refused else refusal(delta, placed, name in plan.digested)
    if reason:
        message = f"{name}: this engine cannot update it exactly: {reason}"
        if full and is_refused:
            message += f"; {_RESTART}"
        raise NotUpdatable(message, tensor=name, reason=reason)


def is_ignored(delta: ParamDelta, plan: Plan) -> bool:
    """Return whether a param can be skipped: no rank would have made anything of it.

    Raises:
        NotUpdatable: it can, but has another shape or dtype than the tensor it is of.
    """
    spec = plan.ignores(delta.name)
    if spec is not None:
        _check_spec(delta, spec)
    return spec is not None


def _check_spec(delta: ParamDelta, spec: TensorSpec) -> None:
    name, dtype = delta.name, name_of(spec.dtype)
    if (delta.shape, delta.dtype) != (spec.shape, dtype):
        raise NotUpdatable(
            f"{name}: it is {dtype} {list(spec.shape)} in the checkpoint, and {delta.dtype} "
            f"{list(delta.shape)} in the delta",
            tensor=name,
        )


def check_no_overlap(staged: Sequence[StagedPart]) -> None:
    """Check that no element of a tensor on this rank is sent more than once.

    A part that declares the whole new bytes of a tensor must send all of its changes.
    """
    whole = totals(staged)
    if whole.is_apart:
        return
    counts = Counter(name for part in whole.parts for name in part.changes.names)
    repeated = {name for name, count in counts.items() if count > 1}
    by_name: dict[str, list[StagedParam]] = defaultdict(list)
    alone = set()
    for part in staged:
        for param in part.params_of(repeated):
            by_name[param.name].append(param)
            if param.dense or part.manifest.proves_states:
                alone.add(param.name)
    for name, params in by_name.items():
        if name in alone or _overlap(params):
            raise NotUpdatable(
                f"{name}: two parts send the same elements; send each element in one part",
                tensor=name,
            )


def _overlap(params: Sequence[StagedParam]) -> bool:
    """Return whether sparse params of one tensor write to the same element."""
    by_live: dict[str, list[Any]] = defaultdict(list)
    for write in (write for param in params for write in param.writes):
        if isinstance(write.elements, HostElements):
            by_live[write.live].append(write.elements.offsets)
        elif isinstance(write.elements, DeviceElements):
            by_live[write.live].append(write.elements.offsets.cpu().numpy())
    for rows, number in (row for param in params for row in param.rows):
        live, elements = rows.of(number)
        by_live[live].append(elements.offsets.cpu().numpy())
    return any(
        len(np.unique(np.concatenate(found))) < sum(map(len, found)) for found in by_live.values()
    )


def check_covers(staged: Sequence[StagedPart], plan: Plan) -> None:
    """Check that a full sync, whose params are dense, sends every tensor that any rank holds."""
    missing = sorted(plan.held - {param.name for part in staged for param in part.params})
    if missing:
        message = f"a full sync must cover every tensor; {len(missing)} are missing: {missing}"
        refused = uncertified(plan.placement)
        if lost := next((name for name in missing if name in refused), None):
            message += f"; {lost} cannot be updated exactly ({refused[lost]}): {_RESTART}"
        raise NotUpdatable(message, tensors=missing)


def check_undo_log(staged: Sequence[StagedPart], limit: int) -> None:
    """Check that the old values of a sync fit into `limit` bytes of host memory."""
    needed = totals(staged).undo_bytes
    if needed > limit:
        raise NotUpdatable(
            f"the undo log of this sync takes {needed} bytes, --delta-undo-bytes allows {limit}; "
            "send a full sync",
            needed=needed,
            limit=limit,
        )
