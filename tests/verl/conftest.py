"""Tests that need verl: they run in .venv-trainers only."""

import os

from tests.live.conftest import checkpoint, start

# Ray asks for the token that an earlier cluster left in the home folder, if there is one.
os.environ["RAY_AUTH_MODE"] = "disabled"

__all__ = ["checkpoint", "start"]
