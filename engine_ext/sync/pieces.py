"""The pieces in which a param is staged."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from engine_ext.format import ParamDelta
from engine_ext.placement import Target

# Elements of one piece. On the CPU the temporaries of a piece stay in a core's cache, and the
# threads get equal shares; on a device each piece costs several kernel launches.
_HOST_SPAN = 1 << 16
_DEVICE_SPAN = 1 << 22
# A dense param that is one contiguous run in live memory needs no temporaries.
_RUN_SPAN = 1 << 20


def spans(delta: ParamDelta, targets: Sequence[Target]) -> list[tuple[int, int]]:
    """Return the pieces of a param that may be on this rank, as ranges of its values."""
    if not targets:
        return []
    step = _DEVICE_SPAN if targets[0].host is None else _HOST_SPAN
    if delta.indices is None and all(target.is_run for target in targets):
        step = _RUN_SPAN
    spans = [(start, min(start + step, delta.nnz)) for start in range(0, delta.nnz, step)]
    if delta.indices is None:
        return spans
    ends = [target.locator.ends for target in targets]
    first, end = min(first for first, _ in ends), max(end for _, end in ends)
    indices = delta.indices
    return [span for span in spans if indices[span[0]] < end and indices[span[1] - 1] >= first]


def is_one_piece(delta: ParamDelta) -> bool:
    """Return whether a sparse param whose targets are in host memory is staged in one piece."""
    return delta.nnz <= _HOST_SPAN


def holds_all(delta: ParamDelta, targets: Sequence[Target]) -> bool:
    """Return whether all elements of a tensor are on this rank."""
    own = [target for number, target in enumerate(targets) if target.first == number]
    return delta.numel <= sum(prod(t.segment.sizes) // t.locator.copies for t in own)
