"""Fixtures that the fault tests share with the live tests."""

from tests.live.conftest import checkpoint, start

__all__ = ["checkpoint", "start"]
