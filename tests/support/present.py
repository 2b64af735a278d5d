"""What a status has only at times, and has when a test looks."""

from __future__ import annotations

from typing import TypeVar

from msgspec import UnsetType

from engine_ext.ranks.status import EngineStatus, FollowStatus

T = TypeVar("T")


def present(value: T | UnsetType | None) -> T:
    """Return the value, which must be there."""
    assert value is not None
    assert not isinstance(value, UnsetType)
    return value


def following(status: EngineStatus) -> FollowStatus:
    """Return how an engine follows its delta log."""
    return present(present(status.log).follow)
