"""Tests that need verl: they run in .venv-verl only."""

from tests.live.conftest import checkpoint, start

__all__ = ["checkpoint", "start"]
