"""Check that all ranks agree on a sync before anything is written."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from engine_ext.errors import BaseMismatch
from engine_ext.wire.digest import Digest


def _expect(what: str, declared: str | None, actual: Digest, part: int) -> None:
    if declared is not None and Digest.parse(declared) != actual:
        raise BaseMismatch(
            f"{what} is {actual.hex()}, part {part} says {declared}: the engine's old bytes are "
            "not the sender's; send a full sync",
            expected=declared,
            actual=actual.hex(),
        )


def _check_replicas(briefs: Sequence[dict[str, Any]]) -> None:
    """Ranks that hold the same elements must have found the same old values there."""
    by_group: dict[tuple[int, ...], set[str]] = defaultdict(set)
    heard: Counter[tuple[int, ...]] = Counter()
    for brief in briefs:
        for ranks, change in brief["replicas"]:
            by_group[tuple(ranks)].add(change)
            heard[tuple(ranks)] += 1
    for group, changes in by_group.items():
        if len(changes) > 1 or heard[group] != len(group):
            raise BaseMismatch(f"ranks {list(group)} hold different copies of the same weights")


def _sum(digests: Iterable[Digest]) -> Digest:
    lane0 = lane1 = 0
    for digest in digests:
        lane0, lane1 = lane0 + digest.lane0, lane1 + digest.lane1
    return Digest(lane0, lane1)
