"""Tests that need verl: they run in .venv-trainers only."""

from tests.live.conftest import checkpoint, start

__all__ = ["checkpoint", "start"]
