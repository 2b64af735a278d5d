"""Start the project's programs as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return an environment in which ``python -m`` finds the packages of this checkout."""
    paths = [str(ROOT / folder) for folder in (".", "server", "trainer")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start(name: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start ``python -m scripts.NAME``, with its temporary folders in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", f"scripts.{name}", *options],
        env={**environment(), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_in(folder: Path) -> list[str]:
    """List what a program left in its folder for temporary files."""
    return [path.name for what in ("delta-*", "engine-*") for path in folder.glob(what)]
