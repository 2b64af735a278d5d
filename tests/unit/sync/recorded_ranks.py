"""Ranks whose appliers record their calls, and parts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine_ext.sync.receiver import Receiver
from tests.support.rank_engine import Engine, RecordingApplier, errors_of, part_id
from tests.support.served_models import dense_delta, one_part

ONES = torch.ones(6, dtype=torch.bfloat16)


def body(version: int = 1, *, value: float = 1, name: str = "w", **metadata: Any) -> bytes:
    """A part of one dense param."""
    return one_part([dense_delta(name, ONES * value)], current_version=version, **metadata)


class Ranks:
    """Several ranks with appliers that write nothing."""

    def __init__(self, folder: Path, size: int = 3, **options: Any) -> None:
        self.appliers = [RecordingApplier() for _ in range(size)]
        self.engine = Engine(self.appliers, folder, **options)

    @property
    def written(self) -> list[int]:
        """How many syncs each rank was asked to write."""
        return [len(applier.committed) for applier in self.appliers]

    def states(self) -> set[tuple[int, str]]:
        return {(s["version"], s["engine_state"]) for s in self.engine.status()}


def replace_weights(ranks: Ranks) -> None:
    for receiver in ranks.engine.receivers:
        receiver.weights_replaced("the engine's own update")


def release_weights(ranks: Ranks) -> None:
    for receiver in ranks.engine.receivers:
        receiver.weights_released()


def begin_another(ranks: Ranks) -> None:
    """A sync whose part of the same number is staged; that of ours is stale."""
    ranks.engine.now += 60
    other = body(value=3, part=0, num_parts=2, sync_id="other")
    errors_of(ranks.engine.stage(part_id(other), other), none=True)


def lose_sync(receiver: Receiver) -> None:
    receiver.handle("abort", {})
